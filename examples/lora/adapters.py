"""GPT-2 by transformers with LoRA adapters by peft (Hu et al., ICLR 2022): only the adapters are trained and sent.

Parameters that need no gradient are no part of a client's row: the backbone is kept once, for all clients.
"""

from __future__ import annotations

from torch import nn

from fedsim import ConfigError
from fedsim.core.torchvision_import import import_torchvision


def gpt2(
    shape: tuple[int, ...],
    classes: int,
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
    rank: int = 4,
    weights: str | None = None,
) -> nn.Module:
    """[B, L] tokens → an object whose `logits` are [B, L, classes].

    Args:
        shape: (L,), the longest sequence.
        classes: size of the vocabulary.
        width, heads, layers: of the backbone, which is drawn at random.
        rank: r of the adapters.
        weights: a backbone that `save_pretrained` wrote, for the same vocabulary; width, heads and layers are its own.
    """
    try:
        import_torchvision()  # transformers imports it, and cannot where its operators are built for another PyTorch
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise ConfigError(
            f"this model needs transformers and peft ({error}); pip install 'fedsim-torch[huggingface]'"
        ) from error
    config = GPT2Config(
        vocab_size=classes,
        n_positions=shape[0],
        n_embd=width,
        n_head=heads,
        n_layer=layers,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    backbone = GPT2LMHeadModel(config) if weights is None else GPT2LMHeadModel.from_pretrained(weights, use_cache=False)
    adapted = ["c_attn", "c_proj", "c_fc"]  # all linear layers of a block; GPT-2 keeps their weights transposed
    return get_peft_model(
        backbone, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=adapted, fan_in_fan_out=True)
    )
