"""Labels as colours, and a slice of labels as a PNG."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

_N_COLORS_LOG2 = 12
_STRIP_VOXELS = 1 << 16  # a strip's labels and hashes stay in the processor's cache


def label_colors(labels: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """Gives each label a colour of its own: the same one always, and unlike that of the next label.

    Colours are drawn from 4096 by a hash of the label, evenly over the hues and never dark. Label 0 is black.

    Args:
        labels: uint64, any shape.

    Returns:
        Red, green and blue as uint8, shape (*labels.shape, 3).

    Raises:
        TypeError: `labels` is not uint64.
    """
    labels = np.asarray(labels)
    if labels.dtype != np.uint64:
        raise TypeError(f"labels must be uint64, not {labels.dtype}")
    palette = _palette()
    colors = np.empty((*labels.shape, 3), np.uint8)
    pixels = colors.reshape(-1, 3)
    for start in range(0, labels.size, _STRIP_VOXELS):
        strip = labels.flat[start : start + _STRIP_VOXELS]
        background = strip == 0
        # Mixing as in splitmix64, so that labels which differ in one bit land far apart.
        strip ^= strip >> np.uint64(30)
        strip *= np.uint64(0xBF58476D1CE4E5B9)
        strip ^= strip >> np.uint64(27)
        strip *= np.uint64(0x94D049BB133111EB)
        strip >>= np.uint64(64 - _N_COLORS_LOG2)
        strip_pixels = palette[strip.astype(np.intp)]
        strip_pixels[background] = 0
        pixels[start : start + _STRIP_VOXELS] = strip_pixels
    return colors


def save_label_image(path: str | os.PathLike[str], labels: npt.NDArray[np.uint64]) -> None:
    """Writes a slice of labels as a PNG, one pixel a voxel, in the colours of `label_colors`.

    Args:
        path: File to write; one that exists is replaced.
        labels: uint64, two dimensions: rows of the picture from the top, columns from the left.

    Raises:
        ImportError: Pillow is not installed.
        TypeError: `labels` is not uint64.
        ValueError: `labels` has not two dimensions, or one of them is empty.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("pictures need Pillow; install it with `pip install 'zarr-dvid[cli]'`") from error
    if labels.ndim != 2 or labels.size == 0:
        raise ValueError(f"a picture needs a slice of two dimensions with voxels in it, not shape {labels.shape}")
    Image.fromarray(label_colors(labels)).save(path, format="PNG")


@functools.cache
def _palette() -> npt.NDArray[np.uint8]:
    """The colours, picked in OKLCh: every hue in four shades; shape (4096, 3)."""
    n = 1 << _N_COLORS_LOG2
    index = np.arange(n)
    hue = index // 4 * (2 * np.pi / (n // 4))
    # Yellows look muddy where blues look fresh.
    lightness = np.array([0.62, 0.69, 0.76, 0.82])[index % 4] + 0.09 * np.cos(hue - 1.8)
    chroma = np.array([0.15, 0.13, 0.15, 0.11])[index % 4]
    a, b = chroma * np.cos(hue), chroma * np.sin(hue)
    cone = np.stack(
        [
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ],
        axis=1,
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = np.clip(cone**3 @ to_rgb.T, 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    colors: npt.NDArray[np.uint8] = np.rint(255 * encoded).astype(np.uint8)
    return colors
