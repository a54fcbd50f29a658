"""The keys of an export's hierarchy. What is no such key is known not to exist, with no look at the export."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zarr_dvid.metadata import AXES
from zarr_dvid.voxels import VALUES, Values

_INDEX = r"(?:0|[1-9][0-9]{0,7})"
_KEY = re.compile(
    r"(?:s(?P<level>0|[1-9][0-9]?)/)?(?:(?P<array>labels|supervoxels|[zyx])/)?"
    rf"(?:zarr\.json|c/(?P<chunk>{_INDEX}(?:/{_INDEX}){{0,2}}))"
)


@dataclass(frozen=True, slots=True)
class DocumentKey:
    """Metadata of the group or array at `path`; "" is the root."""

    path: str


@dataclass(frozen=True, slots=True)
class CoordinatesKey:
    """The coordinates of a scale along an axis, all in one chunk."""

    level: int
    axis: str


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """A chunk of a scale's labels or supervoxels."""

    level: int
    values: Values
    chunk_xyz: tuple[int, int, int]

    def __str__(self) -> str:
        x, y, z = self.chunk_xyz
        return f"s{self.level}/{self.values}/c/{z}/{y}/{x}"


def parse_key(key: str) -> DocumentKey | CoordinatesKey | ChunkKey | None:
    """What a key names, by its form; None where it can't be one of an export's."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    level, array, chunk = match["level"], match["array"], match["chunk"]
    if chunk is None:
        path = [part for part in (level and f"s{level}", array) if part]
        return DocumentKey("/".join(path)) if level or not array else None
    if not level or not array:
        return None
    if array in AXES:
        return CoordinatesKey(int(level), array) if chunk == "0" else None
    values = next(values for values in VALUES if values == array)
    indices = [int(index) for index in chunk.split("/")]
    if len(indices) != 3:
        return None
    z, y, x = indices
    return ChunkKey(int(level), values, (x, y, z))
