"""A damaged, hostile, later or outdated index: it raises or is passed over; it never gives other voxels, or zeros."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import XYZ, CountingReader, Dialect, assert_reads, make_chunks, write_shard
from indexed import all_xyz, box_around, index_files, make_index, open_indexed, put, shards_of

from zarr_dvid.errors import ExportWarning, MissingFileError, ShardError, ShardIndexError, ZarrDvidError
from zarr_dvid.export import Export
from zarr_dvid.export_index import manifest_crc32
from zarr_dvid.index_tables import BLOCKS, SHARDS, WIDE, batch_message, read_batch, read_table, schema_message, write_table
from zarr_dvid.reader import LocalReader

SHARDS_OF_TEST = {"s0/0_0_0": [(0, 0, 0), (1, 2, 3), (3, 3, 3)], "s0/512_0_0": [(8, 1, 1), (9, 2, 2)]}
BATCHED = {"s0/0_512_0": [(0, 8, 0), (1, 9, 1)]}  # two rows a batch: of the wide form
ALL = [xyz for some in (SHARDS_OF_TEST | BATCHED).values() for xyz in some]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = shards_of(SHARDS_OF_TEST) | shards_of(BATCHED, Dialect(rows_a_batch=2))
    make_index(put(tmp_path / "export", files), tmp_path / "index")
    return tmp_path


def answers(folder: Path, chunks: list[XYZ]) -> dict[XYZ, Any]:
    """What each chunk gives: its bytes, None, or "raised"."""
    found: dict[XYZ, Any] = {}
    export, _, _ = open_indexed(folder / "export", folder / "index")
    for xyz in chunks:
        try:
            found[xyz] = export.read_chunk(0, xyz)
        except ZarrDvidError:
            found[xyz] = "raised"
    return found


def assert_never_wrong(folder: Path, expected: dict[XYZ, Any], *, what: object) -> bool:
    """Whether anything was refused."""
    found = answers(folder, list(expected))
    wrong = {xyz for xyz, value in found.items() if value not in ("raised", expected[xyz])}
    assert not wrong, (what, wrong)
    return "raised" in found.values()


@pytest.mark.filterwarnings("ignore::zarr_dvid.errors.ExportWarning")
def test_no_damaged_byte_gives_another_answer(folder: Path) -> None:
    sound = answers(folder, [*ALL, (0, 0, 1), (8, 8, 8)])
    assert sum(isinstance(value, bytes) for value in sound.values()) == len(ALL)
    rng = np.random.default_rng(1)
    for name, data in index_files(folder / "index").items():
        path = folder / "index" / name
        for at in range(0, len(data), 1 if len(data) < 300 else 7):
            path.write_bytes(data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :])
            assert_never_wrong(folder, sound, what=(name, at))
        path.write_bytes(data)


@pytest.mark.filterwarnings("ignore::zarr_dvid.errors.ExportWarning")
def test_no_cut_or_lost_file_gives_another_answer(folder: Path) -> None:
    sound = answers(folder, [*ALL, (0, 0, 1), (8, 8, 8)])
    for name, data in index_files(folder / "index").items():
        path = folder / "index" / name
        for size in {0, 1, 8, len(data) // 2, len(data) - 9, len(data) - 1}:
            path.write_bytes(data[:size])
            is_refused = assert_never_wrong(folder, sound, what=(name, size))
            assert is_refused or size > len(data) - 9 or name.startswith("wide"), (name, size)
        path.write_bytes(data + b"more")
        assert_never_wrong(folder, sound, what=name)
        path.unlink()
        assert assert_never_wrong(folder, sound, what=name)
        path.write_bytes(data)
    assert answers(folder, ALL) == {xyz: sound[xyz] for xyz in ALL}


@pytest.mark.parametrize("is_found", [False, True])
def test_a_damaged_index_is_named_and_the_advice_helps(folder: Path, is_found: bool) -> None:
    export, index = folder / "export", folder / "index"
    if is_found:
        index = index.rename(export / "zarr-dvid-index")
    open_it: Callable[[], Export] = (
        (lambda: Export(CountingReader(LocalReader(export))))  # whose key is new, so that no shard is loaded already
        if is_found
        else (lambda: open_indexed(export, index)[0])
    )
    for kind in ("index", "shards", "blocks", "wide"):
        path = next(index.glob(f"{kind}*"))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] + b"x" * (path.stat().st_size // 2))
        with pytest.raises(ShardIndexError, match=r"Delete the index, or run `zarr-dvid index` again") as caught:
            for xyz in ALL:
                open_it().read_chunk(0, xyz)
        assert caught.value.path == str(path)
        assert "damaged" in str(caught.value)
        assert not make_index(export, index).was_up_to_date
        assert_reads(open_it(), make_chunks(*ALL))


def test_a_later_version_is_refused_by_name(folder: Path) -> None:
    path = folder / "index" / "index.json"
    document = json.loads(path.read_text())
    for changed, match in (
        (document | {"version": 2, "news": [1]}, "later version: expected version 1, found version 2.*later zarr-dvid"),
        (document | {"format": "other"}, "no manifest of an index"),
        (document | {"crc32": 1}, "not what was written"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(ShardIndexError, match=match) as caught:
            open_indexed(folder / "export", folder / "index")[0].read_chunk(0, (0, 0, 0))
        assert caught.value.path == str(path)


# ---- made to mislead, with good checksums


def rewritten(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Changes the manifest and the table of shards, and makes all checksums good again."""
    index = folder / "index"
    document = json.loads((index / "index.json").read_text())
    path = index / document["files"]["shards"]["name"]
    rows = {name: values.copy() for name, values in read_table(SHARDS, path.read_bytes(), "x").items()}
    change(document, rows)
    data = write_table(SHARDS, rows)
    path.write_bytes(data)
    if isinstance(document.get("files"), dict) and isinstance(document["files"].get("shards"), dict):
        document["files"]["shards"] |= {"size_bytes": len(data), "crc32": zlib.crc32(data)}
    document.pop("crc32", None)
    (index / "index.json").write_text(json.dumps(document | {"crc32": manifest_crc32(document)}))


def row(name: str, value: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(_: dict[str, Any], rows: dict[str, Any]) -> None:
        rows[name][0] = value

    return change


def entry(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(document: dict[str, Any], _: dict[str, Any]) -> None:
        document[name] = value

    return change


ENTRIES = ("files", "dialects", "schemas", "problems", "cubes_voxels")
HOSTILE = {
    **{f"{name} {value}": row(name, value) for name in SHARDS for value in (1, 3, 200) if name != "fingerprint"},
    **{f"{name} -1": row(name, -1) for name, kind in SHARDS.items() if kind[0] == "i"},
    **{f"{name} huge": row(name, 2**62) for name, kind in SHARDS.items() if kind == "i8"},
    **{f"{name} {value!r}": entry(name, value) for name in ENTRIES for value in (None, [], {}, 5, ["x"], [1])},
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.filterwarnings("ignore::zarr_dvid.errors.ExportWarning")
def test_hostile_entries_raise_or_do_not_matter(folder: Path, how: str) -> None:
    sound = answers(folder, ALL)
    rewritten(folder, HOSTILE[how])
    assert_never_wrong(folder, sound, what=how)


def rebatched(folder: Path, table: dict[str, Any], columns: Any = BLOCKS) -> None:
    """Puts other entries in the place of the first shard's."""
    document = json.loads((folder / "index" / "index.json").read_text())
    path = folder / "index" / document["files"]["blocks" if columns is BLOCKS else "wide"]["name"]
    message = batch_message(columns, table)
    path.write_bytes(schema_message(columns) + message)
    offset = path.stat().st_size - len(message)

    def change(document: dict[str, Any], rows: dict[str, Any]) -> None:
        document["files"]["blocks" if columns is BLOCKS else "wide"]["size_bytes"] = path.stat().st_size
        at = int(np.flatnonzero(rows["form"] == (0 if columns is BLOCKS else 1))[0])
        rows["batch_offset"][at], rows["batch_bytes"][at], rows["batch_crc32"][at] = (
            offset,
            len(message),
            zlib.crc32(message),
        )

    rewritten(folder, change)


def first_blocks(folder: Path, columns: Any = BLOCKS) -> dict[str, Any]:
    document = json.loads((folder / "index" / "index.json").read_text())
    rows = read_table(SHARDS, (folder / "index" / document["files"]["shards"]["name"]).read_bytes(), "x")
    at = int(np.flatnonzero(rows["form"] == (0 if columns is BLOCKS else 1))[0])
    data = (folder / "index" / document["files"]["blocks" if columns is BLOCKS else "wide"]["name"]).read_bytes()
    start = int(rows["batch_offset"][at])
    table = read_batch(columns, data[start : start + int(rows["batch_bytes"][at])])
    return {name: values.copy() for name, values in table.items()}


def changed_tables(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in table:
        for value in (0, 1, -1, 2, 60000, 2**40):
            if np.iinfo(table[name].dtype).min <= value <= np.iinfo(table[name].dtype).max:
                changed = {other: values.copy() for other, values in table.items()}
                changed[name][0] = value
                yield f"{name} {value}", changed
        yield f"{name} turned", {**table, name: table[name][::-1]}
    yield "cut", {name: values[:-1] for name, values in table.items()}
    yield "none", {name: values[:0] for name, values in table.items()}
    yield "twice", {name: np.concatenate([values, values]) for name, values in table.items()}


@pytest.mark.filterwarnings("ignore::zarr_dvid.errors.ExportWarning")
@pytest.mark.parametrize("columns", [BLOCKS, WIDE], ids=["blocks", "wide"])
def test_hostile_batches_raise_or_are_told_by_the_records(folder: Path, columns: Any) -> None:
    """A place that is wrong points to another record, and that shows; no index can be caught at leaving a chunk out."""
    sound = answers(folder, ALL)
    for how, table in changed_tables(first_blocks(folder, columns)):
        shutil.copytree(folder / "index", folder / "kept")
        rebatched(folder, table, columns)
        found = answers(folder, ALL)
        assert all(value in ("raised", None, sound[xyz]) for xyz, value in found.items()), how
        assert found != sound or how.endswith(("cut", "size 2")) or table_is_same(table, first_blocks(folder, columns)), how
        shutil.rmtree(folder / "index")
        (folder / "kept").rename(folder / "index")


def table_is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all((one[name] == other[name]).all() for name in one)


# ---- out of date


def touch(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("which", ["s0/0_0_0.arrow", "s0/0_0_0.csv"])
def test_a_shard_that_changed_is_read_as_without_an_index(folder: Path, which: str) -> None:
    other = make_chunks((0, 0, 0), (2, 2, 2), seed=1)
    put(folder / "export", {path: data for path, data in write_shard(other).files().items() if path != "x"})
    touch(folder / "export" / which)
    export, reader, _ = open_indexed(folder / "export", folder / "index")
    with pytest.warns(
        ExportWarning, match="out of date: since it was made, 1 shards changed, 0 came and 0 went.*Run `zarr-dvid index`"
    ) as caught:
        assert_reads(export, other)
    assert len(caught) == 1
    assert_reads(export, make_chunks((8, 1, 1), (0, 8, 0)))
    for xyz in ((1, 2, 3), (3, 3, 3), (5, 5, 5)):
        assert export.read_chunk(0, xyz) is None
    assert {path for method, path in reader.taken() if path.endswith(".csv")} == {"s0/0_0_0.csv"}
    summary = make_index(folder / "export", folder / "index")
    assert (summary.n_done_before, summary.n_shards) == (2, 3)
    export, _, _ = open_indexed(folder / "export", folder / "index")
    assert_reads(export, other)
    assert make_index(folder / "export", folder / "index").was_up_to_date


def test_shards_that_came_are_read(folder: Path) -> None:
    put(folder / "export", shards_of({"s0/512_512_0": [(8, 8, 0)], "s0/512_512_512": [(9, 9, 9), (2, 1, 1)]}))
    export, _, _ = open_indexed(folder / "export", folder / "index")
    with pytest.warns(ExportWarning, match="0 shards changed, 2 came and 0 went"):
        assert_reads(export, make_chunks((8, 8, 0), (9, 9, 9), (2, 1, 1), *ALL))
    chunks = {*ALL, (8, 8, 0), (9, 9, 9), (2, 1, 1)}
    assert all_xyz(export) == chunks
    for xyz in box_around(chunks)[::5]:
        assert (export.read_chunk(0, xyz) is not None) == (xyz in chunks)


def test_a_shard_that_went_is_no_zeros(folder: Path) -> None:
    for path in (folder / "export" / "s0").glob("512_0_0*"):
        path.unlink()
    export, _, _ = open_indexed(folder / "export", folder / "index")
    with pytest.warns(ExportWarning, match="0 shards changed, 0 came and 1 went"):
        assert_reads(export, make_chunks((0, 0, 0), (1, 9, 1)))
    for xyz in ((8, 1, 1), (9, 2, 2), (8, 2, 1)):
        with pytest.raises(MissingFileError, match="had when it was indexed"):
            export.read_chunk(0, xyz)
        with pytest.raises(MissingFileError) as caught:
            export.scales[0].locate(np.array([(0, 0, 0), (5, 5, 5), xyz]))
        assert caught.value.chunk_xyz == xyz
    assert export.read_chunk(0, (5, 5, 5)) is None
    with pytest.raises(MissingFileError):
        list(export.scales[0].occupied())
    assert len(np.concatenate(list(export.scales[0].occupied((0, 0, 0), (7, 7, 7))))) == 3
    make_index(folder / "export", folder / "index")
    export, _, _ = open_indexed(folder / "export", folder / "index")
    assert export.read_chunk(0, (8, 1, 1)) is None


def test_a_lost_arrow_file_raises(folder: Path) -> None:
    (folder / "export" / "s0" / "512_0_0.arrow").unlink()
    export, _, _ = open_indexed(folder / "export", folder / "index")
    with pytest.warns(ExportWarning, match="1 shards changed"), pytest.raises(ShardError, match="missing"):
        export.read_chunk(0, (8, 1, 1))


def test_one_process_may_read_with_and_without(folder: Path) -> None:
    """What several streams hold is refused without an index, whoever has it loaded by one."""
    one, other = make_chunks((0, 0, 0)), make_chunks((1, 1, 1))
    arrow = write_shard(one).arrow + write_shard(other).arrow
    export = put(folder / "twice", {"s0/0_0_0.arrow": arrow, "s0/0_0_0.csv": write_shard(other).indexes[".csv"]})
    make_index(export, folder / "other")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        for _ in range(2):
            assert_reads(Export(LocalReader(export), index=LocalReader(folder / "other")), one + other)
            with pytest.raises(ZarrDvidError):
                Export(LocalReader(export), index=False).read_chunk(0, (0, 0, 0))
