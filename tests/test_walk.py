"""A shard's framing: found where it is, and refused wherever it is cut, torn, or goes on."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import read_shard_rows
from exports import (
    COLUMNS,
    END_MARK,
    INDEX_KINDS,
    XYZ,
    CountingReader,
    Dialect,
    MemoryReader,
    Shard,
    assert_reads,
    footer,
    json_index,
    make_chunks,
    open_export,
    write_shard,
)
from hypothesis import given
from hypothesis import strategies as st

from zarr_dvid.errors import RecordError, ShardError, ShardIndexError, ZarrDvidError
from zarr_dvid.export import Export
from zarr_dvid.reader import LocalReader
from zarr_dvid.walk import is_end_mark, read_framing, walk_records

ALL: tuple[XYZ, ...] = ((0, 0, 0), (1, 2, 3), (3, 1, 0))
PATH = "s0/0_0_0.arrow"


def framing_of(arrow: bytes) -> Any:
    return read_framing(MemoryReader({PATH: arrow}), PATH, len(arrow))


def walk_of(arrow: bytes, *, window_bytes: int = 1024) -> Any:
    reader = MemoryReader({PATH: arrow}, window_bytes=window_bytes)
    return walk_records(reader, read_framing(reader, PATH, len(arrow)))


def assert_walks(shard: Shard, *, has_end_mark: bool = True) -> None:
    walk = walk_of(shard.arrow)
    assert list(zip(walk.offset_bytes, walk.size_bytes, walk.row, strict=True)) == list(shard.ranges)
    assert walk.has_end_mark == has_end_mark
    assert walk.n_batches == len({at for at, _, _ in shard.ranges})


# ---- what is there


@pytest.mark.parametrize("container", ["stream", "file"])
@pytest.mark.parametrize("rows_a_batch", [1, 2, 3])
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_records_are_found(container: Any, rows_a_batch: int, compression: str | None) -> None:
    shard = write_shard(
        make_chunks(*ALL), Dialect(container=container, rows_a_batch=rows_a_batch, body_compression=compression)
    )
    assert_walks(shard)
    assert [tuple(xyz) for xyz in walk_of(shard.arrow).xyz.tolist()] == list(ALL)
    framing = framing_of(shard.arrow)
    assert framing.is_file_format == (container == "file")
    assert (framing.schema_at, framing.records_at) == (shard.schema_range[0], sum(shard.schema_range))
    assert framing.footer is None


@pytest.mark.parametrize("container", ["stream", "file"])
def test_a_footer_ends_the_records(container: Any) -> None:
    plain = write_shard(make_chunks(*ALL), Dialect(container=container, index="none"))
    document = json_index(ALL)
    shard = write_shard(make_chunks(*ALL), Dialect(container=container, index="footer"))
    assert shard.arrow == plain.arrow + footer(document)
    framing = framing_of(shard.arrow)
    assert framing.footer == (len(plain.arrow), len(document))
    if container == "stream":
        assert framing.records_end == len(plain.arrow)
    assert_walks(shard)


def test_end_marks() -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index="none"))
    end = sum(shard.ranges[-1][:2])
    assert is_end_mark(MemoryReader({}), framing_of(shard.arrow), end)
    for at in (end - 8, end - 1, end + 1, end + 8, sum(shard.schema_range)):
        assert not is_end_mark(MemoryReader({}), framing_of(shard.arrow), at)
    for mark in (b"", b"\xff\xff\xff\xff", bytes(8), b"\xff" * 8, b"\xff\xff\xff\xff\x01\x00\x00\x00"):
        assert not is_end_mark(MemoryReader({}), framing_of(shard.arrow[:-8] + mark), end)
    assert_walks(write_shard(make_chunks(*ALL), Dialect(index="json", has_end_mark=False)), has_end_mark=False)


@given(st.integers(8, 5000))
def test_the_window_does_not_matter(window_bytes: int) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(rows_a_batch=2))
    np.testing.assert_array_equal(walk_of(shard.arrow, window_bytes=window_bytes).xyz, ALL)


@pytest.mark.parametrize("n_columns", [10, 240])
def test_a_schema_longer_than_the_first_read(n_columns: int) -> None:
    """A conversion with many columns more."""
    dialect = Dialect(columns=(*(f"note {i}" for i in range(n_columns)), *COLUMNS))
    shard = write_shard(make_chunks(*ALL), dialect)
    assert shard.schema_range[1] > 1024
    assert_walks(shard)
    assert_reads(open_export(shard.files()), make_chunks(*ALL))


# ---- what is not


def sample_places(shard: Shard) -> list[int]:
    """Every border of a shard's parts, and what is around it."""
    borders = [0, 4, 8, sum(shard.schema_range), len(shard.arrow)]
    for at, size, _ in shard.ranges:
        n_metadata = struct.unpack_from("<i", shard.arrow, at + 4)[0]
        borders += [at, at + 4, at + 8, at + 8 + n_metadata, at + size]
    places = {border + delta for border in borders for delta in (-9, -8, -7, -4, -1, 0, 1, 4, 7, 8, 9, 16)}
    return sorted(place for place in places if 0 <= place < len(shard.arrow))


@pytest.mark.parametrize("index", [kind for kind in INDEX_KINDS if kind != "footer"])
@pytest.mark.parametrize("rows_a_batch", [1, 3])
def test_a_shard_cut_anywhere_is_refused(index: Any, rows_a_batch: int) -> None:
    """With its whole index beside it; only the end mark may lack."""
    if index == "rec,offset,size" and rows_a_batch > 1:
        return
    shard = write_shard(make_chunks(*ALL), Dialect(index=index, rows_a_batch=rows_a_batch))
    for place in sample_places(shard):
        files = shard.files() | {PATH: shard.arrow[:place]}
        if place == len(shard.arrow) - 8 and index != "none":
            assert_reads(open_export(files), make_chunks(*ALL))
            continue
        for xyz in (ALL[0], ALL[2]):
            with pytest.raises((ShardError, ShardIndexError)) as caught:
                open_export(files).read_chunk(0, xyz)
            assert caught.value.chunk_xyz == xyz
            assert caught.value.path is not None
            assert "None" not in str(caught.value)


def test_a_shard_with_a_footer_cut_anywhere_is_refused() -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index="footer"))
    end = shard.arrow.rindex(END_MARK) + 8
    for place in [*sample_places(shard), *range(end, len(shard.arrow), 5)]:
        if place == end:
            continue  # what is left is a whole shard without index
        with pytest.raises((ShardError, ShardIndexError)):
            open_export({PATH: shard.arrow[:place]}).read_chunk(0, ALL[0])


def test_an_arrow_file_cut_anywhere_is_refused() -> None:
    for index in ("none", "rec", "offset"):
        shard = write_shard(make_chunks(*ALL), Dialect(container="file", index=index))
        for place in sample_places(shard):
            with pytest.raises((ShardError, ShardIndexError)):
                open_export(shard.files() | {PATH: shard.arrow[:place]}).read_chunk(0, ALL[0])


@pytest.mark.parametrize("index", [kind for kind in INDEX_KINDS if kind != "footer"])
@pytest.mark.parametrize(
    "more", [b"\x00", bytes(8), END_MARK, b"\xff" * 8, b"x" * 100, bytes(5000)], ids=lambda more: repr(more[:8])
)
def test_bytes_behind_the_end_are_refused(index: Any, more: bytes) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))
    with pytest.raises((ShardError, ShardIndexError)):
        open_export(shard.files() | {PATH: shard.arrow + more}).read_chunk(0, ALL[0])


@pytest.mark.parametrize("index", [kind for kind in INDEX_KINDS if kind != "footer"])
def test_bytes_before_the_start_are_refused(index: Any) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))
    for before in (b"\x00", bytes(8), END_MARK, shard.arrow[: sum(shard.schema_range)]):
        with pytest.raises((ShardError, ShardIndexError)):
            open_export(shard.files() | {PATH: before + shard.arrow}).read_chunk(0, ALL[0])


@pytest.mark.parametrize("index", [kind for kind in INDEX_KINDS if kind not in ("footer", "none")])
def test_a_record_torn_out_is_refused(index: Any) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))
    at, size, _ = shard.ranges[1]
    for n in (8, size // 2 // 8 * 8, size):
        # An index with offsets can't tell 8 bytes from the end mark; the records behind them are not where it says.
        with pytest.raises((ShardError, ShardIndexError, RecordError)):
            open_export(shard.files() | {PATH: shard.arrow[:at] + shard.arrow[at + n :]}).read_chunk(0, ALL[2])


@pytest.mark.parametrize(
    "arrow",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x00", id="a byte"),
        pytest.param(b"\xff\xff\xff\xff", id="a continuation mark"),
        pytest.param(END_MARK, id="an end mark"),
        pytest.param(bytes(5000), id="zeros"),
        pytest.param(b"\xff" * 5000, id="ones"),
        pytest.param(b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(5000), id="metadata of 2 GiB"),
        pytest.param(b"\xff\xff\xff\xff\x00\x00\x10\x00" + bytes(2 << 20), id="metadata of 1 MiB of zeros"),
        pytest.param(b"ARROW1", id="a magic"),
        pytest.param(b"ARROW1\x00\x00", id="a padded magic"),
        pytest.param(b"ARROW1\x00\x00ARROW1", id="two magics"),
        pytest.param(b"ARROW1\x00\x00" + bytes(4) + b"ARROW1", id="a footer of 0 bytes"),
        pytest.param(b"ARROW1\x00\x00" + bytes(100) + b"\x64\x00\x00\x00ARROW1", id="a footer of everything"),
        pytest.param(b"ARROW1\x00\x00" + bytes(100) + b"\xff\xff\xff\xffARROW1", id="a footer of less than nothing"),
        pytest.param(b"CHUNKIDX", id="a footer's magic"),
        pytest.param(b"PAR1" + bytes(100) + b"PAR1", id="parquet"),
        pytest.param(b"x,y,z,rec\n", id="text"),
        pytest.param(b"\x28\xb5\x2f\xfd" + bytes(100), id="zstd"),
        pytest.param(b"\x1f\x8b" + bytes(100), id="gzip"),
    ],
)
def test_what_is_no_shard_is_refused(arrow: bytes) -> None:
    indexes = write_shard(make_chunks(*ALL), Dialect()).files()
    for files in ({PATH: arrow}, indexes | {PATH: arrow}):
        with pytest.raises(ZarrDvidError) as caught:
            open_export(files).read_chunk(0, ALL[0])
        assert isinstance(caught.value, ShardError | ShardIndexError)
        assert caught.value.path == PATH
        assert len(str(caught.value)) < 1000


def test_an_empty_shard_file_names_the_dvid_that_made_such() -> None:
    with pytest.raises(ShardError, match=r"empty.*0 bytes.*2025-08-29"):
        open_export({PATH: b""}).read_chunk(0, ALL[0])


def test_a_schema_of_something_else_is_refused() -> None:
    columns = Dialect().columns
    for missing in columns[:-1]:
        dialect = Dialect(columns=tuple(name for name in columns if name != missing))
        with pytest.raises(ShardError, match=rf"does not start with a schema.*lacks a column.*{missing}"):
            open_export(write_shard(make_chunks(*ALL), dialect).files()).read_chunk(0, ALL[0])


# ---- what it costs


def test_a_walk_of_the_real_shard_reads_less_than_half_of_it(shared_data: Path) -> None:
    """Headers and coordinates in windows; blocks are skipped."""
    name = "s1/30720_24576_28672"
    root = shared_data / "mcns" / "export"
    reader = CountingReader(LocalReader(root))
    export = Export(reader)
    rows = read_shard_rows(root / f"{name}.arrow")
    export.scales[1].load((30720, 24576, 28672))
    assert reader.n_bytes(f"{name}.arrow") < (root / f"{name}.arrow").stat().st_size / 2
    # A window for each record at most, beside head and tail.
    n_reads = sum(method == "read" and path == f"{name}.arrow" for method, path, _ in reader.calls)
    assert n_reads <= len(rows) + 2
    assert sum(method == "read" and path == f"{name}.csv" for method, path, _ in reader.calls) == 1


def test_a_walk_with_large_windows_reads_each_byte_once() -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index="rec"))
    reader = CountingReader(MemoryReader(shard.files(), window_bytes=1 << 20))
    walk_records(reader, read_framing(reader, PATH, len(shard.arrow)))
    assert len(reader.calls) == 2  # head and tail; everything


def test_small_records_share_a_window() -> None:
    chunks = make_chunks(*[(x, y, 0) for x in range(4) for y in range(4)])
    shard = write_shard(chunks, Dialect(index="none"))
    reader = CountingReader(MemoryReader(shard.files(), window_bytes=4 * shard.ranges[0][1]))
    walk_records(reader, read_framing(reader, PATH, len(shard.arrow)))
    assert len(reader.calls) <= 2 + len(chunks) // 3
