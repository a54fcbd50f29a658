"""What is known of an export's volume: its size at each scale, its voxels' size, and how it was cut into shards.

An export itself holds no such document. In order of trust: a neuroglancer volume description (`info`, or the spec that the
export was made with), the report that DVID writes at the end (`export.log`), the index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zarr_dvid.errors import ExportError

XYZ = tuple[int, int, int]

_LOG_SCALE = re.compile(r"--- Scale ([0-9]{1,2}) ---\n((?:(?!---).*\n)*)")
_LOG_VOLUME = re.compile(
    r"^[ \t]*Volume:[ \t]+([0-9][0-9,]{0,15}) x ([0-9][0-9,]{0,15}) x ([0-9][0-9,]{0,15}) voxels[ \t]*$", re.MULTILINE
)
_LOG_CHUNKS = re.compile(r"^[ \t]*Chunks exported:[ \t]+([0-9][0-9,]{0,15})[ \t]*$", re.MULTILINE)
_LOG_SHARDS = re.compile(r"^[ \t]*Shard files:[ \t]+([0-9][0-9,]{0,15})[ \t]*$", re.MULTILINE)
_LARGEST_SIDE = 64 << 21


@dataclass(frozen=True, slots=True)
class Sharding:
    """Neuroglancer's sharding of one scale, as far as DVID's file names follow from it."""

    preshift_bits: int
    minishard_bits: int
    shard_bits: int

    def cube_voxels(self, size_xyz: XYZ) -> int | None:
        """Side of the cubes that this sharding cuts a volume into, or None where its shards are no cubes.

        DVID names a file by the multiple of D = 64 * (longest side of a shard's cell) that holds it. Only where the cell
        is a cube, or spans the grid where it is shorter, and where shard ids do not repeat, is a file's name enough to
        know which chunks it may hold (DVID ``datatype/labelmap/export.go``).
        """
        grid = [-(-side // 64) for side in size_xyz]
        bits = [(side - 1).bit_length() for side in grid]
        given, left = [0, 0, 0], min(self.preshift_bits + self.minishard_bits, sum(bits))
        while left:
            for axis in range(3):
                if left and given[axis] < bits[axis]:
                    given[axis] += 1
                    left -= 1
        if sum(bits) - sum(given) > self.shard_bits:
            return None  # distant cells share an id, and so a file
        sides = [min(1 << n, side) for n, side in zip(given, grid, strict=True)]
        longest = max(sides)
        spanned = all(side in (longest, span) for side, span in zip(sides, grid, strict=True))
        # A cell that ends with the grid need not be a power of two: then names are no borders of cells.
        aligned = longest & (longest - 1) == 0 or sides == grid
        return 64 * longest if spanned and aligned else None


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A neuroglancer volume description; its scale i is DVID's scale i.

    Attributes:
        source: Where it came from, for messages.
        sizes_xyz: Voxels of each scale, (x, y, z).
        voxel_size_xyz: Of scale 0, in nanometres, or None where its scales have no resolution.
        shardings: Of each scale; None where it has none.
    """

    source: str
    sizes_xyz: tuple[XYZ, ...]
    voxel_size_xyz: tuple[float, float, float] | None
    shardings: tuple[Sharding | None, ...]


@dataclass(frozen=True, slots=True)
class LoggedScale:
    """What export.log tells of one scale.

    Attributes:
        size_xyz: Voxels, (x, y, z).
        n_chunks: Chunks exported, or None where the report does not say.
        n_shards: Shard files written, likewise.
    """

    size_xyz: XYZ
    n_chunks: int | None
    n_shards: int | None


def parse_info(document: Mapping[str, Any] | bytes, source: str) -> VolumeInfo:
    """Parses a neuroglancer volume description.

    Args:
        document: The parsed document, or its bytes.
        source: Where it came from, for messages.

    Raises:
        ExportError: It is not one, or not of a segmentation in 64^3 chunks.
    """
    if not isinstance(document, Mapping):
        try:
            document = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise _bad(source, "it is no JSON document", "JSON", error) from None
    if not isinstance(document, Mapping):
        raise _bad(source, "it is no object", "a neuroglancer volume description", type(document).__name__)
    if document.get("data_type", "uint64") != "uint64" or document.get("num_channels", 1) != 1:
        found = f"{document.get('num_channels', 1)} of {document.get('data_type')}"
        raise _bad(source, "it describes no segmentation", "one channel of uint64", found)
    scales = document.get("scales")
    if not isinstance(scales, list) or not scales:
        raise _bad(source, "it has no scales", "a list of scales", scales)
    sizes, resolutions, shardings = [], [], []
    for i, scale in enumerate(scales):
        try:
            sizes.append(_three(scale["size"], int))
            resolutions.append(_three(scale["resolution"], float) if "resolution" in scale else None)
            chunk = list(scale.get("chunk_sizes", [[64, 64, 64]])[0])
            sharding = scale.get("sharding")
            bits = ("preshift_bits", "minishard_bits", "shard_bits")
            shardings.append(None if sharding is None else Sharding(*(_bits(sharding[name]) for name in bits)))
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise _bad(
                source,
                f"its scale {i} can't be understood",
                "size, chunk_sizes, and resolution and sharding if any",
                repr(error),
            ) from None
        if chunk != [64, 64, 64]:
            raise _bad(source, f"its scale {i} has other chunks than an export", [64, 64, 64], chunk)
    return VolumeInfo(source, tuple(sizes), resolutions[0], tuple(shardings))


def _bad(source: str, problem: str, expected: object, found: object) -> ExportError:
    return ExportError(
        f"the volume description can't be used: {problem}",
        path=source,
        expected=expected,
        found=found,
        advice="Give the neuroglancer spec that the export was made with, as info=",
    )


def _three(values: Any, kind: type) -> Any:
    if any(type(value) not in (int, float) for value in values):
        raise ValueError(f"{values!r} is not three numbers")
    three = tuple(kind(value) for value in values)
    if len(three) != 3 or not all(0 < value <= _LARGEST_SIDE for value in three) or three != tuple(values):
        raise ValueError(f"{values!r} is not three positive numbers")
    return three


def _bits(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 64:
        raise ValueError(f"{value!r} is no number of bits")
    return value


def parse_export_log(text: str) -> dict[int, LoggedScale]:
    """Reads the scales' sizes out of DVID's report; those that it does not tell are left out."""
    scales = {}
    for match in _LOG_SCALE.finditer(text):
        size = _LOG_VOLUME.search(match[2])
        chunks, shards = _LOG_CHUNKS.search(match[2]), _LOG_SHARDS.search(match[2])
        if size:
            x, y, z = (_count(side) for side in size.groups())
            if all(0 < side <= _LARGEST_SIDE for side in (x, y, z)):
                scales[int(match[1])] = LoggedScale((x, y, z), chunks and _count(chunks[1]), shards and _count(shards[1]))
    return scales


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def grid_of(size_xyz: XYZ) -> XYZ:
    """Chunks along each axis of a volume of so many voxels."""
    x, y, z = (-(-side // 64) for side in size_xyz)
    return x, y, z
