"""Which file a chunk is in, and when its absence may be told: cubes, scattered chunks, samples, lost shards."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from exports import (
    XYZ,
    CountingReader,
    Dialect,
    MemoryReader,
    assert_reads,
    make_chunk,
    make_chunks,
    open_export,
    read_voxels,
    volume_info,
    write_shard,
)
from hypothesis import given
from hypothesis import strategies as st

from zarr_dvid import survey
from zarr_dvid.errors import AmbiguousChunkError, ExportError, ExportWarning, MissingFileError, ShardError, ShardIndexError
from zarr_dvid.export import Export
from zarr_dvid.placement import are_in_cubes, common_cube, proves_chunks, tell_units
from zarr_dvid.reader import FileInfo
from zarr_dvid.shard_files import group_files

Files = dict[str, bytes]


def shards_of(chunks: dict[str, Sequence[XYZ]], dialect: Dialect | None = None, *, level: int = 0) -> Files:
    """Shards by name, with these chunks."""
    files: Files = {}
    for name, some in chunks.items():
        files |= write_shard(make_chunks(*some), dialect or Dialect()).files(f"s{level}/{name}")
    return files


@contextmanager
def export_warnings() -> Iterator[list[str]]:
    """The ExportWarnings of a block, as they come."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught if warning.category is ExportWarning]


def log(n_shards: int, *, size: XYZ = (2048, 2048, 2048)) -> bytes:
    x, y, z = size
    return (
        f"--- Scale 0 ---\n  Volume:              {x:,} x {y:,} x {z:,} voxels\n  Chunks exported:     9\n"
        f"  Shard files:         {n_shards:,}\n"
    ).encode()


# ---- names


def test_files_are_sorted_into_shards() -> None:
    names = [
        *("0_0_0.arrow", "0_0_0.csv", "0_0_0-offsets.csv", "0_0_0.json", "2048_0_64.arrow", "64_0_0.csv"),
        *("00_0_0.arrow", "0_0.arrow", "0_0_0_0.arrow", "-64_0_0.arrow", "0_0_0-newformat.csv", "0_0_0.csv.gz", "readme"),
        *("0_0_0", "shard_5.arrow", "0_0_0.ARROW", "12345678901_0_0.arrow", "\u0661_0_0.arrow", ".arrow", "0_0_0.arrow~"),
    ]
    files = [FileInfo(name, 10 + i, is_dir=False, version="v") for i, name in enumerate(names)]
    shards, others = group_files("s3", [*files, FileInfo("9_9_9.arrow", 0, is_dir=True)])
    assert list(shards) == [(0, 0, 0), (64, 0, 0), (2048, 0, 64)]
    assert shards[0, 0, 0].path == "s3/0_0_0.arrow"
    assert sorted(file.name for file in shards[0, 0, 0].indexes) == ["0_0_0-offsets.csv", "0_0_0.csv", "0_0_0.json"]
    assert shards[0, 0, 0].index_bytes == 11 + 12 + 13
    assert shards[64, 0, 0].arrow is None
    assert shards[2048, 0, 64].indexes == ()
    assert others == sorted([*names[6:], "9_9_9.arrow"])


@pytest.mark.parametrize("name", ["1_0_0", "64_63_0", "0_0_9999999999"])
def test_a_name_that_is_no_chunks_place_is_refused(name: str) -> None:
    for ending in (".arrow", ".csv"):
        files = shards_of({"0_0_0": [(0, 0, 0)]}) | {f"s0/{name}{ending}": b"x"}
        with pytest.raises(ExportError, match="no place of a chunk") as caught:
            open_export(files).read_chunk(0, (0, 0, 0))
        assert caught.value.path == f"s0/{name}{ending}"


origin = st.tuples(*[st.integers(0, 50)] * 3)


@given(st.lists(origin, max_size=8), st.sampled_from([64, 320, 2048]))
def test_the_common_cube_divides_all_names(origins: list[XYZ], side: int) -> None:
    names = [(x * side, y * side, z * side) for x, y, z in origins]
    found = common_cube(names)
    if not any(map(any, names)):
        assert found == 0
        return
    assert found % side == 0
    parts = [part for name in names for part in name]
    assert all(part % found == 0 for part in parts)
    assert not any(all(part % (found * k) == 0 for part in parts) for k in (2, 3, 5, 7, 11, 13))


# ---- chunks or voxels, and cubes, as arithmetic


def table(name: XYZ, *rows: XYZ) -> tuple[XYZ, Any]:
    return name, np.array(rows, np.int64).reshape(-1, 3)


FAR = table((256, 0, 0), (5, 1, 2))


@pytest.mark.parametrize(
    ("tables", "side", "grid", "units"),
    [
        ([table((0, 0, 0), (1, 0, 0))], 0, None, "chunks"),
        ([table((0, 0, 0), (64, 0, 1))], 0, None, "chunks"),
        ([table((0, 0, 0), (64, 0, 0)), FAR], 256, None, "chunks"),
        ([table((0, 0, 0), (64, 0, 0)), table((256, 0, 0), (256, 0, 0))], 256, None, "voxels"),
        ([table((0, 0, 0), (64, 0, 0))], 256, None, "voxels"),
        ([table((4096, 0, 0), (64, 0, 0))], 4096, None, "chunks"),
        ([table((0, 0, 0), (64, 0, 0))], 0, None, None),
        ([table((0, 0, 0), (64, 0, 0))], 8192, None, None),
        ([table((0, 0, 0), (64, 0, 0))], 8192, (50, 50, 50), "voxels"),
        ([table((0, 0, 0), (64, 0, 0))], 8192, (65, 1, 1), None),
        ([table((0, 0, 0), (64, 0, 0))], 0, (1, 1, 1), None),
        ([table((0, 0, 0), (640, 64, 0))], 256, (11, 2, 1), "voxels"),
        ([table((0, 0, 0), (640, 64, 0))], 256, (640, 65, 1), "voxels"),
        ([table((0, 0, 0), (640, 64, 0))], 256, (641, 65, 1), None),
        ([table((0, 0, 0), (-64, 0, 0))], 256, None, None),
    ],
)
def test_units(tables: list[Any], side: int, grid: XYZ | None, units: str | None) -> None:
    assert tell_units(tables, side_voxels=side, grid_xyz=grid) == units


@given(st.lists(st.tuples(*[st.integers(-200, 200)] * 3), max_size=5))
def test_what_proves_chunks(rows: list[XYZ]) -> None:
    all_zero = not any(map(any, rows))
    assert proves_chunks(np.array(rows, np.int64).reshape(-1, 3)) == (all_zero or any(c % 64 for xyz in rows for c in xyz))


chunk = st.tuples(*[st.integers(0, 40)] * 3)


@given(st.lists(chunk, min_size=1, max_size=20), st.sampled_from([2, 4, 8]), st.booleans(), st.booleans())
def test_units_are_never_told_wrong_of_chunks_in_cubes(
    chunks: list[XYZ], side: int, in_voxels: bool, has_grid: bool
) -> None:
    """Of a sound export; it may be impossible to tell."""
    tables: dict[XYZ, list[XYZ]] = {}
    for x, y, z in chunks:
        name = (64 * side * (x // side), 64 * side * (y // side), 64 * side * (z // side))
        factor = 64 if in_voxels else 1
        tables.setdefault(name, []).append((factor * x, factor * y, factor * z))
    found = tell_units(
        [table(name, *rows) for name, rows in tables.items()],
        side_voxels=common_cube(tables),
        grid_xyz=(41, 41, 41) if has_grid else None,
    )
    assert found in ("voxels" if in_voxels else "chunks", None) or not any(map(any, chunks))


@given(st.lists(chunk, max_size=6), origin, st.sampled_from([0, 64, 128, 512]))
def test_being_in_cubes(chunks: list[XYZ], name: XYZ, side: int) -> None:
    expected = all(
        64 * c - o >= 0 and (not side or 64 * c - o < side) for xyz in chunks for c, o in zip(xyz, name, strict=True)
    )
    assert are_in_cubes([table(name, *chunks)], side) == expected


# ---- absence in a sound export

SOUND = {"0_0_0": [(0, 0, 0), (1, 2, 3)], "512_0_0": [(8, 1, 1)], "0_512_512": [(7, 8, 9)]}


def test_absence_in_a_sound_export() -> None:
    export = open_export(shards_of(SOUND))
    assert_reads(export, make_chunks(*[xyz for some in SOUND.values() for xyz in some]))
    for xyz in (
        *((1, 0, 0), (7, 7, 7)),  # in a shard that is there
        *((9, 0, 0), (8, 8, 8), (0, 8, 0)),  # whose shard is not there
        *((16, 0, 0), (2**20, 0, 0), (0, 0, 2**21 - 1)),  # past everything
    ):
        assert export.read_chunk(0, xyz) is None
        assert open_export(shards_of(SOUND)).read_chunk(0, xyz) is None


def test_names_with_a_larger_divisor_than_the_cubes() -> None:
    """Cubes of 256 voxels, of which only every fourth has a file."""
    some: dict[str, Sequence[XYZ]] = {"1024_0_0": [(16, 0, 0), (19, 3, 3)], "3072_2048_0": [(48, 33, 1)]}
    export = open_export(shards_of(some))
    for xyz in ((20, 0, 0), (0, 0, 0), (4, 0, 0), (32, 0, 0), (48, 32, 0), (52, 33, 1)):
        assert export.read_chunk(0, xyz) is None
    assert_reads(export, make_chunks(*[xyz for chunks in some.values() for xyz in chunks]))


def test_a_lost_shard_is_no_zeros_where_the_report_counts_it() -> None:
    files = shards_of(SOUND) | {"export.log": log(4)}
    spec = volume_info((2048, 2048, 2048), sharding=(6, 3, 6))  # cubes of 8^3 chunks
    for info in (None, spec):
        export = open_export(files, info=info)
        assert_reads(export, make_chunks((0, 0, 0), (8, 1, 1)))
        with pytest.raises(MissingFileError, match="shards are missing") as caught:
            export.read_chunk(0, (20, 0, 0))
        error = caught.value
        assert (error.path, error.chunk_xyz, error.found) == ("s0", (20, 0, 0), 3)
        assert "4 shards" in str(error.expected)
    # The spec tells that it can't have been lost with another shard.
    assert open_export(files, info=spec).read_chunk(0, (1, 0, 0)) is None
    whole = shards_of(SOUND) | {"export.log": log(3)}
    assert open_export(whole).read_chunk(0, (20, 0, 0)) is None


def test_the_size_without_documents_is_up_to_the_last_chunk() -> None:
    assert open_export(shards_of(SOUND)).scales[0].size_xyz == (64 * 9, 64 * 9, 64 * 10)
    reader = CountingReader(MemoryReader(shards_of({f"{256 * x}_0_0": [(4 * x, 1, 2)] for x in range(1, 30)})))
    assert Export(reader).scales[0].size_xyz == (64 * 117, 128, 192)
    empty = shards_of({"0_0_0": []})
    with pytest.warns(ExportWarning, match="no record"):
        assert open_export(empty).scales[0].size_xyz == (64, 64, 64)


def test_occupied_lists_each_chunk_once_and_none_past_the_end() -> None:
    chunks = make_chunks((0, 0, 0), (1, 2, 3), (1, 2, 3), (3, 3, 3))
    files = write_shard(chunks).files()
    info = volume_info((192, 192, 256))
    with pytest.warns(ExportWarning, match="past the end"):
        found = list(open_export(files, info=info).scales[0].occupied())
    assert [tuple(xyz) for part in found for xyz in part.tolist()] == [(0, 0, 0), (1, 2, 3)]


# ---- scattered chunks

OWN, STRAYS = ((3, 3, 3), (0, 1, 0)), ((9, 1, 2), (1, 1, 1), (100, 7, 0))
SCATTERED: dict[str, Sequence[XYZ]] = {"0_0_0": OWN, "512_0_0": STRAYS}
ALL_DIALECTS = [Dialect(), Dialect(index="rec"), Dialect(index="json"), Dialect(index="footer"), Dialect(rows_a_batch=2)]


@pytest.mark.parametrize("dialect", ALL_DIALECTS, ids=lambda dialect: f"{dialect.index} {dialect.rows_a_batch}")
@pytest.mark.parametrize("first", [*OWN, *STRAYS, (5, 5, 5)])
def test_chunks_in_other_cubes_files_are_found(dialect: Dialect, first: XYZ) -> None:
    """Whatever is read first."""
    files = shards_of(SCATTERED, dialect)
    export = open_export(files)
    found = read_voxels(export, first)
    assert (found is None) == (first == (5, 5, 5))
    assert_reads(export, make_chunks(*OWN, *STRAYS))
    for xyz in ((0, 0, 0), (8, 0, 0), (1, 1, 0), (101, 7, 0), (100, 7, 1), (2**20, 0, 0)):
        assert export.read_chunk(0, xyz) is None
    assert export.scales[0].size_xyz == (64 * 101, 64 * 8, 64 * 4)
    assert {tuple(xyz) for part in export.scales[0].occupied() for xyz in part.tolist()} == {*OWN, *STRAYS}


def cut_at_line(csv: bytes) -> bytes:
    return b"".join(csv.splitlines(keepends=True)[:-1])


BREAKAGE = {
    "empty": lambda _: b"",
    "cut in a line": lambda csv: csv[:-4],
    "cut at a line": cut_at_line,
    "text": lambda _: b"hello\n",
}


@pytest.mark.parametrize("how", BREAKAGE)
@pytest.mark.parametrize("index", ["offset", "rec"])
def test_absence_is_not_told_where_a_scattered_scale_has_a_broken_shard(how: str, index: Any) -> None:
    files = shards_of({**SCATTERED, "0_512_0": [(1, 9, 1), (2, 10, 1)]}, Dialect(index=index))
    files["s0/0_512_0.csv"] = BREAKAGE[how](files["s0/0_512_0.csv"])
    export = open_export(files)
    assert_reads(export, make_chunks(*OWN, *STRAYS))
    for xyz in ((5, 5, 5), (1, 9, 1), (0, 8, 0), (500, 0, 0)):
        with pytest.raises(ShardIndexError) as caught:
            export.read_chunk(0, xyz)
        assert (caught.value.path, caught.value.chunk_xyz) == ("s0/0_512_0.csv", xyz)
    with pytest.raises(ShardIndexError):
        list(export.scales[0].occupied())
    assert_reads(export, make_chunks(*OWN, *STRAYS))


@pytest.mark.parametrize("what", ["arrow", "csv and arrow"])
def test_absence_is_not_told_where_a_scattered_scale_lacks_a_file(what: str) -> None:
    files = shards_of({**SCATTERED, "0_512_0": [(1, 9, 1)]})
    files["s0/0_512_0.arrow"] = files["s0/0_512_0.arrow"][:100]
    if what == "arrow":
        del files["s0/0_512_0.arrow"]
    with pytest.raises(ShardError) as caught:
        open_export(files).read_chunk(0, (5, 5, 5))
    assert caught.value.path == "s0/0_512_0.arrow"


@pytest.mark.parametrize("how", BREAKAGE)
def test_a_broken_shard_that_may_hold_others_chunks_is_told_of(how: str) -> None:
    """What it holds can't be known: here it is just the one that has strays."""
    files = shards_of(SCATTERED)
    files["s0/512_0_0.csv"] = BREAKAGE[how](files["s0/512_0_0.csv"])
    export = open_export(files)
    with pytest.warns(ExportWarning, match="taken to be absent.*1 of 2 shards.*info="):
        assert export.read_chunk(0, (1, 1, 1)) is None
    with pytest.raises(ShardIndexError):
        export.read_chunk(0, (9, 1, 2))


def test_a_chunk_in_two_files_of_a_scattered_scale() -> None:
    files = shards_of(SCATTERED)
    twin = make_chunk((1, 1, 1), seed=7)
    same = files | write_shard([make_chunk((1, 1, 1)), make_chunk((1, 9, 1))]).files("s0/0_512_0")
    export = open_export(same)
    assert export.read_chunk(0, (5, 5, 5)) is None
    assert_reads(export, make_chunks((1, 1, 1)))
    differing = files | write_shard([twin, make_chunk((1, 9, 1))]).files("s0/0_512_0")
    for first in ((5, 5, 5), (1, 1, 1), (9, 1, 2)):
        export = open_export(differing)
        for xyz in (first, (1, 1, 1)):
            if xyz == (1, 1, 1):
                with pytest.raises(AmbiguousChunkError):
                    export.read_chunk(0, xyz)
            else:
                export.read_chunk(0, xyz)


def test_an_error_that_is_kept_holds_no_arrays() -> None:
    """A placement outlives the call that found out about a broken shard; the caller's frames must not."""
    files = shards_of({**SCATTERED, "0_512_0": [(1, 9, 1)]}) | {"s0/0_512_0.csv": b""}
    export = open_export(files)

    def read(mine: Any) -> None:
        with pytest.raises(ShardIndexError):
            export.read_chunk(0, (5, 5, 5))
        assert mine.any()

    array = np.ones(8)
    held = weakref.ref(array)
    for _ in range(2):
        read(array)
    del array
    gc.collect()
    assert held() is None


# ---- too many shards to look at all


def many_shards(n: int, **stray: Sequence[XYZ]) -> Files:
    return shards_of({f"{256 * x}_0_0": stray.get(f"at_{x}", [(4 * x, 1, 2)]) for x in range(n)})


def test_a_sample_is_told_of_without_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_CHECK_ALL_BYTES", 100)
    reader = CountingReader(MemoryReader(many_shards(40)))
    export = Export(reader)
    with export_warnings() as messages:
        for xyz in ((0, 0, 0), (1, 1, 2), (100, 0, 0), (10_000, 0, 0)):
            assert export.read_chunk(0, xyz) is None
    assert len(messages) == 1
    assert "of 40 shards" in messages[0]
    assert "info=" in messages[0]
    looked_at = {path for method, path, _ in reader.calls if path.endswith(".csv")}
    assert len(looked_at) <= 16 + 3  # the sample, and the absent chunks' own
    assert_reads(export, make_chunks((4, 1, 2), (156, 1, 2)))


CUBES = (4, 2, 12)  # cells of 4^3 chunks


def test_a_spec_of_cubes_is_believed_after_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_CHECK_ALL_BYTES", 100)
    reader = CountingReader(MemoryReader(many_shards(40)))
    export = Export(reader, info=volume_info((256 * 64, 1024, 1024), sharding=CUBES))
    for xyz in ((0, 0, 0), (1, 1, 2), (100, 0, 0), (10_000, 0, 0)):
        assert export.read_chunk(0, xyz) is None
    looked_at = {path for method, path, _ in reader.calls if path.endswith(".csv")}
    assert len(looked_at) <= 16 + 3


def test_a_spec_is_not_believed_where_all_shards_can_be_looked_at() -> None:
    """It says nothing about the exporters of September 2025, which put rows into any file."""
    info = volume_info((256 * 64, 1024, 1024), sharding=CUBES)
    for n in range(8):
        export = open_export(many_shards(40, **{f"at_{n}": [(4 * n, 1, 2), (200, 2, 2)]}), info=info)
        assert export.read_chunk(0, (5, 5, 5)) is None
        assert_reads(export, make_chunks((200, 2, 2), (4, 1, 2)))


def test_strays_in_a_sample_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_CHECK_ALL_BYTES", 100)
    files = many_shards(40, at_0=[(0, 1, 2), (50, 1, 1)])
    for info in (None, volume_info((256 * 64, 1024, 1024), sharding=CUBES)):
        export = open_export(files, info=info)
        for xyz in ((5, 5, 5), (1, 0, 0)):
            with pytest.raises(ShardIndexError, match="too many to index") as caught:
                export.read_chunk(0, xyz)
            assert caught.value.chunk_xyz == xyz
    # The same few shards are all indexed, and read right.
    monkeypatch.undo()
    export = open_export(files)
    assert export.read_chunk(0, (5, 5, 5)) is None
    assert_reads(export, make_chunks((0, 1, 2), (50, 1, 1), (4, 1, 2)))


ALIASED = (4, 2, 5)  # of 12 bits of cells, 5 are kept: distant cells share an id


def test_a_spec_with_repeated_shard_ids_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    size = (256 * 64, 1024, 1024)
    files = many_shards(40, at_7=[(28, 1, 2), (60, 2, 2)])
    export = open_export(files, info=volume_info(size, sharding=ALIASED))
    assert_reads(export, make_chunks((28, 1, 2), (60, 2, 2), (60, 1, 2)))
    assert export.read_chunk(0, (60, 2, 3)) is None
    monkeypatch.setattr(survey, "_CHECK_ALL_BYTES", 100)
    with export_warnings() as messages:
        assert open_export(many_shards(40), info=volume_info(size, sharding=ALIASED)).read_chunk(0, (1, 1, 2)) is None
    assert len(messages) == 1
    assert "taken to be absent" in messages[0]


def test_a_spec_that_does_not_fit_the_names_is_not_believed() -> None:
    """Larger cubes than the spec's, as DVID before 2026-03-21 named them: all shards are looked at."""
    files = many_shards(8)
    info = volume_info((256 * 64, 1024, 1024), sharding=(3, 0, 20))  # cells of 2^3 chunks
    export = open_export(files, info=info)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        assert export.read_chunk(0, (1, 1, 2)) is None
        assert_reads(export, make_chunks((4, 1, 2), (28, 1, 2)))


def test_chunks_past_the_end_do_not_make_a_scale_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    """DVID exports them into files of a wrong cube. No array reaches them, so that they do not matter."""
    monkeypatch.setattr(survey, "_CHECK_ALL_BYTES", 100)
    files = many_shards(40, at_0=[(0, 1, 2), (1000, 1, 1)])
    export = open_export(files, info=volume_info((256 * 40, 1024, 1024), sharding=CUBES))
    with export_warnings() as messages:
        assert export.read_chunk(0, (1, 1, 2)) is None
        assert_reads(export, make_chunks((0, 1, 2), (4, 1, 2)))
    assert [message for message in messages if "past the end" not in message] == []
