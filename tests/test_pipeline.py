"""The codec pipeline as zarr uses it: against zarr's own, on arrays of its own, in threads, loops and processes."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import pickle
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import fsspec
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from conftest import default_pipeline
from distributed import Client, LocalCluster
from exports import CountingReader, Dialect, MemoryReader, make_chunk, make_chunks, relabelled, volume_info, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from sample import BOTH, INFO, SHAPES, sample_files, sample_volume, shard_path, window_of_chunk, write_files
from zarr.codecs import BytesCodec, ShardingCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.buffer.cpu import NDBuffer
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.storage import FsspecStore, LoggingStore, MemoryStore

import zarr_dvid
from zarr_dvid import AmbiguousChunkError, BlockError, DvidStore, ExportWarning, ReadOnlyError
from zarr_dvid.codec import DvidBlockCodec
from zarr_dvid.configuration import PIPELINE, use_pipeline
from zarr_dvid.errors import ZarrDvidError
from zarr_dvid.hierarchy import Hierarchy
from zarr_dvid.pipeline import DvidPipeline, hierarchy_of

Array = zarr.Array[Any]
Voxels = npt.NDArray[Any]
GUARD = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
PROTOTYPE = default_buffer_prototype()


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = sample_files() | {"info": json.dumps(INFO).encode()}
    return write_files(tmp_path_factory.mktemp("pipeline") / "sample", files)


@pytest.fixture(autouse=True)
def _in_place() -> None:
    use_pipeline()


def array_of(node: Any) -> Array:
    assert isinstance(node, zarr.Array)
    return node


def pipeline_of(array: Array) -> Any:
    return array.async_array.codec_pipeline


def counted(files: dict[str, bytes], *, concurrency: int = 1, info: Any = INFO) -> tuple[DvidStore, CountingReader]:
    reader = CountingReader(MemoryReader(files, concurrency=concurrency))
    store = DvidStore("of-the-test", info=info)
    store.hierarchy = Hierarchy(lambda: reader, name="sample", info=info)
    return store, reader


def both_arrays(store: Any, path: str) -> tuple[Array, Array]:
    """An array with this pipeline, and with zarr's."""
    ours = zarr.open_array(store, path=path, mode="r")
    with default_pipeline():
        theirs = zarr.open_array(store, path=path, mode="r")
    assert type(pipeline_of(ours)) is DvidPipeline
    assert type(pipeline_of(theirs)) is BatchedCodecPipeline
    return ours, theirs


# ---- selections


def parts(size: int) -> st.SearchStrategy[Any]:
    bound = st.none() | st.integers(-size - 3, size + 3) | st.sampled_from([0, 63, 64, 65, -1])
    return st.integers(-size, size - 1) | st.builds(slice, bound, bound, st.sampled_from([None, 1, 1, 2, 7, 64, 70]))


def basic(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    return st.tuples(*map(parts, shape)) | st.tuples(*map(parts, shape[:2])) | st.just(...)


def orthogonal(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    def part(size: int) -> st.SearchStrategy[Any]:
        index = st.integers(-size, size - 1)
        return (
            parts(size)
            | st.lists(index, min_size=1, max_size=9)
            | st.lists(index, min_size=1, max_size=30).map(lambda some: np.sort(np.array(some)))
            | st.lists(st.integers(0, size - 1), max_size=9).map(lambda some: np.isin(np.arange(size), some))
        )

    return st.tuples(*map(part, shape))


def points(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(*(st.integers(-n, n - 1) for n in shape)), min_size=1, max_size=40).map(
        lambda some: tuple(np.array(some, np.int64).reshape(-1, len(shape)).T)
    )


def block_indices(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    def part(size: int) -> st.SearchStrategy[Any]:
        n = -(-size // 64)
        return st.integers(-n, n - 1) | st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(
            lambda ends: slice(ends[0], max(ends))
        )

    return st.tuples(*map(part, shape))


FORMS: dict[str, tuple[Callable[[tuple[int, ...]], st.SearchStrategy[Any]], Callable[[Array, Any], Any]]] = {
    "basic": (basic, lambda array, selection: array[selection]),
    "orthogonal": (orthogonal, lambda array, selection: array.oindex[selection]),
    "points": (points, lambda array, selection: array.vindex[selection]),
    "blocks": (block_indices, lambda array, selection: array.blocks[selection]),
    "mask": (
        lambda shape: st.integers(0, 99).map(lambda seed: np.random.default_rng(seed).random(shape) < 2e-4),
        lambda array, selection: array.get_mask_selection(selection),
    ),
}
DIALECTS = {
    "dvid": Dialect(),
    "batches": Dialect(rows_a_batch=3),
    "compressed batches": Dialect(body_compression="zstd", rows_a_batch=2),
    "voxels": Dialect(units="voxels", index="rec"),
    "oldest": Dialect(raw_blocks=True, has_size=False, index="json"),
}
_pairs: dict[tuple[str, int, str, int], tuple[Array, Array]] = {}


def pair(dialect: str, level: int, values: str, concurrency: int) -> tuple[Array, Array]:
    key = dialect, level, values, concurrency
    if key not in _pairs:
        store, _ = counted(sample_files(DIALECTS[dialect]), concurrency=concurrency)
        _pairs[key] = both_arrays(store, f"s{level}/{values}")
    return _pairs[key]


class TestSelections:
    """What zarr's own pipeline gives, this one gives: voxels, shape, type; or the same error."""

    @pytest.mark.parametrize("form", FORMS)
    @settings(max_examples=40)
    @given(data=st.data())
    def test_any(self, form: str, data: st.DataObject) -> None:
        level = data.draw(st.sampled_from([0, 1]))
        draw, read = FORMS[form]
        selection = data.draw(draw(SHAPES[level]))
        arrays = pair(
            data.draw(st.sampled_from(list(DIALECTS))),
            level,
            data.draw(st.sampled_from(BOTH)),
            data.draw(st.sampled_from([1, 4])),
        )
        results = []
        for array in arrays:
            try:
                found = read(array, selection)
                results.append((type(found), found.dtype, found.shape, found.tobytes()))
            except (IndexError, ValueError) as error:
                results.append((type(error), str(error)))
        assert results[0] == results[1]

    @pytest.mark.parametrize("values", BOTH)
    def test_images_of_one_voxel(self, export: Path, values: str) -> None:
        array = zarr.open_array(DvidStore(export), path=f"s0/{values}", mode="r")
        volume = sample_volume(0, values)
        for at in (0, 63, 64, 100, 129):
            np.testing.assert_array_equal(array[at], volume[at])
            np.testing.assert_array_equal(array[:, at], volume[:, at])
            np.testing.assert_array_equal(array[:, :, at], volume[:, :, at])
            np.testing.assert_array_equal(array[at, at], volume[at, at])
            np.testing.assert_array_equal(array[:, at, at], volume[:, at, at])
            assert array[at, at, at] == volume[at, at, at]

    def test_a_single_voxel_is_a_scalar(self, export: Path) -> None:
        ours, theirs = both_arrays(DvidStore(export), "s0/labels")
        for selection in ((1, 2, 3), (-1, -1, -1), (100, 0, 0)):
            found, expected = ours[selection], theirs[selection]
            assert type(found) is type(expected)
            assert found == expected

    def test_the_order_of_the_configuration(self, export: Path) -> None:
        with zarr.config.set({"array.order": "F"}):
            array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
            for selection in (np.s_[:], np.s_[3:70, :, 5], np.s_[70, 60:70, ::3], np.s_[5, 6, 7]):
                found = np.asarray(array[selection])
                np.testing.assert_array_equal(found, sample_volume(0, "labels")[selection])
                assert found.flags.f_contiguous

    def test_chunks_of_several_equal_records(self) -> None:
        chunks = make_chunks((0, 0, 0), (1, 0, 0), (0, 0, 0))
        store, _ = counted(write_shard(chunks).files(), info=volume_info((128, 64, 64)))
        ours, theirs = both_arrays(store, "s0/labels")
        for selection in (np.s_[:], np.s_[3, :, 60:70], np.s_[::9, ::9, ::9], np.s_[1, 2, 3]):
            np.testing.assert_array_equal(ours[selection], theirs[selection])
        np.testing.assert_array_equal(ours[:, :, :64], chunks[0].voxels["labels"])

    def test_chunks_past_the_end(self) -> None:
        store, _ = counted(
            write_shard(make_chunks((0, 0, 0), (1, 0, 0), (2, 1, 0))).files(), info=volume_info((70, 64, 64))
        )
        with pytest.warns(ExportWarning, match="past the end"):
            array = zarr.open_array(store, path="s0/labels", mode="r")
            found = array[:, :, 60:]
        first, second = (chunk.voxels["labels"] for chunk in make_chunks((0, 0, 0), (1, 0, 0)))
        np.testing.assert_array_equal(found, np.concatenate([first[:, :, 60:], second[:, :, :6]], axis=2))

    @pytest.mark.skipif(not hasattr(zarr.errors, "ChunkNotFoundError"), reason="zarr has it since 3.2")
    @pytest.mark.parametrize("selection", [np.s_[:], np.s_[::5, ::5, ::5], np.s_[100, 100, 10]], ids=str)
    def test_chunks_that_are_missing_can_be_refused(self, export: Path, selection: Any) -> None:
        with zarr.config.set({"array.read_missing_chunks": False}):
            ours, theirs = both_arrays(DvidStore(export), "s0/labels")
            told = []
            for array in (ours, theirs):
                with pytest.raises(zarr.errors.ChunkNotFoundError) as caught:
                    array[selection]
                told.append(str(caught.value))
            assert told[0] == told[1]
            np.testing.assert_array_equal(ours[:64, :64, :128], sample_volume(0, "labels")[:64, :64, :128])


def outs(shape: tuple[int, ...]) -> dict[str, Voxels]:
    """Arrays of a shape that a caller may have."""
    z, y, x = shape
    return {
        "C": np.full(shape, GUARD),
        "F": np.full(shape, GUARD, order="F"),
        "a part": np.full((z + 4, y + 3, x + 5), GUARD)[2:-2, 1:-2, 3:-2],
        "backwards along z and y": np.full(shape, GUARD)[::-1, ::-1],
        "backwards along x": np.full(shape, GUARD)[:, :, ::-1],
        "every other along x": np.full((z, y, 2 * x), GUARD)[:, :, ::2],
        "every third along z": np.full((3 * z, y, x), GUARD)[::3],
        "transposed": np.full((x, z, y), GUARD).transpose(1, 2, 0),
        "big-endian": np.full(shape, GUARD).astype(">u8"),
        "int64": np.full(shape, -5, np.int64),
        "uint32": np.full(shape, 5, np.uint32),
        "float64": np.full(shape, np.nan),
        "float32": np.full(shape, np.nan, np.float32),
        "bool": np.zeros(shape, bool),
        "objects": np.full(shape, None),
        "not aligned": np.frombuffer(bytearray(8 * z * y * x + 3), np.uint8)[3:].view(np.uint64).reshape(shape),
        "of a record": np.zeros(shape, [("a", "u8"), ("b", "u1")])["a"],
    }


class TestOut:
    """Arrays of the caller."""

    @pytest.mark.parametrize("selection", [np.s_[3:70, 60:66, 1:99], np.s_[3:70:2, 60:66, 1:99:3]], ids=["box", "steps"])
    @pytest.mark.parametrize("name", outs((2, 2, 2)))
    def test_any_array(self, export: Path, name: str, selection: Any) -> None:
        expected = sample_volume(0, "labels")[selection]
        found = []
        for array in both_arrays(DvidStore(export), "s0/labels"):
            out = outs(expected.shape)[name]
            array.get_basic_selection(selection, out=NDBuffer(out))
            found.append(out)
        np.testing.assert_array_equal(found[0], found[1])
        if found[0].dtype == np.uint64:
            np.testing.assert_array_equal(found[0], expected)
        base = found[0].base
        if name == "a part":
            assert base is not None
            assert (base == GUARD).sum() == base.size - expected.size

    @pytest.mark.parametrize(
        "selection", [np.s_[5:6, 60:70, 9:99], np.s_[5, 60:70, 9:99], np.s_[5, 6, 7], np.s_[:, 3, 4]], ids=str
    )
    def test_any_number_of_dimensions(self, export: Path, selection: Any) -> None:
        expected = np.asarray(sample_volume(0, "labels")[selection])
        array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
        for dtype in (np.uint64, np.float64):
            out = np.full(expected.shape, 7, dtype)
            array.get_basic_selection(selection, out=NDBuffer(out))
            np.testing.assert_array_equal(out, expected.astype(dtype))
        flat = np.zeros(3 * expected.size, np.uint64)[::3].reshape(expected.shape) if expected.ndim == 0 else None
        if flat is not None:
            array.get_basic_selection(selection, out=NDBuffer(flat))
            assert flat == expected

    def test_other_forms(self, export: Path) -> None:
        array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
        volume = sample_volume(0, "labels")
        for dtype in (np.uint64, np.float64):
            out = np.zeros((3, 130, 2), dtype)
            array.get_orthogonal_selection(([3, 9, 100], slice(None), [199, 0]), out=NDBuffer(out))
            np.testing.assert_array_equal(out, volume[np.ix_([3, 9, 100], range(130), [199, 0])].astype(dtype))
            row = np.zeros(3, dtype)
            array.get_coordinate_selection(([0, 149, 3], [0, 129, 70], [0, 199, 65]), out=NDBuffer(row))
            np.testing.assert_array_equal(row, volume[[0, 149, 3], [0, 129, 70], [0, 199, 65]].astype(dtype))
            block = np.zeros((64, 66, 64), dtype)
            array.get_block_selection((1, slice(1, 3), 0), out=NDBuffer(block))
            np.testing.assert_array_equal(block, volume[64:128, 64:, :64].astype(dtype))

    @pytest.mark.parametrize("selection", [np.s_[3:70, 60:66, 1:99], np.s_[3:70:2, 60:66, 1:99:3]], ids=["box", "steps"])
    def test_one_that_is_read_only_is_refused(self, export: Path, selection: Any) -> None:
        out = np.zeros(sample_volume(0, "labels")[selection].shape, np.uint64)
        out.flags.writeable = False
        array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
        with pytest.raises(ValueError, match="read-only"):
            array.get_basic_selection(selection, out=NDBuffer(out))
        assert not out.any()

    def test_one_of_another_shape_is_refused(self, export: Path) -> None:
        out = np.zeros((3, 4, 5), np.uint64)
        array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
        with pytest.raises(ValueError, match="shape of out argument doesn't match"):
            array.get_basic_selection(np.s_[:3, :4, :6], out=NDBuffer(out))
        assert not out.any()


class TestForeignArrays:
    """All other arrays of the process have zarr's own pipeline."""

    @pytest.mark.parametrize("sharded", [False, True])
    @pytest.mark.parametrize("kind", ["memory", "local", "fsspec"])
    def test_they_work_as_ever(self, kind: str, sharded: bool, tmp_path: Path) -> None:
        assert zarr.config.get("codec_pipeline.path") == PIPELINE
        store: Any = {
            "memory": MemoryStore,
            "local": lambda: tmp_path / "a.zarr",
            "fsspec": lambda: FsspecStore.from_url(f"memory://pipeline-{sharded}/a.zarr"),
        }[kind]()
        data = np.random.default_rng(0).integers(0, 99, (100, 70, 30), np.uint64)
        array = zarr.create_array(
            store, shape=data.shape, dtype="u8", chunks=(16, 16, 16), shards=(64, 32, 32) if sharded else None
        )
        assert type(pipeline_of(array)) is BatchedCodecPipeline
        array[...] = data
        array[3:50, 5, ::2] = data[3:50, 5, ::2] = 7
        again = zarr.open_array(store, mode="r+")
        assert type(pipeline_of(again)) is BatchedCodecPipeline
        for selection in (np.s_[:], np.s_[3:40, 5], np.s_[::7, ::3, ::2], np.s_[9, 8, 7]):
            np.testing.assert_array_equal(again[selection], data[selection])
        np.testing.assert_array_equal(again.oindex[[3, 99], :, [1, 1]], data[np.ix_([3, 99], range(70), [1, 1])])
        again.resize((120, 70, 30))
        assert not np.any(np.asarray(again[100:]))

    def test_zarr_format_2(self) -> None:
        array = zarr.create_array(MemoryStore(), shape=(30, 30), dtype="i4", chunks=(7, 7), zarr_format=2)
        array[...] = np.arange(900).reshape(30, 30)
        assert type(pipeline_of(array)) is BatchedCodecPipeline
        np.testing.assert_array_equal(array[3:20, ::3], np.arange(900).reshape(30, 30)[3:20, ::3])

    def test_the_sharding_codec_has_zarrs_pipeline_inside(self) -> None:
        codec = ShardingCodec(chunk_shape=(8, 8), codecs=[BytesCodec(), ZstdCodec()])
        array = zarr.create_array(
            MemoryStore(), shape=(64, 64), dtype="u2", chunks=(32, 32), serializer=codec, compressors=None
        )
        data = np.arange(4096, dtype=np.uint16).reshape(64, 64)
        array[...] = data
        np.testing.assert_array_equal(array[5:50, 3:9], data[5:50, 3:9])
        assert type(codec.codec_pipeline) is BatchedCodecPipeline

    def test_blocks_and_records_in_other_stores(self, export: Path) -> None:
        store = MemoryStore()
        blocks = zarr.create_array(
            store,
            name="blocks",
            shape=(130, 70, 64),
            dtype="u8",
            chunks=(64, 64, 64),
            serializer=DvidBlockCodec(),
            compressors=None,
        )
        data = sample_volume(0, "supervoxels")[:130, :70, :64]
        blocks[...] = data
        assert type(pipeline_of(blocks)) is BatchedCodecPipeline
        np.testing.assert_array_equal(blocks[60:70, 3:, ::2], data[60:70, 3:, ::2])
        # Records that somebody copied out of an export.
        hierarchy = DvidStore(export).hierarchy
        for key in hierarchy.keys("s1/labels/"):
            value = hierarchy.get(key)
            assert value is not None
            store._store_dict[key] = PROTOTYPE.buffer.from_bytes(value)
        copied = zarr.open_array(store, path="s1/labels", mode="r")
        assert type(pipeline_of(copied)) is BatchedCodecPipeline
        np.testing.assert_array_equal(copied[...], sample_volume(1, "labels"))

    def test_coordinates_of_an_export(self, export: Path) -> None:
        z = zarr.open_array(DvidStore(export), path="s1/z", mode="r")
        assert type(pipeline_of(z)) is BatchedCodecPipeline
        np.testing.assert_array_equal(z[:3], [4, 20, 36])

    def test_a_store_around_an_export(self, export: Path) -> None:
        array = zarr.open_array(LoggingStore(DvidStore(export), log_level="ERROR"), path="s1/labels", mode="r")
        assert type(pipeline_of(array)) is BatchedCodecPipeline
        np.testing.assert_array_equal(array[...], sample_volume(1, "labels"))


class TestExports:
    @pytest.mark.parametrize(
        "open_",
        [
            lambda path: zarr_dvid.open(path)["s0/labels"],
            lambda path: zarr.open_array(DvidStore(path), path="s0/labels", mode="r"),
            lambda path: zarr.open(f"dvid::file://{path}", mode="r")["s0/labels"],
            lambda path: zarr.open(f"dvid://{path}", mode="r")["s0/labels"],
            lambda path: zarr.open_group(f"dvid://s0::file://{path}", mode="r")["labels"],
            lambda path: zarr.open_array(f"dvid://s0/labels::file://{path}", mode="r"),
            lambda path: zarr.open_group(fsspec.get_mapper(f"dvid::file://{path}"), mode="r")["s0/labels"],
            lambda path: zarr.open_group(DvidStore(f"file://{path}"), mode="r")["s0"]["labels"],
        ],
        ids=["open", "store", "chained", "alone", "scale", "array", "mapper", "url"],
    )
    def test_arrays_of_an_export_have_it(self, export: Path, open_: Callable[[Path], Any]) -> None:
        array = array_of(open_(export))
        assert type(pipeline_of(array)) is DvidPipeline
        for selection in (np.s_[:], np.s_[60:70, 3, ::2], np.s_[1, 2, 3]):
            np.testing.assert_array_equal(array[selection], sample_volume(0, "labels")[selection])

    def test_over_a_remote_filesystem(self, export: Path) -> None:
        memory = fsspec.filesystem("memory")
        memory.put(str(export), "/pipeline-remote", recursive=True)
        store = DvidStore("memory://pipeline-remote")
        assert store.hierarchy.export.reader.concurrency > 1
        for target in (store, "dvid::memory://pipeline-remote"):
            for array in (
                both_arrays(target, "s0/labels") if target is store else [zarr.open_array(target, path="s0/labels")]
            ):
                for selection in (np.s_[:], np.s_[60:70, 3, ::2], np.s_[1, 2, 3]):
                    np.testing.assert_array_equal(array[selection], sample_volume(0, "labels")[selection])
        memory.rm("/pipeline-remote", recursive=True)

    def test_hierarchy_of(self, export: Path) -> None:
        store = DvidStore(export)
        assert hierarchy_of(store) == (store.hierarchy, "")
        filesystem: Any = zarr.open_group(f"dvid://s1::file://{export}", mode="r").store
        found = hierarchy_of(filesystem)
        assert found is not None
        assert found[1] == "s1"
        assert hierarchy_of(MemoryStore()) is None
        assert hierarchy_of(FsspecStore.from_url("memory://x")) is None

    def test_it_can_be_named_in_the_configuration(self, export: Path) -> None:
        with default_pipeline():
            store = DvidStore(export)
        with zarr.config.set({"codec_pipeline.path": PIPELINE}):
            assert type(pipeline_of(zarr.open_array(store, path="s0/labels", mode="r"))) is DvidPipeline

    def test_pickles(self, export: Path) -> None:
        array = zarr.open_array(DvidStore(export), path="s1/labels", mode="r")
        again = pickle.loads(pickle.dumps(array))
        assert again == array
        assert type(pipeline_of(again)) is DvidPipeline
        assert pipeline_of(again) == pipeline_of(array)
        np.testing.assert_array_equal(again[...], sample_volume(1, "labels"))

    def test_writing_is_refused(self, export: Path) -> None:
        array = zarr.open_array(DvidStore(export), path="s1/labels", mode="r")
        for selection in (np.s_[:], np.s_[3], np.s_[1, 2, 3], np.s_[:64, :64, :64]):
            with pytest.raises(ReadOnlyError):
                array[selection] = 1
        with pytest.raises(ReadOnlyError):
            array.oindex[[1, 2], :, :] = 5

    async def test_what_it_does_not_do_zarrs_does(self, export: Path) -> None:
        store = DvidStore(export)
        array = zarr.open_array(store, path="s1/labels", mode="r")
        pipeline = pipeline_of(array)
        assert [type(codec) for codec in pipeline] == [DvidBlockCodec]
        assert pipeline.supports_partial_decode
        assert not pipeline.supports_partial_encode
        spec = zarr.core.array_spec.ArraySpec(
            shape=(64, 64, 64),
            dtype=array.metadata.data_type,
            fill_value=np.uint64(0),
            config=array.async_array.config if hasattr(array.async_array, "config") else array.async_array._config,
            prototype=PROTOTYPE,
        )
        assert pipeline.evolve_from_array_spec(spec) is pipeline
        value = await store.get("s1/labels/c/0/0/0", PROTOTYPE)
        found = list(await pipeline.decode([(value, spec), (None, spec)]))
        np.testing.assert_array_equal(found[0].as_numpy_array(), make_chunk((0, 0, 0), seed=1).voxels["labels"])
        assert found[1] is None
        with pytest.raises(ReadOnlyError):
            await pipeline.encode([(found[0], spec)])
        with pytest.raises(NotImplementedError):
            pipeline.compute_encoded_size(5, spec)
        empty = NDBuffer(np.full((0, 3), GUARD))
        assert not list(await pipeline.read([], empty) or ())

    def test_a_pipeline_may_be_given_another_store(self, export: Path) -> None:
        """Chunks that lie elsewhere, whatever the pipeline was made for, are read from there."""
        store, memory = DvidStore(export), MemoryStore()
        for key in store.hierarchy.keys("s1/labels/"):
            memory._store_dict[key] = PROTOTYPE.buffer.from_bytes(store.hierarchy.get(key) or b"")
        array = zarr.open_array(store, path="s1/labels", mode="r")
        object.__setattr__(array.async_array.store_path, "store", memory)
        memory._store_dict = {key: value for key, value in memory._store_dict.items() if "c/0/0" not in key}
        found = np.asarray(array[...])
        assert not found[:64, :64].any()
        np.testing.assert_array_equal(found[64:], sample_volume(1, "labels")[64:])


class TestErrors:
    """They come through zarr with their type, shard and chunk."""

    @pytest.mark.parametrize("selection", [np.s_[:], np.s_[::2, ::2, ::2], np.s_[64, 64, 64], np.s_[64:66]], ids=str)
    @pytest.mark.parametrize("way", ["store", "filesystem"])
    def test_of_a_broken_block(self, tmp_path: Path, selection: Any, way: str) -> None:
        files = sample_files() | {"info": json.dumps(INFO).encode()}
        path = shard_path(0, (1, 1, 1))
        data = bytearray(files[path])
        data[-200] ^= 1  # of the frame of the last record
        folder = write_files(tmp_path, files | {path: bytes(data)})
        target: Any = DvidStore(folder) if way == "store" else f"dvid::file://{folder}"
        ours, theirs = (zarr.open_group(target, mode="r")["s0/labels"] for _ in range(2))
        for array in (array_of(ours), array_of(theirs)):
            with pytest.raises(BlockError, match=r"s0/0_0_0\.arrow, chunk \(1, 1, 1\) \(x, y, z\)") as caught:
                array[selection]
            assert (caught.value.path, caught.value.chunk_xyz) == (path, (1, 1, 1))
            np.testing.assert_array_equal(array[:64, :, :], sample_volume(0, "labels")[:64])

    def test_of_records_that_differ(self) -> None:
        chunk = make_chunk((0, 0, 0))
        files = write_shard([chunk, make_chunk((1, 0, 0)), relabelled(chunk, seed=4)]).files()
        store, _ = counted(files, info=volume_info((128, 64, 64)))
        array = zarr.open_array(store, path="s0/labels", mode="r")
        for selection in (np.s_[:], np.s_[5, 5, 5], np.s_[::3]):
            with pytest.raises(AmbiguousChunkError) as caught:
                array[selection]
            assert (caught.value.path, caught.value.chunk_xyz) == ("s0/0_0_0.arrow", (0, 0, 0))
        np.testing.assert_array_equal(array[:, :, 64:], make_chunk((1, 0, 0)).voxels["labels"])

    def test_they_do_not_keep_the_output(self, tmp_path: Path) -> None:
        files = sample_files()
        path = shard_path(0, (1, 1, 1))
        data = bytearray(files[path])
        data[-200] ^= 1
        array = zarr.open_array(
            DvidStore(write_files(tmp_path, files | {path: bytes(data)}), info=INFO), path="s0/labels", mode="r"
        )
        out = np.zeros(SHAPES[0], np.uint64)
        before = sys.getrefcount(out)
        for _ in range(5):
            with pytest.raises(BlockError):
                array.get_basic_selection(..., out=NDBuffer(out))
        for _ in range(500):  # threads of zarr's may hold the last of them for a moment
            gc.collect()
            if sys.getrefcount(out) == before:
                break
            time.sleep(0.01)
        assert sys.getrefcount(out) == before

    def test_under_load(self, tmp_path: Path) -> None:
        """Threads that meet a broken chunk, and threads that do not, all at once."""
        files = sample_files()
        path = shard_path(0, (1, 1, 1))
        data = bytearray(files[path])
        data[-200] ^= 1
        array = zarr.open_array(
            DvidStore(write_files(tmp_path, files | {path: bytes(data)}), info=INFO), path="s0/labels", mode="r"
        )

        def work(i: int) -> str:
            if i % 2:
                np.testing.assert_array_equal(array[:64], sample_volume(0, "labels")[:64])
                return "right"
            with pytest.raises(BlockError) as caught:
                array[::2] if i % 4 else array[...]
            return f"{caught.value.path} {caught.value.chunk_xyz}"

        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(work, range(60)))
        assert set(found[1::2]) == {"right"}
        assert set(found[::2]) == {"s0/0_0_0.arrow (1, 1, 1)"}

    def test_of_an_export_that_counts_voxels(self) -> None:
        """The chunk is named in chunks, whoever decodes it."""
        shard = write_shard(make_chunks((0, 0, 0), (1, 0, 0), (0, 1, 0)), Dialect(units="voxels"))
        data = bytearray(shard.arrow)
        at, size, _ = shard.ranges[1]
        data[at + size - 200] ^= 1  # of the frame
        files = shard.files() | {"s0/0_0_0.arrow": bytes(data)}
        store, _ = counted(files, info=volume_info((128, 128, 64)))
        for array in both_arrays(store, "s0/labels"):
            for selection in (np.s_[:], np.s_[::3, ::3, ::3], np.s_[3, 4, 70]):
                with pytest.raises(BlockError) as caught:
                    array[selection]
                assert (caught.value.path, caught.value.chunk_xyz) == ("s0/0_0_0.arrow", (1, 0, 0))
            np.testing.assert_array_equal(array[:, 64:, :64], make_chunk((0, 1, 0)).voxels["labels"])

    @pytest.mark.parametrize("name", DIALECTS)
    def test_damaged_exports_read_alike(self, name: str) -> None:
        """Whatever is done to a file: both pipelines give the same voxels, or the same error."""
        rng = random.Random(7)
        cells = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1), (2, 0, 0)]
        files = write_shard(make_chunks(*cells), DIALECTS[name]).files()
        windows = [window_of_chunk(xyz) for xyz in (*cells, (0, 0, 1), (2, 1, 1))]
        n_refused = 0
        for _ in range(25):
            path = rng.choice([path for path in files if path.endswith(".arrow") or rng.random() < 0.3])
            damaged = files | {path: damage(files[path], rng)}
            selections = [*rng.sample(windows, 2), np.s_[::3, ::3, ::3]]
            outcomes = []
            for _ in range(2):
                store, _ = counted(damaged, concurrency=rng.choice([1, 4]), info=volume_info((192, 128, 128)))
                try:
                    array = both_arrays(store, "s0/labels")[len(outcomes)]
                except ZarrDvidError as error:
                    outcomes.append([str(error)])
                    continue
                outcomes.append([outcome(array, selection) for selection in selections])
            ours, theirs = outcomes
            assert ours == theirs
            n_refused += sum(isinstance(one, str) for one in ours)
        assert n_refused > 5


def damage(data: bytes, rng: random.Random) -> bytes:
    """Changes some bytes, most of them of headers, or cuts some out."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        near_a_header = rng.choice([0, 696, 2880]) + rng.randrange(700)
        at = rng.choice([rng.randrange(len(changed)), min(near_a_header, len(changed) - 1)])
        match rng.randrange(4):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at : at + 1] = rng.randbytes(1)
            case 2:
                changed[at : at + 4] = rng.choice([bytes(4), b"\xff" * 4, b"\0\2\0\0", b"\xff\xff\xff\x7f"])
            case 3 if rng.random() < 0.2:
                del changed[at : at + rng.choice([1, 8, 100])]
    return bytes(changed)


def outcome(array: Array, selection: Any) -> Any:
    """A digest of the voxels, or what the error says but for which of several broken chunks it is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        try:
            return hash(np.asarray(array[selection]).tobytes())
        except ZarrDvidError as error:
            # Of several broken chunks, a large selection may name any.
            return "refused" if selection[0].step else str(error)


class TestLoops:
    """zarr's asynchronous interface, in a loop of the caller's."""

    async def test_it_reads_right(self, export: Path) -> None:
        array: Any = await (await zarr.api.asynchronous.open_group(store=DvidStore(export), mode="r")).getitem("s0/labels")
        assert type(array.codec_pipeline) is DvidPipeline
        volume = sample_volume(0, "labels")
        np.testing.assert_array_equal(await array.getitem(...), volume)
        assert await array.getitem((3, 4, 5)) == volume[3, 4, 5]
        selections = [np.s_[z : z + 9, :, ::2] for z in range(0, 140, 10)] + [np.s_[z, 3, :] for z in range(140)]
        found = await asyncio.gather(*(array.getitem(selection) for selection in selections))
        for selection, voxels in zip(selections, found, strict=True):
            np.testing.assert_array_equal(voxels, volume[selection])

    async def test_it_does_not_hold_others_up(self) -> None:
        """Another task goes on while a read waits; the read would wait for ever if it did not."""
        go_on = threading.Event()
        waiting = threading.Event()

        def wait(path: str) -> None:
            if path.endswith(".arrow") and waiting.is_set():
                assert go_on.wait(60)

        reader = CountingReader(MemoryReader(sample_files()), before_read=wait)
        store = DvidStore("of-the-test", info=INFO)
        store.hierarchy = Hierarchy(lambda: reader, name="sample", info=INFO)
        array = zarr.open_array(store, path="s0/labels", mode="r").async_array
        assert await array.getitem((0, 0, 0)) == sample_volume(0, "labels")[0, 0, 0]
        waiting.set()

        async def release() -> None:
            await asyncio.sleep(0.05)
            go_on.set()

        for selection in (np.s_[1, 2, 3], np.s_[:64, :64, :64], np.s_[:]):
            go_on.clear()
            found, _ = await asyncio.wait_for(asyncio.gather(array.getitem(selection), release()), 60)
            np.testing.assert_array_equal(found, sample_volume(0, "labels")[selection])

    async def test_a_read_that_is_given_up(self, export: Path) -> None:
        array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r").async_array
        for _ in range(5):
            task = asyncio.create_task(array.getitem(...))
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        np.testing.assert_array_equal(await array.getitem(...), sample_volume(0, "labels"))

    def test_several_loops_in_threads(self, export: Path) -> None:
        array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")

        def work(z: int) -> bool:
            found = asyncio.run(array.async_array.getitem(np.s_[z : z + 5]))
            return bool((found == sample_volume(0, "labels")[z : z + 5]).all())

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(40)))


class TestThreads:
    @pytest.mark.parametrize("concurrency", [1, 4])
    @pytest.mark.parametrize("threads", [None, 1, 3])
    def test_many_read_at_once(self, concurrency: int, threads: int | None) -> None:
        store, _ = counted(sample_files(), concurrency=concurrency)
        store.hierarchy.threads = threads
        arrays = {
            (level, values): zarr.open_array(store, path=f"s{level}/{values}", mode="r")
            for level in SHAPES
            for values in BOTH
        }

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(4):
                level = int(rng.integers(2))
                values = BOTH[int(rng.integers(2))]
                low = [int(rng.integers(0, side)) for side in SHAPES[level]]
                high = [int(rng.integers(a, side)) + 1 for a, side in zip(low, SHAPES[level], strict=True)]
                step = int(rng.integers(1, 3))
                selection = tuple(slice(a, b, step) for a, b in zip(low, high, strict=True))
                found = np.asarray(arrays[level, values][selection])
                np.testing.assert_array_equal(found, sample_volume(level, values)[selection])

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(48)))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None, memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        yield client


def kind_of_pipeline(array: Array) -> str:
    return f"{type(pipeline_of(array)).__name__} {int(np.asarray(array[3:70, 5, ::3]).sum(dtype=np.uint64))}"


def opened_there(target: Any) -> str:
    return kind_of_pipeline(array_of(zarr.open_group(target, mode="r")["s0/labels"]))


class TestProcesses:
    EXPECTED = f"DvidPipeline {int(sample_volume(0, 'labels')[3:70, 5, ::3].sum(dtype=np.uint64))}"

    @pytest.fixture(params=["store", "filesystem"])
    def target(self, request: pytest.FixtureRequest, export: Path) -> Any:
        return DvidStore(export) if request.param == "store" else f"dvid::file://{export}"

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    @pytest.mark.parametrize("method", ["spawn", "fork"])
    def test_workers(self, export: Path, method: str) -> None:
        store = DvidStore(export)
        array = zarr.open_array(store, path="s0/labels", mode="r")
        assert np.asarray(array[...]).any()  # threads are running now
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            assert pool.submit(kind_of_pipeline, array).result(120) == self.EXPECTED
            assert pool.submit(opened_there, store).result(120) == self.EXPECTED

    def test_dask_workers(self, target: Any, client: Client) -> None:
        array = array_of(zarr.open_group(target, mode="r")["s0/labels"])
        assert client.submit(kind_of_pipeline, array).result(120) == self.EXPECTED
        assert client.submit(opened_there, target).result(120) == self.EXPECTED
        lazy = da.from_zarr(array)
        np.testing.assert_array_equal(client.compute(lazy).result(120), sample_volume(0, "labels"))

    @pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
    def test_dask_schedulers(self, target: Any, scheduler: str) -> None:
        array = da.from_zarr(array_of(zarr.open_group(target, mode="r")["s0/labels"]))
        with dask.config.set(scheduler=scheduler, num_workers=4):
            np.testing.assert_array_equal(array.compute(), sample_volume(0, "labels"))
            np.testing.assert_array_equal(array[60:70, ::3, 5].compute(), sample_volume(0, "labels")[60:70, ::3, 5])


@pytest.mark.parametrize("values", BOTH)
def test_real_chunks(shared_data: Path, values: str) -> None:
    """An export of DVID's: both pipelines, box after box, over scales and shards."""
    store = DvidStore(shared_data / "exports" / "csv-offset")
    rng = np.random.default_rng(3)
    for level in (0, 1):
        ours, theirs = both_arrays(store, f"s{level}/{values}")
        for _ in range(12):
            low = [int(rng.integers(0, side)) for side in ours.shape]
            box = tuple(slice(a, min(a + int(rng.integers(1, 150)), side)) for a, side in zip(low, ours.shape, strict=True))
            found = np.asarray(ours[box])
            np.testing.assert_array_equal(found, theirs[box])
            np.testing.assert_array_equal(found, store.read(level, box, values=values))


def test_a_window_of_a_chunk(export: Path) -> None:
    array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
    window = window_of_chunk((1, 1, 1))
    np.testing.assert_array_equal(array[window], make_chunk((1, 1, 1)).voxels["labels"])
