"""Inputs are scaled and normalised; crops and flips move each image by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from published import SETTINGS, keys_of

from fedsim.core import ConfigError, rng
from fedsim.data.datasets import (
    CropFlip,
    Dataset,
    Digits,
)


def pad_and_slice(images: np.ndarray, keys: torch.Tensor, crop: CropFlip) -> np.ndarray:
    """One image after the other: pad with zeros, cut a window at a drawn place, mirror it by a drawn coin."""
    out = np.empty_like(images)
    _, size, _, height, width = images.shape
    p = crop.padding
    for client, key in enumerate(keys):
        for image in range(size):
            slot = 3 * (image if crop.per == "image" else 0)
            top, left = (int(rng.integers(key, torch.tensor(slot + which), 2 * p + 1)) for which in (0, 1))
            padded = np.pad(images[client, image], ((0, 0), (p, p), (p, p)))
            window = padded[:, top : top + height, left : left + width]
            mirrored = crop.flip and int(rng.integers(key, torch.tensor(slot + 2), 2))
            out[client, image] = window[:, :, ::-1] if mirrored else window
    return out


def places(crop: CropFlip, clients: int, size: int, width: int = 9) -> np.ndarray:
    """[clients, size, 2] where a single bright pixel in the middle of each image went (−1 where it is gone)."""
    images = torch.zeros(clients, size, 1, width, width, dtype=torch.uint8)
    images[..., width // 2, width // 2] = 1
    flat = crop(images, keys_of(clients)).flatten(2)
    at = flat.argmax(-1)
    found = torch.stack([at // width, at % width], -1)
    return torch.where(flat.bool().any(-1, keepdim=True), found, -1).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prepare_is_scaling_then_normalising(dtype: torch.dtype) -> None:
    """(x/255 − mean)/std channel by channel, for any number of leading axes; the stored bytes stay as they are."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    raw = torch.randint(0, 256, (5, 3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data, kept = Dataset("images", raw, mean=mean, std=std), raw.clone()
    column = (-1, 1, 1)
    expected = (raw.to(dtype) / 255 - torch.tensor(mean, dtype=dtype).reshape(column)) / torch.tensor(
        std, dtype=dtype
    ).reshape(column)
    assert data.prepare(raw, dtype).dtype == dtype
    torch.testing.assert_close(data.prepare(raw, dtype), expected)
    torch.testing.assert_close(data.prepare(raw[2], dtype), expected[2])
    torch.testing.assert_close(data.prepare(raw.reshape(1, 5, 3, 6, 7), dtype), expected[None])
    assert torch.equal(raw, kept)


def test_prepare_without_statistics_scales_bytes_and_leaves_floats() -> None:
    raw = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    torch.testing.assert_close(Dataset("bytes", raw).prepare(raw, torch.float32), torch.tensor([[0.0, 0.2, 1.0]]))
    numbers = torch.tensor([[-3.0, 0.5, 400.0]])
    kept = numbers.clone()
    assert torch.equal(Dataset("numbers", numbers).prepare(numbers, torch.float64), numbers.double())
    assert torch.equal(numbers, kept)


def test_a_stored_data_set_does_not_draw() -> None:
    with pytest.raises(NotImplementedError, match="digits"):
        Digits().draw(torch.tensor([0]), torch.tensor([0]), 3, torch.float32)


@SETTINGS
@given(
    shape=st.tuples(*(st.integers(1, high) for high in (3, 4, 3, 9, 9))),
    padding=st.integers(0, 5),
    flip=st.booleans(),
    per=st.sampled_from(["image", "batch"]),
    floating=st.booleans(),
)
def test_crop_and_flip_equal_padding_and_slicing(
    shape: tuple[int, ...], padding: int, flip: bool, per: str, floating: bool
) -> None:
    """Also where the window leaves the image altogether."""
    images = np.random.default_rng(0).integers(1, 256, shape).astype(np.float32 if floating else np.uint8)
    crop, keys, raw = CropFlip(padding, flip, per), keys_of(shape[0]), torch.as_tensor(images)
    moved = crop(raw, keys)
    assert moved.dtype == raw.dtype
    assert np.array_equal(moved.numpy(), pad_and_slice(images, keys, crop))
    assert np.array_equal(raw.numpy(), images)


def test_without_padding_and_flip_nothing_changes() -> None:
    images = torch.randint(0, 256, (2, 3, 3, 8, 8), dtype=torch.uint8)
    for per in ("image", "batch"):
        assert torch.equal(CropFlip(0, False, per)(images, keys_of(2)), images)


def test_every_offset_is_equally_likely() -> None:
    """(2·4 + 1)² windows, 40,000 images: each within 5 σ of its share, both ends included."""
    found = places(CropFlip(4), 40, 1000).reshape(-1, 2)
    counts = np.bincount(found[:, 0] * 9 + found[:, 1], minlength=81)
    p = 1 / 81
    assert len(counts) == 81
    assert (np.abs(counts - len(found) * p) < 5 * np.sqrt(len(found) * p * (1 - p))).all()


def test_half_of_the_images_are_mirrored_independently_of_the_crop() -> None:
    images = torch.zeros(20, 500, 1, 3, 3, dtype=torch.uint8)
    images[..., 0] = 1  # a bright left column
    mirrored = CropFlip(0, True)(images, keys_of(20))[:, :, 0, 0, 2].double()
    assert abs(mirrored.mean() - 0.5) < 5 * 0.5 / np.sqrt(mirrored.numel())
    row = torch.as_tensor(places(CropFlip(4), 20, 500)[..., 0]).double()
    assert abs(torch.corrcoef(torch.stack([mirrored.flatten(), row.flatten()]))[0, 1]) < 5 / np.sqrt(row.numel())


def test_per_batch_moves_a_clients_images_together_and_per_image_apart() -> None:
    together, apart = places(CropFlip(4, per="batch"), 30, 16), places(CropFlip(4), 30, 16)
    assert (together == together[:, :1]).all()
    assert len(np.unique(together[:, 0], axis=0)) > 10
    assert all(len(np.unique(of_client, axis=0)) > 5 for of_client in apart)


@pytest.mark.parametrize("per", ["image", "batch"])
def test_a_clients_augmentation_does_not_depend_on_its_neighbours_or_on_padding(per: str) -> None:
    """Chunks and padded batches see the same images."""
    images = torch.randint(0, 256, (4, 6, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    crop, keys = CropFlip(2, True, per), keys_of(4)
    whole = crop(images, keys)
    assert torch.equal(crop(images[2:3], keys[2:3]), whole[2:3])
    assert torch.equal(crop(images[:, :4], keys), whole[:, :4])


def test_impossible_augmentations_name_their_key() -> None:
    with pytest.raises(ConfigError, match=r"per='images'"):
        CropFlip(per="images")
    with pytest.raises(ConfigError, match=r"padding=-1"):
        CropFlip(padding=-1)
    with pytest.raises(ConfigError, match=r"border='grey'"):
        CropFlip(border="grey")
