"""Label volumes whose blocks are as hard to decode as those of a real export."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Voxels = npt.NDArray[np.uint64]
    Box = tuple[slice, slice, slice]

_FIRST_ID = 10**10
_BUNDLE_RADIUS = 13  # voxels
_PLANES_AT_ONCE = 4
_IDS_OF_A_TILE = 10**8
_TILE_FILE, _N_TILES_FILE = "tile.npy", "tiles.npy"


@dataclass(frozen=True, slots=True)
class Tiled:
    """A volume of copies of a tile, each with labels of its own.

    So a volume of any size is soon made, and need not be held in memory. No two of its blocks are alike, if no two of
    the tile's are and the tile's sides are whole blocks.

    Attributes:
        tile: uint64, shape (z, y, x).
        n_tiles_zyx: How often it is repeated along each axis.
    """

    tile: Voxels
    n_tiles_zyx: tuple[int, int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels along (z, y, x)."""
        return tuple(side * n for side, n in zip(self.tile.shape, self.n_tiles_zyx, strict=True))

    @property
    def dtype(self) -> np.dtype[np.uint64]:
        """uint64."""
        return self.tile.dtype

    def __getitem__(self, box: Box) -> Voxels:
        """The voxels of a box of three slices, as a new array."""
        voxels = np.empty([part.stop - part.start for part in box], np.uint64)
        spans = [range(part.start // side, -(-part.stop // side)) for part, side in zip(box, self.tile.shape, strict=True)]
        for place in product(*spans):
            number = np.ravel_multi_index(place, self.n_tiles_zyx)
            source, target = [], []
            for at, part, side in zip(place, box, self.tile.shape, strict=True):
                start, stop = max(part.start, at * side), min(part.stop, (at + 1) * side)
                source.append(slice(start - at * side, stop - at * side))
                target.append(slice(start - part.start, stop - part.start))
            voxels[tuple(target)] = self.tile[tuple(source)] + np.uint64(number * _IDS_OF_A_TILE)
        return voxels

    def save(self, folder: Path) -> None:
        """Keeps the volume in a folder, for other processes."""
        np.save(folder / _TILE_FILE, self.tile)
        np.save(folder / _N_TILES_FILE, self.n_tiles_zyx)

    @classmethod
    def load(cls, folder: Path) -> Tiled:
        """The volume that was kept in a folder; its memory is shared with all who load it."""
        z, y, x = np.load(folder / _N_TILES_FILE).tolist()
        return cls(np.load(folder / _TILE_FILE, mmap_mode="r"), (z, y, x))


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
    owner = np.empty((n, n, n), np.uint64)
    # Some planes at a time, so that what is compared 27 times over stays in the processor's cache.
    for start in range(0, n, _PLANES_AT_ONCE):
        planes = slice(start, start + _PLANES_AT_ONCE)
        nearest = np.full(owner[planes].shape, np.inf, np.float32)
        nearest_step = np.zeros(nearest.shape, np.uint8)
        for number, step in enumerate(np.ndindex(3, 3, 3)):
            in_z, in_y, in_x = (axis + d - 1 for axis, d in zip((cube[planes], cube, cube), step, strict=True))
            z, y, x = points[:, in_z].take(in_y, axis=2).take(in_x, axis=3)
            z -= voxel[planes, None, None]
            y -= voxel[:, None]
            x -= voxel
            distance = z * z + y * y + x * x
            nearest_step[distance < nearest] = number
            np.minimum(nearest, distance, out=nearest)
        in_z, in_y, in_x = np.unravel_index(nearest_step, (3, 3, 3))
        in_z, in_y, in_x = in_z + cube[planes, None, None] - 1, in_y + cube[:, None] - 1, in_x + cube - 1
        owner[planes] = (in_z * m + in_y) * m + in_x
    return owner + np.uint64(_FIRST_ID)
