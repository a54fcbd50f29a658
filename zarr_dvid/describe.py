"""What an export holds, told from its listings and indexes without reading a block."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zarr_dvid.block import CHUNK_SHAPE, ShapeZYX
from zarr_dvid.errors import ExportWarning, ZarrDvidError
from zarr_dvid.hierarchy import Hierarchy
from zarr_dvid.progress import progress_bar
from zarr_dvid.scale import Scale

if TYPE_CHECKING:
    from zarr_dvid.export import Export

_CHUNK_NBYTES = 8 * math.prod(CHUNK_SHAPE)


@dataclass(frozen=True, slots=True)
class ScaleDescription:
    """One scale of an export.

    Attributes:
        level: Its number.
        shape: Voxels (z, y, x), or None where that could not be told.
        shape_from: The document that gives the shape, or "index".
        n_shards: Shards by their files' names.
        n_blocks: Blocks that the readable indexes list, each once.
        n_chunks: Chunks of the grid.
        bytes_on_disk: Of shards and indexes.
        bytes_decoded: Of the blocks' voxels.
        dialects: Shards of each dialect.
        problems: What is wrong or could not be told.
    """

    level: int
    shape: ShapeZYX | None
    shape_from: str
    n_shards: int
    n_blocks: int
    n_chunks: int | None
    bytes_on_disk: int
    bytes_decoded: int
    dialects: dict[str, int]
    problems: tuple[str, ...]

    @property
    def occupancy(self) -> float | None:
        """Blocks by chunks of the grid."""
        return self.n_blocks / self.n_chunks if self.n_chunks else None


@dataclass(frozen=True, slots=True)
class ExportDescription:
    """An export as a whole.

    Attributes:
        url: Its directory.
        voxel_size: Of scale 0, (z, y, x) in nanometres, or None.
        scales: Of those that are there.
        problems: What is wrong or could not be told of the whole.
    """

    url: str
    voxel_size: tuple[float, float, float] | None
    scales: tuple[ScaleDescription, ...]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The same for programs; sizes in bytes, shapes as (z, y, x)."""
        return {
            "url": self.url,
            "voxel_size_nm": self.voxel_size,
            "scales": [
                {
                    "scale": scale.level,
                    "shape": scale.shape,
                    "shape_from": scale.shape_from,
                    "shards": scale.n_shards,
                    "blocks": scale.n_blocks,
                    "chunks": scale.n_chunks,
                    "occupancy": scale.occupancy,
                    "bytes_on_disk": scale.bytes_on_disk,
                    "bytes_decoded": scale.bytes_decoded,
                    "dialects": scale.dialects,
                    "problems": list(scale.problems),
                }
                for scale in self.scales
            ],
            "problems": list(self.problems),
        }


def describe(hierarchy: Hierarchy, *, progress: bool = False) -> ExportDescription:
    """Looks at all listings and indexes of an export.

    A shard that can't be indexed is a problem of the description, not an error.

    Args:
        hierarchy: Of the export.
        progress: Whether to show a bar, where stderr is a terminal and tqdm is installed.

    Raises:
        ExportError: There is no export, or its parts contradict each other.
    """
    export = hierarchy.export
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExportWarning)
        levels = export.scales
        problems = [str(warning.message) for warning in caught]
    n_shards = sum(len(scale.shards) for scale in levels.values())
    with progress_bar(n_shards, "shards", enabled=progress) as advance:
        scales = tuple(_describe_scale(export, scale, advance) for scale in levels.values())
    try:
        grid = hierarchy.grid
        voxel_size = grid.voxel_size if grid.unit == "nanometer" else None
    except ZarrDvidError:  # told at the scale whose shape is missing
        voxel_size = hierarchy.voxel_size
    if voxel_size is None:
        problems.append("the voxel size is not known: give info= or voxel_size=")
    if not export.log:
        problems.append("there is no export.log: whether the export was finished can't be told")
    return ExportDescription(export.reader.url, voxel_size, scales, tuple(problems))


def _describe_scale(export: Export, scale: Scale, advance: Any) -> ScaleDescription:
    dialects: Counter[str] = Counter()
    problems: list[str] = []
    n_blocks = n_twice = n_past_the_end = 0
    logged = export.log.get(scale.level)
    is_documented = export.info is not None or logged is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExportWarning)
        index = scale.index
        if index is not None:
            totals = index.totals()
            dialects.update(totals.dialects)
            n_blocks += totals.n_chunks
            n_twice += totals.n_records - totals.n_chunks
            problems += index.notes(scale.shards)
        for origin in scale.shards:
            is_counted = index is not None and origin in index and origin not in index.broken
            if is_counted and not (is_documented and index is not None and index.reaches(origin, scale.grid_xyz)):
                advance(1)
                continue
            try:
                shard = scale.load(origin)
            except ZarrDvidError as error:
                problems.append(str(error))
            else:
                if not is_counted:
                    dialects[shard.dialect] += 1
                    n_blocks += shard.index.n_chunks
                    n_twice += len(shard.index) - shard.index.n_chunks
                if is_documented:
                    beyond = shard.index.chunks_xyz() >= np.array(scale.grid_xyz)
                    n_past_the_end += int(beyond.any(axis=1).sum())
            advance(1)
        shape = _shape(scale, problems)
    problems += [text for text in dict.fromkeys(str(warning.message) for warning in caught) if text not in problems]
    if n_twice:
        problems.append(f"{n_twice} chunks are claimed by a second record; those whose records differ can't be read")
    if n_past_the_end:
        problems.append(f"{n_past_the_end} chunks in all lie past the end of the volume")
    if logged is not None and logged.n_chunks not in (None, n_blocks):
        problems.append(f"export.log says that {logged.n_chunks} chunks were exported, the indexes have {n_blocks}")
    n_found = sum(shard.arrow is not None for shard in scale.shards.values())
    if logged is not None and logged.n_shards is not None and n_found < logged.n_shards:
        problems.append(f"export.log says that {logged.n_shards} shards were written, {n_found} are there")
    files = [file for shard in scale.shards.values() for file in (shard.arrow, *shard.indexes) if file is not None]
    info = export.info
    return ScaleDescription(
        level=scale.level,
        shape=shape,
        shape_from=info.source if info is not None else "export.log" if logged is not None else "index",
        n_shards=len(scale.shards),
        n_blocks=n_blocks,
        n_chunks=None if shape is None else math.prod(-(-side // 64) for side in shape),
        bytes_on_disk=sum(file.size_bytes for file in files),
        bytes_decoded=n_blocks * _CHUNK_NBYTES,
        dialects=dict(dialects),
        problems=tuple(problems),
    )


def _shape(scale: Scale, problems: list[str]) -> ShapeZYX | None:
    try:
        x, y, z = scale.size_xyz
    except ZarrDvidError as error:
        problems.append(f"the shape can't be told: {error}")
        return None
    return z, y, x
