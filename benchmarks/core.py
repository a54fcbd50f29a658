"""The block core: decoding against a memcpy of the voxels and against zstd alone, windows, encoding."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import zstandard

from benchmarks.table import Row
from benchmarks.timing import interleaved
from benchmarks.volumes import dense_volume, sparse_volume
from zarr_dvid import decode_block, encode_block
from zarr_dvid._native import core
from zarr_dvid.block import CHUNK_SHAPE

if TYPE_CHECKING:
    import numpy.typing as npt

    Voxels = npt.NDArray[np.uint64]

REAL_EXPORT = Path(__file__).parents[2] / "shared" / "data" / "mcns" / "export"
_BARE_TARGETS = {"real": 1.3, "sparse": 1.3, "dense": 1.5}
_FRAMED_TARGET = 1.05
_ROUNDS = 21
_MADE_SIDE = 192  # voxels: 27 blocks, too many to stay in a core's own cache


def real_blocks() -> list[bytes]:
    """The zstd-framed blocks of the real shard."""
    framed: list[bytes] = []
    for path in sorted(REAL_EXPORT.glob("s*/*.arrow")):
        with pa.ipc.open_stream(path) as stream:
            framed += stream.read_all().column("dvid_compressed_block").to_pylist()
    return framed


def made_blocks(volume: Voxels) -> list[bytes]:
    """The zstd-framed blocks of a volume."""
    compressor = zstandard.ZstdCompressor()
    parts = [[slice(at, at + side) for at in range(0, _MADE_SIDE, side)] for side in CHUNK_SHAPE]
    return [compressor.compress(encode_block(volume[window])) for window in itertools.product(*parts)]


def measure() -> dict[str, list[Row]]:
    """Rows for each kind of blocks: of the real shard where it is there, and made ones."""
    kinds = {"dense": made_blocks(dense_volume(_MADE_SIDE)), "sparse": made_blocks(sparse_volume(_MADE_SIDE))}
    if REAL_EXPORT.exists():
        kinds = {"real": real_blocks(), **kinds}
    else:
        print(f"no real shard at {REAL_EXPORT}: skipped")
    # As a user would make it. Where it happens to begin matters to the time, so the tables tell it.
    out = np.empty(CHUNK_SHAPE, np.uint64)
    where = f"into an array that begins {out.ctypes.data % 64} bytes past a cache line"
    return {
        f"{kind} blocks, {where}": measure_blocks(framed, out=out, bare_target=_BARE_TARGETS[kind])
        for kind, framed in kinds.items()
    }


def measure_blocks(framed: Sequence[bytes], *, out: Voxels, bare_target: float) -> list[Row]:
    """Times the core over zstd-framed blocks, in one thread; all times are per block."""
    zstd = zstandard.ZstdDecompressor()
    bare = [zstd.decompress(frame) for frame in framed]
    source = decode_block(bare[0])
    plane = np.empty((1, *CHUNK_SHAPE[1:]), np.uint64)
    volumes = [decode_block(block) for block in bare[:16]]
    start = (0, 0, 0)
    middle = slice(32, 33), slice(None), slice(None)

    def every(blocks: Sequence[object], operation: Callable[..., object]) -> Callable[[], None]:
        def run() -> None:
            for block in blocks:
                operation(block)

        return run

    seconds = interleaved(
        {
            "memcpy": every(bare, lambda _: np.copyto(out, source)),
            "native": every(bare, lambda block: core.decode_block(block, None, start, out)),
            "bare": every(bare, lambda block: decode_block(block, out=out)),
            "zstd": every(framed, zstd.decompress),
            "framed": every(framed, lambda frame: decode_block(frame, out=out)),
            "plane": every(bare, lambda block: decode_block(block, window=middle, out=plane)),
            "encode": every(volumes, encode_block),
        },
        rounds=_ROUNDS,
        clock=time.thread_time,
    )
    each = {name: 1e6 * taken / (len(volumes) if name == "encode" else len(framed)) for name, taken in seconds.items()}
    memcpy, zstd_alone, decoded = each["memcpy"], each["zstd"], each["bare"]
    return [
        Row(name="memcpy of 2 MiB", microseconds=memcpy),
        Row(
            name="decode_block, bare",
            microseconds=decoded,
            ratio=decoded / memcpy,
            ratio_of="it / memcpy",
            target=bare_target,
        ),
        Row(
            name="  the native call in it",
            microseconds=each["native"],
            ratio=each["native"] / memcpy,
            ratio_of="it / memcpy",
        ),
        Row(name="zstd alone", microseconds=zstd_alone, ratio=zstd_alone / memcpy, ratio_of="it / memcpy"),
        Row(
            name="decode_block, zstd frame",
            microseconds=each["framed"],
            ratio=each["framed"] / (zstd_alone + decoded),
            ratio_of="it / (zstd alone + bare)",
            target=_FRAMED_TARGET,
        ),
        Row(
            name="  less decode_block, bare",
            microseconds=each["framed"] - decoded,
            ratio=(each["framed"] - decoded) / zstd_alone,
            ratio_of="it / zstd alone",
        ),
        Row(
            name="decode_block, one z plane",
            microseconds=each["plane"],
            ratio=each["plane"] / decoded,
            ratio_of="it / whole block",
        ),
        Row(name="encode_block", microseconds=each["encode"], ratio=each["encode"] / memcpy, ratio_of="it / memcpy"),
    ]
