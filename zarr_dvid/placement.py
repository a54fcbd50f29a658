"""What only a look at several shards of a scale can tell: what coordinates count, and which files chunks lie in.

Pure arithmetic on tables of chunks; `zarr_dvid.scale` reads them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.errors import ZarrDvidError
from zarr_dvid.shard_index import CHUNK_VOXELS, Units
from zarr_dvid.volume import XYZ

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Table = tuple[XYZ, Ints]  # a shard's origin in voxels, and coordinates of shape (n, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The boxes that shards' chunks lie in: int64 arrays of shape (n, 3), x, y, z, one row for each shard.

    Attributes:
        origins_voxel: First voxel of the cube that the shard is named for.
        low: First chunk of the box.
        high: Last chunk of it.
    """

    origins_voxel: Ints
    low: Ints
    high: Ints

    def __len__(self) -> int:
        return len(self.low)

    def at(self, which: npt.NDArray[np.bool_] | Ints) -> Boxes:
        """Some of them, given by a mask or by positions."""
        return Boxes(self.origins_voxel[which], self.low[which], self.high[which])

    def are_in_cubes(self, side_voxels: int) -> npt.NDArray[np.bool_]:
        """Whether each lies within `side_voxels` of its origin; 0 bounds nothing."""
        is_in: npt.NDArray[np.bool_] = np.all(CHUNK_VOXELS * self.low >= self.origins_voxel, axis=1)
        if side_voxels:
            is_in &= (CHUNK_VOXELS * self.high < self.origins_voxel + side_voxels).all(axis=1)
        return is_in

    def meet(self, low_xyz: npt.ArrayLike, high_xyz: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each has a chunk in common with the box from one chunk to another."""
        meets: npt.NDArray[np.bool_] = np.all(
            (self.low <= np.asarray(high_xyz)) & (self.high >= np.asarray(low_xyz)), axis=1
        )
        return meets


def no_boxes() -> Boxes:
    """Of no shard."""
    return Boxes(*(np.empty((0, 3), np.int64) for _ in range(3)))


def join_boxes(some: Boxes, others: Boxes) -> Boxes:
    """All of both."""
    pairs = ((some.origins_voxel, others.origins_voxel), (some.low, others.low), (some.high, others.high))
    return Boxes(*(np.concatenate(pair) for pair in pairs))


def boxes_of(tables: Iterable[Table]) -> Boxes:
    """The boxes of shards' chunks; shards without any are left out."""
    some = [(origin, chunks.min(axis=0), chunks.max(axis=0)) for origin, chunks in tables if len(chunks)]
    return Boxes(*(np.array([row[i] for row in some], np.int64).reshape(-1, 3) for i in range(3)))


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Whether the chunks of a scale lie in the cubes of their files; and if not, which files they may lie in.

    Attributes:
        strays: Boxes of the shards that hold chunks of others' cubes.
        broken: Why the shards that could not be indexed could not; what they hold is not known.
        is_shared: Whether a file was seen that several writers wrote to, as where shards share their names.
    """

    strays: Boxes
    broken: tuple[ZarrDvidError, ...] = ()
    is_shared: bool = False

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return 72 * len(self.strays) + 4096 * len(self.broken)

    @property
    def is_scattered(self) -> bool:
        """Whether some chunks lie outside their files' cubes."""
        return len(self.strays) > 0

    @property
    def broken_may_hold_any(self) -> bool:
        """Whether a broken shard may hold chunks of others' cubes, so that none can be said to be absent."""
        return bool(self.broken) and (self.is_scattered or self.is_shared)

    def shards_near(self, low_xyz: npt.ArrayLike, high_xyz: npt.ArrayLike) -> list[XYZ]:
        """Origins of the shards outside of whose cubes some chunk of a box may be."""
        found = self.strays.origins_voxel[self.strays.meet(low_xyz, high_xyz)] if self.is_scattered else ()
        return [(x, y, z) for x, y, z in map(tuple, np.asarray(found, np.int64).reshape(-1, 3).tolist())]


def common_cube(origins_voxel: Iterable[XYZ]) -> int:
    """A side that every shard's cube has, or a multiple of it: the greatest common divisor of all names; 0 if all are 0.

    Names are multiples of one side D for each scale. A multiple of D serves as well to find a chunk's file: the files
    that are there all start at its borders.
    """
    return math.gcd(*set(itertools.chain.from_iterable(origins_voxel)))


def are_in_cubes(tables: Iterable[Table], side_voxels: int) -> bool:
    """Whether all chunks lie within `side_voxels` of the origin that their file is named for; 0 bounds nothing."""
    return all(
        _all_within(chunks_xyz * CHUNK_VOXELS, np.array(origin), side_voxels or None) for origin, chunks_xyz in tables
    )


def proves_chunks(xyz: Ints) -> bool:
    """Whether coordinates can't be voxels, which are multiples of 64, or are the same either way."""
    return not xyz.any() or bool((xyz % CHUNK_VOXELS).any())


def tell_units(tables: Sequence[Table], *, side_voxels: int, grid_xyz: XYZ | None) -> Units | None:
    """Tells whether a scale's coordinates are chunks, as DVID writes them, or voxels, as the first documents have them.

    One coordinate that is no multiple of 64 proves chunks. Else the cubes that the files are named for decide; then the
    volume.

    Args:
        tables: Coordinates as written, by shard.
        side_voxels: Side of the cubes (or a multiple of it), or 0 where it is not known.
        grid_xyz: Chunks of the volume along each axis, or None where that is not known.

    Returns:
        The unit, or None where it can't be told.
    """
    if any((xyz % CHUNK_VOXELS).any() for _, xyz in tables):
        return "chunks"
    as_chunks = are_in_cubes(tables, side_voxels)
    as_voxels = are_in_cubes([(origin, xyz // CHUNK_VOXELS) for origin, xyz in tables], side_voxels)
    if as_chunks == as_voxels and grid_xyz is not None:
        zero, grid = np.zeros(3, np.int64), np.array(grid_xyz)
        as_chunks = all(_all_within(xyz, zero, grid) for _, xyz in tables)
        as_voxels = all(_all_within(xyz // CHUNK_VOXELS, zero, grid) for _, xyz in tables)
    if as_chunks == as_voxels:
        return None
    return "chunks" if as_chunks else "voxels"


def _all_within(xyz: Ints, low: Ints, size: Ints | int | None) -> bool:
    return bool((xyz >= low).all()) and (size is None or bool((xyz < low + size).all()))
