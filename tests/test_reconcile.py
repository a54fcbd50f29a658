"""A shard and an index that do not belong together are refused; a chunk never reads wrong, nor as absent."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from exports import (
    END_MARK,
    XYZ,
    Dialect,
    IndexKind,
    Shard,
    assert_reads,
    csv_index,
    footer,
    json_index,
    make_chunks,
    open_export,
    read_voxels,
    write_shard,
)

from zarr_dvid.errors import ExportWarning, RecordError, ShardError, ShardIndexError, ZarrDvidError

ALL: tuple[XYZ, ...] = ((0, 0, 0), (1, 2, 3), (3, 1, 0), (2, 2, 2), (0, 0, 3), (5, 1, 1))
CSV_INDEXES: tuple[IndexKind, ...] = ("rec", "rec,morton", "offset", "offset from 688", "rec,offset,size")

Rows = list[list[int]]


def split(csv: bytes) -> tuple[list[str], str, Rows]:
    """Comment lines, the header and the rows of a CSV index."""
    lines = csv.decode().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    header, *rows = lines[len(comments) :]
    return comments, header, [[int(value) for value in row.split(",")] for row in rows]


def edited(shard: Shard, edit: Callable[[Rows], Rows | None], *, ending: str = ".csv") -> dict[str, bytes]:
    """A shard's files with the rows of an index changed."""
    comments, header, rows = split(shard.indexes[ending])
    rows = edit(rows) or rows
    comment = "".join(f"{line}\n" for line in comments)
    return shard.files() | {f"s0/0_0_0{ending}": csv_index(header, rows, comment=comment)}


def assert_never_wrong(files: dict[str, bytes], *, absent_is_right: tuple[XYZ, ...] = ()) -> list[ZarrDvidError]:
    """Every chunk reads right or is refused; gives the errors."""
    errors = []
    for chunk in make_chunks(*ALL):
        export = open_export(files)
        for values in ("labels", "supervoxels"):
            try:
                found = read_voxels(export, chunk.xyz, values=values)
            except ZarrDvidError as error:
                assert error.path is not None
                assert error.path.startswith("s0/0_0_0")
                assert error.chunk_xyz == chunk.xyz
                errors.append(error)
                continue
            if found is None:
                assert chunk.xyz in absent_is_right, f"{chunk.xyz} is silently absent"
            else:
                np.testing.assert_array_equal(found, chunk.voxels[values])
    return errors


def assert_refused(files: dict[str, bytes], kinds: tuple[type[ZarrDvidError], ...] = (ShardIndexError,)) -> None:
    """No chunk reads at all."""
    errors = assert_never_wrong(files)
    assert len(errors) == 2 * len(ALL)
    assert all(isinstance(error, kinds) for error in errors)


def swap_places(rows: Rows) -> None:
    rows[1][3:], rows[4][3:] = rows[4][3:], rows[1][3:]


def swap_rows(rows: Rows) -> None:
    rows[1], rows[4] = rows[4], rows[1]


# ---- CSV indexes of one row a batch


@pytest.mark.parametrize("index", CSV_INDEXES)
def test_the_order_of_rows_does_not_matter(index: IndexKind) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))
    assert assert_never_wrong(edited(shard, swap_rows)) == []
    assert assert_never_wrong(edited(shard, lambda rows: sorted(rows))) == []
    assert assert_never_wrong(edited(shard, lambda rows: random.Random(0).sample(rows, len(rows)))) == []


@pytest.mark.parametrize("index", CSV_INDEXES)
@pytest.mark.parametrize("n", range(len(ALL)))
def test_a_row_is_missing(index: IndexKind, n: int) -> None:
    """Wherever it is; the last one is an index cut at a line end."""
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))
    assert_refused(edited(shard, lambda rows: rows[:n] + rows[n + 1 :]))
    assert_refused(edited(shard, lambda rows: rows[:n]) if n else shard.files() | {"s0/0_0_0.csv": b""})


@pytest.mark.parametrize("index", CSV_INDEXES)
def test_a_row_too_many(index: IndexKind) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))
    past = {"rec": [6], "rec,morton": [6], "rec,offset,size": [6, len(shard.arrow), 8]}
    behind = past.get(index, [len(shard.arrow), 8, 0])
    for xyz in ((9, 9, 9), (1, 2, 3)):
        assert_refused(edited(shard, lambda rows, xyz=xyz: [*rows, [*xyz, *behind]]))
        assert_refused(edited(shard, lambda rows, xyz=xyz: [[*xyz, *rows[0][3:]], *rows]))
    for i in range(len(ALL)):
        assert_refused(edited(shard, lambda rows, i=i: [*rows, rows[i]]))


@pytest.mark.parametrize("index", CSV_INDEXES)
def test_rows_with_swapped_places(index: IndexKind) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))
    errors = assert_never_wrong(edited(shard, swap_places))
    if index.startswith("offset") or index == "rec,offset,size":
        # Only reading the records can tell; the two are refused then, and the others read.
        assert {error.chunk_xyz for error in errors} == {ALL[1], ALL[4]}
        assert all(isinstance(error, RecordError) for error in errors)
        for error in errors:
            assert (error.expected, error.found) in ((ALL[1], ALL[4]), (ALL[4], ALL[1]))
    else:
        assert_refused(edited(shard, swap_places))


@pytest.mark.parametrize("index", ["offset", "offset from 688", "rec,offset,size"])
@pytest.mark.parametrize("delta", [-8, 8, -1, 1, 64, -10_000, 2**40])
def test_wrong_offsets(index: IndexKind, delta: int) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))
    column = split(shard.indexes[".csv"])[1].split(",").index("offset")

    def shift(rows: Rows, which: slice, columns: tuple[int, ...]) -> None:
        for row in rows[which]:
            for c in columns:
                row[c] += delta

    for which in (slice(1, None), slice(2, 3), slice(5, 6), slice(1, 2)):
        for columns in ((column,), (column + 1,), (column, column + 1)):
            files = edited(shard, lambda rows, w=which, c=columns: shift(rows, w, c))
            if delta == 8 and which == slice(5, 6) and columns == (column + 1,):
                # The last record takes in the end mark. It is refused itself, and the others are where they should be.
                assert {error.chunk_xyz for error in assert_never_wrong(files)} == {ALL[5]}
            else:
                assert_refused(files)


def test_the_end_mark_is_no_record() -> None:
    shard = write_shard(make_chunks(*ALL))
    for xyz in ((9, 9, 9), ALL[1]):
        files = edited(shard, lambda rows, xyz=xyz: [*rows, [*xyz, len(shard.arrow) - 8, 8, 0]])
        assert_never_wrong(files)
        with pytest.raises(ZarrDvidError):
            open_export(files).read_chunk(0, xyz)


@pytest.mark.parametrize("index", ["rec", "rec,morton"])
@pytest.mark.parametrize("delta", [-1, 1, 6, 2**40])
def test_wrong_records(index: IndexKind, delta: int) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))

    def shift(rows: Rows, which: slice) -> None:
        for row in rows[which]:
            row[3] += delta

    for which in (slice(None), slice(2, 3), slice(5, 6)):
        assert_refused(edited(shard, lambda rows, w=which: shift(rows, w)))


@pytest.mark.parametrize("index", ["rec", "rec,morton"])
@pytest.mark.parametrize("xyz", [(9, 9, 9), (-1, 2, 3), (1, 2, 4), (64, 128, 192), (2**40, 0, 0), (1, 2, -(2**63))])
def test_wrong_coordinates_without_offsets(index: IndexKind, xyz: XYZ) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index=index))
    assert_refused(edited(shard, lambda rows: [rows[0], [*xyz, *rows[1][3:]], *rows[2:]]))


@pytest.mark.parametrize(
    "xyz", [(-1, 2, 3), (2**21, 0, 0), (2**40, 0, 0), (1, 2, -(2**63)), (2**63 - 1, 0, 0), (2**58, 0, 0)]
)
def test_impossible_coordinates_with_offsets(xyz: XYZ) -> None:
    shard = write_shard(make_chunks(*ALL))
    assert_refused(edited(shard, lambda rows: [rows[0], [*xyz, *rows[1][3:]], *rows[2:]]))


def test_another_chunks_coordinates_with_offsets() -> None:
    """A row's coordinates can't be checked before its record is read: the chunk that it names is refused then."""
    shard = write_shard(make_chunks(*ALL))
    files = edited(shard, lambda rows: [rows[0], [*ALL[4], *rows[1][3:]], *rows[2:]])
    errors = assert_never_wrong(files, absent_is_right=(ALL[1],))
    assert {error.chunk_xyz for error in errors} == {ALL[4]}
    with pytest.raises(RecordError, match="another chunk") as caught:
        open_export(edited(shard, lambda rows: [rows[0], [2, 0, 0, *rows[1][3:]], *rows[2:]])).read_chunk(0, (2, 0, 0))
    error = caught.value
    assert (error.path, error.chunk_xyz) == ("s0/0_0_0.arrow", (2, 0, 0))
    assert (error.expected, error.found, error.offset_bytes) == ((2, 0, 0), ALL[1], shard.ranges[1][0])


def test_the_indexes_of_two_shards_swapped() -> None:
    for index in ("offset", "rec", "json", "batch_offset"):
        dialect = Dialect(index=index)
        here, there = write_shard(make_chunks(*ALL), dialect), write_shard(make_chunks((8, 9, 10), (9, 8, 11)), dialect)
        files = {"s0/0_0_0.arrow": here.arrow, "s0/512_512_512.arrow": there.arrow}
        files |= {f"s0/0_0_0{ending}": data for ending, data in there.indexes.items()}
        files |= {f"s0/512_512_512{ending}": data for ending, data in here.indexes.items()}
        for xyz in (*ALL, (8, 9, 10), (9, 8, 11)):
            with pytest.raises((ShardIndexError, RecordError)):
                open_export(files).read_chunk(0, xyz)


def test_the_index_of_the_same_chunks_in_another_order() -> None:
    """What a re-export over a deleted shard leaves: sizes that fill the file, and yet other records."""
    chunks = make_chunks(*ALL)
    for index in CSV_INDEXES:
        dialect = Dialect(index=index)
        one, other = write_shard(chunks, dialect), write_shard(chunks[::-1], dialect)
        errors = assert_never_wrong({"s0/0_0_0.arrow": one.arrow, "s0/0_0_0.csv": other.indexes[".csv"]})
        assert len(errors) == 2 * len(ALL)


# ---- batches of several rows


@pytest.mark.parametrize("rows_a_batch", [2, 3, 6])
@pytest.mark.parametrize("n", range(len(ALL)))
@pytest.mark.parametrize("index", ["offset", "rec"])
def test_a_row_is_missing_in_a_batch(index: IndexKind, n: int, rows_a_batch: int) -> None:
    """The batches still follow one another, and the last one still ends with the shard."""
    shard = write_shard(make_chunks(*ALL), Dialect(index=index, rows_a_batch=rows_a_batch))
    assert_refused(edited(shard, lambda rows: rows[:n] + rows[n + 1 :]), (ShardIndexError, RecordError))
    if n:
        assert_refused(edited(shard, lambda rows: rows[:n]), (ShardIndexError, RecordError))


def test_a_row_is_missing_where_only_the_first_batch_has_several() -> None:
    shard = write_shard(make_chunks(*ALL[:3]), Dialect(rows_a_batch=2))
    files = edited(shard, lambda rows: [rows[0], rows[2]])
    for xyz in ALL[:3]:
        with pytest.raises((ShardIndexError, RecordError)):
            open_export(files).read_chunk(0, xyz)


@pytest.mark.parametrize("n", range(len(ALL)))
def test_a_row_is_missing_in_both_indexes_of_a_shard(n: int) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index="batch_offset", rows_a_batch=4))
    endings = (".csv", "-offsets.csv")
    for some in (endings, endings[:1], endings[1:]):
        files = shard.files()
        for ending in some:
            files |= {
                path: data
                for path, data in edited(shard, lambda rows: rows[:n] + rows[n + 1 :], ending=ending).items()
                if path.endswith(f"0_0_0{ending}")
            }
        assert_refused(files, (ShardIndexError, RecordError))


def test_rows_of_a_batch_exchanged() -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(rows_a_batch=6))
    errors = assert_never_wrong(edited(shard, swap_places))
    assert {error.chunk_xyz for error in errors} >= {ALL[1], ALL[4]}


@pytest.mark.parametrize("index", ["offset", "offset from 688", "batch_offset"])
@pytest.mark.parametrize("n", [0, 1, 3, 5])
def test_rows_of_one_batch_with_other_sizes(index: IndexKind, n: int) -> None:
    """Of 0 above all: then the next row seems to follow."""
    shard = write_shard(make_chunks(*ALL), Dialect(rows_a_batch=3, index=index))
    ending = "-offsets.csv" if index == "batch_offset" else ".csv"
    column = split(shard.indexes[ending])[1].split(",").index("size")

    for size in (0, 8, shard.schema_range[1], shard.schema_range[1] + 8, len(shard.arrow)):

        def resize(rows: Rows, size: int = size) -> None:
            rows[n][column] = size

        assert_refused(edited(shard, resize, ending=ending))


@pytest.mark.parametrize("batch_idx", [1, 5, 6, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**61])
def test_rows_that_a_batch_does_not_have(batch_idx: int) -> None:
    for rows_a_batch in (1, 6):
        shard = write_shard(make_chunks(*ALL), Dialect(rows_a_batch=rows_a_batch))
        files = edited(shard, lambda rows: [[*rows[0][:5], batch_idx], *rows[1:]])
        assert ALL[0] in {error.chunk_xyz for error in assert_never_wrong(files)}


# ---- JSON


@pytest.mark.parametrize("index", ["json", "footer"])
def test_json_faults(index: IndexKind) -> None:
    whole = write_shard(make_chunks(*ALL), Dialect(index=index))

    def with_json(document: bytes) -> dict[str, bytes]:
        if index == "json":
            return {"s0/0_0_0.arrow": whole.arrow, "s0/0_0_0.json": document}
        return {"s0/0_0_0.arrow": whole.arrow[: whole.arrow.rindex(END_MARK) + 8] + footer(document)}

    document = json_index(ALL)
    assert assert_never_wrong(with_json(document)) == []
    assert assert_never_wrong(with_json(document.replace(b"\n", b""))) == []
    key = b'"1_2_3": 1'
    assert key in document
    for new in (
        *(b'"1_2_3": 0', b'"1_2_3": 6', b'"1_2_3": -1', b'"1_2_3": 1.0', b'"1_2_3": 1e0', b'"1_2_3": null', b'"1_2_3": 3'),
        *(b'"1_2_4": 1', b'"64_128_192": 1', b'"x": 1', b'"1_2_3": 1, "9_9_9": 6', b'"1_2_3": 1, "1_2_3": 1'),
        *(b'"1_2_3": 1, "1_2_3": 0', b'"1_2_3": 0, "1_2_3": 1', b'"1_2_3": {"1_2_3": 1}', b'"1_2_3": 1, "9_9_9": 1'),
        b'"1_2_3": ' + b"9" * 5000,
    ):
        assert_refused(with_json(document.replace(key, new)))
    assert_refused(with_json(json_index(ALL[:-1])))
    assert_refused(with_json(json_index(ALL[::-1])))
    assert_refused(with_json(b"{}"))
    assert_refused(with_json(b""))
    assert_refused(with_json(document[:-1]))
    assert_refused(with_json(document[: len(document) // 2]))
    assert_refused(with_json(b"[" * 100_000))


def test_footers_of_impossible_lengths() -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index="footer"))
    arrow, n = shard.arrow, len(shard.arrow)
    document = json_index(ALL)
    for length in (
        0,
        1,
        len(document) - 1,
        len(document) + 1,
        len(document) + 8,
        n - 16,
        n - 15,
        n,
        2**32,
        2**63,
        2**64 - 1,
    ):
        files = {"s0/0_0_0.arrow": arrow[:-16] + length.to_bytes(8, "little") + b"CHUNKIDX"}
        assert_refused(files, (ShardIndexError, ShardError))
    for tail in (
        b"CHUNKIDX",
        bytes(8) + b"CHUNKIDX",
        b"\xff" * 8 + b"CHUNKIDX",
        b"{}" + (2).to_bytes(8, "little") + b"CHUNKIDX",
    ):
        with pytest.raises((ShardError, ShardIndexError)):
            open_export({"s0/0_0_0.arrow": tail}).read_chunk(0, (0, 0, 0))


# ---- several index files, and none


@pytest.mark.parametrize("lie", [".csv", "-offsets.csv"])
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda rows: rows[:-1], id="cut"),
        pytest.param(lambda rows: [*rows, [9, 9, 9, *rows[0][3:]]], id="a row more"),
        pytest.param(lambda rows: [[9, 9, 9, *rows[0][3:]], *rows[1:]], id="another chunk"),
        pytest.param(lambda rows: [], id="no rows"),
    ],
)
def test_two_indexes_that_contradict_each_other(lie: str, edit: Callable[[Rows], Rows]) -> None:
    shard = write_shard(make_chunks(*ALL), Dialect(index="batch_offset"))
    comments, header, rows = split(shard.indexes[lie])
    files = shard.files() | {f"s0/0_0_0{lie}": csv_index(header, edit(rows), comment="".join(f"{c}\n" for c in comments))}
    assert_refused(files)
    assert_refused(shard.files() | {f"s0/0_0_0{lie}": b""})


def test_a_json_and_a_csv_index_that_contradict_each_other() -> None:
    chunks = make_chunks(*ALL)
    for index in CSV_INDEXES:
        files = write_shard(chunks, Dialect(index=index)).files()
        assert assert_never_wrong(files | {"s0/0_0_0.json": json_index(ALL)}) == []
        assert_refused(files | {"s0/0_0_0.json": json_index(ALL[:-1])})
        assert_refused(files | {"s0/0_0_0.json": json_index([*ALL[:-1], (9, 9, 9)])})


def test_an_index_beside_a_footer_that_contradicts_it() -> None:
    chunks = make_chunks(*ALL)
    arrow = write_shard(chunks, Dialect(index="footer")).arrow
    cut = arrow[: arrow.rindex(END_MARK) + 8] + footer(json_index(ALL[:-1]))
    for index in CSV_INDEXES:
        indexes = {"s0/0_0_0.csv": write_shard(chunks, Dialect(index=index)).indexes[".csv"]}
        assert assert_never_wrong({"s0/0_0_0.arrow": arrow, **indexes}) == []
        assert_refused({"s0/0_0_0.arrow": cut, **indexes})


@pytest.mark.parametrize(
    "dialect", [Dialect(), Dialect(rows_a_batch=3), Dialect(container="file", body_compression="zstd")], ids=str
)
def test_a_shard_without_index_is_indexed_from_its_records_with_one_warning(dialect: Dialect) -> None:
    files = {"s0/0_0_0.arrow": write_shard(make_chunks(*ALL), replace(dialect, index="none")).arrow}
    export = open_export(files)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_reads(export, make_chunks(*ALL))
        assert read_voxels(export, (9, 9, 9)) is None
        assert [tuple(xyz) for xyz in next(export.scales[0].occupied()).tolist()] == sorted(ALL)
    messages = [str(warning.message) for warning in caught if warning.category is ExportWarning]
    assert len(messages) == 1
    assert messages[0].startswith("s0/0_0_0.arrow: the shard has no index")
    assert "6 records" in messages[0]


def test_neither_index_nor_end_mark_is_no_whole_shard() -> None:
    """Nothing can tell then whether something lacks behind the last whole record."""
    shard = write_shard(make_chunks(*ALL), Dialect(index="none"))
    for arrow in (shard.arrow[:-8], shard.arrow[: shard.ranges[3][0]], shard.arrow[: sum(shard.schema_range)]):
        for xyz in ALL:
            with pytest.raises(ShardIndexError, match="end mark") as caught:
                open_export({"s0/0_0_0.arrow": arrow}).read_chunk(0, xyz)
            assert (caught.value.path, caught.value.chunk_xyz) == ("s0/0_0_0.arrow", xyz)


def test_an_index_without_its_shard() -> None:
    for index in (*CSV_INDEXES, "json", "batch_offset"):
        shard = write_shard(make_chunks(*ALL), Dialect(index=index))
        files = {f"s0/0_0_0{ending}": data for ending, data in shard.indexes.items()}
        for xyz in (*ALL, (1, 1, 1)):
            with pytest.raises(ShardError, match="shard is missing") as caught:
                open_export(files).read_chunk(0, xyz)
            assert (caught.value.path, caught.value.chunk_xyz) == ("s0/0_0_0.arrow", xyz)
