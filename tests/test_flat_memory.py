"""Reading for long leaves memory as it was, and a slice holds no more compressed data than it was told it may."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from exports import XYZ, Voxels, make_chunks, volume_info, write_shard
from sample import write_files

from zarr_dvid import DvidStore
from zarr_dvid.reader import FileInfo, LocalReader

MIB = 1 << 20
SHARD_XYZ = (8, 8, 32)  # chunks of each shard that there are: 2,048 in a cube of 32 a side
N_SHARDS = 5
N_CHUNKS = N_SHARDS * 2048

needs_statm = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")


def chunks_of_shard(shard: int) -> list[XYZ]:
    """Its chunks in a random order, as DVID writes them."""
    cells = list(itertools.product(*(range(n) for n in SHARD_XYZ)))
    return [(32 * shard + x, y, z) for x, y, z in (cells[i] for i in np.random.default_rng(shard).permutation(2048))]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of 10,240 chunks in five shards, of eight kinds."""
    kinds = make_chunks(*((i, 0, 0) for i in range(8)))
    files = {"info": json.dumps(volume_info((64 * 32 * N_SHARDS, 512, 2048))).encode()}
    for shard in range(N_SHARDS):
        chunks = [replace(kinds[sum(xyz) % 8], xyz=xyz) for xyz in chunks_of_shard(shard)]
        files |= write_shard(chunks).files(f"s0/{2048 * shard}_0_0")
    return write_files(tmp_path_factory.mktemp("flat") / "export", files)


# Runs alone in a process, so that nothing else takes or gives back memory. After each step it notes how much is resident.
PROGRAM = """
import json, os, sys
import numpy as np
import zarr
import zarr_dvid

path, pipeline, what = sys.argv[1], sys.argv[2] == "True", sys.argv[3]
zarr.config.set({"dvid.pipeline": pipeline})
array = zarr_dvid.open(path)["s0/labels"]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def chunks():  # one after another, all of each shard
    for shard in range(5):
        for z, y, x in np.ndindex(32, 8, 8):
            at = 64 * z, 64 * y, 64 * (32 * shard + x)
            yield array[tuple(slice(start, start + 64) for start in at)]

def slabs():  # of one shard, a layer of chunks at a time
    for z in range(32):
        yield array[64 * z : 64 * z + 64, :, :512]

noted, n_voxels = [], 0
for voxels in {"chunks": chunks, "slabs": slabs}[what]():
    assert voxels[0].any() and voxels[-1].any()
    n_voxels += voxels.size
    del voxels
    if n_voxels % 64**4 == 0:  # after each 64 chunks
        noted.append(resident())
print(json.dumps({"noted": noted, "n_voxels": n_voxels, "pipeline": zarr.config.get("codec_pipeline.path")}))
"""


def resident_while(export: Path, *, pipeline: bool, what: str) -> list[int]:
    """Bytes resident after each step of reading all chunks of the export, or all slabs of one shard."""
    command = [sys.executable, "-c", PROGRAM, str(export), str(pipeline), what]
    done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert done["n_voxels"] == 64**3 * (N_CHUNKS if what == "chunks" else 2048)
    assert done["pipeline"].startswith("zarr_dvid." if pipeline else "zarr.")
    noted: list[int] = done["noted"]
    return noted


@needs_statm
@pytest.mark.parametrize("pipeline", [True, False])
def test_memory_is_flat_while_10000_chunks_are_read(export: Path, pipeline: bool) -> None:
    noted = resident_while(export, pipeline=pipeline, what="chunks")
    warm = len(noted) // 10
    # Bounds what each of the 9,216 chunks that follow could leave behind to 1 KiB; the indexes of four shards are in it.
    # Zarr's own pipeline has chunks decoded by a few threads of a pool, each of which keeps the memory of two for the next.
    assert max(noted[warm:]) - noted[warm] < (9 if pipeline else 36) * MIB


@needs_statm
@pytest.mark.parametrize("pipeline", [True, False])
def test_memory_is_flat_while_a_shard_is_streamed(export: Path, pipeline: bool) -> None:
    noted = resident_while(export, pipeline=pipeline, what="slabs")
    # A slab takes 128 MiB while it is there. Zarr's loop thread may hold one a moment longer, and zarr's own
    # pipeline decodes up to ten chunks of 2 MiB at once. Bounds what each slab could leave behind to about 1 MiB.
    assert statistics.median(noted[18:]) - statistics.median(noted[4:18]) < 14 * MIB


class Held(bytes):
    """Bytes that tell when they are let go."""

    tally: Tally

    def __del__(self) -> None:
        self.tally.add(-len(self))


class Tally:
    """Bytes that are held, and the most that were at any time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # something may be let go while this thread holds the lock
        self.now = self.peak = self.total = 0

    def add(self, n_bytes: int) -> None:
        with self._lock:
            self.now += n_bytes
            self.peak = max(self.peak, self.now)
            self.total += max(0, n_bytes)


class TallyingReader:
    """A directory whose shards' bytes are counted, from when they are asked for until they are let go."""

    def __init__(self, folder: Path, *, concurrency: int) -> None:
        self._reader = LocalReader(folder)
        self.url, self.key, self.window_bytes = self._reader.url, object(), self._reader.window_bytes
        self.concurrency = concurrency
        self.tally = Tally()

    def list(self, path: str) -> Sequence[FileInfo]:
        return self._reader.list(path)

    def size(self, path: str) -> int:
        return self._reader.size(path)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        if not path.endswith(".arrow"):
            return self._reader.read_ranges(path, ranges)
        self.tally.add(sum(size for _, size in ranges))
        time.sleep(0.002)  # who holds on to what came before, holds it now
        parts = [Held(part) for part in self._reader.read_ranges(path, ranges)]
        for part in parts:
            part.tally = self.tally
        return parts


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("max_bytes", [20_000, 300_000])
def test_a_slice_holds_no_more_than_max_in_flight_bytes(export: Path, max_bytes: int, concurrency: int) -> None:
    store = DvidStore(export)
    reader = TallyingReader(export, concurrency=concurrency)
    store.hierarchy.export.reader = reader
    array = zarr.open_array(store, path="s0/labels", mode="r")
    assert array[0, 0, 0].shape == array[0, 0, 2048].shape == ()  # loads the indexes of both shards
    assert reader.tally.now < 10_000  # of each shard, its head is kept
    before, reader.tally = reader.tally, Tally()
    with zarr.config.set({"dvid.max_in_flight_bytes": max_bytes}):
        voxels = array[:64, :512, :4096]
    assert_right(voxels)
    tally = reader.tally
    assert tally.now == 0
    assert max_bytes / 2 < tally.peak <= max_bytes < tally.total
    assert before.now < 10_000


def assert_right(voxels: Voxels) -> None:
    """The lowest layer of chunks of the first two shards, and of the room between them."""
    kinds = [chunk.voxels["labels"] for chunk in make_chunks(*((i, 0, 0) for i in range(8)))]
    for y, x in np.ndindex(8, 64):
        found = voxels[:, 64 * y : 64 * y + 64, 64 * x : 64 * x + 64]
        if x % 32 < 8:
            np.testing.assert_array_equal(found, kinds[(x + y) % 8], err_msg=f"{(x, y, 0)}")
        else:
            assert not found.any()
