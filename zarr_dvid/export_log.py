"""The report at the end of an export, as far as it follows from the export's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zarr_dvid.block import ShapeZYX

_RULE = "=" * 37
_UNITS = ("bytes", "KB", "MB", "GB", "TB")  # of 1024, as DVID counts


@dataclass(frozen=True, slots=True)
class ScaleSummary:
    """What is on disk of one scale.

    Attributes:
        scale: Number of the scale, 0 for full resolution.
        shape_zyx: Voxels.
        records: Records of each shard.
        sizes_bytes: Size of each shard's `.arrow` file.
    """

    scale: int
    shape_zyx: ShapeZYX
    records: Sequence[int]
    sizes_bytes: Sequence[int]


def export_log(scales: Sequence[ScaleSummary]) -> str:
    """Text of an ``export.log`` as DVID writes it, without times and places: the same export gives the same text."""
    records = [n for summary in scales for n in summary.records]
    sizes_bytes = [n for summary in scales for n in summary.sizes_bytes]
    lines = [_RULE, "DVID Export-Shards Report", _RULE, "Written by:  zarr-dvid", ""]
    for summary in scales:
        lines += [*_scale_section(summary), ""]
    lines += [
        "--- Totals ---",
        f"  Chunks:        {sum(records):,}",
        f"  Shard files:   {len(records):,}",
        f"  File sizes:    {_size(sum(sizes_bytes))}",
    ]
    return "\n".join(lines) + "\n"


def _scale_section(summary: ScaleSummary) -> list[str]:
    z, y, x = summary.shape_zyx
    lines = [
        f"--- Scale {summary.scale} ---",
        f"  Volume:              {x:,} x {y:,} x {z:,} voxels",
        "  Chunk size:          64 x 64 x 64 voxels",
        f"  Chunks exported:     {sum(summary.records):,}",
        f"  Shard files:         {len(summary.records):,}",
    ]
    if summary.records:
        smallest, largest, mean = _spread(summary.records)
        lines += ["", "  Records per shard file:"]
        lines += [f"    Min:     {smallest:,}", f"    Max:     {largest:,}", f"    Mean:    {mean:,}"]
        smallest, largest, mean = _spread(summary.sizes_bytes)
        lines += ["", "  Shard file sizes (arrow):", f"    Total:   {_size(sum(summary.sizes_bytes))}"]
        lines += [f"    Min:     {_size(smallest)}", f"    Max:     {_size(largest)}", f"    Mean:    {_size(mean)}"]
    return lines


def _spread(numbers: Sequence[int]) -> tuple[int, int, int]:
    return min(numbers), max(numbers), sum(numbers) // len(numbers)


def _size(n_bytes: int) -> str:
    power = min((n_bytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{n_bytes} bytes" if n_bytes < 1024 else f"{n_bytes / 1024**power:.2f} {_UNITS[power]}"
