"""What went wrong while an export was made: DVID's own mishaps, and the same in small."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from conftest import ShardRow, expected_sha256, read_shard_rows, volume_sha256
from exports import (
    END_MARK,
    SHAPE,
    XYZ,
    Dialect,
    IndexKind,
    assert_reads,
    footer,
    json_index,
    make_chunk,
    make_chunks,
    open_export,
    read_voxels,
    relabelled,
    volume_info,
    write_shard,
)
from naive import naive_decode

import zarr_dvid
from zarr_dvid.errors import (
    AmbiguousChunkError,
    BlockError,
    ExportWarning,
    RecordError,
    ShardError,
    ShardIndexError,
    ZarrDvidError,
)
from zarr_dvid.export import Export
from zarr_dvid.reader import LocalReader
from zarr_dvid.voxels import decode_payload

AnyError = tuple[type[ZarrDvidError], ...]


@pytest.fixture
def hazards(shared_data: Path) -> Path:
    return shared_data / "exports" / "hazards"


def csv_chunks(path: Path) -> list[XYZ]:
    rows = [line.split(",") for line in path.read_text().splitlines() if line[:1].isdigit()]
    return [(int(row[0]), int(row[1]), int(row[2])) for row in rows]


# ---- DVID's own


def test_exported_twice_is_refused(hazards: Path) -> None:
    path = hazards / "exported-twice"
    name = "s1/30720_24576_28672"
    export = Export(LocalReader(path))
    chunks = csv_chunks(path / f"{name}.csv")
    assert len(chunks) == 258
    for xyz in chunks:
        with pytest.raises(ShardIndexError, match="do not fill the shard") as caught:
            export.read_chunk(1, xyz)
        error = caught.value
        assert (error.path, error.chunk_xyz, error.offset_bytes) == (f"{name}.csv", xyz, 1131160)
        assert "2262328" in str(error.expected)
        assert error.advice is not None
        assert "exported twice" in error.advice
    arrow = (path / f"{name}.arrow").read_bytes()
    for files in ({f"{name}.arrow": arrow}, {f"{name}.arrow": arrow, f"{name}.csv": rec_csv(chunks)}):
        with pytest.raises(ShardError, match="goes on behind its end mark") as other:
            open_export(files).read_chunk(1, chunks[0])
        assert (other.value.path, other.value.offset_bytes) == (f"{name}.arrow", 1131160)


def rec_csv(chunks: list[XYZ]) -> bytes:
    return ("x,y,z,rec\n" + "".join(f"{x},{y},{z},{i}\n" for i, (x, y, z) in enumerate(chunks))).encode()


def test_shared_file_names_are_refused(hazards: Path) -> None:
    path = hazards / "shared-file-names"
    export = Export(LocalReader(path))
    names = sorted(file.stem for file in path.glob("s0/*.csv"))
    assert names == ["0_0_0", "0_256_0", "256_0_0", "256_256_0"]
    for name in names:
        for xyz in csv_chunks(path / f"s0/{name}.csv"):
            with pytest.raises(ShardIndexError, match="do not fill the shard") as caught:
                export.read_chunk(0, xyz)
            assert (caught.value.path, caught.value.chunk_xyz) == (f"s0/{name}.csv", xyz)
    # Most of the chunks are in no index at all.
    for xyz in np.ndindex(8, 8, 4):
        with pytest.raises(ShardIndexError):
            export.read_chunk(0, xyz)
    # Nor does the file alone do.
    arrows = {f"s0/{file.name}": file.read_bytes() for file in path.glob("s0/*.arrow")}
    for xyz in np.ndindex(8, 8, 4):
        with pytest.raises(ShardError, match="torn or overwritten|goes on behind") as torn:
            open_export(arrows).read_chunk(0, xyz)
        assert torn.value.offset_bytes is not None


def test_cancelled_reads_as_absent_and_is_reported(hazards: Path) -> None:
    export = Export(LocalReader(hazards / "cancelled"))
    with pytest.warns(ExportWarning, match=r"s0/0_0_0.arrow: .*holds no record") as caught:
        assert export.read_chunk(0, (0, 0, 0)) is None
        assert export.read_chunk(0, (31, 15, 15)) is None
    assert len([warning for warning in caught if issubclass(warning.category, ExportWarning)]) == 1
    assert export.scales[0].size_xyz == (2048, 1024, 1024)


def test_killed_is_refused(hazards: Path) -> None:
    path = hazards / "killed"
    for xyz in ((0, 0, 0), (5, 5, 5), (1000, 0, 0)):
        with pytest.raises(ShardIndexError, match="index is empty") as caught:
            Export(LocalReader(path)).read_chunk(0, xyz)
        error = caught.value
        assert (error.path, error.chunk_xyz, error.found) == ("s0/0_0_0.csv", xyz, "0 bytes")
        assert error.advice is not None
        assert "killed" in error.advice
    arrow = (path / "s0/0_0_0.arrow").read_bytes()
    with pytest.raises(ShardError, match="behind 402 whole records") as torn:
        open_export({"s0/0_0_0.arrow": arrow}).read_chunk(0, (0, 0, 0))
    assert (torn.value.path, torn.value.chunk_xyz) == ("s0/0_0_0.arrow", (0, 0, 0))
    assert torn.value.offset_bytes is not None
    assert torn.value.offset_bytes < len(arrow)


def test_past_the_end_is_reported_once_and_reads_right(hazards: Path) -> None:
    path = hazards / "past-the-end"
    export = Export(LocalReader(path))
    with pytest.warns(ExportWarning, match=r"past the end of the volume of \(10, 10, 10\) chunks") as caught:
        for file in sorted(path.glob("s0/*.arrow")):
            for row in read_shard_rows(file):
                payload = export.read_chunk(0, row.chunk_xyz)
                assert payload is not None
                found = decode_payload(payload, values="supervoxels", shape=SHAPE)
                np.testing.assert_array_equal(found, naive_decode(plain(row)))
    assert len([warning for warning in caught if issubclass(warning.category, ExportWarning)]) == 1
    occupied = np.concatenate(list(export.scales[0].occupied()))
    assert {tuple(xyz) for xyz in occupied.tolist()} == {(0, 0, 0), (9, 9, 9)}


def plain(row: ShardRow) -> bytes:
    """A row's bare block."""
    return zstandard.ZstdDecompressor().decompress(row.block, max_output_size=1 << 22)


def test_odd_blocks_are_refused_by_name(shared_data: Path) -> None:
    path = shared_data / "exports" / "odd-blocks"
    export = Export(LocalReader(path))
    rows = {row.chunk_xyz: row for row in read_shard_rows(path / "s0/0_0_0.arrow")}
    assert sorted(rows) == [(2, 0, 0), (3, 0, 0), (6, 0, 0), (7, 0, 0), (11, 0, 0)]
    broken = {(7, 0, 0): "run", (11, 0, 0): "another size"}
    for xyz, row in rows.items():
        payload = export.read_chunk(0, xyz)
        assert payload is not None
        assert (payload.path, payload.chunk_xyz) == ("s0/0_0_0.arrow", xyz)
        for values in ("labels", "supervoxels"):
            if xyz in broken:
                with pytest.raises(BlockError, match=broken[xyz]) as caught:
                    decode_payload(payload, values=values, shape=SHAPE)
                assert caught.value.chunk_xyz == xyz
            else:
                found = decode_payload(payload, values=values, shape=SHAPE)
                supervoxels = naive_decode(plain(row))
                mapping = dict(zip(row.supervoxels.tolist(), getattr(row, values).tolist(), strict=True))
                expected = np.vectorize(mapping.get, otypes=[np.uint64])(supervoxels)
                np.testing.assert_array_equal(found, expected)


def test_odd_blocks_are_refused_by_name_in_an_array(shared_data: Path) -> None:
    labels = zarr_dvid.open(shared_data / "exports" / "odd-blocks")["s0/labels"]
    assert labels[0:64, 0:64, 128:192].any()
    for x in (7, 11):
        with pytest.raises(BlockError) as caught:
            labels[0:64, 0:64, 64 * x : 64 * x + 64]
        assert caught.value.path == "s0/0_0_0.arrow"
        assert caught.value.chunk_xyz == (x, 0, 0)
        assert str(caught.value).startswith(f"s0/0_0_0.arrow, chunk ({x}, 0, 0) (x, y, z): ")


def test_mixed_scales_are_refused_where_they_differ(shared_data: Path) -> None:
    """DVID of September 2025 wrote rows of scale 1 into open files of scale 0."""
    path = shared_data / "exports" / "json-zstd"
    rows = read_shard_rows(path / "s0/0_0_0.arrow")
    by_chunk: dict[XYZ, list[ShardRow]] = {}
    for row in rows:
        by_chunk.setdefault(row.chunk_xyz, []).append(row)
    export = Export(LocalReader(path))
    n = {"one": 0, "equal": 0, "differing": 0}
    for xyz, some in by_chunk.items():
        if len({volume_sha256(naive_decode(plain(row))) for row in some}) > 1:
            n["differing"] += 1
            with pytest.raises(AmbiguousChunkError, match="2 records") as caught:
                export.read_chunk(0, xyz)
            assert (caught.value.path, caught.value.chunk_xyz) == ("s0/0_0_0.arrow", xyz)
        else:
            n["equal" if len(some) > 1 else "one"] += 1
            assert export.read_chunk(0, xyz) is not None
    assert n["differing"] > 0
    assert n["one"] + n["equal"] > 0


# ---- the same in small

BY_RECORD: tuple[IndexKind, ...] = ("none", "json", "footer", "rec")


@pytest.mark.parametrize("index", ["none", "json", "rec", "offset", "offset from 688", "batch_offset", "rec,offset,size"])
@pytest.mark.parametrize("same", [True, False])
def test_a_second_export_behind_the_first_is_refused(index: IndexKind, same: bool) -> None:
    dialect = Dialect(index=index)
    first = write_shard(make_chunks((0, 0, 0), (1, 2, 3), (3, 1, 0)), dialect)
    order = make_chunks((0, 0, 0), (1, 2, 3), (3, 1, 0)) if same else make_chunks((3, 1, 0), (0, 0, 0), (1, 2, 3))
    second = write_shard(order, dialect)
    # A re-export appends to the shard and starts the index anew; the other way round, the old index is left.
    for indexes in (first.indexes, second.indexes):
        files = {"s0/0_0_0.arrow": first.arrow + second.arrow}
        files |= {f"s0/0_0_0{ending}": data for ending, data in indexes.items()}
        for xyz in ((0, 0, 0), (1, 2, 3), (2, 2, 2)):
            with pytest.raises((ShardError, ShardIndexError)) as caught:
                open_export(files).read_chunk(0, xyz)
            assert caught.value.chunk_xyz == xyz
            assert "twice" in str(caught.value)


@pytest.mark.parametrize("index", BY_RECORD)
def test_a_second_schema_without_end_mark_is_refused(index: IndexKind) -> None:
    """As several writers of one file leave it."""
    dialect = Dialect(index="none", has_end_mark=False)
    one, other = write_shard(make_chunks((0, 0, 0)), dialect), write_shard(make_chunks((1, 2, 3)), dialect)
    arrow = one.arrow + other.arrow
    xyz = [(0, 0, 0), (1, 2, 3)]
    files = {
        "none": {"s0/0_0_0.arrow": arrow + END_MARK},
        "json": {"s0/0_0_0.arrow": arrow, "s0/0_0_0.json": json_index(xyz)},
        "footer": {"s0/0_0_0.arrow": arrow + footer(json_index(xyz))},
        "rec": {"s0/0_0_0.arrow": arrow + END_MARK, "s0/0_0_0.csv": rec_csv(xyz)},
    }[index]
    for chunk in xyz:
        with pytest.raises(ShardError, match="no record batch|type 1") as caught:
            open_export(files).read_chunk(0, chunk)
        assert caught.value.offset_bytes == len(one.arrow)


@pytest.mark.parametrize(
    "dialect", [Dialect(index="rec"), Dialect(), Dialect(index="none"), Dialect(rows_a_batch=3)], ids=str
)
def test_several_records_of_a_chunk(dialect: Dialect) -> None:
    one, other = make_chunk((1, 2, 3)), make_chunk((1, 2, 3), seed=1)
    rest = make_chunks((0, 0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        for same in ([one, *rest, one], [one, one, one, *rest]):
            assert_reads(open_export(write_shard(same, dialect).files()), [one, *rest])
        for differing, n in (([one, *rest, other], 2), ([other, one, *rest], 2), ([one, one, other, *rest], 3)):
            export = open_export(write_shard(differing, dialect).files())
            for _ in range(2):
                with pytest.raises(AmbiguousChunkError) as caught:
                    export.read_chunk(0, (1, 2, 3))
                error = caught.value
                assert (error.path, error.chunk_xyz, error.found) == ("s0/0_0_0.arrow", (1, 2, 3), f"{n} records")
                assert str(pickle.loads(pickle.dumps(error))) == str(error)
            assert_reads(export, rest)


def test_records_that_only_differ_in_labels_are_ambiguous() -> None:
    one = make_chunk((1, 2, 3))
    other = relabelled(one, seed=0)
    labels = tuple(label + 1 for label in one.labels)
    changed = type(other)(xyz=other.xyz, voxels={}, table=other.table, labels=labels, block=other.block)
    export = open_export(write_shard([one, changed]).files())
    with pytest.raises(AmbiguousChunkError):
        export.read_chunk(0, (1, 2, 3))


def test_the_same_voxels_in_other_bytes_are_one_chunk() -> None:
    """A block's table may be in any order; a re-exported chunk differs in nothing else."""
    one = make_chunk((1, 2, 3))
    shuffled = reordered(one)
    assert shuffled.block != one.block
    np.testing.assert_array_equal(naive_decode(shuffled.block), one.voxels["supervoxels"])
    assert_reads(open_export(write_shard([one, shuffled]).files()), [one])


def reordered(chunk: Any) -> Any:
    """The same chunk with its block's label table turned round by one."""
    n = len(chunk.table)
    block = chunk.block
    counts_at = 16 + 8 * n
    counts = np.frombuffer(block, "<u2", 512, counts_at)
    at = counts_at + 1024
    indices = np.frombuffer(block, "<u4", int(counts.sum()), at)
    table = chunk.table[1:] + chunk.table[:1]
    turned = ((indices.astype(np.int64) - 1) % n).astype("<u4").tobytes()
    new = block[:16] + np.array(table, "<u8").tobytes() + block[counts_at:at] + turned + block[at + len(turned) :]
    labels = chunk.labels[1:] + chunk.labels[:1]
    return type(chunk)(xyz=chunk.xyz, voxels=chunk.voxels, table=table, labels=labels, block=new)


@pytest.mark.parametrize("read_first", [(1, 1, 1), (7, 7, 7), (9, 1, 1)])
def test_a_chunk_in_two_files_is_ambiguous_once_a_stray_was_seen(read_first: XYZ) -> None:
    """Without a look at all indexes the file of a chunk's own cube is believed; a stray in any file ends that."""
    own, stray = make_chunk((1, 1, 1)), make_chunk((1, 1, 1), seed=1)
    files = write_shard([own, make_chunk((2, 1, 1))]).files("s0/0_0_0")
    files |= write_shard([stray, make_chunk((9, 1, 1))]).files("s0/512_0_0")
    export = open_export(files)
    first = read_voxels(export, read_first)
    if read_first == (1, 1, 1):
        np.testing.assert_array_equal(first, own.voxels["labels"])
        assert read_voxels(export, (7, 7, 7)) is None
    for _ in range(2):
        with pytest.raises(AmbiguousChunkError):
            read_voxels(export, (1, 1, 1))
    assert read_voxels(export, (2, 1, 1)) is not None


@pytest.mark.parametrize(
    "index", ["none", "json", "footer", "rec", "rec,morton", "offset", "offset from 688", "batch_offset"]
)
def test_an_empty_shard_is_reported(index: IndexKind) -> None:
    files = write_shard([], Dialect(index=index)).files("s0/0_0_0")
    files |= write_shard(make_chunks((5, 1, 1)), Dialect(index=index)).files("s0/256_0_0")
    export = open_export(files)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExportWarning)
        assert export.read_chunk(0, (1, 2, 3)) is None
    messages = [str(warning.message) for warning in caught if str(warning.message).startswith("s0/0_0_0.arrow: ")]
    assert sum("no record" in message for message in messages) == 1
    assert sum("no index" in message for message in messages) == (index == "none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        assert_reads(export, make_chunks((5, 1, 1)))


def test_an_export_killed_between_shards_lacks_what_has_no_file() -> None:
    """Nothing tells a shard that was never written from one without a block; only DVID's report could."""
    export = open_export(write_shard(make_chunks((5, 1, 1))).files("s0/256_0_0"))
    assert read_voxels(export, (0, 0, 0)) is None


def test_blocks_are_checked_against_their_records() -> None:
    chunk = make_chunk((1, 2, 3))
    other = make_chunk((0, 0, 0))
    kind = type(chunk)
    wrong: list[tuple[str, Any]] = [
        ("supervoxels", kind(xyz=chunk.xyz, voxels={}, table=other.table, labels=chunk.labels, block=chunk.block)),
        ("labels", kind(xyz=chunk.xyz, voxels={}, table=chunk.table, labels=chunk.labels[:-1], block=chunk.block)),
        ("labels", kind(xyz=chunk.xyz, voxels={}, table=chunk.table, labels=(), block=chunk.block)),
        ("labels", kind(xyz=chunk.xyz, voxels={}, table=chunk.table[:-1], labels=chunk.labels[:-1], block=chunk.block)),
        ("supervoxels", kind(xyz=chunk.xyz, voxels={}, table=chunk.table, labels=chunk.labels, block=other.block)),
        ("", kind(xyz=chunk.xyz, voxels={}, table=(), labels=(), block=b"")),
        ("", kind(xyz=chunk.xyz, voxels={}, table=(), labels=(), block=chunk.block[:100])),
    ]
    for field, bad in wrong:
        for dialect in (Dialect(), Dialect(raw_blocks=True, has_size=False), Dialect(rows_a_batch=2)):
            export = open_export(write_shard([bad, make_chunk((0, 0, 1))], dialect).files())
            for values in ("labels", "supervoxels"):
                with pytest.raises((BlockError, RecordError)) as caught:
                    read_voxels(export, (1, 2, 3), values=values)
                assert caught.value.chunk_xyz == (1, 2, 3)
                assert field in str(caught.value)
            assert_reads(export, make_chunks((0, 0, 1)))


def test_info_tells_the_volume_that_chunks_lie_past() -> None:
    chunks = make_chunks((0, 0, 0), (3, 3, 3))
    export = open_export(write_shard(chunks).files(), info=volume_info((130, 256, 256)))
    with pytest.warns(ExportWarning, match=r"1 chunks lie past the end .*\(3, 4, 4\).*\(3, 3, 3\) for one"):
        assert_reads(export, chunks)


def test_two_scales_read_alike_with_and_without_their_log(shared_data: Path) -> None:
    path = shared_data / "exports" / "two-scales"
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.glob("s*/*")}
    export = open_export(files)
    for scale in ("s0", "s1"):
        for xyz, entry in list(expected_sha256(path, scale).items())[:4]:
            found = read_voxels(export, (xyz[0], xyz[1], xyz[2]), level=int(scale[1]))
            assert found is not None
            assert volume_sha256(found) == entry["labels"]
