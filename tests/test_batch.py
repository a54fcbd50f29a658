"""Decoding many records at once, against decoding each by itself and against the naive decoder."""

from __future__ import annotations

import itertools
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from conftest import SHARED_DATA, expected_sha256, read_shard_rows, valid_block_vectors, volume_sha256
from exports import COLUMNS, XYZ, Chunk, Dialect, make_chunk, make_chunks, message_buffers, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import assemble_block, naive_decode, naive_encode_libdvid

from zarr_dvid._native import core
from zarr_dvid.errors import ZarrDvidError
from zarr_dvid.record import dvid_layouts, parse_payload, read_layout, record_message
from zarr_dvid.voxels import VALUES, Values, decode_record

Voxels = npt.NDArray[np.uint64]
ZYX = tuple[int, int, int]
DONE, REFUSED, COMPRESSED_BODY = 0, 1, 2
SIDE = (64, 64, 64)
GUARD = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
LAYOUT = dvid_layouts()[0].native


@dataclass(frozen=True, kw_only=True)
class Job:
    """A row of the table of jobs; the defaults decode the whole of the first source to the start of the first target."""

    source: int = 0
    offset: int = 0
    size: int = 0
    xyz: tuple[int, int, int] = (0, 0, 0)
    start: ZYX = (0, 0, 0)
    shape: ZYX = SIDE
    target: int = 0
    to: ZYX = (0, 0, 0)

    def row(self) -> list[int]:
        return [self.source, self.offset, self.size, *self.xyz, *self.start, *self.shape, self.target, *self.to]

    def cut(self, volume: Voxels) -> Voxels:
        return volume[tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))]

    def place(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.to, self.shape, strict=True))


def run(
    jobs: Sequence[Job],
    sources: Sequence[bytes],
    targets: Sequence[Voxels],
    *,
    values: Values = "labels",
    layout: core.Layout = LAYOUT,
    threads: int = 1,
) -> list[int]:
    table = np.array([job.row() for job in jobs], np.int64).reshape(-1, 16)
    return list(core.decode_batch(sources, table, targets, layout, values == "labels", threads))


def decode(message: bytes, xyz: XYZ, *, values: Values = "labels", layout: core.Layout = LAYOUT) -> tuple[int, Voxels]:
    """Status and voxels of one record."""
    out = np.full(SIDE, GUARD)
    (status,) = run([Job(size=len(message), xyz=xyz)], [message], [out], values=values, layout=layout)
    return status, out


def message_of(chunk: Chunk, dialect: Dialect | None = None) -> bytes:
    shard = write_shard([chunk], dialect)
    at, size, _ = shard.ranges[0]
    return shard.arrow[at : at + size]


def record_of(block: bytes, labels: Sequence[int] | None = None, *, frame: bytes | None = None, **facts: Any) -> bytes:
    """A record of chunk (1, 2, 3) around any block; `frame` stands in for its zstd frame."""
    n_labels = struct.unpack_from("<I", block, 12)[0]
    table = np.frombuffer(block, "<u8", n_labels, 16)
    given_: dict[str, Any] = {
        "labels": table + np.uint64(1000) if labels is None else np.array(labels, np.uint64),
        "supervoxels": table,
        "block": zstandard.compress(block) if frame is None else frame,
        "uncompressed_size": len(block),
    }
    return record_message((1, 2, 3), **(given_ | facts))


@cache
def some_chunks() -> list[Chunk]:
    return make_chunks((0, 0, 0), (1, 2, 3), (7, 0, 31), (2**21 - 1, 5, 0))


class TestRecords:
    @pytest.mark.parametrize("values", VALUES)
    @pytest.mark.parametrize(
        "dialect",
        [
            Dialect(),
            Dialect(raw_blocks=True),
            Dialect(has_size=False),
            Dialect(large=True),
            Dialect(columns=("a", *COLUMNS, "tags")),
        ],
        ids=["dvid", "raw", "no size", "large", "converted"],
    )
    def test_of_every_layout(self, dialect: Dialect, values: Values) -> None:
        shard = write_shard(some_chunks(), dialect)
        layout = read_layout(shard.arrow)[0].native
        target = np.full((64, 64, 64 * len(some_chunks())), GUARD)
        jobs = [
            Job(offset=at, size=size, xyz=chunk.xyz, to=(0, 0, 64 * i))
            for i, (chunk, (at, size, _)) in enumerate(zip(some_chunks(), shard.ranges, strict=True))
        ]
        assert run(jobs, [shard.arrow], [target], values=values, layout=layout) == [DONE] * len(jobs)
        for job, chunk in zip(jobs, some_chunks(), strict=True):
            np.testing.assert_array_equal(target[job.place()], chunk.voxels[values])

    @pytest.mark.parametrize("values", VALUES)
    @pytest.mark.parametrize("vector", [v for v in valid_block_vectors() if v.shape_zyx == SIDE], ids=lambda v: v.name)
    def test_of_dvids_blocks(self, vector: Any, values: Values) -> None:
        block = vector.read()
        for frame in (None, block):
            status, found = decode(record_of(block, frame=frame), (1, 2, 3), values=values)
            if not vector.strict_ok:
                assert status == REFUSED
                continue
            assert status == DONE
            if values == "supervoxels":
                assert volume_sha256(found) == vector.volume_sha256
            else:
                np.testing.assert_array_equal(found, expected_of(record_of(block), "labels"))

    def test_of_the_real_shard(self, shared_data: Path) -> None:
        folder = shared_data / "mcns"
        expected = expected_sha256(folder, "s1")
        path = next((folder / "export" / "s1").glob("*.arrow"))
        data = path.read_bytes()
        layout, at = read_layout(data)
        jobs = []
        for row in read_shard_rows(path):
            end, _, _ = message_buffers(data, at)
            jobs.append(Job(offset=at, size=end - at, xyz=row.chunk_xyz, target=len(jobs)))
            at = end
        for values in VALUES:
            targets = [np.full(SIDE, GUARD) for _ in jobs]
            assert run(jobs, [data], targets, values=values, layout=layout.native, threads=3) == [DONE] * len(expected)
            for job, target in zip(jobs, targets, strict=True):
                assert volume_sha256(target) == expected[job.xyz][values]

    @settings(max_examples=25)
    @given(data=st.data())
    def test_of_any_block(self, data: st.DataObject) -> None:
        message = data.draw(messages())
        for values in VALUES:
            status, found = decode(message, (1, 2, 3), values=values)
            assert status == DONE
            np.testing.assert_array_equal(found, expected_of(message, values))

    def test_absent_chunks_are_filled(self) -> None:
        target = np.full((70, 5, 9), GUARD)
        job = Job(source=-1, shape=(64, 3, 7), to=(6, 1, 2))
        assert run([job], [], [target]) == [DONE]
        expected = np.full(target.shape, GUARD)
        expected[job.place()] = 0
        np.testing.assert_array_equal(target, expected)

    def test_none(self) -> None:
        assert run([], [], []) == []
        assert run([], [b"abc"], [np.zeros(SIDE, np.uint64)]) == []


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Records of chunk (1, 2, 3) whose sub-blocks have any counts, unused and repeated labels, and values of all widths."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_labels = draw(st.sampled_from([1, 2, 3, 17, 300, 5000]))
    table = rng.integers(0, 2**64, n_labels, np.uint64, endpoint=False)
    if n_labels == 1:
        block = assemble_block((8, 8, 8), table.tolist())
    else:
        widths = draw(st.lists(st.integers(0, 512), min_size=1, max_size=12))
        counts = rng.choice(np.array(widths), 512)
        values = b"".join(pack(rng.integers(0, max(1, count), 512), int(count)) for count in counts)
        block = assemble_block(
            (8, 8, 8), table.tolist(), counts.tolist(), rng.integers(0, n_labels, int(counts.sum())).tolist(), values
        )
    level = draw(st.sampled_from([None, 1, 19]))
    frame = block if level is None else zstandard.ZstdCompressor(level, write_checksum=level == 1).compress(block)
    return record_of(block, rng.integers(0, 2**64, n_labels, np.uint64, endpoint=False).tolist(), frame=frame)


def pack(values: npt.NDArray[np.int64], count: int) -> bytes:
    bits = max(0, count - 1).bit_length()
    shifts = np.arange(bits - 1, -1, -1)
    return np.packbits((values[:, None] >> shifts & 1).astype(np.uint8)).tobytes()


def expected_of(message: bytes, values: Values) -> Voxels:
    """A sound record's voxels by the naive decoder."""
    record = parse_payload(message)
    block = bytes(record.block)
    if block[:4] == zstandard.FRAME_HEADER:
        block = zstandard.ZstdDecompressor().decompress(block, max_output_size=1 << 23)
    if values == "labels":
        block = block[:16] + bytes(record.labels) + block[16 + len(record.labels) :]
    return naive_decode(block)


@st.composite
def windows(draw: st.DrawFn) -> tuple[ZYX, ZYX]:
    start, shape = [], []
    for _ in range(3):
        first = draw(st.integers(0, 63))
        start.append(first)
        shape.append(draw(st.integers(0, 64 - first)))
    return (start[0], start[1], start[2]), (shape[0], shape[1], shape[2])


class TestWindows:
    @settings(max_examples=60)
    @given(window=windows(), margins=st.tuples(*[st.integers(0, 5)] * 6), values=st.sampled_from(VALUES))
    def test_any_window_to_any_place_and_nothing_beside_it(
        self, window: tuple[ZYX, ZYX], margins: tuple[int, ...], values: Values
    ) -> None:
        chunk = make_chunk((1, 2, 3))
        start, shape = window
        target = np.full([a + n + b for a, n, b in zip(margins[:3], shape, margins[3:], strict=True)], GUARD)
        message = message_of(chunk)
        to = (margins[0], margins[1], margins[2])
        job = Job(size=len(message), xyz=chunk.xyz, start=start, shape=shape, to=to)
        expected = target.copy()
        expected[job.place()] = job.cut(chunk.voxels[values])
        assert run([job], [message], [target], values=values) == [DONE]
        np.testing.assert_array_equal(target, expected)

    @pytest.mark.parametrize("z_step", [1, -1, 2, -3])
    @pytest.mark.parametrize("y_step", [1, -1, -2])
    @pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
    def test_targets_with_any_strides(self, z_step: int, y_step: int, order: tuple[int, int, int]) -> None:
        chunk = make_chunk((1, 2, 3))
        message = message_of(chunk)
        memory = np.full((200, 150, 75), GUARD)
        target = memory.transpose(order)[::z_step, ::y_step, 4:70]
        job = Job(size=len(message), xyz=chunk.xyz, start=(3, 0, 5), shape=(30, 61, 59), to=(2, 1, 3))
        expected = memory.copy()
        expected.transpose(order)[::z_step, ::y_step, 4:70][job.place()] = job.cut(chunk.voxels["labels"])
        assert run([job], [message], [target]) == [DONE]
        np.testing.assert_array_equal(memory, expected)

    @pytest.mark.parametrize("step", [2, -1, 64])
    def test_a_target_of_one_column_may_have_any_stride(self, step: int) -> None:
        chunk = make_chunk((1, 2, 3))
        message = message_of(chunk)
        memory = np.full((64, 64, 130), GUARD)
        target = memory[:, :, 5::step][:, :, :1]
        job = Job(size=len(message), xyz=chunk.xyz, start=(0, 0, 9), shape=(64, 64, 1))
        assert run([job], [message], [target]) == [DONE]
        np.testing.assert_array_equal(memory[:, :, 5], chunk.voxels["labels"][:, :, 9])
        memory[:, :, 5] = GUARD
        assert (memory == GUARD).all()


class TestMany:
    """Several sources, targets and threads."""

    @pytest.mark.parametrize("threads", [1, 2, 3, 4])
    def test_a_volume_is_put_together(self, threads: int) -> None:
        rng = np.random.default_rng(threads)
        chunks = make_chunks(*itertools.product(range(3), repeat=3))
        sources = [write_shard(chunks[i::4]).arrow for i in range(4)]
        ranges = [write_shard(chunks[i::4]).ranges for i in range(4)]
        targets = [np.full((200, 200, 200), GUARD), np.full((192, 192, 192), GUARD)]
        jobs = []
        for i, chunk in enumerate(chunks):
            at, size, _ = ranges[i % 4][i // 4]
            x, y, z = (64 * c for c in chunk.xyz)
            for target in (0, 1):
                jobs.append(Job(source=i % 4, offset=at, size=size, xyz=chunk.xyz, target=target, to=(z, y, x)))
        jobs[::5] = [Job(source=-1, target=job.target, to=job.to) for job in jobs[::5]]
        expected = [target.copy() for target in targets]
        for job, chunk in zip(jobs, [c for c in chunks for _ in (0, 1)], strict=True):
            expected[job.target][job.place()] = 0 if job.source < 0 else chunk.voxels["supervoxels"]
        order = rng.permutation(len(jobs)).tolist()
        status = run([jobs[i] for i in order], sources, targets, values="supervoxels", threads=threads)
        assert status == [DONE] * len(jobs)
        np.testing.assert_array_equal(targets[0], expected[0])
        np.testing.assert_array_equal(targets[1], expected[1])

    @pytest.mark.parametrize("threads", [1, 4])
    def test_a_refused_job_has_its_own_status_and_leaves_the_others_alone(self, threads: int) -> None:
        chunk = make_chunk((1, 2, 3))
        good, bad = message_of(chunk), message_of(make_chunk((1, 2, 4)))
        packed = message_of(chunk, Dialect(body_compression="zstd"))
        target = np.full((64, 64, 64 * 40), GUARD)
        kinds = [random.Random(2).randrange(3) for _ in range(40)]
        sources = [good, bad, packed]
        jobs = [Job(source=kind, size=len(sources[kind]), xyz=chunk.xyz, to=(0, 0, 64 * i)) for i, kind in enumerate(kinds)]
        assert run(jobs, sources, [target], threads=threads) == kinds  # 0, 1 and 2 are also what they are answered with
        for job, kind in zip(jobs, kinds, strict=True):
            if kind == DONE:
                np.testing.assert_array_equal(target[job.place()], chunk.voxels["labels"])
            else:
                assert (target[job.place()] == GUARD).all()

    def test_from_many_threads_with_other_limits(self) -> None:
        chunks = some_chunks()
        sources = [message_of(chunk) for chunk in chunks]
        wrong: list[Any] = []

        def work(threads: int) -> None:
            for _ in range(6):
                target = np.full((64, 64, 64 * 12), GUARD)
                jobs = [
                    Job(source=i % 4, size=len(sources[i % 4]), xyz=chunks[i % 4].xyz, to=(0, 0, 64 * i)) for i in range(12)
                ]
                status = run(jobs, sources, [target], threads=threads)
                right = [np.array_equal(target[j.place()], chunks[j.source].voxels["labels"]) for j in jobs]
                if status != [DONE] * 12 or not all(right):
                    wrong.append((threads, status, right))

        workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in (1, 2, 3, 4, 1, 2, 3, 4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not any(worker.is_alive() for worker in workers)
        assert wrong == []

    def test_a_caller_of_one_thread_is_let_in_among_others_of_several(self) -> None:
        chunk = make_chunk((1, 2, 3))
        message = message_of(chunk)
        job = Job(size=len(message), xyz=chunk.xyz)
        done = threading.Event()
        n_batches = itertools.count()

        def keep_busy() -> None:
            target = np.empty(SIDE, np.uint64)
            while not done.is_set():
                run([job] * 300, [message], [target], threads=4)
                next(n_batches)

        others = [threading.Thread(target=keep_busy) for _ in range(4)]
        for other in others:
            other.start()
        try:
            waits = []
            for _ in range(3):
                before = next(n_batches)
                caller = threading.Thread(target=decode, args=(message, chunk.xyz), daemon=True)
                caller.start()
                caller.join(30)
                waits.append(next(n_batches) - before)
            # Those that were at it when it came, and some that got in before it asked.
            assert max(waits) < 20
        finally:
            done.set()
            for other in others:
                other.join()


class TestRefusals:
    """Jobs outside their source, chunk or target: nothing is written."""

    @pytest.mark.parametrize(
        "change",
        [
            {"source": 2},
            {"source": 2**40},
            {"offset": -1},
            {"offset": 1},
            {"offset": 2**62},
            {"size": -1},
            {"size": "one more"},
            {"size": 2**63 - 1},
            {"xyz": (-1, 2, 3)},
            {"xyz": (1, 2, 2**31)},
            {"start": (-1, 0, 0)},
            {"start": (0, 1, 0)},
            {"start": (0, 0, 65), "shape": (64, 64, 0)},
            {"shape": (64, -1, 64)},
            {"shape": (65, 64, 64)},
            {"shape": (64, 64, 2**62)},
            {"shape": (-(2**63), 64, 64)},
            {"target": -1},
            {"target": 2},
            {"to": (-1, 0, 0)},
            {"to": (7, 0, 0)},
            {"to": (0, 7, 0)},
            {"to": (0, 0, 7)},
            {"to": (0, 0, 2**63 - 1)},
            {"to": (0, -(2**63), 0)},
            {"target": 1},
            {"target": 1, "source": -1},
            {"to": (0, 7, 0), "source": -5},
        ],
        ids=str,
    )
    def test_a_job_outside(self, change: dict[str, Any]) -> None:
        chunk = make_chunk((1, 2, 3))
        message = message_of(chunk)
        memory = np.full((2, 90, 90, 90), GUARD)
        targets = [memory[0, 10:80, 10:80, 10:80], memory[1, 10:80, 10:80, 10:70]]
        if change.get("size") == "one more":
            change = {"size": len(message) + 1}
        good = Job(size=len(message), xyz=chunk.xyz, to=(1, 2, 3))
        bad = Job(**({"size": len(message), "xyz": chunk.xyz} | change))
        for jobs in ([bad], [good, bad], [bad, good]):
            with pytest.raises(ValueError, match="a job must lie inside its source, its chunk and its target"):
                run(jobs, [message, message], targets)
            assert (memory == GUARD).all()

    @settings(max_examples=300)
    @given(row=st.tuples(*[st.integers(-3, 130) | st.sampled_from([-(2**63), 2**63 - 1, 2**32, 2**31 - 1, 2**62])] * 16))
    def test_any_job(self, row: tuple[int, ...]) -> None:
        memory = np.full((2, 100, 100, 100), GUARD)
        targets = [memory[0, 10:80, 10:80, 10:80], memory[1, 10:90, 10:60, 10:75]]
        try:
            core.decode_batch([message_of(make_chunk((1, 2, 3)))], np.array([row], np.int64), targets, LAYOUT, True, 1)
        except ValueError:
            assert (memory == GUARD).all()
        for target in targets:
            target[:] = GUARD
        assert (memory == GUARD).all()

    @pytest.mark.parametrize(
        "target",
        [
            np.zeros((64, 64), np.uint64),
            np.zeros((64, 64, 64), np.uint32),
            np.zeros((64, 64, 128), np.uint64)[:, :, ::2],
            np.zeros((64, 64, 64), np.uint64)[:, :, ::-1],
            np.zeros((64, 64, 64), np.uint64, order="F"),
            np.frombuffer(bytes(8 * 64**3), np.uint64).reshape(SIDE),
            b"abc",
            None,
        ],
        ids=["plane", "uint32", "every other", "backwards", "Fortran", "read-only", "bytes", "None"],
    )
    def test_a_target_that_can_not_be_written_to(self, target: Any) -> None:
        message = message_of(make_chunk((1, 2, 3)))
        before = None if target is None or isinstance(target, bytes) else target.copy()
        with pytest.raises((ValueError, TypeError, BufferError)):
            run([Job(size=len(message), xyz=(1, 2, 3))], [message], [target])
        if before is not None:
            np.testing.assert_array_equal(target, before)

    @pytest.mark.parametrize(
        "jobs",
        [np.zeros((1, 15), np.int64), np.zeros((1, 17), np.int64), np.zeros(16, np.int64), np.zeros((1, 16), np.int32)],
        ids=str,
    )
    def test_a_table_of_another_shape(self, jobs: Any) -> None:
        with pytest.raises(ValueError, match=r"jobs must be int64 of shape \(n, 16\)"):
            core.decode_batch([], jobs, [np.zeros(SIDE, np.uint64)], LAYOUT, True, 1)

    def test_no_thread(self) -> None:
        with pytest.raises(ValueError, match="one thread or more"):
            run([], [], [], threads=0)


def frame_with(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def frame_header(content_size: int, *, window_log: int = 17) -> bytes:
    """The head of a frame that claims a content size of 8 bytes."""
    return zstandard.FRAME_HEADER + bytes([0b11000000, (window_log - 10) << 3]) + struct.pack("<Q", content_size)


class TestBrokenRecords:
    """What is broken is refused by the core and by Python alike, or read right by both."""

    def both(self, message: bytes, xyz: XYZ = (1, 2, 3)) -> bool:
        """Whether a record is taken; the core and Python must agree on it, and on its voxels."""
        taken = set()
        for values in VALUES:
            status, found = decode(message, xyz, values=values)
            expected = by_python(message, xyz, values)
            assert status == (DONE if expected is not None else REFUSED)
            if expected is not None:
                np.testing.assert_array_equal(found, expected)
            taken.add(expected is not None)
        (answer,) = taken
        return answer

    @pytest.mark.parametrize("xyz", [(1, 2, 4), (3, 2, 1), (0, 0, 0), (64, 128, 192), (2**31 - 1, 2, 3)])
    def test_of_another_chunk(self, xyz: XYZ) -> None:
        message = message_of(make_chunk((1, 2, 3)))
        assert self.both(message)
        assert not self.both(message, xyz)

    def test_every_cut(self) -> None:
        message = message_of(make_chunk((1, 2, 3)))
        for size in [*range(0, 1300, 7), *range(0, len(message), 61), len(message) - 1]:
            assert not self.both(message[:size]), size

    def test_anything_behind(self) -> None:
        message = message_of(make_chunk((1, 2, 3)))
        for more in (b"\0", bytes(8), message):
            assert not self.both(message + more)

    def test_several_rows(self) -> None:
        shard = write_shard(make_chunks((1, 2, 3), (1, 2, 4)), Dialect(rows_a_batch=2))
        at, size, _ = shard.ranges[0]
        assert decode(shard.arrow[at : at + size], (1, 2, 3))[0] == REFUSED

    @pytest.mark.parametrize("data", [b"", b"\xff" * 3, b"\xff" * 8, b"\xff" * 4 + bytes(4), bytes(800), b"\xff" * 800])
    def test_what_is_no_message(self, data: bytes) -> None:
        assert not self.both(data)

    def test_a_schema(self) -> None:
        shard = write_shard([make_chunk((1, 2, 3))])
        assert not self.both(shard.arrow[: shard.schema_range[1]])

    @pytest.mark.parametrize("codec", ["zstd", "lz4"])
    def test_a_compressed_body_is_left_to_python(self, codec: str) -> None:
        message = message_of(make_chunk((1, 2, 3)), Dialect(body_compression=codec))
        status, found = decode(message, (1, 2, 3))
        assert status == COMPRESSED_BODY
        assert (found == GUARD).all()

    def test_the_layout_of_another_dialect(self) -> None:
        newer, older = (layout.native for layout in dvid_layouts())
        chunk = make_chunk((1, 2, 3))
        assert decode(message_of(chunk), chunk.xyz, layout=older)[0] == REFUSED
        assert decode(message_of(chunk, Dialect(has_size=False)), chunk.xyz, layout=newer)[0] == REFUSED
        assert decode(message_of(chunk, Dialect(has_size=False)), chunk.xyz, layout=older)[0] == DONE

    def test_frames(self) -> None:
        block = make_chunk((1, 2, 3)).block
        whole = frame_with(block)
        unstated = frame_with(block, write_content_size=False)
        assert zstandard.frame_content_size(unstated) == -1
        assert self.both(record_of(block))
        assert self.both(record_of(block, frame=unstated))
        assert self.both(record_of(block, frame=frame_with(block, write_checksum=True)))
        skippable = struct.pack("<II", 0x184D2A50, 4) + b"note"
        for frame in (
            whole + whole,
            whole + frame_with(b""),
            whole + skippable,
            skippable + whole,
            whole + b"\0",
            whole[:-1],
            unstated[:-1],
            unstated + unstated,
            frame_with(block, write_checksum=True)[:-1] + b"\0",
            frame_with(b""),
            frame_with(block[:-1]),
            frame_with(block + b"\0"),
            frame_with(whole),
            whole[:4],
            whole[:6],
            b"",
            b"\x28\xb5\x2f",
        ):
            assert not self.both(record_of(block, frame=frame)), frame[:20]
        dictionary = zstandard.ZstdCompressionDict(block[:4096] * 4)
        assert not self.both(record_of(block, frame=frame_with(block, dict_data=dictionary)))

    def test_bombs(self) -> None:
        block = make_chunk((1, 2, 3)).block
        zeros = bytes(64 << 20)
        for frame in (
            frame_with(zeros),
            frame_with(zeros, write_content_size=False),
            frame_with(block + zeros),
            frame_header(2**63) + frame_with(block)[9:],
            frame_header(2**40) + bytes([1, 0, 0]),
            frame_header(len(block)) + bytes([1, 0, 0]),
            frame_header(0) + bytes([1, 0, 0]),
        ):
            assert not self.both(record_of(block, frame=frame, uncompressed_size=len(block)))
            assert not self.both(record_of(block, frame=frame, uncompressed_size=(64 << 20) & 0xFFFFFFFF))

    def test_a_window_that_is_larger_than_any_decoder_has_to_have(self) -> None:
        block = make_chunk((1, 2, 3)).block
        for window_log, is_taken in ((23, True), (24, False), (27, False), (31, False)):
            # A frame of one raw block, which takes all that is stated of its size away.
            head = zstandard.FRAME_HEADER + bytes([0, (window_log - 10) << 3])
            raw = struct.pack("<I", len(block) << 3 | 1)[:3] + block
            assert self.both(record_of(block, frame=head + raw)) == is_taken, window_log

    @pytest.mark.parametrize("grid", [(1, 1, 1), (4, 4, 4), (8, 8, 4), (16, 8, 4), (8, 8, 9), (128, 128, 128)], ids=str)
    def test_a_block_of_another_size(self, grid: tuple[int, int, int]) -> None:
        x, y, z = (8 * side for side in grid)
        for block in (
            assemble_block(grid, [7]),
            naive_encode_libdvid(np.random.default_rng(1).integers(1, 5, (z, y, x), np.uint64)) if x < 500 else None,
        ):
            if block is not None:
                assert not self.both(record_of(block))
                assert not self.both(record_of(block, frame=block))

    @pytest.mark.parametrize("vector", sorted((SHARED_DATA / "blocks" / "invalid").glob("*.block")), ids=lambda p: p.stem)
    def test_dvids_broken_blocks(self, vector: Path) -> None:
        block = vector.read_bytes()
        table = np.frombuffer(block[16 : 16 + 8 * (len(block[16:]) // 8)], "<u8")
        for labels in (table, table[:1], table[:0]):
            for frame in (block, frame_with(block)):
                message = record_message(
                    (1, 2, 3), labels=labels, supervoxels=labels, block=frame, uncompressed_size=len(block)
                )
                assert not self.both(message)

    def test_lists_that_do_not_fit_the_block(self) -> None:
        chunk = make_chunk((1, 2, 3))
        table = list(chunk.table)
        assert self.both(record_of(chunk.block, range(len(table))))
        for facts in (
            {"labels": table[:-1]},
            {"labels": [*table, 1]},
            {"labels": []},
            {"supervoxels": [*table, 1]},
            {"supervoxels": table[:-1]},
            {"supervoxels": table[::-1]},
            {"supervoxels": [table[0] + 1, *table[1:]]},
            {"labels": table[:-1], "supervoxels": table[:-1]},
            {"labels": [*table, 1], "supervoxels": [*table, 1]},
            {"uncompressed_size": len(chunk.block) + 1},
            {"uncompressed_size": 0},
            {"uncompressed_size": 2**32 - 1},
        ):
            arrays = {key: np.array(some, np.uint64) if isinstance(some, list) else some for key, some in facts.items()}
            assert not self.both(record_of(chunk.block, **arrays)), facts

    @pytest.mark.parametrize("dialect", [Dialect(), Dialect(raw_blocks=True)], ids=["zstd", "raw"])
    @pytest.mark.parametrize("seed", range(4))
    def test_mutations(self, dialect: Dialect, seed: int) -> None:
        rng = random.Random(seed)
        message = message_of(make_chunk((1, 2, 3)), dialect)
        taken = [self.both(mutate(message, rng)) for _ in range(150)]
        assert not all(taken)

    @settings(max_examples=60)
    @given(data=st.data())
    def test_any_mutation_of_any_record(self, data: st.DataObject) -> None:
        message = data.draw(messages())
        self.both(mutate(message, random.Random(data.draw(st.integers(0, 2**32)))))


def by_python(message: bytes, xyz: XYZ, values: Values) -> Voxels | None:
    """What the Python path reads of a record, or None where it refuses it; checked against the naive decoder."""
    try:
        record = parse_payload(message)
        if record.chunk_xyz != xyz:
            return None
        found = decode_record(record, values=values, shape=SIDE)
    except ZarrDvidError:
        return None
    np.testing.assert_array_equal(found, expected_of(message, values))
    return found


INTERESTING = [b"\0" * 4, b"\xff" * 4, b"\1\0\0\0", b"\0\0\0\x80", b"\xff\xff\xff\x7f", b"\0\2\0\0", b"\1\2\0\0"]


def mutate(message: bytes, rng: random.Random) -> bytes:
    """Flips bits, writes numbers that parsers stumble over, copies parts over others, cuts."""
    data = bytearray(message)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        # Most of the structure is in the first 1,200 bytes.
        at = rng.randrange(min(len(data), rng.choice([700, 1200, len(data)])))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 4] = rng.choice(INTERESTING)[: len(data) - at]
            case 3:
                n = rng.randrange(1, 40)
                other = rng.randrange(len(data))
                part = data[other : other + n]
                data[at : at + len(part)] = part[: len(data) - at]
            case 4:
                del data[at : at + rng.choice([1, 8, 100])]
    return bytes(data)


def test_a_daemon_thread_that_decodes_when_python_ends() -> None:
    """It must not end the process with a signal."""
    program = """
import sys, threading, time
import numpy as np
from zarr_dvid._native import core
from zarr_dvid.block import decode_block, encode_block
from zarr_dvid.record import dvid_layouts

layout = dvid_layouts()[0].native
block = encode_block(np.arange(64**3, dtype=np.uint64).reshape(64, 64, 64) // 900)

def fill():
    target = np.empty((64, 64, 64), np.uint64)
    jobs = np.zeros((20, 16), np.int64)
    jobs[:, 0], jobs[:, 9:12] = -1, 64
    while True:
        core.decode_batch([], jobs, [target], layout, True, 2)

def decode():
    while True:
        decode_block(block)

for work in (fill, fill, decode, decode):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
