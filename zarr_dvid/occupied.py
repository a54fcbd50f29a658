"""Which shards a box of chunks may be in, and which of them gives a chunk that several have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.cubes import by_cube, corner, first_chunk
from zarr_dvid.placement import Placement
from zarr_dvid.shard_index import CHUNK_VOXELS
from zarr_dvid.volume import XYZ

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid.scale import Scale

    Ints = npt.NDArray[np.int64]


def shards_near(placement: Placement, origins: Iterable[XYZ], low: Ints, high: Ints, cube_voxels: int) -> Iterator[XYZ]:
    """The shards that may hold a chunk of a box, from its first chunk to its last.

    Raises:
        ZarrDvidError: One that can't be read may hold any chunk.
    """
    names = list(origins)
    if not names or (low > high).any():
        return
    if placement.broken_may_hold_any:
        raise placement.broken[0].located()
    strays = set(placement.shards_near(low, high))
    first = np.array(names) // CHUNK_VOXELS
    is_near: npt.NDArray[np.bool_] = np.all(first <= high, axis=1)
    if cube_voxels:
        is_near &= np.all(first + cube_voxels // CHUNK_VOXELS > low, axis=1)
    yield from (origin for origin, near in zip(names, is_near.tolist(), strict=True) if near or origin in strays)


def met_first(scale: Scale, chunks: Ints, origin: XYZ) -> npt.NDArray[np.bool_]:
    """Whether each of a shard's chunks is in neither its own cube's shard nor one with strays that comes before this."""
    is_first = np.ones(len(chunks), bool)
    for some in by_cube(chunks, scale.cube_voxels):
        own = corner(first_chunk(chunks, some), scale.cube_voxels)
        if own == origin:
            continue
        near = scale.placement.shards_near(chunks[some].min(axis=0), chunks[some].max(axis=0))
        others = [other for other in near if other < origin and other != own] + [own] * (own in scale.shards)
        for other in others:
            is_first[some] &= scale.load(other).index.look_up(chunks[some]).n_records == 0
    return is_first
