"""An export's records read through references to its shards: the codec alone, in stores that are not ours."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from conftest import ZARR_PIPELINE, expected_sha256, volume_sha256
from exports import XYZ, Dialect, make_chunks, write_shard
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.reference import ReferenceNotReachable
from sample import BOTH, CHUNKS, INFO, SHAPES, SHARDS, sample_files, sample_volume, shard_path, window_of_chunk, write_files

import zarr_dvid
from zarr_dvid import BlockError, DvidStore, RecordError, voxels
from zarr_dvid.configuration import PIPELINE
from zarr_dvid.voxels import Values

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "benchmarks").exists():
    pytest.skip("needs the benchmarks, which a source distribution leaves out", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import references  # noqa: E402 - found by the path above
from benchmarks.references import Place, icechunk_store, kerchunk_store, places_of  # noqa: E402 - found by the path above

KINDS = ("Icechunk", "kerchunk", "kerchunk v2")
WITH_PARTS = ("Icechunk", "kerchunk")  # zarr decodes only whole chunks of Zarr v2
FUSED_PIPELINE = "zarr.core.codec_pipeline.FusedCodecPipeline"  # zarr has it since 3.2
PIPELINES = [ZARR_PIPELINE, PIPELINE] + [FUSED_PIPELINE] * hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline")
A, B = (1, 1, 0), (0, 0, 1)  # chunks of one shard; neither its first record
SHARD = shard_path(0, A)

Array = zarr.Array[Any]
Windows = list[tuple[int, ...]]


def open_by(
    kind: str,
    export: Path,
    places: Mapping[XYZ, Place],
    *,
    level: int = 0,
    values: Values = "labels",
    pipeline: str = ZARR_PIPELINE,
) -> Array:
    """An array whose chunks are references."""
    if kind == "Icechunk":
        pytest.importorskip("icechunk")
        store = icechunk_store(export, level, values, places)
    else:
        store = kerchunk_store(export, level, values, places, zarr_format=2 if kind == "kerchunk v2" else 3)
    with zarr.config.set({"codec_pipeline.path": pipeline, "dvid.pipeline": False}):
        return zarr.open_array(store, mode="r")


def unreadable(kind: str) -> Any:
    """What a store raises that can't fetch a reference."""
    return pytest.importorskip("icechunk").IcechunkError if kind == "Icechunk" else ReferenceNotReachable


def write_export(folder: Path, dialect: Dialect | None = None) -> Path:
    write_files(folder, sample_files(dialect))
    # As with any export that is not of this very second.
    for path in folder.glob("s*/*"):
        os.utime(path, (time.time() - 100,) * 2)
    return folder


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("references") / "export")


@pytest.fixture(scope="module")
def places(export: Path) -> dict[int, dict[XYZ, Place]]:
    """Of both scales, from the export's index."""
    return {level: places_of(DvidStore(export, info=INFO), level) for level in SHAPES}


@pytest.fixture
def copied(export: Path, tmp_path: Path) -> Path:
    """The export, to break."""
    shutil.copytree(export, tmp_path / "copied")
    return tmp_path / "copied"


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    """Shapes of the windows that are decoded."""
    seen: Windows = []
    decode = voxels.decode_into

    def decode_and_tell(*arguments: Any, **options: Any) -> Any:
        found = decode(*arguments, **options)
        seen.append(found.shape)
        return found

    monkeypatch.setattr(voxels, "decode_into", decode_and_tell)
    return seen


@cache
def padded(level: int, values: Values) -> npt.NDArray[np.uint64]:
    """A scale's voxels up to the end of its last chunks, which is where arrays without a description end."""
    shape = [64 * (1 + max(xyz[axis] for xyz in CHUNKS[level])) for axis in (2, 1, 0)]
    volume = np.zeros(shape, np.uint64)
    for chunk in make_chunks(*CHUNKS[level], seed=level):
        volume[window_of_chunk(chunk.xyz)] = chunk.voxels[values]
    return volume


def test_the_index_gives_the_ranges_that_were_written(places: dict[int, dict[XYZ, Place]]) -> None:
    expected: dict[int, dict[XYZ, Place]] = {0: {}, 1: {}}
    for (level, _), chunks in SHARDS.items():
        ranges = write_shard(make_chunks(*chunks, seed=level)).ranges
        for xyz, (at, size, _) in zip(chunks, ranges, strict=True):
            expected[level][xyz] = Place(shard_path(level, xyz), at, size)
    assert places == expected


class TestVoxels:
    @pytest.mark.parametrize("level", SHAPES)
    @pytest.mark.parametrize("values", BOTH)
    @pytest.mark.parametrize("kind", KINDS)
    def test_whole_arrays(
        self, kind: str, values: Values, level: int, export: Path, places: dict[int, dict[XYZ, Place]]
    ) -> None:
        array = open_by(kind, export, places[level], level=level, values=values)
        assert (array.dtype, array.chunks, array.fill_value) == (np.uint64, (64, 64, 64), 0)
        np.testing.assert_array_equal(array[...], padded(level, values))

    @pytest.mark.parametrize("pipeline", PIPELINES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_selections(self, kind: str, pipeline: str, export: Path, places: dict[int, dict[XYZ, Place]]) -> None:
        array = open_by(kind, export, places[0], pipeline=pipeline)
        volume = padded(0, "labels")
        for selection in (
            ...,
            np.s_[70],
            np.s_[:, 10],
            np.s_[:, :, -60],
            np.s_[10, 20, 30],
            np.s_[-100, 64, 255],
            np.s_[5:140:9, 60:70, 3:200:61],
            np.s_[0:0, 3, :],
        ):
            np.testing.assert_array_equal(array[selection], volume[selection], err_msg=str(selection))
        z, y, x = np.random.default_rng(0).integers(0, volume.shape, (50, 3)).T
        np.testing.assert_array_equal(array.vindex[z, y, x], volume[z, y, x])
        np.testing.assert_array_equal(array.oindex[[3, 130], 5:7, [199, 2]], volume[np.ix_([3, 130], [5, 6], [199, 2])])

    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_but_the_shards_is_needed(self, kind: str, copied: Path, places: dict[int, dict[XYZ, Place]]) -> None:
        array = open_by(kind, copied, places[0])
        for path in copied.glob("*/*.csv"):
            path.unlink()
        np.testing.assert_array_equal(array[...], padded(0, "labels"))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "dialect",
        [
            Dialect(index="rec"),
            Dialect(index="json", has_size=False, raw_blocks=True),
            Dialect(index="footer", has_size=False, raw_blocks=True),
            Dialect(index="offset from 688"),
            Dialect(body_compression="zstd"),
            Dialect(body_compression="lz4"),
            Dialect(container="file"),
        ],
        ids=["rec", "json, raw", "footer, raw", "offset from 688", "zstd bodies", "lz4 bodies", "Arrow file"],
    )
    def test_other_dialects(self, kind: str, dialect: Dialect, tmp_path: Path) -> None:
        export = write_export(tmp_path / "export", dialect)
        array = open_by(kind, export, places_of(DvidStore(export), 0))
        np.testing.assert_array_equal(array[...], padded(0, "labels"))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("values", BOTH)
    def test_the_real_shard(self, kind: str, values: Values, shared_data: Path) -> None:
        export = shared_data / "mcns" / "export"
        found = places_of(DvidStore(export), 1)
        [table] = (shared_data / "mcns").glob("*-newformat.csv")
        rows = [tuple(map(int, line.split(","))) for line in table.read_text().splitlines()[2:]]
        [path] = {place.path for place in found.values()}
        assert found == {(x, y, z): Place(path, at, size) for x, y, z, at, size, _ in rows}
        array = open_by(kind, export, found, level=1, values=values)
        expected = expected_sha256(shared_data / "mcns", "s1")
        assert expected.keys() == found.keys()
        for xyz in sorted(found)[::4]:
            assert volume_sha256(array[window_of_chunk(xyz)]) == expected[xyz][values], xyz


class TestCosts:
    """What is decoded and read, counted; never seconds."""

    @staticmethod
    def expected_windows(selection: tuple[slice, ...]) -> Windows:
        """The part of a selection in each chunk that is there."""
        shapes = []
        for xyz in CHUNKS[0]:
            low = [max(part.start, 64 * c) for part, c in zip(selection, xyz[::-1], strict=True)]
            high = [min(part.stop, 64 * c + 64) for part, c in zip(selection, xyz[::-1], strict=True)]
            shape = tuple(b - a for a, b in zip(low, high, strict=True))
            if min(shape) > 0:
                shapes.append(shape)
        return sorted(shapes)

    SELECTIONS = (
        np.s_[0:192, 0:192, 0:256],
        np.s_[70:71, 0:192, 0:256],
        np.s_[0:192, 3:4, 0:256],
        np.s_[0:192, 0:192, 130:131],
        np.s_[10:11, 20:21, 30:31],
        np.s_[30:100, 60:70, 100:140],
        np.s_[0:64, 128:192, 128:192],  # where the export has nothing
    )

    @pytest.mark.parametrize("selection", SELECTIONS, ids=str)
    @pytest.mark.parametrize("pipeline", PIPELINES)
    @pytest.mark.parametrize("kind", WITH_PARTS)
    def test_only_what_is_selected_is_decoded(
        self,
        kind: str,
        pipeline: str,
        selection: tuple[slice, ...],
        export: Path,
        places: dict[int, dict[XYZ, Place]],
        windows: Windows,
    ) -> None:
        array = open_by(kind, export, places[0], pipeline=pipeline)
        np.testing.assert_array_equal(array[selection], padded(0, "labels")[selection])
        assert sorted(windows) == self.expected_windows(selection)

    @pytest.mark.parametrize("kind", WITH_PARTS)
    def test_of_points_the_smallest_window(
        self, kind: str, export: Path, places: dict[int, dict[XYZ, Place]], windows: Windows
    ) -> None:
        array = open_by(kind, export, places[0])
        array.vindex[[3, 10, 70], [5, 4, 100], [60, 63, 100]]
        assert sorted(windows) == [(1, 1, 1), (8, 2, 4)]  # of chunks (1, 1, 1) and (0, 0, 0)

    @pytest.mark.parametrize("selection", SELECTIONS, ids=str)
    def test_of_zarr_v2_whole_chunks_are_decoded(
        self, selection: tuple[slice, ...], export: Path, places: dict[int, dict[XYZ, Place]], windows: Windows
    ) -> None:
        array = open_by("kerchunk v2", export, places[0])
        np.testing.assert_array_equal(array[selection], padded(0, "labels")[selection])
        assert windows == [(64, 64, 64)] * len(self.expected_windows(selection))

    @pytest.mark.parametrize("kind", ["kerchunk", "kerchunk v2"])
    def test_each_chunk_is_one_read_of_its_record(
        self, kind: str, export: Path, places: dict[int, dict[XYZ, Place]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reads = []
        cat_file = LocalFileSystem.cat_file

        def cat_and_tell(self: Any, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
            reads.append((Path(path.removeprefix("file://")).relative_to(export).as_posix(), start, end))
            return cat_file(self, path, start, end, **options)

        monkeypatch.setattr(LocalFileSystem, "cat_file", cat_and_tell)
        array = open_by(kind, export, places[0])
        assert reads == []
        array[0]
        of_plane = [place for (_, _, z), place in places[0].items() if z == 0]
        assert sorted(reads) == sorted(
            (place.path, place.offset_bytes, place.offset_bytes + place.size_bytes) for place in of_plane
        )


def at(change: Callable[[Place], Place]) -> Callable[[Path, Place], Place]:
    """A reference that is wrong."""
    return lambda _, place: change(place)


def shifted(start: int, end: int) -> Callable[[Path, Place], Place]:
    """A reference whose ends are out by some bytes."""
    return at(lambda p: replace(p, offset_bytes=p.offset_bytes + start, size_bytes=p.size_bytes - start + end))


def change_shard(change: Callable[[bytes, Place], bytes]) -> Callable[[Path, Place], Place]:
    """A shard that was changed, while nobody looks at its time."""

    def apply(export: Path, place: Place) -> Place:
        path = export / place.path
        before = path.stat()
        path.write_bytes(change(path.read_bytes(), place))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return place

    return apply


def flipped(data: bytes, offset_bytes: int) -> bytes:
    return data[:offset_bytes] + bytes([data[offset_bytes] ^ 1]) + data[offset_bytes + 1 :]


NOTICED: dict[str, tuple[Callable[[Path, Place], Place], str]] = {
    "starts late": (shifted(8, 0), "no Arrow message starts here"),
    "starts early": (shifted(-8, 0), "no Arrow message starts here"),
    "moved": (shifted(8, 8), "no Arrow message starts here"),
    "ends early": (shifted(0, -1), "the message's body has another length"),
    "ends late": (shifted(0, 8), "the message's body has another length"),
    "ends in the next record": (shifted(0, 2000), "the message's body has another length"),
    # DVID's own index gives the first record of a shard together with the schema message.
    "with the schema": (
        at(lambda place: Place(place.path, 0, place.offset_bytes + place.size_bytes)),
        "the message is no record batch",
    ),
    "metadata flipped": (change_shard(lambda data, p: flipped(data, p.offset_bytes + 20)), "metadata version"),
    "block flipped": (
        change_shard(lambda data, p: flipped(data, p.offset_bytes + p.size_bytes - 40)),
        "the zstd frame is broken",
    ),
}


@pytest.mark.parametrize("damage", NOTICED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_codec_notices(kind: str, damage: str, copied: Path, places: dict[int, dict[XYZ, Place]]) -> None:
    break_it, message = NOTICED[damage]
    array = open_by(kind, copied, {A: break_it(copied, places[0][A])})
    for selection in (window_of_chunk(A), np.s_[3, 70, 100]):
        with pytest.raises((RecordError, BlockError), match=message):
            array[selection]


def test_a_broken_block_is_named_by_its_record(copied: Path, places: dict[int, dict[XYZ, Place]]) -> None:
    break_it, _ = NOTICED["block flipped"]
    with pytest.raises(BlockError, match=re.escape(f"chunk {A} (x, y, z)")):
        open_by("kerchunk", copied, {A: break_it(copied, places[0][A])})[...]


@pytest.mark.parametrize("kind", KINDS)
class TestShardsThatAreGone:
    def test_missing(self, kind: str, copied: Path, places: dict[int, dict[XYZ, Place]]) -> None:
        array = open_by(kind, copied, places[0])
        (copied / SHARD).unlink()
        with pytest.raises(unreadable(kind)):
            array[window_of_chunk(A)]

    @pytest.mark.parametrize("kept", [0, 100, -40], ids=["empty", "before it", "amid it"])
    def test_cut(self, kind: str, kept: int, copied: Path, places: dict[int, dict[XYZ, Place]]) -> None:
        place = places[0][A]
        array = open_by(kind, copied, places[0])
        end = kept if kept >= 0 else place.offset_bytes + place.size_bytes + kept
        change_shard(lambda data, _: data[:end])(copied, place)
        with pytest.raises((RecordError, unreadable(kind))):
            array[window_of_chunk(A)]


class TestWhatGoesUnnoticed:
    """Not wished for: a codec gets a chunk's bytes without its place. docs/references.md says so."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_reference_to_the_record_of_another_chunk(
        self, kind: str, export: Path, places: dict[int, dict[XYZ, Place]]
    ) -> None:
        array = open_by(kind, export, {A: places[0][B]})
        np.testing.assert_array_equal(array[window_of_chunk(A)], sample_volume(0, "labels")[window_of_chunk(B)])

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_reference_that_is_not_there(self, kind: str, export: Path, places: dict[int, dict[XYZ, Place]]) -> None:
        array = open_by(kind, export, {xyz: place for xyz, place in places[0].items() if xyz != A})
        assert sample_volume(0, "labels")[window_of_chunk(A)].any()
        assert not array[window_of_chunk(A)].any()

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_index_that_names_the_wrong_chunks(self, kind: str, copied: Path) -> None:
        index = (copied / SHARD).with_suffix(".csv")
        lines = index.read_text().splitlines()
        one, other = (
            next(i for i, line in enumerate(lines) if line.startswith(f"{xyz[0]},{xyz[1]},{xyz[2]},")) for xyz in (A, B)
        )
        for i, xyz in ((one, B), (other, A)):
            lines[i] = ",".join([*map(str, xyz), *lines[i].split(",")[3:]])
        index.write_text("\n".join(lines) + "\n")
        array = open_by(kind, copied, places_of(DvidStore(copied), 0))
        np.testing.assert_array_equal(array[window_of_chunk(A)], sample_volume(0, "labels")[window_of_chunk(B)])
        # The store compares each record with its chunk.
        with pytest.raises(RecordError, match="the record of another chunk"):
            zarr_dvid.open(copied)["s0/labels"][window_of_chunk(A)]
        with pytest.raises(RecordError, match="the record of another chunk"):
            DvidStore(copied).hierarchy.export.read_chunk(0, A)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_shard_that_was_written_again(self, kind: str, copied: Path, places: dict[int, dict[XYZ, Place]]) -> None:
        array = open_by(kind, copied, places[0])
        # As after a merge in DVID: the same block with other labels, and the record as long as before.
        labels = make_chunks(A)[0].labels
        path = copied / SHARD
        path.write_bytes(
            path.read_bytes().replace(np.array(labels, "<u8").tobytes(), np.full(len(labels), 77, "<u8").tobytes())
        )
        if kind == "Icechunk":  # by the time that the reference holds
            with pytest.raises(unreadable(kind), match="changed"):
                array[window_of_chunk(A)]
        else:
            assert (array[window_of_chunk(A)] == 77).all()


class TestRecordsThatNoReferenceCanName:
    @pytest.mark.parametrize(
        "dialect",
        [Dialect(rows_a_batch=2), Dialect(columns=Dialect().columns[::-1]), Dialect(large=True)],
        ids=["rows", "columns", "large"],
    )
    def test_messages_of_other_forms(self, dialect: Dialect, tmp_path: Path) -> None:
        export = write_export(tmp_path / "export", dialect)
        with pytest.raises(ValueError, match="not messages of one row, as DVID writes them today"):
            places_of(DvidStore(export), 0)
        chunks = make_chunks(*SHARDS[0, (0, 0, 0)])
        offset, size, _ = write_shard(chunks, dialect).ranges[0]
        array = open_by("kerchunk", export, {chunks[0].xyz: Place(SHARD, offset, size)})
        with pytest.raises((RecordError, BlockError)):
            array[window_of_chunk(chunks[0].xyz)]

    def test_chunks_that_several_records_claim(self, tmp_path: Path) -> None:
        chunks = [*make_chunks(A, B), *make_chunks(A, seed=1)]
        export = write_files(tmp_path / "export", write_shard(chunks).files())
        with pytest.raises(ValueError, match=re.escape(f"several records claim chunk {A}")):
            places_of(DvidStore(export), 0)


def test_icechunk_tells_of_references_that_it_does_not_take(tmp_path: Path) -> None:
    pytest.importorskip("icechunk")
    export = write_export(tmp_path / "with a blank")
    with pytest.raises(ValueError, match="takes no references"):
        icechunk_store(export, 0, "labels", places_of(DvidStore(export), 0))


def test_the_benchmark_tells_each_system(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "_ROUNDS", 1)
    rows = references.measure(export)
    systems = {row.name.partition(": ")[2] for row in rows}
    assert len(rows) == 3 * len(systems)
    assert systems >= {"DvidStore", "DvidStore, zarr's default pipeline", "kerchunk references"}
    assert all(row.microseconds > 0 and math.isfinite(row.microseconds) for row in rows)
