"""Reading pieces of many chunks: what is read, when, by whom, and what comes of it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zstandard
from conftest import expected_sha256, volume_sha256
from exports import (
    XYZ,
    CountingReader,
    Dialect,
    MemoryReader,
    Voxels,
    make_chunk,
    make_chunks,
    moved,
    relabelled,
    volume_info,
    write_shard,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import naive_encode_libdvid
from sample import BOTH, CHUNKS, INFO, SHAPES, sample_files, sample_volume, shard_path, window_of_chunk, write_files

import zarr_dvid.record
from zarr_dvid import BlockError, DvidStore, ExportError, ExportWarning, MissingFileError, RecordError, ShardError
from zarr_dvid.errors import AmbiguousChunkError, ZarrDvidError
from zarr_dvid.hierarchy import Hierarchy
from zarr_dvid.reader import FileInfo, Reader
from zarr_dvid.voxels import Values

GUARD = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
Box = tuple[slice, slice, slice]
Files = Mapping[str, bytes]
SIDE = (64, 64, 64)


def store_of(reader: Any, info: Any = INFO, **options: Any) -> DvidStore:
    store = DvidStore("of-the-test", info=info)
    store.hierarchy = Hierarchy(lambda: reader, name="sample", info=info, **options)
    return store


def counted(files: Files, info: Any = INFO, *, concurrency: int = 1, **options: Any) -> tuple[DvidStore, CountingReader]:
    """A store over files in memory, and what it reads of them."""
    reader = CountingReader(MemoryReader(files, concurrency=concurrency))
    return store_of(reader, info, **options), reader


def reads_of(reader: CountingReader) -> list[tuple[str, int, int]]:
    """Path, offset and size of each range of a shard that was read since the last time."""
    found = [(path, *part) for method, path, parts in reader.calls if method == "read" for part in parts]
    reader.calls.clear()
    assert all(path.endswith(".arrow") for path, _, _ in found)
    return found


def n_bytes_read_twice(reads: Sequence[tuple[str, int, int]]) -> int:
    times = Counter((path, at) for path, offset, size in reads for at in range(offset, offset + size))
    return sum(n - 1 for n in times.values())


def whole(level: int) -> Box:
    z, y, x = (slice(0, side) for side in SHAPES[level])
    return z, y, x


DIALECTS = {
    "dvid": Dialect(),
    "raw": Dialect(raw_blocks=True),
    "oldest": Dialect(raw_blocks=True, has_size=False, index="json"),
    "batches": Dialect(rows_a_batch=2),
    "large batches": Dialect(rows_a_batch=64, index="rec"),
    "zstd bodies": Dialect(body_compression="zstd"),
    "lz4 bodies": Dialect(body_compression="lz4", index="rec"),
    "compressed batches": Dialect(body_compression="zstd", rows_a_batch=3, index="batch_offset"),
    "voxels": Dialect(units="voxels", index="rec"),
    "voxels in batches": Dialect(units="voxels", rows_a_batch=2),
    "file": Dialect(container="file", index="rec"),
    "large": Dialect(large=True),
}


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Boxes of any place and size, many of them along the borders of chunks."""
    parts = []
    for size in shape:
        at = st.integers(0, size) | st.sampled_from([n for n in (0, 1, 63, 64, 65, 127, 128, size - 1, size) if n <= size])
        low, high = sorted((draw(at), draw(at)))
        parts.append(slice(low, high))
    return parts[0], parts[1], parts[2]


class TestVoxels:
    @pytest.mark.parametrize("concurrency", [1, 4])
    @pytest.mark.parametrize("name", DIALECTS)
    def test_all_dialects(self, name: str, concurrency: int) -> None:
        store, _ = counted(sample_files(DIALECTS[name]), concurrency=concurrency)
        for level in SHAPES:
            for values in BOTH:
                np.testing.assert_array_equal(store.read(level, whole(level), values=values), sample_volume(level, values))

    @settings(max_examples=60)
    @given(data=st.data())
    def test_any_box(self, data: st.DataObject) -> None:
        level, values = data.draw(st.sampled_from([(0, "labels"), (1, "labels"), (0, "supervoxels")]))
        box = data.draw(boxes(SHAPES[level]))
        store, reader = shared_store(data.draw(st.sampled_from(["dvid", "batches", "zstd bodies", "compressed batches"])))
        with zarr.config.set({"dvid.max_in_flight_bytes": data.draw(st.sampled_from([1, 3000, 10_000, 64 << 20]))}):
            found = store.read(level, box, values=values)
        np.testing.assert_array_equal(found, sample_volume(level, values)[box])
        assert (found.dtype, found.flags.c_contiguous, found.flags.owndata) == (np.uint64, True, True)
        assert n_bytes_read_twice(reads_of(reader)) == 0

    @settings(max_examples=30)
    @given(data=st.data())
    def test_into_a_part_of_an_array(self, data: st.DataObject) -> None:
        box = data.draw(boxes(SHAPES[0]))
        shape = [part.stop - part.start for part in box]
        margins = data.draw(st.tuples(*[st.integers(0, 3)] * 3))
        z_step, y_step = data.draw(st.tuples(*[st.sampled_from([1, -1, 2])] * 2))
        memory = np.full([2 * n + 2 * m + 2 for n, m in zip(shape, margins, strict=True)], GUARD)
        expected = memory.copy()

        def part(array: Voxels) -> Voxels:
            (z, y, x), (a, b, c) = shape, margins
            return array[::z_step, ::y_step][a : a + z, b : b + y, c : c + x]

        part(expected)[...] = sample_volume(0, "labels")[box]
        out = part(memory)
        assert shared_store("dvid")[0].read(0, box, out=out) is out
        np.testing.assert_array_equal(memory, expected)

    def test_bounds_are_as_numpys(self) -> None:
        store, _ = shared_store("dvid")
        for box in ((slice(None),) * 3, (slice(-5, None), slice(120, 10**6), slice(None, -190)), (slice(5, 3),) * 3):
            np.testing.assert_array_equal(store.read(0, box), sample_volume(0, "labels")[box])

    def test_chunks_of_several_equal_records(self) -> None:
        chunks = make_chunks((0, 0, 0), (1, 0, 0), (0, 0, 0))
        info = volume_info((128, 64, 64))
        store, _ = counted(write_shard(chunks).files(), info)
        for values in BOTH:
            expected = np.concatenate([chunk.voxels[values] for chunk in chunks[:2]], axis=2)
            np.testing.assert_array_equal(store.read(0, [slice(None)] * 3, values=values), expected)
            np.testing.assert_array_equal(
                store.read(0, (slice(3, 9), slice(1, 60), slice(60, 70)), values=values), expected[3:9, 1:60, 60:70]
            )

    def test_chunks_outside_their_files_cubes(self) -> None:
        shards = {"0_0_0": [(0, 0, 0), (3, 1, 1), (1, 1, 1), (2, 0, 0)], "128_0_0": [(2, 1, 0), (1, 0, 1)]}
        volume = np.zeros((128, 128, 256), np.uint64)
        for rows in (1, 4):
            files: dict[str, bytes] = {}
            for name, some in shards.items():
                files |= write_shard(make_chunks(*some), Dialect(rows_a_batch=rows)).files(f"s0/{name}")
                for chunk in make_chunks(*some):
                    volume[window_of_chunk(chunk.xyz)] = chunk.voxels["labels"]
            store, reader = counted(files, volume_info((256, 128, 128)))
            np.testing.assert_array_equal(store.read(0, [slice(None)] * 3), volume)
            reader.calls.clear()
            np.testing.assert_array_equal(store.read(0, [slice(None)] * 3), volume)
            reads = reads_of(reader)
            assert len(reads) == 2
            assert n_bytes_read_twice(reads) == 0

    def test_chunks_past_the_end_are_left_out(self) -> None:
        chunks = make_chunks((0, 0, 0), (1, 0, 0), (0, 1, 0), (2, 3, 1))
        store, _ = counted(write_shard(chunks).files(), volume_info((70, 64, 64)))
        with pytest.warns(ExportWarning, match="past the end"):
            found = store.read(0, [slice(None)] * 3)
        expected = np.concatenate([chunks[0].voxels["labels"], chunks[1].voxels["labels"][:, :, :6]], axis=2)
        np.testing.assert_array_equal(found, expected)


_stores: dict[str, tuple[DvidStore, CountingReader]] = {}


def shared_store(name: str) -> tuple[DvidStore, CountingReader]:
    """A store of a dialect whose indexes are loaded."""
    if name not in _stores:
        _stores[name] = counted(sample_files(DIALECTS[name]))
        for level in SHAPES:
            _stores[name][0].read(level, whole(level))
    _stores[name][1].calls.clear()
    return _stores[name]


class TestRefusals:
    """What can not be asked for."""

    @pytest.fixture
    def store(self) -> DvidStore:
        return shared_store("dvid")[0]

    @pytest.mark.parametrize("scale", [2, -1, "0", "s0", None, 0.5])
    def test_scales(self, store: DvidStore, scale: Any) -> None:
        with pytest.raises(ExportError, match=r"no such scale: expected one of \[0, 1\]"):
            store.read(scale, whole(0))

    @pytest.mark.parametrize("values", ["label", "", None, 0])
    def test_values(self, store: DvidStore, values: Any) -> None:
        with pytest.raises(ValueError, match="values must be one of"):
            store.read(0, whole(0), values=values)

    @pytest.mark.parametrize(
        "box", [(slice(0, 3),) * 2, (slice(0, 3), 3, slice(0, 3)), (slice(0, 9, 2),) * 3, (..., slice(3))], ids=repr
    )
    def test_boxes(self, store: DvidStore, box: Any) -> None:
        with pytest.raises(ValueError, match="box must be three slices"):
            store.read(0, box)

    @pytest.mark.parametrize(
        "out",
        [
            np.zeros((3, 4, 6), np.uint64),
            np.zeros((3, 4), np.uint64),
            np.zeros((1, 3, 4, 5), np.uint64),
            np.zeros((3, 4, 5), np.int64),
            np.zeros((3, 4, 5), np.uint32),
            np.zeros((3, 4, 5), ">u8"),
            np.zeros((3, 4, 5), np.uint64, order="F"),
            np.zeros((3, 4, 10), np.uint64)[:, :, ::2],
            np.zeros((3, 4, 5), np.uint64)[:, :, ::-1],
            np.frombuffer(bytes(8 * 60), np.uint64).reshape(3, 4, 5),
            np.frombuffer(bytearray(8 * 60 + 4), np.uint8)[4:].view(np.uint64).reshape(3, 4, 5),
            np.zeros((3, 4), [("a", "u8", 5), ("b", "u1")])["a"],
        ],
        ids=lambda out: f"{out.dtype} {out.shape} {out.strides}",
    )
    def test_arrays(self, store: DvidStore, out: Any) -> None:
        before = out.copy()
        with pytest.raises(ValueError, match=r"out must be a writable uint64 array of shape \(3, 4, 5\)"):
            store.read(0, (slice(0, 3), slice(0, 4), slice(0, 5)), out=out)
        np.testing.assert_array_equal(out, before)


class TestCounts:
    """Reads and bytes of a selection whose indexes are loaded."""

    XYZ: tuple[XYZ, ...] = tuple((x, y, z) for z in range(3) for y in range(3) for x in range(3))

    def opened(self, dialect: Dialect | None = None, **options: Any) -> tuple[DvidStore, CountingReader, Any]:
        shard = write_shard(make_chunks(*self.XYZ), dialect)
        files = shard.files() | write_shard(make_chunks((4, 4, 4))).files("s0/256_256_256")
        store, reader = counted(files, volume_info((320, 320, 320)), **options)
        store.read(0, [slice(0, 1)] * 3)
        store.read(0, [slice(319, 320)] * 3)
        store.read(0, [slice(0, 1), slice(0, 1), slice(319, 320)])
        reader.calls.clear()
        return store, reader, shard

    def test_a_chunk_is_its_record(self) -> None:
        store, reader, shard = self.opened()
        for xyz, (at, size, _) in zip(self.XYZ, shard.ranges, strict=True):
            np.testing.assert_array_equal(store.read(0, window_of_chunk(xyz)), make_chunk(xyz).voxels["labels"])
            assert reads_of(reader) == [("s0/0_0_0.arrow", at, size)]

    def test_records_that_touch_are_one_read(self) -> None:
        store, reader, shard = self.opened()
        store.read(0, [slice(0, 192)] * 3)
        first = shard.ranges[0][0]
        assert reads_of(reader) == [("s0/0_0_0.arrow", first, sum(shard.ranges[-1][:2]) - first)]
        store.read(0, (slice(0, 64), slice(10, 140), slice(0, 192)))  # a layer
        assert reads_of(reader) == [("s0/0_0_0.arrow", first, shard.ranges[9][0] - first)]

    def test_one_for_each_shard(self) -> None:
        store, reader, _ = self.opened()
        store.read(0, [slice(None)] * 3)
        reads = reads_of(reader)
        assert sorted(path for path, _, _ in reads) == ["s0/0_0_0.arrow", "s0/256_256_256.arrow"]
        assert n_bytes_read_twice(reads) == 0

    @pytest.mark.parametrize("rows", [2, 5, 27])
    def test_a_batch_of_many_is_read_once(self, rows: int) -> None:
        store, reader, shard = self.opened(Dialect(rows_a_batch=rows))
        store.read(0, [slice(0, 192)] * 3)
        first = shard.ranges[0][0]
        assert reads_of(reader) == [("s0/0_0_0.arrow", first, sum(shard.ranges[-1][:2]) - first)]
        store.read(0, [slice(0, 1)] * 3)
        assert reads_of(reader) == [("s0/0_0_0.arrow", *shard.ranges[0][:2])]

    @pytest.mark.parametrize("codec", ["zstd", "lz4"])
    @pytest.mark.parametrize("form", ["box", "steps"])
    def test_a_compressed_batch_is_decompressed_once(self, codec: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
        store, _, _ = self.opened(Dialect(rows_a_batch=9, body_compression=codec))
        array = zarr.open_array(store, path="s0/labels", mode="r")
        calls = []
        decompress = zarr_dvid.record.decompress_body

        def count(*arguments: Any) -> Any:
            calls.append(arguments)
            return decompress(*arguments)

        monkeypatch.setattr(zarr_dvid.record, "decompress_body", count)
        selection = np.s_[:192, :192, :192] if form == "box" else np.s_[:192:3, :192:2, :192:5]
        assert np.asarray(array[selection])[-1].any()
        assert len(calls) == 3

    def test_absent_chunks_cost_nothing(self) -> None:
        store, reader, _ = self.opened()
        for box in ([slice(200, 256)] * 3, [slice(0, 64), slice(0, 64), slice(192, 320)]):
            assert not store.read(0, box).any()
            assert reads_of(reader) == []

    @pytest.mark.parametrize("chunks", [[(0, 0, 0)], [(0, 0, 0), (1, 0, 1)]], ids=str)
    @pytest.mark.parametrize("name", ["dvid", "voxels", "voxels in batches", "oldest"])
    def test_an_index_is_loaded_once(self, name: str, chunks: list[XYZ]) -> None:
        # Coordinates of a shard may be multiples of 64 only, and do not tell then what they count.
        files = write_shard(make_chunks(*chunks), DIALECTS[name]).files()
        store, reader = counted(files, volume_info((128, 64, 128)))
        for _ in range(2):
            reader.calls.clear()
            assert store.read(0, [slice(5, 6)] * 3) == make_chunk((0, 0, 0)).voxels["labels"][5, 5, 5]
        assert len(reads_of(reader)) == 1

    def test_nor_do_boxes_without_voxels(self) -> None:
        store, reader = counted(sample_files())
        for axis in range(3):
            box = [slice(0, 100)] * 3
            box[axis] = slice(70, 70)
            assert store.read(0, box).size == 0
        assert {method for method, _, _ in reader.calls} == {"list"}

    @pytest.mark.parametrize(("size", "n_reads"), [(200, 1), (40_000, 2)])
    def test_a_gap_is_read_where_that_is_cheaper(self, size: int, n_reads: int) -> None:
        labels = np.random.default_rng(0).integers(1, 2**63, (64, 64, 64), np.uint64)
        labels.ravel()[size // 8 :] = 1
        block = naive_encode_libdvid(labels)
        table = tuple(np.frombuffer(block, "<u8", int.from_bytes(block[12:16], "little"), 16).tolist())
        between = replace(make_chunk((1, 0, 0)), block=block, table=table, labels=table)
        shard = write_shard([make_chunk((0, 0, 0)), between, make_chunk((2, 0, 0))])
        store, reader = counted(shard.files(), volume_info((192, 64, 64)))
        array = zarr.open_array(store, path="s0/labels", mode="r")
        array[0, 0, 0]
        reader.calls.clear()
        found = array.oindex[:, :, [0, 150]]
        for i, (chunk, x) in enumerate(((make_chunk((0, 0, 0)), 0), (make_chunk((2, 0, 0)), 22))):
            np.testing.assert_array_equal(found[:, :, i], chunk.voxels["labels"][:, :, x])
        assert len(reads_of(reader)) == n_reads

    @pytest.mark.parametrize("concurrency", [1, 8])
    @pytest.mark.parametrize("rows", [1, 9, 64])
    @pytest.mark.parametrize("form", ["box", "steps", "orthogonal", "points", "mask", "other dtype"])
    def test_nothing_is_read_twice_in_one_request(self, form: str, rows: int, concurrency: int) -> None:
        cells = [(x, y, z) for z in range(4) for y in range(4) for x in range(4)]
        order = np.random.default_rng(0).permutation(len(cells)).tolist()
        files = write_shard(make_chunks(*(cells[i] for i in order)), Dialect(rows_a_batch=rows)).files()
        store, reader = counted(files, volume_info((256, 256, 256)), concurrency=concurrency)
        array = zarr.open_array(store, path="s0/labels", mode="r")
        array[0, 0, 0]
        reader.calls.clear()
        points = tuple(np.random.default_rng(1).integers(0, 256, (3, 400)))
        mask = np.zeros((256, 256, 256), bool)
        mask[points] = True
        volume = np.zeros(mask.shape, np.uint64)
        for chunk in make_chunks(*cells):
            volume[window_of_chunk(chunk.xyz)] = chunk.voxels["labels"]
        if form == "box":
            np.testing.assert_array_equal(array[3:250, :, 1:], volume[3:250, :, 1:])
        elif form == "steps":
            np.testing.assert_array_equal(array[::5, ::3, ::2], volume[::5, ::3, ::2])
        elif form == "orthogonal":
            some = np.arange(0, 256, 20)
            np.testing.assert_array_equal(array.oindex[some, some, :], volume[np.ix_(some, some, np.arange(256))])
        elif form == "points":
            np.testing.assert_array_equal(array.vindex[points], volume[points])
        elif form == "mask":
            np.testing.assert_array_equal(array.vindex[mask], volume[mask])
        else:
            out = zarr.core.buffer.cpu.NDBuffer.from_numpy_array(np.zeros(mask.shape, np.float64))
            array.get_basic_selection(..., out=out)
            np.testing.assert_array_equal(out.as_numpy_array(), volume.astype(float))
        assert n_bytes_read_twice(reads_of(reader)) == 0


class HeldBytes(bytes):
    """Bytes that tell when they are let go."""

    let_go: Callable[[int], None]

    def __del__(self) -> None:
        self.let_go(len(self))


class SlowReader:
    """A reader whose shards take time, and that knows how many of its reads are under way, and what is held of them."""

    window_bytes = 1024

    def __init__(
        self, files: Files, *, concurrency: int, seconds: float = 0.0, before_read: Callable[[int], None] | None = None
    ) -> None:
        self._reader: Reader = MemoryReader(files)
        self.url, self.key, self.concurrency = "memory", object(), concurrency
        self._seconds, self._before_read = seconds, before_read
        self._lock = threading.RLock()
        self.n_reads = self.n_now = self.most_at_once = self.held = self.most_held = 0
        self.threads: set[str] = set()

    def list(self, path: str) -> Sequence[FileInfo]:
        return self._reader.list(path)

    def size(self, path: str) -> int:
        return self._reader.size(path)

    def forget(self) -> None:
        self.n_reads = self.most_at_once = self.most_held = 0

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        if not path.endswith(".arrow"):
            return self._reader.read_ranges(path, ranges)
        with self._lock:
            self.n_reads += 1
            number = self.n_reads
            self.n_now += 1
            self.most_at_once = max(self.most_at_once, self.n_now)
            self.held += sum(size for _, size in ranges)
            self.most_held = max(self.most_held, self.held)
            self.threads.add(threading.current_thread().name)
        try:
            if self._before_read is not None:
                self._before_read(number)
            time.sleep(self._seconds)
            parts = [HeldBytes(part) for part in self._reader.read_ranges(path, ranges)]
        except BaseException:
            self._let_go(sum(size for _, size in ranges))
            raise
        finally:
            with self._lock:
                self.n_now -= 1
        for part in parts:
            part.let_go = self._let_go
        return parts

    def _let_go(self, n_bytes: int) -> None:
        with self._lock:
            self.held -= n_bytes


def slow(seconds: float = 0.0, *, concurrency: int = 16, **options: Any) -> tuple[DvidStore, SlowReader]:
    """The sample with reads that take long, its indexes loaded; what is held so far stays."""
    reader = SlowReader(sample_files(), concurrency=concurrency, **options)
    store = store_of(reader)
    for level in SHAPES:
        store.read(level, whole(level))
    reader._seconds = seconds
    reader.forget()
    return store, reader


class TestInFlight:
    def test_reads_that_take_long_are_made_side_by_side(self) -> None:
        store, reader = slow(0.3)
        np.testing.assert_array_equal(store.read(0, whole(0)), sample_volume(0, "labels"))
        assert reader.most_at_once == reader.n_reads == 5  # its shards

    def test_those_of_a_local_disk_are_not(self) -> None:
        store, reader = slow(0.01, concurrency=1)
        np.testing.assert_array_equal(store.read(0, whole(0)), sample_volume(0, "labels"))
        assert (reader.most_at_once, reader.n_reads) == (1, 5)
        assert not any("zarr-dvid" in name for name in reader.threads)

    @pytest.mark.parametrize("concurrency", [1, 16])
    @pytest.mark.parametrize("limit", [1, 3000, 10_000, 20_000])
    def test_no_more_is_held_than_may_be(self, limit: int, concurrency: int) -> None:
        store, reader = slow(0.001, concurrency=concurrency)
        before = reader.held
        largest = max(size for xyz in CHUNKS[0] for _, size, _ in write_shard([make_chunk(xyz)]).ranges)
        for how in (whole(0), (slice(None, None, 3), slice(None, None, 3), slice(None, None, 3))):
            array = zarr.open_array(store, path="s0/labels", mode="r")
            with zarr.config.set({"dvid.max_in_flight_bytes": limit}):
                np.testing.assert_array_equal(array[how], sample_volume(0, "labels")[how])
            assert reader.held == before
            assert reader.most_held - before <= max(limit, largest)
            assert reader.n_reads > 5 or limit == 20_000
            reader.forget()

    def test_many_small_reads_are_not_all_asked_for_at_once(self) -> None:
        cells = [(x, y, 0) for x in range(16) for y in range(16)]
        kind = make_chunk((0, 0, 0))
        files: dict[str, bytes] = {}
        for x, y, z in cells:  # each in a shard of its own, so that nothing can be merged
            files |= write_shard([moved(kind, (x, y, z))]).files(f"s0/{64 * x}_{64 * y}_0")
        for concurrency in (2, 4):
            reader = SlowReader(files, concurrency=concurrency, seconds=0.003)
            found = store_of(reader, volume_info((1024, 1024, 64))).read(0, (slice(5, 6), slice(None), slice(None)))
            np.testing.assert_array_equal(found[0], np.tile(kind.voxels["labels"][5], (16, 16)))
            assert 2 <= reader.most_at_once <= 2 * concurrency

    @pytest.mark.parametrize("concurrency", [1, 16])
    @pytest.mark.parametrize("at", [1, 2, 5])
    @pytest.mark.parametrize("kind", [ShardError, OSError, ValueError, MemoryError, KeyboardInterrupt])
    def test_an_error_in_one_read_leaves_nothing_behind(self, at: int, concurrency: int, kind: type[BaseException]) -> None:
        store, reader = slow(0.01, concurrency=concurrency)
        held = reader.held

        def fail(number: int) -> None:
            if number == at:
                raise kind("of the test")

        reader._before_read = fail
        with zarr.config.set({"dvid.max_in_flight_bytes": 12_000}):
            with pytest.raises(kind, match="of the test") as caught:
                store.read(0, whole(0))
            n_reads = reader.n_reads
            assert reader.n_now == 0
            if isinstance(caught.value, ZarrDvidError):
                assert caught.value.path in {shard_path(0, xyz) for xyz in CHUNKS[0]}
                assert caught.value.chunk_xyz in CHUNKS[0]
            del caught
            gc.collect()  # frames of the error's traceback
            time.sleep(0.05)
            assert (reader.n_reads, reader.n_now) == (n_reads, 0)  # nor were others begun afterwards
            assert reader.held == held
            reader._before_read = None
            np.testing.assert_array_equal(store.read(0, whole(0)), sample_volume(0, "labels"))

    def test_an_error_in_decoding_leaves_nothing_behind(self) -> None:
        files = dict(sample_files())
        path = shard_path(0, (1, 1, 1))
        files[path] = broken(files[path], (1, 1, 1))
        reader = SlowReader(files, concurrency=16, seconds=0.01)
        store = store_of(reader)
        with pytest.raises(BlockError, match=r"s0/0_0_0\.arrow, chunk \(1, 1, 1\)"):
            store.read(0, whole(0))
        n_reads = reader.n_reads
        assert reader.n_now == 0
        time.sleep(0.05)
        assert (reader.n_reads, reader.n_now) == (n_reads, 0)

    def test_many_selections_at_once(self) -> None:
        store, _ = slow(0.002, concurrency=4)
        wrong: list[Any] = []

        def work(i: int) -> None:
            rng = np.random.default_rng(i)
            try:
                for _ in range(5):
                    low = [int(rng.integers(0, side)) for side in SHAPES[0]]
                    box = tuple(slice(a, int(rng.integers(a, side)) + 1) for a, side in zip(low, SHAPES[0], strict=True))
                    np.testing.assert_array_equal(store.read(0, box), sample_volume(0, "labels")[box])
            except BaseException:
                wrong.append(traceback.format_exc())

        workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(24)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not any(worker.is_alive() for worker in workers)
        assert wrong == []


def broken(arrow: bytes, xyz: XYZ) -> bytes:
    """A shard of frames with a byte of the chunk's frame changed; frames have checksums."""
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(make_chunk(xyz).block)
    at = arrow.index(frame) + len(frame) // 2
    return arrow[:at] + bytes([arrow[at] ^ 1]) + arrow[at + 1 :]


class TestErrors:
    """Each names its shard and chunk, whatever else is read with it."""

    def check(self, files: Files, kind: type[ZarrDvidError], path: str, xyz: XYZ | None, words: str) -> None:
        for concurrency, limit in ((1, 64 << 20), (1, 3000), (8, 64 << 20), (8, 3000)):
            store, _ = counted(files, concurrency=concurrency)
            array = zarr.open_array(store, path="s0/labels", mode="r")
            ways: list[Callable[[], Any]] = [
                lambda: store.read(0, whole(0)),  # noqa: B023
                lambda: array[...],  # noqa: B023
                lambda: array[::2, ::2, ::2],  # noqa: B023
            ]
            if xyz is not None:
                inside = window_of_chunk(xyz)
                ways += [
                    lambda: store.read(0, inside),  # noqa: B023
                    lambda: array[inside],  # noqa: B023
                    lambda: array[tuple(part.start for part in inside)],  # noqa: B023
                    lambda: array.oindex[inside[0], [inside[1].start], inside[2]],  # noqa: B023
                    lambda: array.vindex[tuple([part.start] for part in inside)],  # noqa: B023
                ]
            with zarr.config.set({"dvid.max_in_flight_bytes": limit}):
                for way in ways:
                    with pytest.raises(kind, match=words) as caught:
                        way()
                    assert type(caught.value) is kind
                    assert caught.value.path == path
                    assert caught.value.chunk_xyz in CHUNKS[0] if xyz is None else caught.value.chunk_xyz == xyz
                    assert caught.value.advice
                # The other shards read as if nothing were.
                other = window_of_chunk((0, 2, 0)) if not path.startswith("s0/0_128_0") else window_of_chunk((3, 2, 2))
                np.testing.assert_array_equal(array[other], sample_volume(0, "labels")[other])

    @pytest.mark.parametrize("xyz", [(0, 0, 0), (1, 1, 1), (3, 2, 2)])
    def test_a_broken_block(self, xyz: XYZ) -> None:
        files = sample_files()
        path = shard_path(0, xyz)
        self.check(files | {path: broken(files[path], xyz)}, BlockError, path, xyz, "the zstd frame is broken")

    def test_the_record_of_another_chunk(self) -> None:
        files = sample_files()
        lines = files["s0/128_0_0.csv"].decode().splitlines()
        at = {tuple(map(int, line.split(",")[:3])): i for i, line in enumerate(lines) if line[0].isdigit()}
        one, other = (lines[at[xyz]].split(",") for xyz in ((2, 0, 0), (2, 1, 1)))
        lines[at[2, 0, 0]], lines[at[2, 1, 1]] = ",".join(one[:3] + other[3:]), ",".join(other[:3] + one[3:])
        files["s0/128_0_0.csv"] = ("\n".join(lines) + "\n").encode()
        for xyz in ((2, 0, 0), (2, 1, 1)):
            store, _ = counted(files)
            with pytest.raises(RecordError, match="points to the record of another chunk") as caught:
                store.read(0, window_of_chunk(xyz))
            assert (caught.value.path, caught.value.chunk_xyz) == ("s0/128_0_0.arrow", xyz)

    def test_a_torn_record(self) -> None:
        files = sample_files()
        path = shard_path(0, (0, 2, 0))
        data = bytearray(files[path])
        shard = write_shard(make_chunks((0, 2, 0), (1, 2, 1)))
        at = shard.ranges[1][0]  # the first one is looked at when the index is loaded
        assert shard.arrow == files[path]
        data[at + 8 : at + 16] = bytes(8)  # where its flatbuffer starts
        self.check(files | {path: bytes(data)}, RecordError, path, (1, 2, 1), "metadata version")

    def test_a_file_that_is_cut_after_opening(self, tmp_path: Path) -> None:
        folder = write_files(tmp_path, sample_files())
        store = DvidStore(folder, info=INFO)
        store.read(0, whole(0))
        path = folder / shard_path(0, (3, 0, 2))
        path.write_bytes(path.read_bytes()[:-3000])
        for way in (lambda: store.read(0, whole(0)), lambda: zarr.open_array(store, path="s0/labels", mode="r")[::9]):
            with pytest.raises(ShardError, match="ends inside a range") as caught:
                way()
            assert caught.value.path == "s0/128_0_128.arrow"
            assert caught.value.chunk_xyz in [(3, 0, 2), (2, 1, 2)]

    def test_a_file_that_is_gone(self, tmp_path: Path) -> None:
        folder = write_files(tmp_path, sample_files())
        store = DvidStore(folder, info=INFO)
        store.read(0, whole(0))
        (folder / shard_path(0, (3, 2, 2))).unlink()
        with pytest.raises(MissingFileError) as caught:
            store.read(0, whole(0))
        assert (caught.value.path, caught.value.chunk_xyz) == ("s0/128_128_128.arrow", (3, 2, 2))
        box = window_of_chunk((0, 0, 0))
        np.testing.assert_array_equal(store.read(0, box), sample_volume(0, "labels")[box])

    def test_several_records_that_differ(self) -> None:
        files = sample_files()
        path = shard_path(0, (1, 1, 1))
        chunks = make_chunks((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1))
        files |= write_shard([*chunks, relabelled(chunks[-1], seed=9)]).files("s0/0_0_0")
        self.check(files, AmbiguousChunkError, path, (1, 1, 1), "several records claim this chunk, and differ")

    @pytest.mark.parametrize("dialect", ["batches", "compressed batches", "voxels in batches", "zstd bodies"])
    def test_a_broken_block_of_another_dialect(self, dialect: str) -> None:
        files = sample_files(replace(DIALECTS[dialect], body_compression=None))
        path = shard_path(0, (1, 2, 1))
        self.check(files | {path: broken(files[path], (1, 2, 1))}, BlockError, path, (1, 2, 1), "the zstd frame is broken")


def n_threads_after(program: str, *arguments: str) -> list[int]:
    """What a program prints: how many threads its process has at some points."""
    command = [sys.executable, "-c", "import os\n" + program, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [int(n) for n in done.stdout.split()]


# Python 3.12 and later warn of what is tested here.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class TestThreads:
    @pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
    def test_one_thread_makes_no_others(self, tmp_path: Path) -> None:
        write_files(tmp_path, sample_files())
        program = """
import sys
import numpy as np
import zarr_dvid

def tell():
    print(len(os.listdir("/proc/self/task")))

boxes = [[slice(0, 3)] * 3, [slice(0, 190)] * 3]
for threads in (1, 2, 4, 1):
    store = zarr_dvid.DvidStore(sys.argv[1], threads=threads)
    store.hierarchy.export.scales[0].load((0, 0, 0))
    store.read(0, boxes[0]) if threads == 1 else None
    tell()
    for box in boxes:
        store.read(0, box)
    tell()
"""
        counts = n_threads_after(program, str(tmp_path))
        made = [after - before for before, after in zip(counts[::2], counts[1::2], strict=True)]
        assert made == [0, 1, 2, 0]

    @forks
    def test_a_child_of_a_fork_has_its_own(self, tmp_path: Path) -> None:
        """Forks while other threads read and decode; the children read right, and so does the parent."""
        store = DvidStore(write_files(tmp_path, sample_files()), info=INFO, threads=3)
        stop = threading.Event()
        wrong: list[str] = []

        def work() -> None:
            try:
                while not stop.is_set():
                    np.testing.assert_array_equal(store.read(0, whole(0)), sample_volume(0, "labels"))
            except BaseException:
                wrong.append(traceback.format_exc())

        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        try:
            statuses = [status_of(fork(lambda: check_all(store))) for _ in range(4)]
        finally:
            stop.set()
            for worker in workers:
                worker.join()
        assert statuses == [0] * 4
        assert wrong == []
        check_all(store)

    @forks
    def test_a_fork_in_the_middle_of_a_read(self) -> None:
        store, reader = slow()
        here, go_on = threading.Event(), threading.Event()
        found: list[Voxels] = []

        def wait(number: int) -> None:
            if number == 2:
                here.set()
                assert go_on.wait(60)

        reader._before_read = wait
        worker = threading.Thread(target=lambda: found.append(store.read(0, whole(0))))
        worker.start()
        assert here.wait(60)

        def child() -> None:
            check_all(slow()[0])
            reader._before_read = None
            reader._lock = threading.RLock()  # the test's own
            check_all(store)

        try:
            assert status_of(fork(child)) == 0
        finally:
            go_on.set()
            worker.join(60)
        np.testing.assert_array_equal(found[0], sample_volume(0, "labels"))


def check_all(store: DvidStore) -> None:
    for level in SHAPES:
        for values in BOTH:
            np.testing.assert_array_equal(store.read(level, whole(level), values=values), sample_volume(level, values))


def fork(function: Callable[[], None]) -> int:
    """A child that ends with status 0 if the function returns, and is killed if it does not end."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(60)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def status_of(pid: int) -> int:
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("values", BOTH)
def test_real_exports(shared_data: Path, values: Values) -> None:
    """What `store.read` gives is what chunk after chunk gives, by the hashes that are kept beside the data."""
    folder = shared_data / "mcns"
    store = DvidStore(folder / "export", info=folder / "mcns-ng-specs.json")
    expected = expected_sha256(folder, "s1")
    low = np.min(list(expected), axis=0)
    high = np.max(list(expected), axis=0) + 1
    (x0, y0, z0), (x1, y1, _) = low.tolist(), high.tolist()
    for z in range(z0, int(high[2])):
        layer = store.read(1, (slice(64 * z, 64 * z + 64), slice(64 * y0, 64 * y1), slice(64 * x0, 64 * x1)), values=values)
        for y in range(y0, y1):
            for x in range(x0, x1):
                chunk = layer[:, 64 * (y - y0) : 64 * (y - y0) + 64, 64 * (x - x0) : 64 * (x - x0) + 64]
                if (x, y, z) in expected:
                    assert volume_sha256(chunk) == expected[x, y, z][values]
                else:
                    assert not chunk.any()
