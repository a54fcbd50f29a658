"""What only a look at several shards of a scale can tell: what coordinates count, and which files chunks lie in.

Pure arithmetic on tables of chunks; `zarr_dvid.scale` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.errors import ZarrDvidError
from zarr_dvid.shard_index import CHUNK_VOXELS, Units, chunk_key, to_keys
from zarr_dvid.volume import XYZ

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Table = tuple[XYZ, Ints]  # a shard's origin in voxels, and coordinates of shape (n, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Whether the chunks of a scale lie in the cubes of their files; and if not, which files they lie in.

    Attributes:
        keys: Of all chunks, ascending; empty where they lie in their cubes.
        origins: The shard of each.
        broken: Why the shards that could not be indexed could not; what they hold is not known.
        is_scattered: Whether some lie outside.
    """

    keys: Ints
    origins: Sequence[XYZ]
    broken: tuple[ZarrDvidError, ...]
    is_scattered: bool

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.keys.nbytes + 8 * len(self.origins)

    def shards_of(self, chunk_xyz: XYZ) -> list[XYZ]:
        """The shards that a scattered scale's chunk lies in."""
        first, last = np.searchsorted(self.keys, [chunk_key(chunk_xyz), chunk_key(chunk_xyz) + 1])
        return list(dict.fromkeys(self.origins[first:last]))


def in_cubes(broken: Sequence[ZarrDvidError]) -> Placement:
    """The placement of a scale whose readable shards all keep to their cubes."""
    return Placement(np.empty(0, np.int64), (), tuple(broken), is_scattered=False)


def scattered(tables: Iterable[Table], broken: Sequence[ZarrDvidError]) -> Placement:
    """The placement of a scale some of whose chunks lie outside their files' cubes."""
    origins: list[XYZ] = []
    keys: list[Ints] = []
    for origin, chunks_xyz in tables:
        origins += [origin] * len(chunks_xyz)
        keys.append(to_keys(chunks_xyz))
    all_keys = np.concatenate(keys)
    order = np.argsort(all_keys, kind="stable")
    return Placement(all_keys[order], [origins[i] for i in order], tuple(broken), is_scattered=True)


def common_cube(origins_voxel: Iterable[XYZ]) -> int:
    """A side that every shard's cube has, or a multiple of it: the greatest common divisor of all names; 0 if all are 0.

    Names are multiples of one side D for each scale. A multiple of D serves as well to find a chunk's file: the files
    that are there all start at its borders.
    """
    return math.gcd(*(side for origin in origins_voxel for side in origin))


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
