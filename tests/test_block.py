"""decode_block, encode_block and block_info against DVID's own blocks and the naive decoder and encoder."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import zstandard
from conftest import (
    BlockVector,
    expected_sha256,
    invalid_block_vectors,
    read_shard_rows,
    valid_block_vectors,
    volume_sha256,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive import assemble_block, naive_decode, naive_encode_libdvid, pack_values, subblock_window, value_bits

from zarr_dvid import block_info, decode_block, encode_block
from zarr_dvid.block import BytesLike, max_block_nbytes
from zarr_dvid.errors import BlockError

Voxels = npt.NDArray[np.uint64]
Window = tuple[slice, slice, slice]

TOP = 2**64 - 1
COUNTS = sorted({count for k in range(1, 10) for count in (2**k - 1, 2**k, 2**k + 1) if 2 <= count <= 512})
LOOSE_COUNTS = [count for count in COUNTS if count != 1 << value_bits(count)]
EVERYTHING: Window = (slice(None), slice(None), slice(None))

valid_vectors = pytest.mark.parametrize("vector", valid_block_vectors(), ids=lambda vector: vector.name)
invalid_vectors = pytest.mark.parametrize("vector", invalid_block_vectors(), ids=lambda vector: vector.name)


def volume_of(counts: list[int], grid_xyz: tuple[int, int, int], *, seed: int = 0, low: int = 0, high: int = TOP) -> Voxels:
    """Voxels whose sub-blocks have these many labels, over and over, out of low..high."""
    rng = np.random.default_rng(seed)
    volume = np.empty([8 * side for side in reversed(grid_xyz)], np.uint64)
    pool = np.unique(rng.integers(low, high, 2000, np.uint64, endpoint=True))
    for s in range(grid_xyz[0] * grid_xyz[1] * grid_xyz[2]):
        own = rng.choice(pool, min(counts[s % len(counts)], len(pool)), replace=False)
        values = rng.permutation(np.resize(np.arange(len(own)), 512))
        volume[subblock_window(grid_xyz, s)] = own[values].reshape(8, 8, 8)
    return volume


def block_of(count: int, grid_xyz: tuple[int, int, int], *, seed: int = 0) -> tuple[bytes, int]:
    """A block of sub-blocks with `count` unsorted labels each, and where its values start."""
    rng = np.random.default_rng(seed)
    n = grid_xyz[0] * grid_xyz[1] * grid_xyz[2]
    table = rng.integers(0, TOP, min(count + 3, 512 * n), np.uint64, endpoint=True).tolist()
    indices = np.concatenate([rng.permutation(len(table))[:count] for _ in range(n)]).tolist()
    packed = [pack_values(rng.permutation(np.resize(np.arange(count), 512)), count) for _ in range(n)]
    values_at = 16 + 8 * len(table) + 2 * n + 4 * len(indices)
    return assemble_block(grid_xyz, table, [count] * n, indices, b"".join(packed)), values_at


def with_value(block: bytes, values_at: int, v: int, bits: int, value: int) -> bytes:
    """The block with the v-th of its values replaced."""
    end = 8 * (len(block) - values_at) - bits * (v + 1)
    packed = int.from_bytes(block[values_at:]) & ~(((1 << bits) - 1) << end) | value << end
    return block[:values_at] + packed.to_bytes(len(block) - values_at)


def with_table(block: bytes, table: npt.ArrayLike) -> bytes:
    """The block with another label table of the same length."""
    labels = np.asarray(table, "<u8").tobytes()
    return block[:16] + labels + block[16 + len(labels) :]


def refusal(block: BytesLike, **options: Any) -> BlockError:
    with pytest.raises(BlockError) as caught:
        decode_block(block, **options)
    return caught.value


def facts(error: BlockError) -> tuple[str, int | None, object, object]:
    return error.field, error.offset_bytes, error.expected, error.found


@contextmanager
def allocating_at_most(nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


# DVID's own blocks


@valid_vectors
def test_valid_vector_decodes_to_its_sha256(vector: BlockVector) -> None:
    block = vector.read()
    if not vector.strict_ok:
        refusal(block)
        with pytest.raises(ValueError, match="rule"):
            naive_decode(block)
        return
    volume = decode_block(block)
    assert volume.dtype == np.uint64
    assert volume.shape == vector.shape_zyx
    assert volume_sha256(volume) == vector.volume_sha256
    np.testing.assert_array_equal(volume, naive_decode(block))
    if (kept := vector.volume()) is not None:
        np.testing.assert_array_equal(volume, kept)
    np.testing.assert_array_equal(decode_block(encode_block(volume)), volume)
    assert encode_block(volume) == naive_encode_libdvid(volume)
    if vector.name.startswith(("libdvid_", "real_mcns_")):
        assert encode_block(volume) == block


@valid_vectors
def test_valid_vector_has_the_info_of_its_manifest(vector: BlockVector) -> None:
    block = vector.read()
    if not vector.strict_ok:
        with pytest.raises(BlockError):
            block_info(block)
        return
    info = block_info(block)
    grid = tuple(side // 8 for side in vector.shape_zyx)
    n = grid[0] * grid[1] * grid[2]
    solid = vector.n_labels == 1
    assert (info.shape, info.grid, info.n_labels, info.solid) == (vector.shape_zyx, grid, vector.n_labels, solid)
    counts = () if solid else struct.unpack_from(f"<{n}H", block, 16 + 8 * vector.n_labels)
    assert info.n_subblock_labels == sum(counts)
    assert (info.nbytes, info.nbytes_stored, info.compressed) == (len(block), len(block), False)


INVALID = {
    "count_65535": ("counts", 32, 512, 65535),
    "empty": ("block", 0, 24, 0),
    "grid_huge": ("gx", 0, "1 to 128", 2**32 - 1),
    "grid_zero_x": ("gx", 0, "1 to 128", 0),
    "header_only_16": ("block", 0, 24, 16),
    "index_max": ("indices", 16 + 8 * 18 + 2 * 512, 17, 2**32 - 1),
    "indices_truncated_mid": ("indices", 16 + 8 * 18 + 2 * 512, 4 * 820, 40),
    "labels_truncated": ("label table", 16, 8 * 18, 8 * 18 - 1),
    "n0_16bytes": ("block", 0, 24, 16),
    "n_2p29_plus1": ("N", 12, 64**3, 2**29 + 1),
    "n_gt_voxels": ("N", 12, 1024, 1025),
    "two_labels_24bytes": ("label table", 16, 16, 8),
    "value_stale": ("values", 244, 2, 3),
    "values_short_1": ("values", 4464, 18048, 18047),
}


@invalid_vectors
def test_invalid_vector_is_refused_and_the_error_says_why(vector: BlockVector) -> None:
    block = vector.read()
    error = refusal(block)
    assert facts(error) == INVALID[vector.name]
    with pytest.raises(ValueError, match="rule"):
        naive_decode(block)


def test_real_blocks_decode_and_re_encode_to_their_very_bytes(shared_data: Path) -> None:
    expected = expected_sha256(shared_data / "mcns", "s1")
    rows = read_shard_rows(shared_data / "mcns" / "export" / "s1" / "30720_24576_28672.arrow")
    assert len(rows) == len(expected) == 258
    for row in rows:
        volume = decode_block(row.block)
        assert volume_sha256(volume) == expected[row.chunk_xyz]["supervoxels"]
        assert volume_sha256(decode_block(row.block, labels=row.labels)) == expected[row.chunk_xyz]["labels"]
        assert encode_block(volume) == zstandard.decompress(row.block)


def test_real_frames_without_a_content_size_decode(shared_data: Path) -> None:
    expected = expected_sha256(shared_data / "exports" / "csv-rec", "s0")
    unknown = zstandard.CONTENTSIZE_UNKNOWN
    rows = read_shard_rows(shared_data / "exports" / "csv-rec" / "s0" / "0_0_0.arrow")
    sizeless = [row for row in rows if zstandard.get_frame_parameters(row.block).content_size == unknown]
    assert len(sizeless) == 2
    for row in sizeless:
        assert volume_sha256(decode_block(row.block)) == expected[row.chunk_xyz]["supervoxels"]


# The rules of the format, each broken by hand in a sound block of 16x8x8 voxels, sub-blocks of 3 and 1 labels

GRID_XYZ = (2, 1, 1)
TABLE = [10, 11, 12]
PACKED = pack_values(np.resize([0, 1, 2], 512), 3)
VALUES_AT = 16 + 8 * 3 + 2 * 2 + 4 * 4


def sound(**changes: Any) -> bytes:
    parts = {"grid_xyz": GRID_XYZ, "table": TABLE, "counts": [3, 1], "indices": [0, 1, 2, 1], "values": PACKED}
    return assemble_block(**{**parts, **changes})


def solid(label: int, grid_xyz: tuple[int, int, int] = (8, 8, 8), tail: bytes = b"") -> bytes:
    return assemble_block(grid_xyz, [label]) + tail


def legacy(counts: list[int], indices: list[int]) -> bytes:
    return assemble_block(GRID_XYZ, [7], counts, indices)


def test_the_sound_block_is_sound() -> None:
    volume = decode_block(sound())
    np.testing.assert_array_equal(volume[..., :8].reshape(-1), np.resize(np.array([10, 11, 12], np.uint64), 512))
    np.testing.assert_array_equal(volume[..., 8:], np.full((8, 8, 8), 11, np.uint64))


BROKEN: dict[str, tuple[bytes, tuple[str, int, int, int]]] = {
    "rule 1: shorter than 24 bytes": (solid(7)[:23], ("block", 0, 24, 23)),
    "rule 1: gx is 0": (solid(7, (0, 1, 1)), ("gx", 0, "1 to 128", 0)),
    "rule 1: gy is 0": (solid(7, (1, 0, 1)), ("gy", 4, "1 to 128", 0)),
    "rule 1: gz is 129": (solid(7, (1, 1, 129)), ("gz", 8, "1 to 128", 129)),
    "rule 1: N is 0": (assemble_block(GRID_XYZ, [7], n_labels=0), ("N", 12, 1, 0)),
    "rule 2: table past the end": (sound()[:39], ("label table", 16, 24, 23)),
    "rule 2: N above the voxels": (assemble_block((1, 1, 1), [7] * 513, [1], [0]), ("N", 12, 512, 513)),
    "rule 2: 8 N wraps in 32 bits": (assemble_block((8, 8, 8), [7], n_labels=2**29 + 1), ("N", 12, 64**3, 2**29 + 1)),
    "rule 3: byte behind a solid block": (solid(7, tail=b"\0"), ("block", 24, 24, 25)),
    "rule 3: legacy form, short": (legacy([1, 1], [0, 0])[:-1], ("block", 24, 24, 35)),
    "rule 3: legacy form, count 2": (legacy([1, 2], [0, 0]), ("counts", 26, 1, 2)),
    "rule 3: legacy form, index 1": (legacy([1, 1], [0, 1]), ("indices", 32, 0, 1)),
    "rule 4: counts past the end": (sound()[:43], ("counts", 40, 4, 3)),
    "rule 4: indices past the end": (sound()[:59], ("indices", 44, 16, 15)),
    "rule 4: values past the end": (sound()[:-1], ("values", VALUES_AT, 128, 127)),
    "rule 4: byte behind the values": (sound() + b"\0", ("block", VALUES_AT + 128, VALUES_AT + 128, VALUES_AT + 129)),
    "rule 5: 513 labels in a sub-block": (sound(counts=[3, 513]), ("counts", 42, 512, 513)),
    "rule 6: index is N": (sound(indices=[0, 1, 3, 1]), ("indices", 52, 2, 3)),
    "rule 6: index of a solid sub-block": (sound(indices=[0, 1, 2, 2**31]), ("indices", 56, 2, 2**31)),
    "rule 7: value is its count": (with_value(sound(), VALUES_AT, 511, 2, 3), ("values", VALUES_AT + 127, 2, 3)),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_block_is_refused(rule: str) -> None:
    block, expected = BROKEN[rule]
    with pytest.raises(ValueError, match=rule[:6]):
        naive_decode(block)
    assert facts(refusal(block)) == expected
    if rule.startswith("rule 7"):
        assert block_info(block).n_labels == 3
    else:
        with pytest.raises(BlockError):
            block_info(block)


ACCEPTED = {
    "sub-block without labels reads as 0": sound(counts=[3, 0], indices=[0, 1, 2]),
    "no sub-block has labels": assemble_block(GRID_XYZ, TABLE, [0, 0]),
    "label twice in the table": sound(table=[10, 11, 10]),
    "index twice in a sub-block": sound(indices=[0, 0, 2, 1]),
    "entries that nothing uses": sound(indices=[1, 1, 1, 1], values=pack_values(np.zeros(512, int), 3)),
    "label 0": sound(table=[0, 11, 0]),
    "labels 2**64 - 1": sound(table=[TOP, TOP - 1, 2**63]),
    "uniform, with two labels": assemble_block(GRID_XYZ, [0, 0], [1, 1], [0, 1]),
    "solid 0": solid(0),
    "solid 2**64 - 1": solid(TOP),
    "solid, 8x8x8": solid(7, (1, 1, 1)),
    "legacy solid form": legacy([1, 1], [0, 0]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_odd_block_is_accepted(name: str) -> None:
    block = ACCEPTED[name]
    np.testing.assert_array_equal(decode_block(block), naive_decode(block))
    assert block_info(block).solid == (block[12] == 1)


def test_messages() -> None:
    advice = "The block was stored or exported broken; export it again from DVID, or mask it there"
    messages = {
        b"": "block is shorter than the shortest block (at byte 0): expected 24, found 0",
        BROKEN["rule 6: index is N"][0]: "indices must be less than N (at byte 52): expected 2, found 3",
        BROKEN["rule 7: value is its count"][0]: (
            f"values must be less than their sub-block's count (at byte {VALUES_AT + 127}): expected 2, found 3"
        ),
        BROKEN["rule 3: byte behind a solid block"][0]: (
            "block of one label has bytes behind its label (at byte 24): expected 24, found 25"
        ),
    }
    for block, message in messages.items():
        assert str(refusal(block)) == f"{message}. {advice}"


@pytest.mark.parametrize("block", [b"", sound() + b"\0", b"\x28\xb5\x2f\xfd"], ids=["short", "long", "frame"])
def test_error_survives_pickling(block: bytes) -> None:
    error = refusal(block).located(path="s0/0_0_0.arrow", chunk_xyz=(1, 2, 3))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is BlockError
    assert isinstance(copy, ValueError)
    assert str(copy) == str(error)
    names = ("problem", "path", "chunk_xyz", "field", "offset_bytes", "expected", "found", "advice")
    assert {name: getattr(copy, name) for name in names} == {name: getattr(error, name) for name in names}


# Every width of values, by whole strips and row by row


@pytest.mark.parametrize("count", COUNTS)
def test_every_width_decodes_by_strips_and_by_rows(count: int) -> None:
    block, _ = block_of(count, (9, 2, 1), seed=count)
    expected = naive_decode(block)
    strips = [EVERYTHING, (slice(0, 8), slice(8, 16), slice(64, 72)), (slice(0, 8), slice(0, 8), slice(8, 72))]
    rows = [(slice(0, 7), slice(0, 16), slice(0, 72)), (slice(0, 8), slice(3, 16), slice(1, 71))]
    for window in strips + rows:
        np.testing.assert_array_equal(decode_block(block, window=window), expected[window])


@pytest.mark.parametrize("count", LOOSE_COUNTS)
def test_every_value_past_its_count_is_found(count: int) -> None:
    grid_xyz = (3, 1, 1)
    block, values_at = block_of(count, grid_xyz, seed=count)
    bits = value_bits(count)
    for s in (0, 2):
        for v in (0, 5, 7, 8, 254, 504, 511):
            for value in {count, (1 << bits) - 1}:
                broken = with_value(block, values_at, 512 * s + v, bits, value)
                expected = ("values", values_at + 64 * bits * s + v * bits // 8, count - 1, value)
                z, y, x = v // 64, v // 8 % 8, 8 * s + v % 8
                voxel = (slice(z, z + 1), slice(y, y + 1), slice(x, x + 1))
                for window in (EVERYTHING, subblock_window(grid_xyz, s), voxel):
                    assert facts(refusal(broken, window=window)) == expected
                other = subblock_window(grid_xyz, 1)
                np.testing.assert_array_equal(decode_block(broken, window=other), naive_decode(block)[other])


# Random voxels, random damage


@st.composite
def volumes(draw: st.DrawFn) -> Voxels:
    grid_xyz = draw(st.tuples(*[st.integers(1, 3)] * 3))
    counts = draw(st.lists(st.sampled_from([1, *COUNTS]) | st.integers(1, 512), min_size=1, max_size=6))
    low, high = draw(st.sampled_from([(0, 3), (0, 600), (0, TOP), (TOP - 600, TOP), (2**53, 2**53 + 2000)]))
    return volume_of(counts, grid_xyz, seed=draw(st.integers(0, 2**32)), low=low, high=high)


@st.composite
def chunks(draw: st.DrawFn) -> Voxels:
    """64^3 voxels: boxes of one label and boxes of noise, one over another."""
    volume = np.full((64, 64, 64), draw(st.integers(0, TOP)), np.uint64)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(0, 6))):
        sides = draw(st.tuples(*[st.tuples(st.integers(0, 63), st.integers(1, 40))] * 3))
        box = tuple(slice(start, start + size) for start, size in sides)
        first = draw(st.sampled_from([0, 1, 2**32, TOP - 2**16]))
        last = first + draw(st.sampled_from([0, 1, 4, 300, 2**16]))
        volume[box] = rng.integers(first, last, volume[box].shape, np.uint64, endpoint=True)
    return volume


@settings(max_examples=150)
@given(volumes())
def test_random_volume_encodes_as_libdvid_does_and_decodes_back(volume: Voxels) -> None:
    block = encode_block(volume)
    assert block == naive_encode_libdvid(volume)
    np.testing.assert_array_equal(decode_block(block), volume)
    np.testing.assert_array_equal(naive_decode(block), volume)


@settings(max_examples=25)
@given(chunks())
def test_random_chunk_encodes_as_libdvid_does_and_decodes_back(volume: Voxels) -> None:
    block = encode_block(volume)
    assert block == naive_encode_libdvid(volume)
    np.testing.assert_array_equal(decode_block(block), volume)


BASES = [
    sound(),
    *ACCEPTED.values(),
    *(naive_encode_libdvid(volume_of(counts, (2, 1, 2), high=600)) for counts in ([1, 2], [3, 5, 1, 9], [17, 1, 33])),
    *(block_of(count, (1, 2, 1))[0] for count in (3, 6, 60, 100, 257, 500)),
]
NUMBERS = [0, 1, 2, 3, 4, 5, 8, 127, 128, 129, 511, 512, 513, 2**15, 2**16 - 1, 2**29 + 1, 2**31, 2**32 - 1]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    block = draw(st.sampled_from(BASES))
    for _ in range(draw(st.integers(1, 3))):
        anywhere = draw(st.integers(0, len(block)))
        at = draw(st.sampled_from([anywhere, len(block) - anywhere, anywhere % 16 * 4]))
        match draw(st.sampled_from(["flip", "flip", "number", "number", "truncate", "extend"])):
            case "flip" if at < len(block):
                block = block[:at] + bytes([block[at] ^ 1 << draw(st.integers(0, 7))]) + block[at + 1 :]
            case "number":
                size = draw(st.sampled_from([2, 4]))
                number = (draw(st.sampled_from(NUMBERS)) % 256**size).to_bytes(size, "little")
                block = block[:at] + number + block[at + size :]
            case "truncate":
                block = block[:at]
            case "extend":
                block += draw(st.binary(min_size=1, max_size=70))
    return block


@settings(max_examples=1500)
@given(damaged())
def test_damaged_block_is_refused_or_decodes_as_the_naive_decoder_says(block: bytes) -> None:
    sides = struct.unpack_from("<3I", block) if len(block) >= 12 else (0, 0, 0)
    assume(max(sides) > 128 or sides[0] * sides[1] * sides[2] <= 4096)  # one of a few bytes may stand for gigabytes
    try:
        expected = naive_decode(block)
    except ValueError as error:
        assert refusal(block).field
        if "rule 7" not in str(error):
            with pytest.raises(BlockError):
                block_info(block)
    else:
        np.testing.assert_array_equal(decode_block(block), expected)
        assert block_info(block).shape == expected.shape


@pytest.mark.parametrize("block", [BASES[0], BASES[-3], legacy([1, 1], [0, 0])], ids=["sound", "100 labels", "legacy"])
def test_block_cut_anywhere_is_refused(block: bytes) -> None:
    for length in range(len(block)):
        if block[12] != 1 or length != 24:  # the legacy form cut there is the short form
            refusal(block[:length])


@contextmanager
def guarded_page() -> Iterator[Callable[[bytes], memoryview]]:
    """Gives a function that copies bytes to the end of memory behind which any access kills the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    room = 16 * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    guard = ctypes.c_char.from_buffer(pages, room)
    address = ctypes.c_void_p(ctypes.addressof(guard))
    assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    def place(data: bytes) -> memoryview:
        pages[room - len(data) : room] = data
        return memoryview(pages)[room - len(data) : room]

    try:
        yield place
    finally:
        libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE)


def test_no_byte_behind_a_block_is_read() -> None:
    with guarded_page() as place:
        for block in (*BASES, *(block_of(count, (1, 1, 1))[0] for count in COUNTS)):
            expected = naive_decode(block)
            rows = (slice(0, 7), slice(1, 8), slice(1, 8))
            np.testing.assert_array_equal(decode_block(place(block)), expected)
            np.testing.assert_array_equal(decode_block(place(block), window=rows), expected[rows])
        for broken, _ in BROKEN.values():
            refusal(place(broken))
        for length in range(len(BASES[0])):
            refusal(place(BASES[0][:length]))


# Windows


WINDOWED = volume_of([1, 2, 3, 6, 12, 24, 48, 96, 200, 300], (10, 2, 3), seed=5)
WINDOWED_BLOCK = naive_encode_libdvid(WINDOWED)
EDGES = st.none() | st.integers(-100, 100)
WINDOWS = st.tuples(*[st.builds(slice, EDGES, EDGES)] * 3)


@settings(max_examples=400)
@given(WINDOWS)
def test_window_is_the_same_part_of_the_whole(window: Window) -> None:
    for block in (WINDOWED_BLOCK, zstandard.compress(WINDOWED_BLOCK)):
        part = decode_block(block, window=window)
        assert part.shape == WINDOWED[window].shape
        np.testing.assert_array_equal(part, WINDOWED[window])


@settings(max_examples=60)
@given(st.tuples(*[st.integers(0, side - 1) for side in WINDOWED.shape]))
def test_window_of_one_voxel(voxel: tuple[int, int, int]) -> None:
    z, y, x = voxel
    window = (slice(z, z + 1, 1), slice(y, y + 1, None), slice(x, x + 1))
    assert decode_block(WINDOWED_BLOCK, window=window).tolist() == [[[WINDOWED[voxel]]]]


@settings(max_examples=30)
@given(WINDOWS)
def test_window_of_a_solid_block(window: Window) -> None:
    expected = np.full((64, 64, 64), TOP, np.uint64)[window]
    np.testing.assert_array_equal(decode_block(solid(TOP), window=window), expected)


@pytest.mark.parametrize(
    "window",
    [
        (slice(0, 8, 2), slice(None), slice(None)),
        (slice(None, None, -1),) * 3,
        (slice(0, 8),) * 2,
        (0, slice(1), slice(1)),
    ],
    ids=["step 2", "step -1", "two slices", "an integer"],
)
def test_odd_window_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="window must") as caught:
        decode_block(WINDOWED_BLOCK, window=window)
    assert not isinstance(caught.value, BlockError)


@pytest.mark.parametrize(
    ("window", "n_decoded"),
    [
        (EVERYTHING, 12),
        ((slice(3, 4), slice(9, 10), slice(23, 24)), 1),
        ((slice(0, 8), slice(0, 8), slice(8, 24)), 2),
        ((slice(7, 9), slice(7, 9), slice(0, 8)), 4),
        ((slice(7, 9), slice(15, 16), slice(7, 17)), 6),
        ((slice(5, 5), slice(None), slice(None)), 0),
    ],
    ids=str,
)
def test_only_subblocks_that_the_window_touches_are_decoded(window: Window, n_decoded: int) -> None:
    """A sub-block whose every row breaks rule 7 tells whether it was decoded."""
    grid_xyz = (3, 2, 2)
    block, values_at = block_of(5, grid_xyz)
    touched = np.zeros((16, 16, 24), bool)
    touched[window] = True
    decoded = []
    for s in range(12):
        broken = block
        for row in range(64):
            broken = with_value(broken, values_at, 512 * s + 8 * row + row % 8, 3, 7)
        try:
            np.testing.assert_array_equal(decode_block(broken, window=window), naive_decode(block)[window])
        except BlockError:
            decoded.append(s)
    assert decoded == [s for s in range(12) if touched[subblock_window(grid_xyz, s)].any()]
    assert len(decoded) == n_decoded


# `out`


def strided(offset: int, pad_y: int, pad_x: float, *, signs: tuple[int, int] = (1, 1), yzx: bool = False) -> Any:
    """Makes a view of a byte buffer of a shape (z, y, x), with room between its lines and planes."""

    def view(buffer: npt.NDArray[np.uint8], shape: tuple[int, int, int]) -> Voxels:
        z, y, x = shape
        line = int(8 * (x + pad_x))
        strides = (line, line * (z + pad_y)) if yzx else (line * (y + pad_y), line)
        signed = [step * sign for step, sign in zip(strides, signs, strict=True)]
        start = offset + sum(min(0, 1 - size) * step for size, step in zip((z, y), signed, strict=True) if step < 0)
        return np.ndarray(shape, np.uint64, buffer, start, (*signed, 8))

    return view


OUTS: dict[str, Callable[[npt.NDArray[np.uint8], tuple[int, int, int]], Voxels]] = {
    "tight": strided(64, 0, 0),
    "padded": strided(64, 2, 3),
    "y slower than z": strided(64, 1, 1, yzx=True),
    "z backwards": strided(64, 2, 3, signs=(-1, 1)),
    "y backwards": strided(64, 2, 3, signs=(1, -1)),
    "z and y backwards": strided(64, 0, 0, signs=(-1, -1)),
    "unaligned": strided(67, 0, 0),
    "lines of part voxels": strided(64, 1, 0.5),
    "unaligned, padded, z backwards": strided(65, 1, 5, signs=(-1, 1)),
}


@pytest.mark.parametrize("name", OUTS)
@pytest.mark.parametrize(
    "window",
    [
        EVERYTHING,
        (slice(8, 24), slice(0, 8), slice(16, 80)),
        (slice(3, 18), slice(1, 15), slice(5, 79)),
        (slice(7, 8), slice(2, 3), slice(77, 78)),
        (slice(0, 4), slice(5, 5), slice(None)),
    ],
    ids=["all", "sub-blocks", "ragged", "voxel", "empty"],
)
def test_out_gets_the_window_and_nothing_around_it_changes(name: str, window: Window) -> None:
    for block, volume in ((WINDOWED_BLOCK, WINDOWED), (solid(9, (10, 2, 3)), np.full_like(WINDOWED, 9))):
        got, expected = (np.full(12 * WINDOWED.size + 64, 0xA5, np.uint8) for _ in range(2))
        out = OUTS[name](got, volume[window].shape)
        assert decode_block(block, window=window, out=out) is out
        OUTS[name](expected, volume[window].shape)[...] = volume[window]
        np.testing.assert_array_equal(got, expected)


def test_decoding_into_out_takes_no_memory_for_voxels() -> None:
    for out in (np.empty((64, 64, 64), np.uint64), np.empty((70, 70, 70), np.uint64)[3:67, :-6, 6:]):
        block, _ = block_of(100, (8, 8, 8))
        decode_block(block, out=out)
        with allocating_at_most(16 << 10):
            decode_block(block, out=out)


def read_only(shape: tuple[int, ...]) -> Voxels:
    out = np.zeros(shape, np.uint64)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("out", "complaint"),
    [
        (np.zeros((8, 8, 8), np.int64), "must be uint64 of shape"),
        (np.zeros((8, 8, 8), ">u8"), "must be uint64 of shape"),
        (np.zeros((8, 8, 9), np.uint64), "must be uint64 of shape"),
        (np.zeros((8, 64), np.uint64), "must be uint64 of shape"),
        (read_only((8, 8, 8)), "must be writable"),
        (np.zeros((8, 8, 16), np.uint64)[..., ::2], "contiguous along x"),
        (np.zeros((8, 8, 8), np.uint64)[..., ::-1], "contiguous along x"),
        (np.zeros((8, 8, 8), np.uint64, order="F"), "contiguous along x"),
    ],
    ids=["int64", "big-endian", "shape", "2-D", "read-only", "x stride", "x backwards", "Fortran"],
)
def test_odd_out_is_refused(out: Any, complaint: str) -> None:
    before = out.copy()
    with pytest.raises(ValueError, match=complaint) as caught:
        decode_block(solid(7, (1, 1, 1)), out=out)
    assert not isinstance(caught.value, BlockError)
    np.testing.assert_array_equal(out, before)


# `labels`


@pytest.mark.parametrize("make", [np.array, list, lambda t: np.array(t, np.int64), lambda t: np.array(t, ">u4")])
def test_labels_replace_the_table(make: Callable[[list[int]], npt.ArrayLike]) -> None:
    table = np.frombuffer(WINDOWED_BLOCK, "<u8", struct.unpack_from("<I", WINDOWED_BLOCK, 12)[0], 16)
    assert len(np.unique(table)) == len(table)
    labels = [int(i) * 7919 % 1000 for i in range(len(table))]
    mapping = dict(zip(table.tolist(), labels, strict=True))
    expected = np.array([mapping[label] for label in WINDOWED.reshape(-1).tolist()], np.uint64).reshape(WINDOWED.shape)
    np.testing.assert_array_equal(decode_block(WINDOWED_BLOCK, labels=make(labels)), expected)
    window = (slice(1, 20), slice(3, 9), slice(0, 77))
    np.testing.assert_array_equal(decode_block(WINDOWED_BLOCK, labels=make(labels), window=window), expected[window])


@pytest.mark.parametrize("name", [name for name in ACCEPTED if "legacy" not in name])
def test_labels_replace_the_table_entry_by_entry(name: str) -> None:
    """Equal entries of the table may be mapped apart, and a sub-block without labels stays 0."""
    labels = list(range(2**64 - 1, 2**64 - 1 - ACCEPTED[name][12], -1))
    expected = naive_decode(with_table(ACCEPTED[name], labels))
    np.testing.assert_array_equal(decode_block(ACCEPTED[name], labels=labels), expected)
    np.testing.assert_array_equal(decode_block(ACCEPTED[name], labels=np.array(labels, np.uint64)), expected)


@pytest.mark.parametrize("labels", [[], [1, 2], [1, 2, 3, 4], np.zeros(1000, np.uint64)], ids=len)
def test_labels_of_another_length_are_refused(labels: Any) -> None:
    assert facts(refusal(sound(), labels=labels)) == ("labels", 16, 3, len(labels))
    assert facts(refusal(zstandard.compress(sound()), labels=labels, window=EVERYTHING))[0] == "labels"


@pytest.mark.parametrize("labels", [[1, -1, 2], [1.0, 2.0, 3.0], [1, 2, 2**64], [[1, 2, 3]], ["1", "2", "3"]], ids=str)
def test_labels_that_are_no_uint64_are_refused(labels: Any) -> None:
    with pytest.raises(ValueError, match="labels must be one dimension of integers") as caught:
        decode_block(sound(), labels=labels)
    assert not isinstance(caught.value, BlockError)


# encode_block


@pytest.mark.parametrize(
    "view",
    [lambda v: v[::-1], lambda v: v[:, ::-1], lambda v: v[..., ::-1], np.transpose, lambda v: v[8:, :, 16:40]],
    ids=["z backwards", "y backwards", "x backwards", "transposed", "part"],
)
def test_volume_of_any_layout_encodes_alike(view: Callable[[Voxels], Voxels]) -> None:
    volume = view(WINDOWED)
    assert encode_block(volume) == naive_encode_libdvid(np.ascontiguousarray(volume))


def test_unaligned_volume_encodes_alike() -> None:
    volume = OUTS["unaligned"](np.zeros(12 * WINDOWED.size, np.uint8), WINDOWED.shape)
    volume[...] = WINDOWED
    assert encode_block(volume) == WINDOWED_BLOCK


def test_uniform_volume_becomes_24_bytes() -> None:
    assert encode_block(np.full((64, 64, 64), TOP, np.uint64)) == solid(TOP)


@pytest.mark.parametrize("shape", [(8, 8, 0), (8, 8, 12), (8, 4, 8), (1032, 8, 8), (8, 8)], ids=str)
def test_volume_that_no_block_can_have_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"each side of a block|three dimensions"):
        encode_block(np.zeros(shape, np.uint64))


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, ">u8", np.float64])
def test_volume_of_another_dtype_is_refused(dtype: npt.DTypeLike) -> None:
    with pytest.raises(TypeError, match="a block holds uint64 labels"):
        encode_block(np.zeros((8, 8, 8), dtype))


def test_no_block_is_larger_than_the_one_whose_voxels_all_differ() -> None:
    differing = np.arange(24 * 8 * 16, dtype=np.uint64).reshape(24, 8, 16)
    assert max_block_nbytes(differing.shape) == len(encode_block(differing)) == len(naive_encode_libdvid(differing))
    assert max_block_nbytes((64, 64, 64)) == 3_441_680


# zstd frames


def zstd_frame(head: bytes, n_zeros: int, *, claim: int | None) -> bytes:
    """A frame of `head` and zeros, in runs of 128 KiB; sound, but for a content size that is claimed freely."""
    descriptor = b"\x00" if claim is None else b"\xc0"  # flags; the 0x68 behind them is a window of 8 MiB
    content_size = b"" if claim is None else struct.pack("<Q", claim)
    frame = zstandard.FRAME_HEADER + descriptor + b"\x68" + content_size + struct.pack("<I", len(head) << 3)[:3] + head
    while n_zeros > 0:
        run = min(n_zeros, 1 << 17)
        frame += struct.pack("<I", run << 3 | 1 << 1)[:3] + b"\0"
        n_zeros -= run
    return frame + b"\x01\x00\x00"


HEADER_64 = struct.pack("<4I", 8, 8, 8, 2)


def arrow_view(data: bytes) -> memoryview:
    return memoryview(pa.py_buffer(data))  # of signed bytes


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, arrow_view])
def test_bare_and_framed_block_are_alike(kind: Callable[[bytes], BytesLike]) -> None:
    framed = zstandard.ZstdCompressor(write_checksum=True).compress(WINDOWED_BLOCK)
    sizeless = zstandard.ZstdCompressor(write_content_size=False).compress(WINDOWED_BLOCK)
    for block in (WINDOWED_BLOCK, framed, sizeless):
        np.testing.assert_array_equal(decode_block(kind(block)), WINDOWED)
        info = block_info(kind(block))
        assert (info.nbytes, info.nbytes_stored) == (len(WINDOWED_BLOCK), len(block))
        assert info.compressed == (block is not WINDOWED_BLOCK)


def test_buffer_of_wider_items_counts_in_bytes() -> None:
    np.testing.assert_array_equal(decode_block(memoryview(solid(7)).cast("Q")), np.full((64, 64, 64), 7, np.uint64))
    assert block_info(memoryview(solid(7)).cast("Q")).nbytes == 24


def test_framed_block_larger_than_a_chunk_is_taken() -> None:
    volume = np.arange(72 * 64 * 64, dtype=np.uint64).reshape(72, 64, 64)
    np.testing.assert_array_equal(decode_block(zstandard.compress(encode_block(volume))), volume)


@pytest.mark.parametrize("head", [b"", b"\0" * 16, HEADER_64], ids=["nothing", "no header", "header"])
@pytest.mark.parametrize(("n_zeros", "claim"), [(0, 2**40), (0, 2**63), (200 << 20, (200 << 20) + 16)])
def test_frame_that_claims_more_than_its_grid_allows_is_refused_unread(head: bytes, n_zeros: int, claim: int) -> None:
    frame = zstd_frame(head, n_zeros, claim=claim)
    with allocating_at_most(1 << 20):
        error = refusal(frame)
        with pytest.raises(BlockError):
            block_info(frame)
    assert error.field == "zstd frame"
    if head == HEADER_64 and n_zeros:
        largest = 16 + 8 * 2 + 512 * (2 + 4 * 512 + 64 * 9)
        assert facts(error) == ("zstd frame", 4, f"at most {largest} bytes", f"{claim} bytes")


def test_frame_in_one_segment_may_not_claim_more_either() -> None:
    frame = zstandard.FRAME_HEADER + b"\xe0" + struct.pack("<Q", 2**40) + struct.pack("<I", 16 << 3)[:3] + HEADER_64
    with allocating_at_most(1 << 20):
        assert refusal(frame).field == "zstd frame"


def test_frame_without_content_size_is_read_no_further_than_the_largest_chunk() -> None:
    frame = zstd_frame(HEADER_64, 200 << 20, claim=None)
    with allocating_at_most(max_block_nbytes((64, 64, 64)) + (1 << 20)):
        assert refusal(frame).field == "zstd frame"


def test_handmade_frame_is_sound() -> None:
    for claim in (len(sound()), None):
        np.testing.assert_array_equal(decode_block(zstd_frame(sound(), 0, claim=claim)), naive_decode(sound()))
    assert zstandard.decompress(zstd_frame(b"head", 10**6, claim=10**6 + 4)) == b"head" + bytes(10**6)


def test_frame_cut_anywhere_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(sound())
    for length in range(len(frame)):
        refusal(frame[:length])


FRAMED = zstandard.ZstdCompressor(write_checksum=True).compress(WINDOWED_BLOCK)


@pytest.mark.parametrize(
    "frame",
    [
        FRAMED[:-1] + bytes([FRAMED[-1] ^ 1]),
        FRAMED[:-100] + bytes(100),
        FRAMED + b"\0",
        FRAMED + FRAMED,
        FRAMED + zstandard.compress(b""),
        zstandard.compress(b""),
        zstandard.compress(FRAMED),
        zstd_frame(sound(), 0, claim=len(sound()) + 1),
        zstd_frame(sound(), 0, claim=len(sound()) - 1),
    ],
    ids=[
        *("checksum", "content", "trailing byte", "two frames", "empty frame behind", "empty", "frame in a frame"),
        *("claims a byte more", "claims a byte less"),
    ],
)
def test_broken_frame_is_refused(frame: bytes) -> None:
    refusal(frame)
    with pytest.raises(BlockError):
        block_info(frame)
