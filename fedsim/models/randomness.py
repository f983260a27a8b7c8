"""Random calls inside a forward pass, answered by a function of (client, round, step, call, position).

`F.dropout`, `torch.rand`, `bernoulli_` and their like draw from a global stream: a client's numbers would depend on who
was computed before it. While a model trains, this mode answers them from the counter-based hash of `fedsim.core.rng`
instead, keyed by the client's step; the order of the calls within one forward pass tells them apart. What it has no
answer for (`torch.multinomial`, say) it refuses by name. Calls with a `generator=` draw from it; a generator
that a module keeps from one pass to the next is state outside of buffers, and refused as such.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedsim.core import rng
from fedsim.core.errors import ConfigError

FIRST_CALL_COUNTER = 1 << 20  # calls are numbered from here; below are the layers of `fedsim.models.dropout`
ALPHA_DROPOUT_VALUE = -1.7580993408473766  # −λα of SELU: the value that alpha dropout inserts


class KeyedRandomness(TorchFunctionMode):
    """Answers the random calls of one client's forward pass.

    Args:
        key: [] int64, of the client's step.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.num_calls = key, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:  # the module's own generator, which is state like any other
            return func(*args, **kwargs)
        if func in REFUSED_RANDOM_CALLS:
            raise ConfigError(
                f"model: {func.__name__} in a forward pass draws from a global stream, so that a client's numbers "
                "would depend on the others'; draw by torch.rand, torch.randn, torch.bernoulli or dropout instead"
            )
        handler = RANDOM_CALL_HANDLERS.get(func)
        return func(*args, **kwargs) if handler is None else handler(self, func, *args, **kwargs)

    def uniform(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Return the uniform numbers on [0, 1) of the next call."""
        return self._draw_numbers(rng.uniform, shape, dtype)

    def normal(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Return the standard normal numbers of the next call."""
        return self._draw_numbers(rng.normal, shape, dtype)

    def _draw_numbers(self, law: Callable[..., Tensor], shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        key, shape = rng.fold_in(self.key, FIRST_CALL_COUNTER + self.num_calls), tuple(shape)
        self.num_calls += 1
        draw_dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        counters = torch.arange(math.prod(shape), dtype=torch.int32, device=key.device)
        return law(key[..., None], counters, draw_dtype).reshape(shape).to(dtype)

    def dropout(self, x: Tensor, p: float, shape: Iterable[int] | None = None) -> Tensor:
        """Return x with entries, or groups that `shape` broadcasts to, zeroed with probability p; the others are
        scaled to keep the mean."""
        if p >= 1:
            return x * 0
        keep_mask = self.uniform(x.shape if shape is None else shape, x.dtype) >= p
        return x * keep_mask.to(x.dtype) / (1 - p)


def _uniform_or_normal(mode: KeyedRandomness, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """torch.rand, randn, rand_like, randn_like: of the shape and type that the call itself would have."""
    empty_tensor = _empty_client_tensor(mode, func, *args, **kwargs)
    return (mode.normal if "randn" in func.__name__ else mode.uniform)(empty_tensor.shape, empty_tensor.dtype)


def _empty_client_tensor(mode: KeyedRandomness, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return a tensor of the call's shape and type that belongs to this client alone, so that it can be written to."""
    if args and isinstance(args[0], Tensor) and func.__name__.endswith("_like"):
        meta_tensor = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
    else:
        meta_tensor = torch.empty(*args, **{**kwargs, "device": "meta"})
    zero = torch.zeros(meta_tensor.shape, dtype=meta_tensor.dtype, device=mode.key.device)
    return (
        zero | (mode.key != mode.key)
        if meta_tensor.dtype == torch.bool
        else zero + (mode.key * 0).to(meta_tensor.dtype)
    )


def _bernoulli(mode: KeyedRandomness, func: Any, x: Tensor, p: Any = None, **_: Any) -> Tensor:
    return (mode.uniform(x.shape, torch.float32) < (x if p is None else p)).to(x.dtype)


def _bernoulli_(mode: KeyedRandomness, func: Any, x: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    return x.copy_((mode.uniform(x.shape, torch.float32) < p).to(x.dtype))


def _uniform_(
    mode: KeyedRandomness, func: Any, x: Tensor, low: float = 0.0, high: float = 1.0, **options: Any
) -> Tensor:
    low, high = options.get("from", low), options.get("to", high)
    return x.copy_(mode.uniform(x.shape, x.dtype) * (high - low) + low)


def _normal_(mode: KeyedRandomness, func: Any, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return x.copy_(mode.normal(x.shape, x.dtype) * std + mean)


def _normal(mode: KeyedRandomness, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **_: Any) -> Tensor:
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(v.shape for v in tensors)) if tensors else size
    return mode.normal(shape, tensors[0].dtype if tensors else torch.get_default_dtype()) * std + mean


def _exponential_(mode: KeyedRandomness, func: Any, x: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    return x.copy_(-torch.log1p(-mode.uniform(x.shape, x.dtype)) / lambd)


def _randint(mode: KeyedRandomness, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    integer_arguments = [a for a in args if isinstance(a, int)]
    high = kwargs.pop("high", None) or integer_arguments[-1]
    low = kwargs.pop("low", None) or (integer_arguments[0] if len(integer_arguments) > 1 else 0)
    shape = next((a for a in args if not isinstance(a, int)), None) or kwargs["size"]
    random_integers = (mode.uniform(shape, torch.float64) * (high - low)).floor() + low
    return random_integers.to(kwargs.get("dtype") or torch.int64)


def _randperm(mode: KeyedRandomness, func: Any, n: int, **_: Any) -> Tensor:
    return mode.uniform((n,), torch.float64).argsort()


def _dropout(mode: KeyedRandomness, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """F.dropout, F.dropout1d … 3d, torch.dropout: of entries, or of whole channels."""
    arguments = inspect.signature(F.dropout).bind(x, *args, **_dropout_keywords(kwargs)).arguments
    p, training = arguments.get("p", 0.5), arguments.get("training", True)
    if not training or p == 0:
        return x
    drops_channels = func.__name__[-2:] in ("1d", "2d", "3d") or func.__name__.startswith("feature")
    if drops_channels:
        batched = x.dim() - (int(func.__name__[-2]) if func.__name__[-1] == "d" else x.dim() - 2) > 1
        num_leading_dims = 2 if batched else 1
        return _in_place_or_new(
            x, mode.dropout(x, p, x.shape[:num_leading_dims] + (1,) * (x.dim() - num_leading_dims)), arguments
        )
    return _in_place_or_new(x, mode.dropout(x, p), arguments)


def _dropout_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of torch.dropout as those of F.dropout."""
    return {"training" if name == "train" else name: value for name, value in kwargs.items()}


def _in_place_or_new(x: Tensor, random_values: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Write the result into x if the call is in place, or return a new tensor."""
    return x.copy_(random_values) if arguments.get("inplace") else random_values


def _alpha_dropout(mode: KeyedRandomness, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """F.alpha_dropout and F.feature_alpha_dropout (Klambauer et al., 2017, §3): mean and variance are kept."""
    arguments = inspect.signature(F.alpha_dropout).bind(x, *args, **kwargs).arguments
    p = arguments.get("p", 0.5)
    if not arguments.get("training", False) or p == 0:
        return x
    shape = x.shape[:2] + (1,) * (x.dim() - 2) if "feature" in func.__name__ else x.shape
    keep_mask = (mode.uniform(shape, x.dtype) >= p).to(x.dtype)
    scale = ((1 - p) * (1 + p * ALPHA_DROPOUT_VALUE**2)) ** -0.5 if p < 1 else 0.0
    return _in_place_or_new(
        x, scale * (x * keep_mask + ALPHA_DROPOUT_VALUE * (1 - keep_mask) - ALPHA_DROPOUT_VALUE * p), arguments
    )


def _rrelu(mode: KeyedRandomness, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    arguments = inspect.signature(F.rrelu).bind(x, *args, **kwargs).arguments
    low, high = arguments.get("lower", 1 / 8), arguments.get("upper", 1 / 3)
    slope = mode.uniform(x.shape, x.dtype) * (high - low) + low if arguments.get("training") else (low + high) / 2
    return _in_place_or_new(x, torch.where(x >= 0, x, x * slope), arguments)


def _gumbel_softmax(
    mode: KeyedRandomness, func: Any, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10,
    dim: int = -1,
) -> Tensor:  # fmt: skip
    tiny = torch.finfo(logits.dtype).tiny
    noise = -(-(mode.uniform(logits.shape, logits.dtype) + tiny).log()).log()
    soft_sample = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft_sample
    return (
        torch.zeros_like(soft_sample).scatter(dim, soft_sample.argmax(dim, keepdim=True), 1.0)
        - soft_sample.detach()
        + soft_sample
    )


def _attention(
    mode: KeyedRandomness, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """F.scaled_dot_product_attention, written out where it drops attention weights."""
    if dropout_p == 0:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
    if options.get("enable_gqa"):
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_boolean_mask = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_boolean_mask else scores + attn_mask
    return mode.dropout(scores.softmax(-1), dropout_p) @ value


def _multihead(mode: KeyedRandomness, func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward: its weights, made without dropout, are dropped and applied anew."""
    bound_arguments = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound_arguments.apply_defaults()
    arguments = bound_arguments.arguments
    p, needs_weights, average = arguments["dropout_p"], arguments["need_weights"], arguments["average_attn_weights"]
    if p == 0 or not arguments["training"]:
        return func(*args, **kwargs)
    if arguments["bias_k"] is not None or arguments["add_zero_attn"]:
        raise ConfigError(
            "model: nn.MultiheadAttention with dropout and with add_bias_kv or add_zero_attn cannot be keyed by "
            "client; set its dropout to 0"
        )
    arguments |= {"dropout_p": 0.0, "need_weights": True, "average_attn_weights": False}
    _, weights = func(*bound_arguments.args, **bound_arguments.kwargs)
    width, num_heads, value = arguments["embed_dim_to_check"], arguments["num_heads"], arguments["value"]
    weight = (
        arguments["v_proj_weight"] if arguments["use_separate_proj_weight"] else arguments["in_proj_weight"][-width:]
    )
    bias = None if arguments["in_proj_bias"] is None else arguments["in_proj_bias"][-width:]
    values = F.linear(value, weight, bias).unflatten(-1, (num_heads, -1))  # [S, (N,) H, e]
    dropped_weights = mode.dropout(weights, p)
    head_values = values.movedim(0, -2)  # [(N,) H, S, e]
    attention_output = (dropped_weights @ head_values).movedim(-2, 0).flatten(-2)
    attention_output = F.linear(attention_output, arguments["out_proj_weight"], arguments["out_proj_bias"])
    return attention_output, (dropped_weights.mean(-3) if average else dropped_weights) if needs_weights else None


RandomCallHandler = Callable[..., Any]
RANDOM_CALL_HANDLERS: dict[Any, RandomCallHandler] = {
    **dict.fromkeys((torch.rand, torch.randn, torch.rand_like, torch.randn_like), _uniform_or_normal),
    **dict.fromkeys((torch.empty, torch.empty_like), _empty_client_tensor),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout), _dropout),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), _alpha_dropout),
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
    torch.normal: _normal,
    torch.randint: _randint,
    torch.randperm: _randperm,
    F.rrelu: _rrelu,
    F.gumbel_softmax: _gumbel_softmax,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multihead,
}
REFUSED_RANDOM_CALLS = {
    torch.multinomial, Tensor.multinomial, torch.poisson, torch.binomial, Tensor.random_, Tensor.geometric_,
    Tensor.log_normal_, Tensor.cauchy_, torch.randint_like, F.fractional_max_pool2d, F.fractional_max_pool3d,
    torch.alpha_dropout, torch.feature_alpha_dropout, torch.rrelu,
}  # fmt: skip


DRAWS = (RANDOM_CALL_HANDLERS.keys() | REFUSED_RANDOM_CALLS) - {
    torch.empty,
    torch.empty_like,
}  # which draw from a stream


class GlobalDrawDetector(TorchFunctionMode):
    """Detects draws from PyTorch's global stream, even if the stream is restored afterwards.

    Attributes:
        draws_seen: whether something has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.draws_seen = self.draws_seen or (kwargs.get("generator") is None and func in DRAWS)
        return func(*args, **kwargs)
