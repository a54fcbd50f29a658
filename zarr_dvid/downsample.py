"""Label volumes at half the resolution."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from zarr_dvid.block import Voxels

# Batcher's odd-even merge sort of eight values: the pairs to put in order, one after another.
_SORT_8 = (
    *((0, 1), (2, 3), (4, 5), (6, 7)),
    *((0, 2), (1, 3), (4, 6), (5, 7)),
    *((1, 2), (5, 6)),
    *((0, 4), (1, 5), (2, 6), (3, 7)),
    *((2, 4), (3, 5)),
    *((1, 2), (3, 4), (5, 6)),
)


def downsample_majority(volume: Voxels) -> Voxels:
    """Halves a label volume: each voxel of the result is the label that most of its 2x2x2 voxels have.

    Of labels that are equally frequent the smallest wins, and any label wins over 0, so that thin processes survive in
    an empty surrounding. At odd sizes the last plane counts twice.

    Args:
        volume: uint64, shape (z, y, x).

    Returns:
        uint64, shape (ceil(z / 2), ceil(y / 2), ceil(x / 2)).

    Raises:
        TypeError: `volume` is not uint64.
        ValueError: It has not three dimensions.
    """
    if volume.dtype != np.uint64:
        raise TypeError(f"labels are uint64, not {volume.dtype}")
    if volume.ndim != 3:
        raise ValueError(f"a volume has three dimensions (z, y, x), not {volume.ndim}")
    z, y, x = volume.shape
    halved = np.empty(((z + 1) // 2, (y + 1) // 2, (x + 1) // 2), np.uint64)
    # Plane by plane, so that all intermediate arrays stay in the processor's cache.
    for plane, out in enumerate(halved):
        pair = volume[2 * plane : 2 * plane + 2]
        missing = ((0, 2 - len(pair)), (0, y % 2), (0, x % 2))
        if any(after for _, after in missing):
            pair = np.pad(pair, missing, mode="edge")
        _majority([pair[dz, dy::2, dx::2] for dz in (0, 1) for dy in (0, 1) for dx in (0, 1)], out)
    return halved


def _majority(corners: list[Voxels], out: Voxels) -> None:
    """Writes the most frequent of eight labels, position by position."""
    one = np.uint64(1)
    ranks = [corner - one for corner in corners]  # 0 wraps round to the largest number, so it comes last of all labels
    for low, high in _SORT_8:
        ranks[low], ranks[high] = np.minimum(ranks[low], ranks[high]), np.maximum(ranks[low], ranks[high])
    out[...] = ranks[0]
    # Equal ranks are neighbours now: the longest run of them wins, and of equally long ones the first.
    longest = np.ones(out.shape, np.uint8)
    run = np.ones(out.shape, np.uint8)
    for before, rank in pairwise(ranks):
        run *= before == rank
        run += 1
        longer = run > longest
        np.copyto(longest, run, where=longer)
        np.copyto(out, rank, where=longer)
    out += one
