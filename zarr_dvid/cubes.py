"""The cubes that files are named for, and the chunks that lie in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.errors import ZarrDvidError
from zarr_dvid.shard_index import CHUNK_VOXELS, to_keys
from zarr_dvid.volume import XYZ

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


def corner(chunk_xyz: XYZ, side_voxels: int) -> XYZ:
    """The first voxel of the cube that a chunk lies in, of those that start at voxel 0; side 0 is one cube for all."""
    x, y, z = ((CHUNK_VOXELS * c) // side_voxels * side_voxels if side_voxels else 0 for c in chunk_xyz)
    return x, y, z


def by_cube(chunks_xyz: Ints, side_voxels: int) -> list[Ints]:
    """Positions of chunks, shape (n, 3), by the cube that they lie in, ascending; the first chunk's cube comes first."""
    if not len(chunks_xyz):
        return []
    if not side_voxels:
        return [np.arange(len(chunks_xyz))]
    cubes = to_keys(chunks_xyz // (side_voxels // CHUNK_VOXELS))
    order = np.argsort(cubes, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(cubes[order])) + 1)
    return sorted(parts, key=lambda part: int(part[0]))


def first_chunk(chunks_xyz: Ints, which: Ints) -> XYZ:
    """The first of some chunks."""
    x, y, z = chunks_xyz[which[0]].tolist()
    return x, y, z


@contextmanager
def located_at(chunk_xyz: XYZ) -> Iterator[None]:
    """Adds a chunk to the error that is raised, as far as it has none."""
    try:
        yield
    except ZarrDvidError as error:
        raise error.located(chunk_xyz=chunk_xyz) from None
