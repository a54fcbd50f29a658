"""What a look at the shards of a scale tells: what their coordinates count, and whether chunks lie in their files' cubes.

All of a scale's shards are looked at where their indexes are small, a sample where they are not; those that an export's
index covers are not read at all.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zarr_dvid.errors import ExportWarning, ShardIndexError, ZarrDvidError
from zarr_dvid.placement import Boxes, Placement, boxes_of, join_boxes, no_boxes, tell_units
from zarr_dvid.reader import Reader
from zarr_dvid.shard import raw_coordinates
from zarr_dvid.shard_files import ShardFiles
from zarr_dvid.shard_index import Units
from zarr_dvid.volume import XYZ

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

# Up to so many bytes of index files, all of a scale's are read before a chunk is said to be absent; above, a sample.
_CHECK_ALL_BYTES = 32 << 20
_SAMPLE_SHARDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What an index of the export tells of a scale, without a look at its shards.

    Attributes:
        origins: Of the shards that it covers.
        boxes: Of their chunks that the volume has, where they have any.
        broken: Why those that could not be indexed could not.
        is_shared: Whether several writers wrote to one of them.
    """

    origins: frozenset[XYZ] = frozenset()
    boxes: Boxes = field(default_factory=no_boxes)
    broken: tuple[ZarrDvidError, ...] = ()
    is_shared: bool = False


def check_cubes(
    level: int,
    shards: Mapping[XYZ, ShardFiles],
    chunks_of: Callable[[XYZ], Ints],
    known: Known,
    *,
    cube_voxels: int,
    spec_cube_voxels: int | None,
) -> Placement:
    """Finds out whether the chunks of a scale lie in their files' cubes.

    Args:
        level: The scale.
        shards: Its shards.
        chunks_of: Gives the chunks of a shard that the volume has.
        known: What an index tells already.
        cube_voxels: Side of the shards' cubes, or a multiple of it, as their names tell.
        spec_cube_voxels: The same as the spec tells, or None.

    Raises:
        ShardIndexError: They do not, and are too many to look at all.
    """
    files = [file for origin, file in shards.items() if origin not in known.origins]
    n_unknown = len(files)
    if is_sample := _are_too_many(files):
        files = _sample(files)
    tables, broken = [], list(known.broken)
    for file in files:
        try:
            tables.append((file.origin_voxel, chunks_of(file.origin_voxel)))
        except ZarrDvidError as error:
            # It is kept for long: without the frames, and all that they hold, of whoever came to read first.
            broken.append(error.located().with_traceback(None))
    boxes = join_boxes(known.boxes, boxes_of(tables))
    placement = Placement(no_boxes(), tuple(broken), is_shared=known.is_shared)
    if spec_cube_voxels is not None and boxes.are_in_cubes(spec_cube_voxels).all():
        return placement
    is_in_cube = boxes.are_in_cubes(cube_voxels)
    if is_in_cube.all():
        if (is_sample or broken) and not placement.broken_may_hold_any:
            _warn_of_doubt(level, len(shards) - n_unknown - len(known.broken) + len(tables), len(shards))
        return placement
    if is_sample and len(files) < n_unknown:
        raise ShardIndexError(
            "shards hold chunks outside the cubes that they are named for, and are too many to index them all",
            path=f"s{level}",
            expected=f"chunks within {spec_cube_voxels or cube_voxels} voxels of a file's name",
            found=f"others, in a sample of {len(files)} shards",
            advice="Run `zarr-dvid index` on the export once; or export it again with a spec whose shards are cubes",
        )
    return Placement(boxes.at(~is_in_cube), tuple(broken), is_shared=known.is_shared)


def _warn_of_doubt(level: int, n_seen: int, n_shards: int) -> None:
    warnings.warn(
        f"s{level}: a chunk that its own shard does not list, or that has no shard, is taken to be absent: that"
        f" chunks lie in the shards that they belong to was seen in {n_seen} of {n_shards} shards; give the"
        " export's spec as info= to be sure of the others",
        ExportWarning,
        stacklevel=2,
    )


def find_units(
    level: int, shards: Mapping[XYZ, ShardFiles], reader: Reader, *, cube_voxels: int, grid_xyz: XYZ | None
) -> Units:
    """What coordinates count, where a shard alone does not tell: a scale counts the same in all its shards.

    Raises:
        ShardIndexError: It can't be told.
    """
    files = list(shards.values())
    if _are_too_many(files):
        files = _sample(files)
    tables = []
    for file in files:
        with contextlib.suppress(ZarrDvidError):  # a broken shard proves nothing
            tables.append((file.origin_voxel, raw_coordinates(reader, file)))
    units = tell_units(tables, side_voxels=cube_voxels, grid_xyz=grid_xyz)
    if units is None:
        some = next(xyz[xyz.any(axis=1)][0] for _, xyz in tables if xyz.any())
        raise ShardIndexError(
            "whether coordinates count chunks or voxels can't be told",
            path=f"s{level}",
            expected="one of them to fit the files' names and the volume",
            found=f"{tuple(some.tolist())}, which fits as both or as neither",
            advice="Give the volume's size with info=, which tells them apart",
        )
    return units


def _are_too_many(files: list[ShardFiles]) -> bool:
    return sum(file.index_bytes for file in files) > _CHECK_ALL_BYTES


def _sample(files: list[ShardFiles]) -> list[ShardFiles]:
    return files[:: -(-len(files) // _SAMPLE_SHARDS)] if files else files
