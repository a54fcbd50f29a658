"""Exports of every dialect read as DVID and a naive decoder say: DVID's own, and synthetic ones of all combinations."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from conftest import SHARED_DATA, volume_sha256
from exports import (
    COLUMNS,
    INDEX_KINDS,
    SHAPE,
    XYZ,
    CountingReader,
    Dialect,
    MemoryReader,
    assert_reads,
    make_chunks,
    open_export,
    read_voxels,
    volume_info,
    write_shard,
)

from zarr_dvid.errors import AmbiguousChunkError, ExportError, ExportWarning, ShardIndexError, ZarrDvidError
from zarr_dvid.export import Export
from zarr_dvid.reader import FsspecReader, LocalReader, open_reader
from zarr_dvid.voxels import VALUES, decode_payload

Expected = dict[XYZ, list[dict[str, str]]]

# ---- DVID's own


def real_exports() -> list[tuple[str, str]]:
    """Folders with an expected.json and their scales, for `pytest.mark.parametrize`; none where the data is absent."""
    found = []
    for path in sorted([*SHARED_DATA.glob("exports/*/expected.json"), *SHARED_DATA.glob("mcns/*/expected.json")]):
        found += [(str(path.parent.relative_to(SHARED_DATA)), scale) for scale in json.loads(path.read_text())]
    return found


def read_expected(path: Path, scale: str) -> Expected:
    """What each chunk has to read as: one entry, or the several that claim it."""
    chunks: dict[str, Any] = json.loads(path.read_text())[scale]
    parsed: Expected = {}
    for name, entries in chunks.items():
        x, y, z = map(int, name.split(","))
        parsed[x, y, z] = entries if isinstance(entries, list) else [entries]
    return parsed


def assert_hashes(export: Export, level: int, expected: Mapping[XYZ, Mapping[str, str]]) -> None:
    """Chunks read as expected, as labels and as supervoxels."""
    out = np.empty(SHAPE, np.uint64)
    for xyz, entry in expected.items():
        payload = export.read_chunk(level, xyz)
        assert payload is not None, xyz
        assert payload.chunk_xyz == xyz
        for values in VALUES:
            assert volume_sha256(decode_payload(payload, values=values, shape=SHAPE, out=out)) == entry[values], xyz


def absent_chunks(expected: Expected) -> Iterator[XYZ]:
    """Chunks that an export does not have: next to those that it has, and far away."""
    for x, y, z in list(expected)[:20]:
        for near in ((x + 1, y, z), (x, y + 1, z), (x, y, z + 1)):
            if near not in expected:
                yield near
    yield from ((10_000, 0, 0), (0, 10_000, 0), (0, 0, 10_000), (2**21 - 1, 2**21 - 1, 2**21 - 1))


@pytest.mark.parametrize(("folder", "scale"), real_exports())
def test_real_exports_read_as_expected(folder: str, scale: str) -> None:
    path = SHARED_DATA / folder
    expected = read_expected(path / "expected.json", scale)
    export = Export(LocalReader(path))
    level = int(scale.removeprefix("s"))
    ambiguous = {xyz: some for xyz, some in expected.items() if any(e[v] != some[0][v] for e in some for v in VALUES)}
    assert_hashes(export, level, {xyz: entries[0] for xyz, entries in expected.items() if xyz not in ambiguous})
    for xyz, entries in ambiguous.items():
        with pytest.raises(AmbiguousChunkError) as caught:
            export.read_chunk(level, xyz)
        assert caught.value.chunk_xyz == xyz
        assert caught.value.path is not None
        assert Path(caught.value.path).name in {entry["file"] for entry in entries}
    mixes_scales = "json-zstd" in folder or folder.endswith(("csv-rec-morton", "json-raw-no-eos"))
    assert bool(ambiguous) == mixes_scales
    for xyz in absent_chunks(expected):
        assert export.read_chunk(level, xyz) is None, xyz


@pytest.fixture
def mcns(shared_data: Path) -> Path:
    return shared_data / "mcns"


def test_the_real_shard_reads_as_expected(mcns: Path) -> None:
    expected = read_expected(mcns / "expected.json", "s1")
    export = Export(LocalReader(mcns / "export"))
    assert len(expected) == 258
    assert_hashes(export, 1, {xyz: entry for xyz, (entry,) in expected.items()})
    for xyz in absent_chunks(expected):
        assert export.read_chunk(1, xyz) is None


@pytest.mark.parametrize("ending", ["-newformat.csv", "-offsets.csv"])
@pytest.mark.parametrize("beside", [False, True])
def test_the_real_shards_other_indexes_give_the_same(mcns: Path, ending: str, beside: bool) -> None:
    name = "30720_24576_28672"
    arrow = (mcns / f"export/s1/{name}.arrow").read_bytes()
    csv = (mcns / f"export/s1/{name}.csv").read_bytes()
    other = (mcns / f"{name}{ending}").read_bytes()
    files = {f"s1/{name}.arrow": arrow, f"s1/{name}.csv": other}
    if beside:  # two index files of one shard, as DVID of 2026-03-24 left them
        files |= {f"s1/{name}.csv": csv, f"s1/{name}-offsets.csv": other}
    export, real = open_export(files), Export(LocalReader(mcns / "export"))
    for xyz in read_expected(mcns / "expected.json", "s1"):
        payload = export.read_chunk(1, xyz)
        assert payload is not None
        assert payload == real.read_chunk(1, xyz)


def test_exports_read_the_same_through_fsspec(mcns: Path) -> None:
    fsspec_export = Export(FsspecReader(fsspec.filesystem("file"), str(mcns / "export")))
    local_export = Export(LocalReader(mcns / "export"))
    for xyz in list(read_expected(mcns / "expected.json", "s1"))[:8]:
        assert fsspec_export.read_chunk(1, xyz) == local_export.read_chunk(1, xyz)
    assert fsspec_export.read_chunk(1, (0, 0, 0)) is None


def test_the_spec_of_the_real_shard_gives_its_volume(mcns: Path) -> None:
    export = Export(LocalReader(mcns / "export"), info=mcns / "mcns-ng-specs.json")
    assert export.scales[1].size_xyz == (47044, 39159, 67288)
    assert export.info is not None
    assert export.info.sizes_xyz[0] == (94088, 78317, 134576)
    assert export.info.voxel_size_xyz == (8.0, 8.0, 8.0)


# ---- every dialect

NEAR = ((0, 0, 0), (1, 2, 3), (3, 1, 0), (2, 2, 2), (0, 0, 3))
NEXT = ((4, 0, 0), (5, 1, 1))
CONVERTED = (
    *("note", "tags", "uncompressed_size", "where", "dvid_compressed_block", "labels", "nothing"),
    *("chunk_z", "supervoxels", "hash", "chunk_x", "chunk_y"),
)
LOG = """\
--- Scale 0 ---
  Volume:              {} x {} x {} voxels
  Chunk size:          64 x 64 x 64 voxels
  Chunks exported:     2
"""


def all_dialects() -> Iterator[Dialect]:
    """All combinations of index, container, units and batches; everything else takes turns."""
    i = 0
    for index in INDEX_KINDS:
        for container in ("stream", "file"):
            for units in ("chunks", "voxels"):
                for rows_a_batch in (1, 2, 5):
                    if index == "rec,offset,size" and rows_a_batch > 1:
                        continue  # it has no column for a row's place in its batch
                    i += 1
                    yield Dialect(
                        container=container,
                        rows_a_batch=rows_a_batch,
                        body_compression=(None, "zstd", None, "lz4", None)[i % 5],
                        raw_blocks=i % 3 == 0,
                        has_size=i % 3 != 0,
                        has_end_mark=container == "file" or index == "none" or i % 4 != 0,
                        index=index,
                        units=units,
                        columns=CONVERTED if i % 7 in (1, 3) else COLUMNS,
                        large=i % 7 in (3, 4),
                    )


def two_shards(dialect: Dialect) -> dict[str, bytes]:
    near, far = write_shard(make_chunks(*NEAR), dialect), write_shard(make_chunks(*NEXT), dialect)
    return near.files("s0/0_0_0") | far.files("s0/256_0_0")


@pytest.mark.parametrize("dialect", list(all_dialects()), ids=str)
def test_every_dialect_reads_right(dialect: Dialect) -> None:
    export = open_export(two_shards(dialect))
    if dialect.index == "none":
        with pytest.warns(ExportWarning, match="no index"):
            assert_reads(export, make_chunks(*NEAR, *NEXT))
    else:
        assert_reads(export, make_chunks(*NEAR, *NEXT))
    for absent in ((1, 0, 0), (3, 3, 3), (6, 0, 0), (8, 0, 0), (64, 128, 192), (256, 0, 0)):
        assert read_voxels(export, absent) is None
    # Without a document, the volume ends with the last chunk.
    assert export.scales[0].size_xyz == (6 * 64, 3 * 64, 4 * 64)
    occupied = np.concatenate(list(export.scales[0].occupied()))
    assert {tuple(xyz) for xyz in occupied.tolist()} == {*NEAR, *NEXT}


@pytest.mark.parametrize("rows_a_batch", [1, 2])
def test_zstd_blocks_are_known_by_the_schema_where_no_column_tells_their_size(rows_a_batch: int) -> None:
    dialect = Dialect(has_size=False, rows_a_batch=rows_a_batch)
    assert_reads(open_export(two_shards(dialect)), make_chunks(*NEAR, *NEXT))


def test_raw_blocks_may_have_their_size_beside_them() -> None:
    for rows_a_batch in (1, 2):
        dialect = Dialect(raw_blocks=True, rows_a_batch=rows_a_batch)
        assert_reads(open_export(two_shards(dialect)), make_chunks(*NEAR, *NEXT))


def test_batches_without_rows_hold_nothing() -> None:
    dialect = Dialect(index="json")
    (chunk,) = make_chunks((1, 2, 3))
    shard, empty = write_shard([chunk], dialect), write_shard([], dialect)
    at, size, _ = shard.ranges[0]
    no_rows = empty_batch(dialect)
    arrow = shard.arrow[:at] + no_rows + shard.arrow[at : at + size] + no_rows + shard.arrow[at + size :]
    export = open_export({"s0/0_0_0.arrow": arrow, "s0/0_0_0.json": shard.indexes[".json"]})
    assert_reads(export, [chunk])
    assert empty.ranges == []


def empty_batch(dialect: Dialect) -> bytes:
    schema = dialect.schema()
    return bytes(pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema).serialize())


def test_scales_of_different_dialects_are_told_apart() -> None:
    fine, coarse = make_chunks((0, 0, 1), (1, 0, 0)), make_chunks((0, 0, 1), seed=1)
    files = write_shard(fine, Dialect(index="json", raw_blocks=True, has_size=False)).files("s0/0_0_0")
    files |= write_shard(coarse, Dialect(rows_a_batch=2)).files("s1/0_0_0")
    export = open_export(files)
    assert sorted(export.scales) == [0, 1]
    assert_reads(export, fine, level=0)
    assert_reads(export, coarse, level=1)
    assert read_voxels(export, (1, 0, 0), level=1) is None


# ---- chunks or voxels

VOXEL_INDEXES = ("json", "footer", "rec", "offset", "batch_offset")


@pytest.mark.parametrize("index", VOXEL_INDEXES)
def test_voxels_of_a_single_shard_need_the_volume(index: Any) -> None:
    chunks = make_chunks((1, 2, 3), (3, 1, 0))
    files = write_shard(chunks, Dialect(units="voxels", index=index)).files()
    with pytest.raises(ShardIndexError, match=r"chunks or voxels can't be told.*info=") as caught:
        open_export(files).read_chunk(0, (1, 2, 3))
    assert caught.value.advice is not None
    for export in (
        open_export(files, info=volume_info((256, 256, 256))),
        open_export({**files, "info": json.dumps(volume_info((256, 256, 256))).encode()}),
        open_export({**files, "export.log": LOG.format(256, 256, 256).encode()}),
    ):
        assert_reads(export, chunks)
        assert read_voxels(export, (64, 128, 192)) is None
        assert read_voxels(export, (0, 0, 0)) is None


def test_chunks_at_multiples_of_64_need_the_volume_too() -> None:
    chunks = make_chunks((64, 128, 192))
    files = write_shard(chunks).files()
    with pytest.raises(ShardIndexError, match="info="):
        open_export(files).read_chunk(0, (64, 128, 192))
    log = LOG.format("4,160", "8,256", "12,352").encode()
    with pytest.raises(ShardIndexError, match="info="):  # as voxels they fit as well
        open_export({**files, "export.log": log}).read_chunk(0, (64, 128, 192))
    # One chunk of the scale that can't be voxels decides for all.
    others = write_shard(make_chunks((65, 130, 195))).files("s0/4096_8192_12288")
    export = open_export(files | others)
    assert_reads(export, [*chunks, *make_chunks((65, 130, 195))])
    assert read_voxels(export, (1, 2, 3)) is None


def test_a_chunk_outside_its_cube_is_not_taken_for_voxels_inside_it() -> None:
    """Scattered exports have files with a single distant chunk; what other files hold shows that these are chunks."""
    distant = make_chunks((64, 0, 0))
    other = make_chunks((5, 1, 2), (6, 0, 1))
    files = write_shard(distant).files("s0/0_0_0") | write_shard(other).files("s0/256_0_0")
    for info in (None, volume_info((6400, 256, 256))):
        export = open_export(files, info=info)
        assert read_voxels(export, (1, 0, 0)) is None
        assert_reads(export, [*distant, *other])
        export = open_export(files, info=info)
        assert_reads(export, [*distant, *other])


@pytest.mark.parametrize("index", VOXEL_INDEXES)
@pytest.mark.parametrize("units", ["chunks", "voxels"])
def test_keys_in_other_units_than_the_records_are_refused(index: Any, units: Any) -> None:
    dialect = Dialect(units=units, index=index)
    other = write_shard(make_chunks(*NEAR), replace(dialect, units={"chunks": "voxels", "voxels": "chunks"}[units]))
    own = write_shard(make_chunks(*NEAR), dialect)
    if index == "footer":
        n_footer = len(other.arrow) - other.arrow.rindex(b"{")
        files = {"s0/0_0_0.arrow": own.arrow[: own.arrow.rindex(b"{")] + other.arrow[-n_footer:]}
    else:
        files = {"s0/0_0_0.arrow": own.arrow} | {f"s0/0_0_0{end}": data for end, data in other.indexes.items()}
    files |= write_shard(make_chunks(*NEXT), dialect).files("s0/256_0_0")
    for xyz in NEAR[1:]:
        with pytest.raises(ZarrDvidError):
            open_export(files).read_chunk(0, xyz)


def test_coordinates_that_fit_neither_way_are_refused() -> None:
    files = write_shard(make_chunks((64, 128, 192)), Dialect(index="json")).files("s0/0_0_0")
    with pytest.raises(ShardIndexError, match="info="):
        open_export(files, info=volume_info((64, 64, 64))).read_chunk(0, (1, 2, 3))


# ---- what an export is


@pytest.mark.parametrize("files", [{}, {"x": b""}, {"s00/0_0_0.arrow": b""}, {"s0": b""}, {"s-1/x": b"", "S0/x": b""}])
def test_no_export(files: Mapping[str, bytes]) -> None:
    with pytest.raises(ExportError, match="no export here") as caught:
        _ = open_export(files).scales
    assert caught.value.path == "memory"
    assert "s0, s1" in str(caught.value.expected)


def test_no_export_on_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "none", tmp_path / "file", tmp_path):
        with pytest.raises(ExportError, match="no export here"):
            _ = Export(LocalReader(path)).scales


def test_foreign_files_are_passed_over(tmp_path: Path) -> None:
    chunks = make_chunks(*NEAR)
    files = write_shard(chunks).files()
    foreign = ["0_0_0-newformat.csv", "0_0_0.csv.bak", "notes.txt", "00_0_0.arrow", "0_0.arrow", ".DS_Store", "0_0_0"]
    for name, data in {**files, **{f"s0/{name}": b"?" for name in foreign}, "s0x/0_0_0.arrow": b"?"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "s0" / "64_0_0.arrow").mkdir()
    (tmp_path / "info").mkdir()
    for link in ("s7", "export.log", "s0/dangling", "s0/128_0_0.txt"):
        (tmp_path / link).symlink_to(tmp_path / "nowhere")
    export = Export(LocalReader(tmp_path))
    assert list(export.scales) == [0]
    assert_reads(export, chunks)


def test_a_scale_that_is_not_there() -> None:
    export = open_export(write_shard(make_chunks(*NEAR)).files("s2/0_0_0"))
    assert list(export.scales) == [2]
    with pytest.raises(ZarrDvidError, match="scale"):
        export.read_chunk(0, (0, 0, 0))


def test_a_scale_without_shards_holds_nothing() -> None:
    export = open_export({**write_shard(make_chunks(*NEAR)).files(), "s1/readme": b""})
    assert read_voxels(export, (0, 0, 0), level=1) is None
    assert list(export.scales[1].occupied()) == []


@pytest.mark.parametrize(
    "xyz",
    [(0, 0, 2**21), (0, 2, -(2**21)), (1, 0, 2**21), (-1, 0, 0), (2**21, 0, 0), (0, 0, 2**42), (10**30, 0, 0)],
)
def test_chunks_that_no_volume_has_are_absent(xyz: XYZ) -> None:
    """Not mistaken for others that have the same key: chunk (1, 0, 2**21) for (1, 1, 0)."""
    one = write_shard(make_chunks((0, 1, 0), (1, 1, 0), (1, 2, 3))).files()
    scattered = one | write_shard(make_chunks((0, 0, 1))).files("s0/512_0_0")
    for files in (one, scattered):
        assert open_export(files).read_chunk(0, xyz) is None


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_coordinates_may_be_numpys(kind: Any) -> None:
    chunks = make_chunks((1, 2, 3), (70, 2, 3))
    export = open_export(write_shard(chunks).files())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chunk in chunks:
            x, y, z = np.array(chunk.xyz, kind)
            payload = export.read_chunk(0, (x, y, z))
            assert payload == export.read_chunk(0, chunk.xyz)
            assert payload is not None
            assert export.payload_nbytes(0, (x, y, z)) == len(payload)


def test_size_comes_from_the_first_document_there_is() -> None:
    files = two_shards(Dialect())
    info = volume_info((700, 400, 300))
    export = open_export(files)
    assert (export.scales[0].size_xyz, export.scales[0].grid_xyz) == ((384, 192, 256), (6, 3, 4))
    logged = {**files, "export.log": LOG.format("640", "512", "256").encode()}
    assert open_export(logged).scales[0].size_xyz == (640, 512, 256)
    beside = {**files, "info": json.dumps(info).encode()}
    assert open_export(beside).scales[0].size_xyz == (700, 400, 300)
    assert open_export(beside).scales[0].grid_xyz == (11, 7, 5)
    given = volume_info((800, 400, 300))
    assert open_export(beside, info=given).scales[0].size_xyz == (800, 400, 300)
    with pytest.warns(ExportWarning, match=r"export.log gives the volume \(640, 512, 256\)"):
        assert open_export(logged, info=given).scales[0].size_xyz == (800, 400, 300)


def test_a_volume_description_with_too_few_scales_is_refused() -> None:
    files = write_shard(make_chunks(*NEAR)).files() | write_shard(make_chunks(*NEAR)).files("s3/0_0_0")
    with pytest.raises(ExportError, match="fewer scales") as caught:
        _ = open_export(files, info=volume_info((256, 256, 256), n_scales=3)).scales
    assert (caught.value.expected, caught.value.found) == ("at least 4 scales", 3)
    assert list(open_export(files, info=volume_info((256, 256, 256), n_scales=4)).scales) == [0, 3]


def test_a_path_is_no_url(tmp_path: Path) -> None:
    chunks = make_chunks((1, 2, 3))
    for name in ("a b", "a#b", "a%20b", "a?b", "a::b", "http:", "~b", "\u00e4"):
        root = tmp_path / name
        (root / "s0").mkdir(parents=True)
        for path, data in write_shard(chunks).files().items():
            (root / path).write_bytes(data)
        assert_reads(Export(open_reader(root)), chunks)


def test_info_by_path(tmp_path: Path) -> None:
    files = MemoryReader(two_shards(Dialect()))
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(volume_info((700, 400, 300))))
    for info in (path, str(path), f"file://{path}"):
        assert Export(files, info=info).scales[0].size_xyz == (700, 400, 300)
    for bad in (tmp_path / "none", tmp_path, tmp_path / "none" / "none"):
        with pytest.raises(ExportError):
            _ = Export(files, info=bad).scales
    path.write_bytes(b"")
    with pytest.raises(ExportError, match="no JSON"):
        _ = Export(files, info=path).scales


# ---- what it costs


def test_costs_of_an_offsets_index() -> None:
    reader = CountingReader(MemoryReader(two_shards(Dialect())))
    export = Export(reader)
    assert reader.calls == []
    assert list(export.scales) == [0]
    assert sorted(reader.taken()) == [("list", ""), ("list", "s0")]
    assert export.read_chunk(0, (1, 2, 3)) is not None
    # Head and tail of the shard in one call, its index in another, the record in a third.
    assert reader.taken() == [("read", "s0/0_0_0.arrow"), ("read", "s0/0_0_0.csv"), ("read", "s0/0_0_0.arrow")]
    assert export.read_chunk(0, (3, 1, 0)) is not None
    (call,) = reader.calls
    at, size, _ = write_shard(make_chunks(*NEAR)).ranges[2]
    assert call == ("read", "s0/0_0_0.arrow", ((at, size),))
    reader.calls.clear()
    # The first absence loads the shards that were not yet, once; it is free from then on.
    assert export.read_chunk(0, (3, 3, 3)) is None
    assert reader.taken() == [("read", "s0/256_0_0.arrow"), ("read", "s0/256_0_0.csv")]
    for absent in ((3, 3, 3), (2, 1, 1), (100, 0, 0), (100_000, 0, 0)):
        assert export.read_chunk(0, absent) is None
    assert reader.taken() == []
    assert export.read_chunk(0, (4, 0, 0)) is not None
    reader.calls.clear()
    assert export.read_chunk(0, (6, 0, 0)) is None
    assert export.payload_nbytes(0, (1, 2, 3)) is not None
    assert reader.taken() == []


def test_a_shard_is_loaded_once_for_all_exports_of_its_files() -> None:
    reader = CountingReader(MemoryReader(two_shards(Dialect())))
    for _ in range(3):
        assert Export(reader).read_chunk(0, (1, 2, 3)) is not None
    paths = [path for method, path, _ in reader.calls if method == "read"]
    assert paths.count("s0/0_0_0.csv") == 1
    assert paths.count("s0/0_0_0.arrow") == 1 + 3
