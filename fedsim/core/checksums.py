"""Checksums of a safetensors file, stored in its header, which reveal damaged bits.

CRC-32, of every tensor and of the header's other entries. A file of an earlier version has none, and is taken as it
is.
"""

from __future__ import annotations

import json
import zlib

from torch import Tensor, uint8

FORMATS_WITH_CHECKSUMS = ("fedsim-constants",)  # formats that have always had checksums
CHECKSUMS_KEY = "sums"  # the header's entry, in which the header's own checksum has the key ''


def _tensor_checksum(tensor: Tensor) -> int:
    """Return the checksum of the tensor's bytes."""
    return zlib.crc32(tensor.reshape(-1).view(uint8).numpy().data) if tensor.numel() else 0


def _header_checksum(header: dict[str, str]) -> int:
    return zlib.crc32(json.dumps(sorted((k, v) for k, v in header.items() if k != CHECKSUMS_KEY)).encode())


def add_checksums(header: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return the header with checksums of itself and of these host tensors."""
    sums = {name: _tensor_checksum(value) for name, value in tensors.items()} | {"": _header_checksum(header)}
    return header | {CHECKSUMS_KEY: json.dumps(sums)}


def find_damaged_entry(file_header: dict[str, str], tensors: dict[str, Tensor]) -> str | None:
    """Return the name of a damaged tensor, or of the header; None if nothing is damaged, or there are no checksums.

    Args:
        file_header: of the file.
        tensors: those that are to be looked at.

    Raises:
        ValueError: the entry is damaged itself.
    """
    if CHECKSUMS_KEY not in file_header:
        return "the header" if file_header.get("format") in FORMATS_WITH_CHECKSUMS else None
    if not isinstance(sums := json.loads(file_header[CHECKSUMS_KEY]), dict):
        raise ValueError("an entry is not a mapping")
    actual_sums = {name: _tensor_checksum(value) for name, value in tensors.items()} | {
        "": _header_checksum(file_header)
    }
    return next((name or "the header" for name in sorted(actual_sums) if sums.get(name) != actual_sums[name]), None)
