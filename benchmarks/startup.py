"""How long a fresh process takes from its start to its first chunk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.table import Row
from benchmarks.timing import interleaved

_ROUNDS = 5
_IMPORT_ZARR = "import zarr"
_READ_CHUNK = """
import sys
import zarr_dvid
path, scale, z, y, x = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
labels = zarr_dvid.open(path)[f"{scale}/labels"]
chunk = labels[64 * z : 64 * z + 64, 64 * y : 64 * y + 64, 64 * x : 64 * x + 64]
assert chunk.any()
"""


def measure(export: Path) -> list[Row]:
    """Rows for a process that imports zarr, and for one that opens an export and reads the first chunk of its index."""
    index = min(export.glob("s*/*.csv"))
    lines = index.read_text().splitlines()
    header = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    x, y, z = lines[header + 1].split(",")[:3]
    seconds = interleaved(
        {
            "zarr": lambda: _run(_IMPORT_ZARR),
            "chunk": lambda: _run(_READ_CHUNK, str(export), index.parent.name, z, y, x),
        },
        rounds=_ROUNDS,
    )
    zarr, chunk = 1e6 * seconds["zarr"], 1e6 * seconds["chunk"]
    return [
        Row(name="process that imports zarr", microseconds=zarr),
        Row(
            name="process that opens the export and reads a chunk",
            microseconds=chunk,
            ratio=chunk / zarr,
            ratio_of="it / import zarr",
        ),
        Row(name="  what it takes more", microseconds=chunk - zarr),
    ]


def _run(code: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
