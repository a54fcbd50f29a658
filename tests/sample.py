"""One small export of two scales and several shards, as files and as the NumPy volumes that it must read as.

Written with `exports`, so that nothing of zarr_dvid's own writer or encoder is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from exports import XYZ, Dialect, Voxels, make_chunks, volume_info, write_shard

from zarr_dvid.voxels import Values

SIZE_XYZ: XYZ = (200, 130, 150)  # no side is a whole number of chunks
INFO: dict[str, Any] = volume_info(SIZE_XYZ, n_scales=2)  # 8 nm
SHAPES: dict[int, tuple[int, int, int]] = {0: (150, 130, 200), 1: (75, 65, 100)}
BOTH: tuple[Values, ...] = ("labels", "supervoxels")

# Chunks (x, y, z) in the shards of cubes of two chunks a side that hold them, by scale and voxel origin.
SHARDS: dict[tuple[int, XYZ], list[XYZ]] = {
    (0, (0, 0, 0)): [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)],
    (0, (128, 0, 0)): [(3, 1, 1), (2, 0, 0), (2, 1, 1)],
    (0, (0, 128, 0)): [(0, 2, 0), (1, 2, 1)],
    (0, (128, 0, 128)): [(3, 0, 2), (2, 1, 2)],
    (0, (128, 128, 128)): [(3, 2, 2)],
    (1, (0, 0, 0)): [(0, 0, 0), (1, 1, 0), (1, 0, 1)],
}
CHUNKS: dict[int, list[XYZ]] = {
    level: [xyz for (its, _), chunks in SHARDS.items() if its == level for xyz in chunks] for level in SHAPES
}


def shard_path(level: int, chunk_xyz: XYZ) -> str:
    """The shard that holds a chunk, relative to the export."""
    origin = next(o for (its, o), chunks in SHARDS.items() if its == level and chunk_xyz in chunks)
    return f"s{level}/{'_'.join(map(str, origin))}.arrow"


def sample_files(dialect: Dialect | None = None) -> dict[str, bytes]:
    """The export's files by path, without any volume description."""
    files: dict[str, bytes] = {}
    for (level, origin), chunks in SHARDS.items():
        shard = write_shard(make_chunks(*chunks, seed=level), dialect)
        files |= shard.files(f"s{level}/{'_'.join(map(str, origin))}")
    return files


@cache
def sample_volume(level: int, values: Values) -> Voxels:
    """All voxels of a scale, (z, y, x)."""
    shape = SHAPES[level]
    volume = np.zeros([-(-side // 64) * 64 for side in shape], np.uint64)
    for chunk in make_chunks(*CHUNKS[level], seed=level):
        volume[window_of_chunk(chunk.xyz)] = chunk.voxels[values]
    volume = volume[tuple(slice(side) for side in shape)].copy()
    volume.flags.writeable = False
    return volume


def window_of_chunk(chunk_xyz: XYZ) -> tuple[slice, slice, slice]:
    """A chunk's voxels (z, y, x) in its volume."""
    x, y, z = (slice(64 * c, 64 * c + 64) for c in chunk_xyz)
    return z, y, x


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Writes files by path, and gives the folder back."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
