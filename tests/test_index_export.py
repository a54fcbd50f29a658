"""An export with a compact index reads as without one: the same voxels, the same absent chunks."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import expected_sha256, volume_sha256
from exports import XYZ, Dialect, assert_reads, make_chunk, make_chunks, read_voxels, volume_info, write_shard
from indexed import all_xyz, box_around, hollow_shard, index_files, make_index, open_indexed, put, shards_of

import zarr_dvid
from zarr_dvid.errors import AmbiguousChunkError, ExportError, ExportWarning, ShardError, ZarrDvidError
from zarr_dvid.export import Export
from zarr_dvid.reader import LocalReader

SOUND = {
    "s0/0_0_0": [(0, 0, 0), (1, 2, 3)],
    "s0/512_0_0": [(8, 1, 1)],
    "s0/0_512_512": [(7, 8, 9)],
    "s1/0_0_0": [(0, 1, 0)],
}
SCATTERED = {"s0/0_0_0": [(3, 3, 3), (0, 1, 0)], "s0/512_0_0": [(9, 1, 2), (1, 1, 1), (100, 7, 0)]}
DIALECTS = [
    Dialect(),
    Dialect(index="rec"),
    Dialect(index="json"),
    Dialect(index="footer"),
    Dialect(index="none"),
    Dialect(index="batch_offset", rows_a_batch=2),
    Dialect(index="offset from 688"),
    Dialect(container="file", index="rec,offset,size"),
    Dialect(body_compression="zstd", index="rec"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read_bytes(export: Export, level: int, xyz: XYZ) -> bytes | type[ZarrDvidError] | None:
    """A chunk's payload, or the kind of error that it raises."""
    try:
        return export.read_chunk(level, xyz)
    except ZarrDvidError as error:
        assert error.chunk_xyz == xyz
        return type(error)


CASES = [(shards, dialect) for shards in (SOUND, SCATTERED) for dialect in DIALECTS]
CASES.append(({name: some for name, some in SOUND.items() if name[:2] == "s0"}, Dialect(units="voxels")))


@pytest.mark.parametrize(("shards", "dialect"), CASES)
@pytest.mark.filterwarnings("ignore::zarr_dvid.errors.ExportWarning")
def test_every_dialect_reads_as_without(tmp_path: Path, shards: dict[str, list[XYZ]], dialect: Dialect) -> None:
    folder = put(tmp_path / "export", shards_of(shards, dialect))
    summary = make_index(folder, tmp_path / "index")
    assert (summary.n_shards, summary.n_broken) == (len(shards), 0)
    assert summary.n_records == sum(map(len, shards.values()))
    export, reader, _ = open_indexed(folder, tmp_path / "index")
    plain = Export(LocalReader(folder), index=False)
    assert export.scales.keys() == plain.scales.keys()
    reader.taken()
    for level, scale in export.scales.items():
        assert scale.size_xyz == plain.scales[level].size_xyz
        for xyz in box_around(all_xyz(plain, level)):
            assert (xyz in all_xyz(plain, level)) == bool(scale.find(xyz))
    assert reader.taken() == []  # not a byte of the export
    for level in export.scales:
        assert all_xyz(export, level) == all_xyz(plain, level)
        for xyz in box_around(all_xyz(plain, level)):
            assert export.read_chunk(level, xyz) == plain.read_chunk(level, xyz)
    assert make_index(folder, tmp_path / "index", check_records=True).n_checked == summary.n_records


EXPORTS = [
    *("csv-offset", "csv-rec", "csv-batch-offset", "batch-100-rows", "csv-rec-morton", "json-zstd"),
    *("json-zstd-body-compressed", "json-raw-no-eos", "json-footer-raw", "two-scales", "odd-blocks"),
]


@pytest.mark.parametrize("name", EXPORTS)
def test_dvids_own_exports(shared_data: Path, tmp_path: Path, name: str) -> None:
    folder = shared_data / "exports" / name
    make_index(folder, tmp_path / "index")
    export, reader, index = open_indexed(folder, tmp_path / "index")
    plain = Export(LocalReader(folder), index=False)
    expected = json.loads((folder / "expected.json").read_text()) if (folder / "expected.json").exists() else {}
    for level, scale in export.scales.items():
        of_scale = expected_sha256(folder, f"s{level}") if f"s{level}" in expected else {}
        reader.taken(), index.taken()
        for i, xyz in enumerate(box_around(all_xyz(plain, level))):
            found = read_bytes(export, level, xyz)
            assert found == read_bytes(plain, level, xyz), xyz
            if (
                i % 20 == 7 and isinstance(found, bytes) and isinstance(of_scale.get(xyz), dict)
            ):  # of a chunk listed twice it is a list
                for values in ("labels", "supervoxels"):
                    voxels = read_voxels(export, xyz, values=values, level=level)
                    assert voxels is not None
                    assert volume_sha256(voxels) == of_scale[xyz][values]
        assert {path.rsplit(".", 1)[-1] for _, path in reader.taken()} <= {"arrow"}
        assert len(index.taken()) == len(scale.shards)


def test_what_opening_and_reading_cost(tmp_path: Path) -> None:
    folder = put(
        tmp_path / "export", shards_of(SOUND) | {"info": json.dumps(volume_info((1024,) * 3, n_scales=2)).encode()}
    )
    make_index(folder, tmp_path / "index")
    names = {name.split("-")[0]: name for name in index_files(tmp_path / "index")}
    export, reader, index = open_indexed(folder, tmp_path / "index")
    assert export.scales[0].grid_xyz == (16, 16, 16)
    assert sorted(reader.taken()) == [("list", ""), ("list", "s0"), ("list", "s1"), ("read", "info")]
    assert index.taken() == [("size", "index.json"), ("read", "index.json"), ("read", names["shards"])]
    for xyz in ((15, 15, 15), (8, 8, 8), (9, 9, 0)):  # no shard may have them
        assert export.read_chunk(0, xyz) is None
    assert reader.taken() + index.taken() == []
    for _ in range(2):
        assert export.read_chunk(0, (0, 0, 1)) is None  # absent in a shard
        assert_reads(export, make_chunks((0, 0, 0), (1, 2, 3)))
    assert index.taken() == [("read", names["blocks"])]
    assert set(reader.taken()) == {("read", "s0/0_0_0.arrow")}
    located, _ = export.scales[0].locate(np.array([(0, 0, 0), (7, 7, 7), (8, 1, 1), (7, 8, 9)]))
    assert sorted(part.which.tolist() for part in located) == [[0], [2], [3]]
    assert reader.taken() == []
    assert len(index.taken()) == 2


def full_cube(x0: int) -> list[XYZ]:
    rng = np.random.default_rng(x0)
    cube = rng.permutation(np.argwhere(np.ones((32, 32, 32)))) + np.array([x0, 0, 0])
    return [(x, y, z) for x, y, z in cube.tolist()]


def test_five_bytes_a_block_for_full_shards_and_eight_in_memory(tmp_path: Path) -> None:
    folder, index = tmp_path / "export", tmp_path / "index"
    for i in range(2):
        hollow_shard(folder, f"s0/{2048 * i}_0_0", full_cube(32 * i))
    summary = make_index(folder, index)
    assert summary.n_records == 2 * 32**3
    assert summary.nbytes == sum(path.stat().st_size for path in index.iterdir())
    assert summary.nbytes / summary.n_records <= 4.2
    export, _, _ = open_indexed(folder, index)
    plain = Export(LocalReader(folder), index=False)
    for one in (export, plain):
        assert one.scales[0].load((2048, 0, 0)).nbytes <= 8.2 * 32**3
    table, other = (one.scales[0].load((2048, 0, 0)).index.table() for one in (export, plain))
    for name in ("keys", "offset_bytes", "size_bytes", "row", "n_rows"):
        np.testing.assert_array_equal(getattr(table, name), getattr(other, name))


def test_any_arrow_reader_opens_the_tables(tmp_path: Path) -> None:
    """pyarrow as the oracle: what docs/index.md says is what lies there."""
    put(tmp_path / "export", shards_of(SOUND))
    make_index(tmp_path / "export", tmp_path / "index")
    manifest = json.loads((tmp_path / "index" / "index.json").read_text())
    tables = {}
    for kind, file in manifest["files"].items():
        data = (tmp_path / "index" / file["name"]).read_bytes()
        assert len(data) == file["size_bytes"]
        tables[kind] = pa.ipc.open_stream(data).read_all()
    shards = tables["shards"].to_pylist()
    assert [(row["scale"], row["origin_x"], row["n_records"], row["form"]) for row in shards] == [
        (0, 0, 2, 0), (0, 0, 1, 0), (0, 512, 1, 0), (1, 0, 1, 0),
    ]  # fmt: skip
    plain = Export(LocalReader(tmp_path / "export"), index=False)
    first, at = shards[0], shards[0]["records_at"]
    extent = [first[f"high_{axis}"] - first[f"low_{axis}"] + 1 for axis in "xyz"]
    for row in tables["blocks"].to_pylist()[: first["n_records"]]:
        x, y, z = (
            int(c) + first[f"low_{axis}"] for c, axis in zip(np.unravel_index(row["cell"], extent), "xyz", strict=True)
        )
        (place,) = plain.scales[0].load((0, 0, 0)).index.places((x, y, z))
        assert (place.offset_bytes, place.size_bytes) == (at, 8 * row["size"])
        at += 8 * row["size"]
    assert tables["wide"].num_rows == 0


# ---- where it is


def test_it_is_found_beside_the_export(tmp_path: Path) -> None:
    folder = put(tmp_path / "export", shards_of(SOUND))
    summary = zarr_dvid_index(folder)
    assert summary == folder / "zarr-dvid-index"
    index = Export(LocalReader(folder)).index
    assert index is not None
    assert Export(LocalReader(folder), index=False).index is None
    for store in (zarr_dvid.DvidStore(folder), zarr_dvid.DvidStore(folder, index=summary)):
        assert store.hierarchy.export.index is not None
    assert zarr_dvid.DvidStore(folder, index=False).hierarchy.export.index is None


def zarr_dvid_index(folder: Path) -> Path:
    from zarr_dvid.index_builder import index_export

    return index_export(folder, jobs=1, progress=False).path


def test_it_goes_into_the_users_cache_where_the_export_is_not_local(tmp_path: Path) -> None:
    import fsspec

    from zarr_dvid.index_builder import index_export

    memory = fsspec.filesystem("memory")
    try:
        for name, data in shards_of(SOUND).items():
            memory.pipe_file(f"/indexed/{name}", data)
        summary = index_export("memory://indexed", jobs=1, progress=False)
        assert summary.path.parent == tmp_path / "cache" / "zarr-dvid"
        store = zarr_dvid.DvidStore("memory://indexed")
        assert store.hierarchy.export.index is not None
        assert_reads(store.hierarchy.export, make_chunks((8, 1, 1)))
    finally:
        memory.rm("/indexed", recursive=True)


def test_the_filesystem_takes_an_index(tmp_path: Path) -> None:
    import fsspec

    folder = put(tmp_path / "export", shards_of(SOUND))
    make_index(folder, tmp_path / "index")
    fs = fsspec.filesystem("dvid", fo=str(folder), index=str(tmp_path / "index"))
    assert fs.hierarchy.export.index is not None
    assert fs.exists("s0/labels/c/1/1/8")
    assert not fs.exists("s0/labels/c/1/1/7")


def test_an_index_that_is_named_must_be_there(tmp_path: Path) -> None:
    folder = put(tmp_path / "export", shards_of(SOUND))
    with pytest.raises(zarr_dvid.ShardIndexError, match="no index here.*zarr-dvid index") as caught:
        zarr_dvid.open(folder, index=tmp_path / "nowhere")
    assert caught.value.path == str(tmp_path / "nowhere" / "index.json")
    (folder / "zarr-dvid-index" / "unfinished").mkdir(parents=True)  # as an interrupted run leaves it
    assert Export(LocalReader(folder)).index is None


def test_a_store_with_an_index_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    folder = put(tmp_path / "export", shards_of(SOUND))
    make_index(folder, tmp_path / "index")
    monkeypatch.chdir(tmp_path)
    for index in ("index", tmp_path / "index", False):
        store = zarr_dvid.DvidStore(folder, index=index)
        monkeypatch.chdir("/")
        copy = pickle.loads(pickle.dumps(store))
        assert copy == store
        assert (copy.hierarchy.export.index is None) == (index is False)
        monkeypatch.chdir(tmp_path)


# ---- exports that can't be read without an index


@pytest.fixture
def hazards(shared_data: Path) -> Path:
    return shared_data / "exports" / "hazards"


def test_dvids_shared_file_names(hazards: Path, tmp_path: Path) -> None:
    folder = hazards / "shared-file-names"
    summary = make_index(folder, tmp_path / "index")
    assert (summary.n_shards, summary.n_broken, summary.n_records) == (4, 1, 192)
    export, reader, _ = open_indexed(folder, tmp_path / "index")
    with pytest.warns(ExportWarning, match="4 streams"):
        for xyz in np.ndindex(8, 8, 4):
            if xyz[0] < 4 and xyz[1] < 4:  # torn
                with pytest.raises(ShardError, match="torn or overwritten behind 53 whole records") as caught:
                    export.read_chunk(0, xyz)
                assert (caught.value.path, caught.value.chunk_xyz) == ("s0/0_0_0.arrow", xyz)
            else:
                record = export.read_chunk(0, xyz)
                assert record is not None
                assert record.chunk_xyz == xyz
    assert {path for _, path in reader.taken()} & {f"s0/{name}.csv" for name in ("0_0_0", "0_256_0")} == set()
    for xyz in ((8, 0, 0), (0, 0, 4), (100, 100, 100)):  # it can't be said what the torn one held
        with pytest.raises(ShardError, match="torn or overwritten"):
            export.read_chunk(0, xyz)
    with pytest.raises(ShardError), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        list(export.scales[0].occupied())
    assert make_index(folder, tmp_path / "index", check_records=True).n_checked == 192


def test_what_several_writers_left_whole(tmp_path: Path) -> None:
    """Streams one after another, and interleaved by whole messages; the index file is one of the writers'."""
    some = [make_chunks((0, 0, 0), (1, 2, 3)), make_chunks((5, 1, 1), (2, 2, 2)), make_chunks((3, 1, 0))]
    shards = [write_shard(chunks) for chunks in some]
    parts = [cut_messages(shard) for shard in shards]
    interleaved = parts[0][0] + parts[1][0] + parts[0][1] + parts[1][1] + parts[2][0] + parts[1][2] + parts[0][2]
    interleaved += parts[2][1] + parts[1][3] + parts[2][2] + parts[0][3]
    for arrow in (b"".join(shard.arrow for shard in shards), interleaved):
        folder = put(tmp_path / "export", {"s0/0_0_0.arrow": arrow, "s0/0_0_0.csv": shards[1].indexes[".csv"]})
        plain = Export(LocalReader(folder), index=False)
        for xyz in ((0, 0, 0), (5, 1, 1), (7, 7, 7)):
            with pytest.raises(ZarrDvidError, match="zarr-dvid index"):
                plain.read_chunk(0, xyz)
        make_index(folder, tmp_path / "index")
        export, _, _ = open_indexed(folder, tmp_path / "index")
        with pytest.warns(ExportWarning, match="holds 3 streams; it was indexed from all their 5 records"):
            assert_reads(export, [chunk for chunks in some for chunk in chunks])
        for xyz in ((0, 0, 1), (7, 7, 7), (50, 0, 0)):
            assert export.read_chunk(0, xyz) is None
        shutil.rmtree(folder)


def cut_messages(shard: Any) -> list[bytes]:
    """Schema, records and end mark of a written shard."""
    start, size = shard.schema_range
    records = [shard.arrow[at : at + n] for at, n, _ in shard.ranges]
    return [shard.arrow[start : start + size], *records, shard.arrow[-8:]]


def test_what_several_writers_tore_is_refused(tmp_path: Path) -> None:
    one, other = (cut_messages(write_shard(make_chunks(xyz, (1, 1, 1)))) for xyz in ((0, 0, 0), (2, 2, 2)))
    torn = {
        "a message in another": one[0] + other[0] + one[1][:96] + other[1] + one[1][96:] + one[2] + other[2] + 2 * one[3],
        "no end mark of one": one[0] + other[0] + one[1] + other[1] + other[2] + other[3],
        "no end mark at the end": one[0] + other[0] + one[1] + one[3] + other[3] + other[1],
        "cut": (one[0] + other[0] + one[1] + other[1] + one[2])[:-8],
        "another schema": b"".join(one)[:-8] + write_shard([], Dialect(has_size=False)).arrow,
        "more end marks": b"".join(one + other) + one[3],
    }
    for how, arrow in torn.items():
        folder = put(tmp_path / "export", {"s0/0_0_0.arrow": arrow} | shards_of({"s0/512_0_0": [(8, 0, 0)]}))
        assert make_index(folder, tmp_path / "index").n_broken == 1, how
        export, reader, _ = open_indexed(folder, tmp_path / "index")
        assert_reads(export, make_chunks((8, 0, 0)))
        reader.taken()
        for xyz in ((0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3)):
            with pytest.raises(ZarrDvidError) as caught:
                export.read_chunk(0, xyz)
            assert caught.value.path == "s0/0_0_0.arrow"
        assert reader.taken() == []
        shutil.rmtree(folder)


def test_exported_twice(hazards: Path, tmp_path: Path) -> None:
    make_index(hazards / "exported-twice", tmp_path / "index")
    export, _, _ = open_indexed(hazards / "exported-twice", tmp_path / "index")
    name = next((hazards / "exported-twice" / "s1").glob("*.csv"))
    with pytest.warns(ExportWarning, match="holds 2 streams"):
        for line in name.read_text().splitlines()[2:12]:
            x, y, z = map(int, line.split(",")[:3])
            record = export.read_chunk(1, (x, y, z))
            assert record is not None
            assert record.chunk_xyz == (x, y, z)
    same, other = make_chunks((0, 0, 0), (1, 1, 1)), [make_chunk((0, 0, 0)), make_chunk((1, 1, 1), seed=1)]
    arrow = write_shard(same).arrow + write_shard(other).arrow
    folder = put(tmp_path / "twice", {"s0/0_0_0.arrow": arrow, "s0/0_0_0.csv": write_shard(other).indexes[".csv"]})
    make_index(folder, tmp_path / "second")
    export, _, _ = open_indexed(folder, tmp_path / "second")
    with pytest.warns(ExportWarning):
        assert_reads(export, same[:1])
    with pytest.raises(AmbiguousChunkError):
        export.read_chunk(0, (1, 1, 1))


def test_exported_twice_with_other_chunks(tmp_path: Path) -> None:
    """The chunk that only one of them has was perhaps deleted in between."""
    shards = [write_shard(make_chunks(*some)) for some in ([(0, 0, 0), (1, 1, 1)], [(0, 0, 0)])]
    for order in (shards, shards[::-1]):
        arrow = b"".join(shard.arrow for shard in order)
        folder = put(tmp_path / "export", {"s0/0_0_0.arrow": arrow, "s0/0_0_0.csv": order[1].indexes[".csv"]})
        make_index(folder, tmp_path / "index")
        export, _, _ = open_indexed(folder, tmp_path / "index")
        for xyz in ((0, 0, 0), (1, 1, 1), (2, 2, 2), (50, 0, 0)):
            with pytest.raises(ZarrDvidError, match="several times, and not with the same chunks"):
                export.read_chunk(0, xyz)
        shutil.rmtree(folder)


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_log_counts_writers(tmp_path: Path, is_lost: bool) -> None:
    """Of files that they share; one that was exported twice hides no lost one."""
    log = b"--- Scale 0 ---\n  Volume:              2,048 x 2,048 x 2,048 voxels\n  Shard files:         4\n"
    two = [write_shard(make_chunks(xyz)) for xyz in ((0, 0, 0), (1, 1, 1))]
    twice = write_shard(make_chunks((8, 0, 0))).arrow * 2
    files = {"s0/0_0_0.arrow": two[0].arrow + two[1].arrow, "s0/512_0_0.arrow": twice, "export.log": log}
    if not is_lost:
        files |= shards_of({"s0/0_512_0": [(0, 8, 0)]})
    folder = put(tmp_path / "export", files)
    make_index(folder, tmp_path / "index")
    export, _, _ = open_indexed(folder, tmp_path / "index")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        assert_reads(export, make_chunks((0, 0, 0), (1, 1, 1), (8, 0, 0)))
        if is_lost:
            with pytest.raises(zarr_dvid.MissingFileError, match="4 shards, as export.log says, found 3"):
                export.read_chunk(0, (5, 5, 5))
        else:
            assert export.read_chunk(0, (5, 5, 5)) is None


@pytest.mark.parametrize("side", [1, 3])
def test_scattered_chunks_of_too_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    """Without an index that is refused where an absent chunk is asked for; with one all is answered."""
    from zarr_dvid import survey

    shards = {f"s0/{256 * x}_0_0": [(4 * x, 1, 2), ((4 * x + 17) % 160, 2, side)] for x in range(40)}
    folder = put(tmp_path / "export", shards_of(shards))
    monkeypatch.setattr(survey, "_CHECK_ALL_BYTES", 100)
    with pytest.raises(zarr_dvid.ShardIndexError, match="too many.*zarr-dvid index"):
        Export(LocalReader(folder), index=False).read_chunk(0, (1, 1, 1))
    make_index(folder, tmp_path / "index")
    export, reader, _ = open_indexed(folder, tmp_path / "index")
    chunks = {xyz for some in shards.values() for xyz in some}
    around = box_around(chunks)
    located, several = export.scales[0].locate(np.array(around))
    found = {around[i] for part in located for i in part.which.tolist()}
    assert found == chunks
    assert not len(several)
    assert all(bool(export.scales[0].find(xyz)) == (xyz in chunks) for xyz in around[:400])
    assert all_xyz(export) == chunks
    assert {method for method, _ in reader.taken()} == {"list"}
    assert_reads(export, make_chunks(*sorted(chunks)))


def test_broken_shards_raise_what_they_raised(tmp_path: Path) -> None:
    files = shards_of({**SOUND, "s0/512_512_0": [(8, 9, 1)]}) | {"s0/512_512_0.csv": b""}
    folder = put(tmp_path / "export", files)
    plain = Export(LocalReader(folder), index=False)
    summary = make_index(folder, tmp_path / "index")
    assert summary.n_broken == 1
    export, reader, _ = open_indexed(folder, tmp_path / "index")
    assert_reads(export, make_chunks((8, 1, 1)))
    reader.taken()
    with pytest.raises(zarr_dvid.ShardIndexError) as expected:
        plain.read_chunk(0, (8, 9, 1))
    with pytest.raises(zarr_dvid.ShardIndexError) as found:
        export.read_chunk(0, (8, 9, 1))
    assert str(found.value) == str(expected.value)
    with pytest.warns(ExportWarning, match="taken to be absent"):
        assert export.read_chunk(0, (0, 0, 1)) is None
    assert reader.taken() == []


def test_chunks_past_the_end_do_not_scatter_a_scale(tmp_path: Path) -> None:
    files = shards_of({"s0/0_0_0": [(0, 1, 2), (1000, 1, 1)], "s0/256_0_0": [(4, 1, 1)]})
    folder = put(tmp_path / "export", files)
    make_index(folder, tmp_path / "index")
    export, _, _ = open_indexed(folder, tmp_path / "index", info=volume_info((640, 640, 640)))
    with pytest.warns(ExportWarning, match="past the end"):
        assert_reads(export, make_chunks((0, 1, 2), (4, 1, 1)))
    assert not export.scales[0].placement.is_scattered
    assert all_xyz(export) == {(0, 1, 2), (4, 1, 1)}


# ---- what else is refused


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    folder = put(tmp_path / "export", shards_of(SOUND))
    put(tmp_path / "mine", {"notes.txt": b"x"})
    with pytest.raises(ExportError, match="something else.*notes.txt"):
        make_index(folder, tmp_path / "mine")
    assert index_files(tmp_path / "mine") == {"notes.txt": b"x"}
    with pytest.raises(ExportError, match="this is a file"):
        make_index(folder, tmp_path / "mine" / "notes.txt")
    with pytest.raises(ExportError, match="no export"):
        make_index(tmp_path / "mine", tmp_path / "other")
    with pytest.raises(ValueError, match="local folder"):
        zarr_dvid_index_to(folder, "s3://bucket/index")
    with pytest.raises(ValueError, match="at least 1"):
        make_index(folder, tmp_path / "index", jobs=0)


def zarr_dvid_index_to(folder: Path, destination: str) -> None:
    from zarr_dvid.index_builder import index_export

    index_export(folder, destination)


def test_checking_finds_an_index_file_that_lies(tmp_path: Path) -> None:
    """Two entries of a CSV whose places are swapped: nothing but the records can tell."""
    shard = write_shard(make_chunks((0, 0, 0), (1, 2, 3), (2, 2, 2)))
    lines = shard.indexes[".csv"].decode().splitlines(keepends=True)
    swapped = [line.split(",") for line in lines[3:5]]
    swapped[0][:3], swapped[1][:3] = swapped[1][:3], swapped[0][:3]
    files = shard.files() | {"s0/0_0_0.csv": "".join([*lines[:3], *map(",".join, swapped)]).encode()}
    folder = put(tmp_path / "export", files)
    make_index(folder, tmp_path / "index")
    for _ in range(2):
        with pytest.raises(zarr_dvid.ShardIndexError, match="does not agree with the shard's records") as caught:
            make_index(folder, tmp_path / "index", check_records=True)
        assert caught.value.path == "s0/0_0_0.arrow"
    export, _, _ = open_indexed(folder, tmp_path / "index")
    with pytest.raises(zarr_dvid.RecordError):
        export.read_chunk(0, (1, 2, 3))
