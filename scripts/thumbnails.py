"""Small versions of the figures in results folders, for the index of results (see scripts/gallery.py)."""

from __future__ import annotations

import hashlib
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

FIGURE = "figure.png"
THUMBNAIL = "thumbnail.png"
SIZE = (280, 200)  # pixels, at most; the page shows them at half this size
COLOURS = 32
KEY = "figure"  # the text entry with the hash of the figure


def write(folder: Path) -> Path | None:
    """Write the thumbnail of a results folder, unless it is current; None if the folder has no figure.

    A current thumbnail is left as it is, since another version of Pillow may encode the same pixels differently.
    """
    figure, thumbnail = folder / FIGURE, folder / THUMBNAIL
    if not figure.exists():
        return None
    if not is_current(folder):
        info = PngInfo()
        info.add_text(KEY, _hash(figure))
        with Image.open(figure) as image:
            small = image.convert("RGB")
        small.thumbnail(SIZE, Image.Resampling.LANCZOS)
        small.quantize(COLOURS).save(thumbnail, optimize=True, pnginfo=info)
    return thumbnail


def is_current(folder: Path) -> bool:
    """Whether the thumbnail exists and was made from the current figure."""
    if not (folder / THUMBNAIL).exists():
        return False
    with Image.open(folder / THUMBNAIL) as image:
        return image.info.get(KEY) == _hash(folder / FIGURE)


def _hash(figure: Path) -> str:
    return hashlib.sha256(figure.read_bytes()).hexdigest()[:16]
