"""Looking many chunks up at once, against looking each up alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import (
    XYZ,
    CountingReader,
    Dialect,
    MemoryReader,
    make_chunk,
    make_chunks,
    open_export,
    volume_info,
    write_shard,
)
from hypothesis import given
from hypothesis import strategies as st

from zarr_dvid import survey
from zarr_dvid.errors import ExportWarning, MissingFileError, ShardError, ShardIndexError, ZarrDvidError
from zarr_dvid.export import Export
from zarr_dvid.reader import LocalReader
from zarr_dvid.scale import Scale

Files = dict[str, bytes]
LAST = 2**21 - 1


def shards_of(chunks: dict[str, Sequence[XYZ]], dialect: Dialect | None = None) -> Files:
    files: Files = {}
    for name, some in chunks.items():
        files |= write_shard(make_chunks(*some), dialect or Dialect()).files(f"s0/{name}")
    return files


def scale_of(files: Files) -> Scale:
    return open_export(files).scales[0]


def box(n: int) -> list[XYZ]:
    return [(x, y, z) for x in range(n) for y in range(n) for z in range(n)]


def locate(scale: Scale, chunks: Sequence[XYZ]) -> dict[XYZ, Any]:
    """What `locate` tells, by chunk: a place, "several", or None."""
    located, several = scale.locate(np.array(chunks, np.int64).reshape(-1, 3))
    found: dict[XYZ, Any] = dict.fromkeys(chunks)
    seen: list[int] = several.tolist()
    for i in seen:
        found[chunks[i]] = "several"
    for part in located:
        assert part.which.dtype == np.int64
        assert (np.diff(part.which) > 0).all()
        assert (part.found.n_records == 1).all()
        seen += part.which.tolist()
        tables = (part.found.offset_bytes, part.found.size_bytes, part.found.row, part.found.n_rows)
        for i, *place in zip(part.which.tolist(), *(table.tolist() for table in tables), strict=True):
            found[chunks[i]] = (part.shard.path, *place)
    assert len(seen) == len(set(seen))
    return found


def find(scale: Scale, chunk_xyz: XYZ) -> Any:
    """The same from `find`."""
    places = [
        (shard.path, place.offset_bytes, place.size_bytes, place.row, place.n_rows)
        for shard in scale.find(chunk_xyz)
        for place in shard.index.places(chunk_xyz)
    ]
    return "several" if len(places) > 1 else places[0] if places else None


def assert_same(make: Callable[[], Scale], chunks: Sequence[XYZ]) -> dict[XYZ, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        found = locate(make(), chunks)
        seen_before = make()
        locate(seen_before, chunks)  # as `find` learns of strays only when it meets them
        assert found == {xyz: find(seen_before, xyz) for xyz in chunks}
        assert locate(seen_before, chunks) == found
    return found


SOUND: dict[str, Sequence[XYZ]] = {"0_0_0": [(0, 0, 0), (1, 2, 3)], "512_0_0": [(8, 1, 1)], "0_512_512": [(7, 8, 9)]}
SCATTERED: dict[str, Sequence[XYZ]] = {"0_0_0": [(3, 3, 3), (0, 1, 0)], "512_0_0": [(9, 1, 2), (1, 1, 1), (100, 7, 0)]}
FAR = [(-1, 0, 0), (0, 0, LAST + 1), (LAST, LAST, LAST), (2**40, 0, 0), (100, 7, 0), (0, 16, 0)]


@pytest.mark.parametrize("dialect", [Dialect(), Dialect(index="rec"), Dialect(rows_a_batch=2)], ids=str)
@pytest.mark.parametrize("shards", [SOUND, SCATTERED, {"0_0_0": [(1, 1, 1)]}, {"0_0_0": []}])
def test_many_chunks_are_located_as_each_is_found(shards: dict[str, Sequence[XYZ]], dialect: Dialect) -> None:
    files = shards_of(shards, dialect)
    found = assert_same(lambda: open_export(files).scales[0], [*box(11), *FAR])
    there = {xyz for some in shards.values() for xyz in some}
    assert {xyz for xyz, place in found.items() if place is not None} == there


@given(st.lists(st.tuples(*[st.integers(-1, 10)] * 3), max_size=40, unique=True))
def test_any_chunks_in_any_order(chunks: list[XYZ]) -> None:
    for shards in (SOUND, SCATTERED):
        assert_same(partial(scale_of, shards_of(shards)), chunks)


def test_the_same_chunk_asked_for_twice_is_located_twice() -> None:
    located, several = open_export(shards_of(SOUND)).scales[0].locate(np.array([(1, 2, 3), (8, 1, 1), (1, 2, 3)]))
    assert [part.which.tolist() for part in located] == [[0, 2], [1]]
    assert several.tolist() == []


def test_none_are_located_of_none() -> None:
    reader = CountingReader(MemoryReader(shards_of(SOUND)))
    scale = Export(reader).scales[0]
    reader.taken()
    located, several = scale.locate(np.empty((0, 3), np.int64))
    assert (located, several.tolist()) == ([], [])
    assert scale.locate(np.array([(-1, 2, 3), (0, 0, LAST + 1)]))[0] == []
    assert reader.taken() == []


def test_chunks_of_several_records() -> None:
    twice = [make_chunk((1, 1, 1)), make_chunk((1, 1, 1), seed=1), make_chunk((2, 2, 2))]
    files = write_shard(twice).files("s0/0_0_0") | shards_of({"512_0_0": [(8, 0, 0)]})
    found = assert_same(lambda: open_export(files).scales[0], box(9))
    assert found[1, 1, 1] == "several"
    assert found[2, 2, 2] not in ("several", None)
    stray = files | shards_of({"512_0_0": [(8, 0, 0), (2, 2, 2)]})
    found = assert_same(lambda: open_export(stray).scales[0], box(9))
    assert (found[1, 1, 1], found[2, 2, 2]) == ("several", "several")


def raised(call: Callable[[], object]) -> ZarrDvidError:
    with pytest.raises(ZarrDvidError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("shards", [SOUND, SCATTERED])
@pytest.mark.parametrize("lost", [".arrow", ".csv"])
def test_errors_name_the_first_chunk(shards: dict[str, Sequence[XYZ]], lost: str) -> None:
    files = shards_of({**shards, "0_512_0": [(1, 9, 1)]})
    if lost == ".csv":
        files["s0/0_512_0.csv"] = b""
    else:
        del files["s0/0_512_0.arrow"]
    for chunks in ([(1, 9, 1)], [(0, 0, 0), (1, 9, 2), (1, 9, 1)], [(16, 9, 0), (0, 8, 0), (1, 9, 1)]):
        error = raised(partial(open_export(files).scales[0].locate, np.array(chunks)))
        assert error.chunk_xyz in chunks
        assert error.path == f"s0/0_512_0{lost}"
        assert error.chunk_xyz is not None
        alone = raised(partial(open_export(files).read_chunk, 0, error.chunk_xyz))
        assert (type(error), str(error)) == (type(alone), str(alone))
    whole = [xyz for some in shards.values() for xyz in some]
    found = locate(open_export(files).scales[0], whole)
    assert None not in found.values()
    if shards is SCATTERED:
        assert raised(lambda: locate(open_export(files).scales[0], [*whole, (5, 5, 5)])).chunk_xyz == (5, 5, 5)


def test_a_lost_shard_that_the_report_counts() -> None:
    log = b"--- Scale 0 ---\n  Volume:              2,048 x 2,048 x 2,048 voxels\n  Shard files:         4\n"
    files = shards_of(SOUND) | {"export.log": log}
    spec = volume_info((2048, 2048, 2048), sharding=(6, 3, 6))
    for info in (None, spec):
        scale = open_export(files, info=info).scales[0]
        assert None not in locate(scale, [(0, 0, 0), (8, 1, 1)]).values()
        with pytest.raises(MissingFileError) as caught:
            locate(scale, [(0, 0, 0), (20, 0, 0), (21, 0, 0)])
        assert caught.value.chunk_xyz == (20, 0, 0)
    assert locate(scale, [(1, 0, 0), (0, 0, 0)])[1, 0, 0] is None  # its shard is there, by the spec


def test_a_sample_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_CHECK_ALL_BYTES", 100)
    files = shards_of({f"{256 * x}_0_0": [(4 * x, 1, 2)] for x in range(40)})
    with pytest.warns(ExportWarning, match="of 40 shards") as caught:
        found = locate(open_export(files).scales[0], [(4 * x + dx, 1, 2) for x in range(40) for dx in range(2)])
    assert len(caught) == 1
    assert sum(place is not None for place in found.values()) == 40
    strays = files | shards_of({"0_0_0": [(0, 1, 2), (50, 1, 1)]})
    with pytest.raises(ShardIndexError, match="too many") as error:
        locate(open_export(strays).scales[0], [(4, 1, 2), (4, 1, 3)])
    assert error.value.chunk_xyz == (4, 1, 3)


def test_shards_are_loaded_only_where_chunks_are_asked_for() -> None:
    reader = CountingReader(MemoryReader(shards_of(SOUND)))
    scale = Export(reader).scales[0]
    locate(scale, [(0, 0, 0), (1, 2, 3)])
    assert {path for method, path, _ in reader.calls if path.endswith(".csv")} == {"s0/0_0_0.csv"}


EXPORTS = [("csv-offset", 0), ("csv-rec", 1), ("json-footer-raw", 0), ("batch-100-rows", 1), ("two-scales", 0)]


@pytest.mark.parametrize(("name", "level"), EXPORTS)
def test_dvids_own_exports(shared_data: Path, name: str, level: int) -> None:
    path = shared_data / "exports" / name
    scale = Export(LocalReader(path)).scales[level]
    chunks = np.concatenate(list(scale.occupied()))
    around = np.unique(np.concatenate([chunks, chunks + 1, chunks - 1]), axis=0)
    assert_same(lambda: Export(LocalReader(path)).scales[level], [(x, y, z) for x, y, z in around.tolist()])


def test_shared_names(shared_data: Path) -> None:
    """Its files are torn: one by one or together, none is taken to be absent."""
    scale = Export(LocalReader(shared_data / "exports" / "hazards" / "shared-file-names")).scales[0]
    with pytest.raises((ShardError, ShardIndexError)):
        locate(scale, box(8))
