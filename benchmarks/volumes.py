"""Label volumes whose blocks are as hard to decode as those of a real export."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Voxels = npt.NDArray[np.uint64]

_FIRST_ID = 10**10
_BUNDLE_RADIUS = 13  # voxels


def sparse_volume(n: int, *, seed: int = 0) -> Voxels:
    """Labels as dense as at scale 0 of the male CNS.

    A block has 20 to 30 labels; some 60 % of its sub-blocks have one, and the others 2 to 3. Cells as large as a block
    do that, with a bundle of thin ones amid each block.

    Args:
        n: Voxels a side.
        seed: Chooses another volume.

    Returns:
        uint64, shape (n, n, n).
    """
    cells = _voronoi(n, spacing=84.0, jitter=1.0, seed=seed)
    thin = _voronoi(n, spacing=14.0, jitter=1.0, seed=seed + 1) + np.uint64(cells.max() - _FIRST_ID + 1)
    off_center = (np.arange(n) % 64 - 32) ** 2
    bundle = off_center[:, None, None] + off_center[:, None] + off_center < _BUNDLE_RADIUS**2
    return np.where(bundle, thin, cells)


def dense_volume(n: int, *, seed: int = 0) -> Voxels:
    """Labels as dense as at scale 3 of the male CNS: about 1,800 a block and 13 a sub-block.

    Args:
        n: Voxels a side.
        seed: Chooses another volume.

    Returns:
        uint64, shape (n, n, n).
    """
    return _voronoi(n, spacing=5.8, jitter=0.6, seed=seed)


def _voronoi(n: int, *, spacing: float, jitter: float, seed: int) -> Voxels:
    """Voronoi cells of one point in each cube of a grid, placed at random in the middle `jitter` of it."""
    m = int(np.ceil(n / spacing)) + 2
    cubes = np.indices((m, m, m), dtype=np.float32)
    points = (cubes - 0.5 + jitter * (np.random.default_rng(seed).random((3, m, m, m)) - 0.5)) * spacing
    points = points.astype(np.float32)
    voxel = np.arange(n, dtype=np.float32)
    cube = (voxel / spacing).astype(np.intp) + 1
    nearest = np.full((n, n, n), np.inf, np.float32)
    owner = np.zeros((n, n, n), np.uint64)
    for step in np.ndindex(3, 3, 3):
        neighbour = np.ix_(*(cube + d - 1 for d in step))
        z, y, x = (axis[neighbour] for axis in points)
        distance = (z - voxel[:, None, None]) ** 2 + (y - voxel[:, None]) ** 2 + (x - voxel) ** 2
        number = (neighbour[0] * m + neighbour[1]) * m + neighbour[2]
        owner = np.where(distance < nearest, number.astype(np.uint64), owner)
        np.minimum(nearest, distance, out=nearest)
    return owner + np.uint64(_FIRST_ID)
