"""`DvidStore` as Zarr uses it: opening, listing, indexing, refusing to write, options."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pytest
import zarr
import zstandard
from conftest import default_pipeline, expected_sha256, read_shard_rows, volume_sha256
from exports import CountingReader, Dialect, MemoryReader, make_chunks, moved, volume_info, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import naive_decode
from sample import (
    BOTH,
    CHUNKS,
    INFO,
    SHAPES,
    SIZE_XYZ,
    sample_files,
    sample_volume,
    shard_path,
    window_of_chunk,
    write_files,
)
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

import zarr_dvid
from zarr_dvid import BlockError, DvidStore, ExportError, ExportWarning, ReadOnlyError, ShardError, ShardIndexError
from zarr_dvid.hierarchy import Hierarchy
from zarr_dvid.store import cut
from zarr_dvid.voxels import Values

PROTOTYPE = default_buffer_prototype()


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("store") / "sample", sample_files())


@pytest.fixture
def store(export: Path) -> DvidStore:
    return DvidStore(export, info=INFO)


def array_of(node: Any) -> zarr.Array[Any]:
    assert isinstance(node, zarr.Array)
    return node


def counted(files: dict[str, bytes], **options: Any) -> tuple[DvidStore, CountingReader]:
    """A store over files in memory, and what it reads of them."""
    reader = CountingReader(MemoryReader(files))
    store = DvidStore("memory-of-the-test", **options)
    store.hierarchy = Hierarchy(lambda: reader, name="sample", **options)
    return store, reader


def listed(keys: Any) -> list[str]:
    async def collect() -> list[str]:
        return [key async for key in keys]

    return sync(collect())


class TestOpening:
    def test_zarr_open_needs_nothing_but_the_store(self, store: DvidStore) -> None:
        root = zarr.open(store)
        assert isinstance(root, zarr.Group)
        assert root.read_only
        assert [name for name, _ in root.members()] == ["s0", "s1"]
        assert list(root.group_keys()) == ["s0", "s1"]
        assert list(root.array_keys()) == []
        assert sorted(root["s0"].array_keys()) == sorted([*BOTH, "z", "y", "x"])

    def test_zarr_dvid_open_gives_the_same_group(self, export: Path) -> None:
        root: Any = zarr_dvid.open(export, info=INFO, voxel_size=4)
        assert root.store == DvidStore(export, info=INFO, voxel_size=4)
        assert root.read_only

    @pytest.mark.parametrize("path", ["s1/labels", "s1/labels/"])
    def test_an_array_can_be_opened_by_itself(self, store: DvidStore, path: str) -> None:
        array = array_of(zarr.open(store, path=path))
        assert (array.shape, array.chunks, array.dtype, array.fill_value) == (SHAPES[1], (64, 64, 64), np.uint64, 0)
        assert array.metadata.zarr_format == 3

    def test_the_tree(self, store: DvidStore) -> None:
        tree = str(zarr.open_group(store, mode="r").tree())
        assert "labels (150, 130, 200) uint64" in tree
        assert "supervoxels (75, 65, 100) uint64" in tree

    @pytest.mark.parametrize("path", ["s2", "labels", "s0/foo", "s0/labels/c"])
    def test_what_is_not_there_is_a_key_error(self, store: DvidStore, path: str) -> None:
        root: Any = zarr.open_group(store, mode="r")
        with pytest.raises(KeyError):
            root[path]
        assert path not in root

    def test_zarr_formats_1_and_2_are_not_there(self, store: DvidStore) -> None:
        with pytest.raises(FileNotFoundError):
            zarr.open_group(store, zarr_format=2, mode="r")

    def test_opening_and_walking_reads_no_shard(self) -> None:
        store, reader = counted(sample_files(), info=INFO)
        assert reader.taken() == []
        root: Any = zarr.open_group(store, mode="r")
        assert len(list(root.members(max_depth=None))) == 12
        str(root.tree())
        str(array_of(root["s0/labels"]).info)
        assert "s1/labels" in root
        assert "s1/nothing" not in root
        assert sorted(reader.taken()) == [("list", ""), ("list", "s0"), ("list", "s1")]

    def test_slicing_reads_the_shards_that_it_touches(self) -> None:
        store, reader = counted(sample_files(), info=INFO)
        labels = array_of(zarr.open_group(store, mode="r")["s0/labels"])
        reader.taken()
        window = window_of_chunk((3, 0, 2))
        np.testing.assert_array_equal(labels[window], sample_volume(0, "labels")[window])
        assert {path.removesuffix("arrow").removesuffix("csv") for _, path in reader.taken()} == {"s0/128_0_128."}
        np.testing.assert_array_equal(labels[window], sample_volume(0, "labels")[window])
        assert reader.taken() == [("read", shard_path(0, (3, 0, 2)))]

    def test_that_a_chunk_is_absent_is_known_without_its_record(self) -> None:
        store, reader = counted(sample_files(), info=INFO)
        labels = array_of(zarr.open_group(store, mode="r")["s0/labels"])
        assert labels[130, 3, 140] == 0  # looks into all indexes, once: a chunk might lie in a shard of another name
        reader.taken()
        assert not np.any(labels[130:, :64, :64])
        assert reader.taken() == []


class TestListing:
    def test_list_gives_every_key_and_each_has_a_value(self, store: DvidStore) -> None:
        keys = listed(store.list())
        assert len(keys) == len(set(keys)) == 13 + 6 + 2 * sum(len(chunks) for chunks in CHUNKS.values())
        assert all(sync(store.exists(key)) for key in keys)
        assert all(sync(store.get(key, PROTOTYPE)) is not None for key in keys)

    @pytest.mark.parametrize("prefix", ["", "s0", "s0/labels/c/1/", "s1/z", "nope", "s0/labels/c/2/1"])
    def test_list_prefix_gives_those_that_start_with_it(self, store: DvidStore, prefix: str) -> None:
        expected = [key for key in listed(store.list()) if key.startswith(prefix)]
        assert sorted(listed(store.list_prefix(prefix))) == sorted(expected)

    @pytest.mark.parametrize(
        ("path", "names"),
        [
            ("", ["zarr.json", "s0", "s1"]),
            ("/", ["zarr.json", "s0", "s1"]),
            ("s1", ["zarr.json", "labels", "supervoxels", "z", "y", "x"]),
            ("s1/", ["zarr.json", "labels", "supervoxels", "z", "y", "x"]),
            ("s1/labels", ["zarr.json", "c"]),
            ("s1/labels/c", ["0", "1"]),
            ("s1/labels/c/0", ["0", "1"]),
            ("s1/labels/c/0/1", ["1"]),
            ("s1/labels/c/0/1/1", []),
            ("s1/y", ["zarr.json", "c"]),
            ("s1/y/c", ["0"]),
            ("nothing", []),
        ],
    )
    def test_list_dir_gives_names(self, store: DvidStore, path: str, names: list[str]) -> None:
        assert sorted(listed(store.list_dir(path))) == sorted(names)

    def test_a_listing_of_chunks_is_lazy(self) -> None:
        n_shards, side = 34, 4
        chunk = make_chunks((0, 0, 0))[0]
        files: dict[str, bytes] = {}
        for i in range(n_shards):
            places = [(side * i + x, y, z) for x, y, z in np.ndindex(side, side, side)]
            files |= write_shard([moved(chunk, xyz) for xyz in places]).files(f"s0/{64 * side * i}_0_0")
        # That its shards are cubes follows from the spec, and is looked at in a sample of them.
        spec = volume_info((64 * side * n_shards, 64 * side, 64 * side), sharding=(6, 0, 16))
        store, reader = counted(files, info=spec)

        async def first_of(keys: AsyncIterator[str]) -> str:
            return await anext(keys)

        def shards_read() -> list[str]:
            return sorted({path for _, path in reader.taken() if path.endswith(".csv")})

        assert sync(first_of(store.list_prefix("s0/labels/c/"))).startswith("s0/labels/c/")
        assert 0 < len(shards_read()) < n_shards
        assert len(listed(store.list_prefix("s0/labels/c/"))) == n_shards * side**3
        assert 0 < len(shards_read()) < n_shards
        assert len(listed(store.list_prefix("s0/supervoxels/c/"))) == n_shards * side**3
        assert reader.taken() == []

    @pytest.mark.parametrize("level", SHAPES)
    @pytest.mark.parametrize("values", BOTH)
    def test_initialized_chunks_are_the_blocks(self, store: DvidStore, level: int, values: str) -> None:
        array = array_of(zarr.open_group(store, mode="r")[f"s{level}/{values}"])
        assert array.nchunks_initialized == len(CHUNKS[level])
        assert array.nchunks == {0: 3 * 3 * 4, 1: 2 * 2 * 2}[level]

    def test_sizes(self, store: DvidStore) -> None:
        keys = [key for key in listed(store.list()) if key.startswith("s1/labels/")]
        sizes = {key: sync(store.getsize(key)) for key in keys}
        assert all(size == len(store.hierarchy.get(key) or b"") for key, size in sizes.items())
        assert sync(store.getsize_prefix("s1/labels")) == sum(sizes.values())
        with pytest.raises(FileNotFoundError):
            sync(store.getsize("s1/labels/c/1/1/1"))

    @pytest.mark.parametrize(
        ("prefix", "expected"), [("", False), ("s0", False), ("s0/labels", False), ("s", True), ("foo", True)]
    )
    def test_is_empty(self, store: DvidStore, prefix: str, expected: bool) -> None:
        assert sync(store.is_empty(prefix)) is expected


class TestByteRanges:
    REQUESTS = (
        None,
        RangeByteRequest(0, 1),
        RangeByteRequest(3, 900),
        RangeByteRequest(5, 5),
        RangeByteRequest(10, 10**9),
        RangeByteRequest(10**9, 10**9 + 1),
        OffsetByteRequest(0),
        OffsetByteRequest(17),
        OffsetByteRequest(10**9),
        SuffixByteRequest(0),
        SuffixByteRequest(1),
        SuffixByteRequest(10**9),
    )

    @pytest.mark.parametrize("request_", REQUESTS, ids=repr)
    @pytest.mark.parametrize("key", ["zarr.json", "s0/z/c/0", "s0/labels/c/0/0/0"])
    def test_a_part_of_a_value(self, store: DvidStore, key: str, request_: Any) -> None:
        whole = (store.hierarchy.get(key) or b"")[:]
        n = len(whole)
        match request_:
            case None:
                expected = whole
            case RangeByteRequest(start, end):
                expected = bytes(whole[i] for i in range(start, min(end, n)))
            case OffsetByteRequest(offset):
                expected = bytes(whole[i] for i in range(offset, n))
            case SuffixByteRequest(suffix):
                expected = bytes(whole[i] for i in range(max(0, n - suffix), n))
        found = sync(store.get(key, PROTOTYPE, request_))
        assert found is not None
        assert found.to_bytes() == expected
        [partial] = sync(store.get_partial_values(PROTOTYPE, iter([(key, request_)])))
        assert partial is not None
        assert partial.to_bytes() == expected

    @pytest.mark.parametrize("request_", [(0, 2), slice(0, 2), 3, "0-2"], ids=repr)
    def test_anything_else_is_refused(self, request_: Any) -> None:
        with pytest.raises(ValueError, match="Unexpected byte_range"):
            cut(b"0123", request_)

    def test_a_part_of_what_is_not_there_is_none(self, store: DvidStore) -> None:
        found = sync(
            store.get_partial_values(PROTOTYPE, [("foo", RangeByteRequest(0, 2)), ("zarr.json", None), ("bar", None)])
        )
        assert [value is None for value in found] == [True, False, True]


def test_unknown_keys_cost_no_input_or_output() -> None:
    # All forms of keys are in test_hierarchy; here, that the store adds nothing to them.
    store, reader = counted({})
    for key in (".zgroup", ".zarray", ".zattrs", ".zmetadata", "foo", "s0/foo/c/0/0/0", "s0/labels/c/0/0", "../x"):
        assert sync(store.get(key, PROTOTYPE)) is None
        assert not sync(store.exists(key))
    assert reader.taken() == []


ONE_BYTE = PROTOTYPE.buffer.from_bytes(b"1")
WRITES: dict[str, Callable[[DvidStore], Any]] = {
    "set": lambda store: sync(store.set("zarr.json", ONE_BYTE)),
    "set elsewhere": lambda store: sync(store.set("foo", ONE_BYTE)),
    "set_if_not_exists": lambda store: sync(store.set_if_not_exists("foo", ONE_BYTE)),
    "_set_many": lambda store: sync(store._set_many([("foo", ONE_BYTE)])),
    "delete": lambda store: sync(store.delete("zarr.json")),
    "delete_dir": lambda store: sync(store.delete_dir("s0")),
    "delete_dir of nothing": lambda store: sync(store.delete_dir("foo")),
    "clear": lambda store: sync(store.clear()),
    "with_read_only": lambda store: store.with_read_only(False),
    "with_read_only by default": lambda store: store.with_read_only(),
    "create_group": lambda store: zarr.open_group(store, mode="r").create_group("foo"),
    "create_array": lambda store: zarr.open_group(store, mode="r").create_array("foo", shape=(1,), dtype="u1"),
    "attributes": lambda store: zarr.open_group(store, mode="r").attrs.update({"a": 1}),
    "array attributes": lambda store: zarr.open_group(store, mode="r")["s0/labels"].attrs.update({"a": 1}),
    "resize": lambda store: array_of(zarr.open_group(store, mode="r")["s0/labels"]).resize((1, 1, 1)),
    "del": lambda store: zarr.open_group(store, mode="r").__delitem__("s0"),
}


class TestReadOnly:
    @pytest.mark.parametrize("name", WRITES)
    def test_writing_is_refused(self, store: DvidStore, name: str) -> None:
        with pytest.raises(ReadOnlyError) as caught:
            WRITES[name](store)
        assert caught.value.path == store.url
        assert "write_export" in str(caught.value)

    @pytest.mark.parametrize("selection", [0, slice(None), (slice(0, 64),) * 3, (1, 2, 3), Ellipsis])
    @pytest.mark.parametrize("name", ["s1/labels", "s1/supervoxels", "s1/z"])
    @pytest.mark.parametrize("value", [0, 1])
    def test_assigning_is_refused(self, store: DvidStore, selection: Any, name: str, value: int) -> None:
        array = array_of(zarr.open_group(store, mode="r")[name])
        with pytest.raises(ReadOnlyError):
            array[selection if name != "s1/z" else ...] = value

    @pytest.mark.parametrize("mode", ["w", "w-", "a", "r+"])
    @pytest.mark.parametrize(
        "open_", [zarr.open, zarr.open_group, lambda store, mode: zarr.open_array(store, path="s0/z", mode=mode)]
    )
    def test_zarr_refuses_other_modes(self, store: DvidStore, mode: str, open_: Callable[..., Any]) -> None:
        # Zarr itself looks at `read_only` before it asks the store; a ReadOnlyError is a ValueError, too.
        with pytest.raises(ValueError, match="read-only"):
            open_(store, mode=mode)

    def test_a_read_only_store_can_be_had_again(self, store: DvidStore) -> None:
        twin = store.with_read_only(True)
        assert twin == store
        assert twin is not store
        assert twin.read_only

    def test_what_it_says_of_itself(self, store: DvidStore) -> None:
        assert store.read_only
        assert store.supports_listing
        assert not store.supports_writes
        assert not store.supports_deletes
        assert not store.supports_partial_writes
        with pytest.raises(AttributeError):
            store.read_only = False


class TestIdentity:
    def test_pickles_are_small_deterministic_and_lazy(self, export: Path) -> None:
        options: dict[str, Any] = {"info": "/nowhere/info", "voxel_size": (8, 8, 8), "storage_options": {"anon": True}}
        for some in ({}, options):
            store = DvidStore(export, **some)
            data = pickle.dumps(store)
            assert len(data) < 300
            assert pickle.dumps(DvidStore(str(export), **some)) == data
            twin = pickle.loads(data)
            assert twin == store
            assert twin.read_only
            assert pickle.dumps(twin) == data

    def test_using_a_store_does_not_change_its_pickle(self, export: Path) -> None:
        store = DvidStore(export, info=INFO)
        before = pickle.dumps(store)
        array_of(zarr.open_group(store, mode="r")["s0/labels"])[:]
        assert pickle.dumps(store) == before
        assert len(before) < 300 + len(pickle.dumps(INFO))

    def test_unpickling_looks_at_nothing(self) -> None:
        twin = pickle.loads(pickle.dumps(DvidStore("/nowhere/at/all", voxel_size=8)))
        assert twin.url == "/nowhere/at/all"
        assert sync(twin.get(".zgroup", PROTOTYPE)) is None
        with pytest.raises(ExportError, match="there is no export here"):
            sync(twin.get("zarr.json", PROTOTYPE))

    def test_pickled_arrays_read_the_same(self, store: DvidStore) -> None:
        labels = array_of(zarr.open_group(store, mode="r")["s1/labels"])
        twin = pickle.loads(pickle.dumps(labels))
        np.testing.assert_array_equal(twin[:], sample_volume(1, "labels"))

    def test_equality(self, export: Path) -> None:
        assert DvidStore(export) == DvidStore(str(export))
        for other in (
            DvidStore(export / "s0"),
            DvidStore(export, voxel_size=8),
            DvidStore(export, info=INFO),
            DvidStore(export, storage_options={"anon": True}),
            zarr.storage.LocalStore(export),
            str(export),
            None,
        ):
            assert DvidStore(export) != other
        assert DvidStore(export, info=INFO) == DvidStore(export, info=json.loads(json.dumps(INFO)))

    @pytest.mark.parametrize("one", [8, 8.0, np.float32(8), (8, 8, 8), [8, 8, 8], np.array([8, 8, 8])], ids=repr)
    @pytest.mark.parametrize("other", [8, (8.0, 8.0, 8.0), np.array([8.0, 8.0, 8.0])], ids=repr)
    def test_the_same_voxel_size_is_the_same_store(self, export: Path, one: Any, other: Any) -> None:
        assert DvidStore(export, voxel_size=one) == DvidStore(export, voxel_size=other)
        assert pickle.dumps(DvidStore(export, voxel_size=one)) == pickle.dumps(DvidStore(export, voxel_size=other))

    def test_options_are_copied(self, export: Path) -> None:
        info, storage_options = json.loads(json.dumps(INFO)), {"anon": True}
        store = DvidStore(export, info=info, storage_options=storage_options)
        before = pickle.dumps(store)
        info["scales"] = []
        storage_options["anon"] = False
        assert pickle.dumps(store) == before

    @pytest.mark.parametrize(
        ("url", "options"),
        [
            ("s3://bucket/export", {"key": "AKIA", "secret": "hush"}),
            ("https://host/export?X-Amz-Signature=hush", {}),
            ("dvid-test::https://host/export?token=hush", {}),
            ("ftp://me:hush@host/export", {}),
        ],
    )
    def test_credentials_are_not_told(self, url: str, options: dict[str, Any]) -> None:
        store = DvidStore(url, storage_options=options)
        with pytest.raises(ReadOnlyError) as caught:
            store.with_read_only(False)
        for text in (repr(store), str(store), f"{store}", str(caught.value), str(caught.value.path)):
            assert "export" in text
            assert "hush" not in text
            assert "AKIA" not in text
        assert pickle.loads(pickle.dumps(store)) == store


def bases(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Basic selections: integers, slices of step 1 or more, an ellipsis, fewer parts than axes."""

    def part(size: int) -> st.SearchStrategy[Any]:
        bound = st.none() | st.integers(-size - 3, size + 3)
        return st.integers(-size, size - 1) | st.builds(slice, bound, bound, st.none() | st.integers(1, 70))

    def with_ellipsis(parts: list[Any], at: int | None, drop: int) -> tuple[Any, ...]:
        if at is None:
            return tuple(parts[: len(parts) - drop])
        return (*parts[:at], Ellipsis, *parts[at + drop :])

    return st.builds(
        with_ellipsis,
        st.tuples(*map(part, shape)).map(list),
        st.none() | st.integers(0, len(shape)),
        st.integers(0, len(shape)),
    )


def orthogonals(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Orthogonal selections: slices, integers, arrays of indices in any order and repeated, boolean masks."""

    def part(size: int) -> st.SearchStrategy[Any]:
        index = st.integers(-size, size - 1)
        return (
            index
            | st.builds(slice, st.integers(0, size), st.integers(0, size), st.integers(1, 9))
            | st.lists(index, min_size=1, max_size=12).map(lambda some: np.array(some))
            | st.lists(st.integers(0, size - 1), max_size=9).map(lambda some: np.isin(np.arange(size), some))
        )

    return st.tuples(*map(part, shape))


def points(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Coordinate selections: as many indices along each axis."""
    return st.lists(st.tuples(*(st.integers(-size, size - 1) for size in shape)), min_size=1, max_size=30).map(
        lambda some: tuple(np.array(some, np.int64).reshape(-1, len(shape)).T)
    )


def outer(volume: npt.NDArray[np.uint64], selection: tuple[Any, ...]) -> npt.NDArray[np.uint64]:
    """An orthogonal selection, axis by axis, by NumPy."""
    for axis, part in reversed(list(enumerate(selection))):
        volume = volume[(slice(None),) * axis + (part,)]
    return volume


Pair = tuple[zarr.Array[Any], npt.NDArray[np.uint64]]


@pytest.fixture(scope="class", params=["ours", "partial", "whole"])
def _decoding(request: pytest.FixtureRequest) -> Iterator[None]:
    """With our pipeline, with zarr's and the codec's partial decoding, and as one that knows nothing of either."""
    if request.param == "ours":
        yield
        return
    with pytest.MonkeyPatch.context() as patch, default_pipeline():
        if request.param == "whole":
            patch.setattr("zarr.core.codec_pipeline.BatchedCodecPipeline.supports_partial_decode", False)
        yield


@pytest.fixture(scope="class", params=["store", "filesystem", "mapper"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _decoding: None) -> zarr.Group:
    files = sample_files() | {"info": json.dumps(INFO).encode()}
    export = write_files(tmp_path_factory.mktemp("indexing") / "sample", files)
    if request.param == "store":
        return zarr.open_group(DvidStore(export), mode="r")
    url = f"dvid::file://{export}"
    return zarr.open_group(url if request.param == "filesystem" else fsspec.get_mapper(url), mode="r")


@pytest.fixture(scope="class", params=[(1, "labels"), (0, "supervoxels")], ids=str)
def pair(request: pytest.FixtureRequest, root: zarr.Group) -> Pair:
    level, values = request.param
    return array_of(root[f"s{level}/{values}"]), sample_volume(level, values)


class TestIndexing:
    """Every way to index gives what NumPy gives on the whole volume."""

    @pytest.mark.parametrize("level", SHAPES)
    @pytest.mark.parametrize("values", BOTH)
    def test_the_whole_volume(self, root: zarr.Group, level: int, values: Values) -> None:
        found = array_of(root[f"s{level}/{values}"])[:]
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (np.uint64, SHAPES[level])
        np.testing.assert_array_equal(found, sample_volume(level, values))

    @settings(max_examples=30)
    @given(data=st.data())
    def test_basic(self, pair: Pair, data: st.DataObject) -> None:
        array, volume = pair
        selection = data.draw(bases(volume.shape))
        np.testing.assert_array_equal(array[selection], volume[selection])
        np.testing.assert_array_equal(array.get_basic_selection(selection), volume[selection])

    @settings(max_examples=30)
    @given(data=st.data())
    def test_orthogonal(self, pair: Pair, data: st.DataObject) -> None:
        array, volume = pair
        selection = data.draw(orthogonals(volume.shape))
        np.testing.assert_array_equal(array.oindex[selection], outer(volume, selection))

    @settings(max_examples=15)
    @given(data=st.data())
    def test_coordinates(self, pair: Pair, data: st.DataObject) -> None:
        array, volume = pair
        selection = data.draw(points(volume.shape))
        np.testing.assert_array_equal(array.vindex[selection], volume[selection])

    @settings(max_examples=10)
    @given(data=st.data())
    def test_blocks(self, pair: Pair, data: st.DataObject) -> None:
        array, volume = pair
        indices, window = [], []
        for size in volume.shape:
            first = data.draw(st.integers(0, (size - 1) // 64))
            last = data.draw(st.integers(first + 1, (size - 1) // 64 + 1))
            indices.append(data.draw(st.sampled_from([first, slice(first, last)])))
            window.append(slice(64 * first, 64 * (first + 1 if isinstance(indices[-1], int) else last)))
        np.testing.assert_array_equal(array.blocks[tuple(indices)], volume[tuple(window)])

    def test_a_mask(self, pair: Pair) -> None:
        array, volume = pair
        for mask in (np.random.default_rng(3).random(volume.shape) < 1e-3, np.zeros(volume.shape, bool)):
            np.testing.assert_array_equal(array.vindex[mask], volume[mask])
            np.testing.assert_array_equal(array.get_mask_selection(mask), volume[mask])

    @pytest.mark.parametrize(
        "selection",
        [
            (),
            Ellipsis,
            0,
            -1,
            (0, 0, 0),
            (-1, -1, -1),
            (..., 0),
            (0, ...),
            (slice(0, 0), 3, slice(None)),
            (slice(5, 5), slice(5, 5), slice(5, 5)),
            (slice(63, 65), slice(63, 65), slice(63, 65)),
            (slice(64, 65), slice(0, 64), slice(-1, None)),
            (slice(None, None, 64), slice(None, None, 63), slice(None, None, 65)),
            (slice(70, 3), slice(None), 0),
            (np.int64(3), np.uint8(2), slice(None)),
            (slice(None), slice(None), np.array(5)[()]),
        ],
        ids=repr,
    )
    def test_forms_at_the_edges(self, pair: Pair, selection: Any) -> None:
        array, volume = pair
        found, expected = np.asarray(array[selection]), np.asarray(volume[selection])
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("selection", [10**6, (0, 0, 0, 0), (0, -1000, 0)])
    def test_indices_out_of_bounds_are_refused(self, pair: Pair, selection: Any) -> None:
        with pytest.raises(IndexError):
            pair[0][selection]

    def test_into_an_array_of_the_caller(self, pair: Pair) -> None:
        array, volume = pair
        window = slice(3, 70), slice(60, 65), slice(1, 99)
        out = PROTOTYPE.nd_buffer.from_numpy_array(np.full((67, 5, 98), 7, np.uint64))
        array.get_basic_selection(window, out=out)
        np.testing.assert_array_equal(out.as_numpy_array(), volume[window])


class TestPartialDecoding:
    def test_only_the_window_is_decoded(self, store: DvidStore, monkeypatch: pytest.MonkeyPatch) -> None:
        shapes: list[tuple[int, ...]] = []
        decode = zarr_dvid.codec.decode_chunk

        def remember(*args: Any, **options: Any) -> Any:
            voxels = decode(*args, **options)
            shapes.append(voxels.shape)
            return voxels

        monkeypatch.setattr(zarr_dvid.codec, "decode_chunk", remember)
        with default_pipeline():
            labels = array_of(zarr.open_group(store, mode="r")["s0/labels"])
        assert labels[3, 4, 5] == sample_volume(0, "labels")[3, 4, 5]
        assert shapes == [(1, 1, 1)]
        shapes.clear()
        np.testing.assert_array_equal(labels[70, :64, :64], sample_volume(0, "labels")[70, :64, :64])
        assert shapes == [(1, 64, 64)]
        shapes.clear()
        expected = outer(sample_volume(0, "labels"), (np.array([3, 9]), slice(0, 64), np.array([20, 10, 10])))
        found = labels.oindex[np.array([3, 9]), slice(0, 64), np.array([20, 10, 10])]
        np.testing.assert_array_equal(found, expected)
        assert shapes == [(7, 64, 11)]

    @pytest.mark.parametrize(
        "dialect",
        [Dialect(rows_a_batch=3), Dialect(raw_blocks=True, has_size=False, index="json")],
        ids=["batches", "oldest"],
    )
    def test_other_dialects_read_alike(self, dialect: Dialect) -> None:
        store, _ = counted(sample_files(dialect), info=INFO)
        root: Any = zarr.open_group(store, mode="r")
        for values in BOTH:
            array = array_of(root[f"s0/{values}"])
            np.testing.assert_array_equal(array[60:70, :, 60:140], sample_volume(0, values)[60:70, :, 60:140])


PIPELINES = [name for name in ("BatchedCodecPipeline", "FusedCodecPipeline") if hasattr(zarr.core.codec_pipeline, name)]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pipeline_of_zarrs_reads_alike(store: DvidStore, pipeline: str) -> None:
    with zarr.config.set({"codec_pipeline.path": f"zarr.core.codec_pipeline.{pipeline}"}):
        root: Any = zarr.open_group(store, mode="r")
        for values in BOTH:
            array = array_of(root[f"s0/{values}"])
            volume = sample_volume(0, values)
            assert type(array.async_array.codec_pipeline).__name__ == pipeline
            np.testing.assert_array_equal(array[...], volume)
            np.testing.assert_array_equal(array[70, 3:90, ::5], volume[70, 3:90, ::5])
            np.testing.assert_array_equal(array.oindex[[3, 1], :, [199, 0]], volume[np.ix_([3, 1], range(130), [199, 0])])
            with pytest.raises(ReadOnlyError):
                array[0, 0, 0] = 1


async def test_zarrs_asynchronous_interface(store: DvidStore) -> None:
    group = await zarr.api.asynchronous.open_group(store=store, mode="r")
    assert sorted([name async for name, _ in group.members()]) == ["s0", "s1"]
    array = await group.getitem("s1/labels")
    assert isinstance(array, zarr.AsyncArray)
    np.testing.assert_array_equal(await array.getitem((slice(5, 70), 3)), sample_volume(1, "labels")[5:70, 3])


class TestRealData:
    def test_a_scale_that_dvid_exported(self, shared_data: Path) -> None:
        folder = shared_data / "exports" / "csv-offset"
        rows = [row for path in (folder / "s1").glob("*.arrow") for row in read_shard_rows(path)]
        volumes = {values: np.zeros((256, 256, 256), np.uint64) for values in BOTH}
        for row in rows:
            window = window_of_chunk(row.chunk_xyz)
            plain = naive_decode(zstandard.decompress(row.block, max_output_size=1 << 22))
            volumes["supervoxels"][window] = plain
            order = np.argsort(row.supervoxels)
            volumes["labels"][window] = row.labels[order][np.searchsorted(row.supervoxels[order], plain)]
        root: Any = zarr_dvid.open(folder)
        for values, volume in volumes.items():
            np.testing.assert_array_equal(array_of(root[f"s1/{values}"])[:], volume)

    def test_initialized_chunks_are_those_that_dvid_counted(self, shared_data: Path) -> None:
        root: Any = zarr_dvid.open(shared_data / "exports" / "csv-offset")
        counts = [root[f"s{level}/labels"].nchunks_initialized for level in (0, 1)]
        log = (shared_data / "exports" / "csv-offset" / "export.log").read_text()
        assert counts == [int(n) for n in re.findall(r"Chunks exported: +(\d+)", log)] == [511, 63]

    def test_the_real_shard(self, shared_data: Path) -> None:
        folder = shared_data / "mcns"
        root: Any = zarr_dvid.open(folder / "export", info=folder / "mcns-ng-specs.json")
        expected = expected_sha256(folder, "s1")
        assert len(expected) == 258
        for values in BOTH:
            array = array_of(root[f"s1/{values}"])
            found = {xyz: volume_sha256(np.asarray(array[window_of_chunk(xyz)])) for xyz in list(expected)[::3]}
            assert found == {xyz: expected[xyz][values] for xyz in found}
            assert not np.any(array[30000:30003, 20000, :3])

    def test_a_pixel_of_a_huge_volume_lists_nothing(self, shared_data: Path) -> None:
        store = DvidStore(shared_data / "mcns" / "export", info=shared_data / "mcns" / "mcns-ng-specs.json")
        store.list_prefix = store.list_dir = None
        labels = array_of(zarr.open_group(store, mode="r")["s1/labels"])
        assert labels[0, 0, 0] == 0
        assert np.any(labels[window_of_chunk((499, 415, 475))])


class TestInfo:
    """Where the volume's size comes from."""

    @pytest.fixture
    def info_file(self, tmp_path: Path) -> Path:
        path = tmp_path / "a spec.json"
        path.write_text(json.dumps(INFO))
        return path

    def shapes(self, store: DvidStore) -> list[tuple[int, ...]]:
        root: Any = zarr.open_group(store, mode="r")
        return [array_of(root[f"s{level}/labels"]).shape for level in (0, 1)]

    def test_any_form(self, export: Path, info_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = fsspec.filesystem("memory")
        memory.pipe("/test-store/info", info_file.read_bytes())
        monkeypatch.chdir(info_file.parent)
        for info in (info_file, str(info_file), f"file://{info_file}", "memory://test-store/info", INFO, info_file.name):
            store = DvidStore(export, info=info)
            assert self.shapes(store) == list(SHAPES.values())
            assert self.shapes(pickle.loads(pickle.dumps(store))) == list(SHAPES.values())
        memory.rm("/test-store", recursive=True)

    def test_beside_the_export(self, tmp_path: Path) -> None:
        files = sample_files() | {"info": json.dumps(INFO).encode()}
        assert self.shapes(DvidStore(write_files(tmp_path, files))) == list(SHAPES.values())

    def test_from_the_log(self, tmp_path: Path) -> None:
        log = "".join(
            f"--- Scale {level} ---\n  Volume:              {x} x {y} x {z} voxels\n" for level, (z, y, x) in SHAPES.items()
        )
        files = sample_files() | {"export.log": log.encode()}
        assert self.shapes(DvidStore(write_files(tmp_path, files))) == list(SHAPES.values())

    def test_from_the_index_up_to_the_last_chunk(self, tmp_path: Path) -> None:
        assert self.shapes(DvidStore(write_files(tmp_path, sample_files()))) == [(192, 192, 256), (128, 128, 128)]

    def test_the_one_that_is_given_counts(self, tmp_path: Path) -> None:
        files = sample_files() | {"info": json.dumps(volume_info((9999, 9999, 9999), n_scales=2)).encode()}
        assert self.shapes(DvidStore(write_files(tmp_path, files), info=INFO)) == list(SHAPES.values())

    def test_one_that_contradicts_the_log_is_reported(self, tmp_path: Path) -> None:
        log = "--- Scale 0 ---\n  Volume:              192 x 192 x 192 voxels\n"
        store = DvidStore(write_files(tmp_path, sample_files() | {"export.log": log.encode()}), info=INFO)
        with pytest.warns(ExportWarning, match=r"export\.log gives the volume \(192, 192, 192\)"):
            assert self.shapes(store) == list(SHAPES.values())

    def test_one_with_fewer_scales_is_refused(self, export: Path) -> None:
        with pytest.raises(ExportError, match="at least 2 scales, found 1"):
            zarr_dvid.open(export, info=volume_info(SIZE_XYZ))

    def test_one_with_other_chunks_is_refused(self, export: Path) -> None:
        info = volume_info(SIZE_XYZ, n_scales=2)
        info["scales"][1]["chunk_sizes"] = [[128, 128, 128]]
        with pytest.raises(
            ExportError, match=r"scale 1 has other chunks.*expected \[64, 64, 64\], found \[128, 128, 128\]"
        ):
            zarr_dvid.open(export, info=info)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (b"", "no JSON"),
            (b"{", "no JSON"),
            (b"\xff\xfe\x00", "no JSON"),
            (b"[" * 100_000, "no JSON"),
            (b"[]", "no object"),
            (b"null", "no object"),
            (b"{}", "no scales"),
            (b'{"scales": {}}', "no scales"),
            (b'{"scales": [{}]}', "scale 0 can't be understood"),
            (b'{"scales": [{"size": [1, 2], "resolution": [8, 8, 8]}]}', "scale 0 can't be understood"),
            (b'{"scales": [{"size": [0, 1, 1], "resolution": [8, 8, 8]}]}', "scale 0 can't be understood"),
            (b'{"scales": [{"size": [1.5, 1, 1], "resolution": [8, 8, 8]}]}', "scale 0 can't be understood"),
            (b'{"scales": [{"size": [1e30, 1, 1], "resolution": [8, 8, 8]}]}', "scale 0 can't be understood"),
            (b'{"data_type": "uint8", "scales": [{}]}', "no segmentation"),
            (b'{"num_channels": 3, "scales": [{}]}', "no segmentation"),
        ],
    )
    def test_garbage_is_refused_in_plain_words(self, export: Path, tmp_path: Path, text: bytes, problem: str) -> None:
        path = tmp_path / "info"
        path.write_bytes(text)
        with pytest.raises(ExportError, match=problem) as caught:
            zarr_dvid.open(export, info=path)
        assert caught.value.path == str(path)
        assert "info=" in str(caught.value)

    @pytest.mark.parametrize("info", ["/nowhere/info", "file:///nowhere/info", "memory://nowhere/info"])
    def test_one_that_is_missing_is_refused(self, export: Path, info: str) -> None:
        with pytest.raises(ExportError, match="the volume description is missing"):
            zarr_dvid.open(export, info=info)


class TestVoxelSize:
    @pytest.mark.parametrize(
        ("voxel_size", "scale"),
        [
            (8, [8, 8, 8]),
            (0.5, [0.5, 0.5, 0.5]),
            (np.float32(4), [4, 4, 4]),
            ((40, 4, 5), [40, 4, 5]),
            ([40.5, 4, 5], [40.5, 4, 5]),
            (np.array([40, 4, 5]), [40, 4, 5]),
        ],
        ids=repr,
    )
    def test_one_number_or_three(self, export: Path, voxel_size: Any, scale: list[float]) -> None:
        root: Any = zarr_dvid.open(export, info=INFO, voxel_size=voxel_size)
        dataset = json.loads(root.store.hierarchy.get("zarr.json"))["attributes"]["ome"]["multiscales"][0]["datasets"][0]
        assert dataset["coordinateTransformations"][0]["scale"] == scale

    @pytest.mark.parametrize(
        "voxel_size",
        [
            0,
            -8,
            float("nan"),
            float("inf"),
            (8, 8),
            (8, 8, 8, 8),
            (),
            (8, 0, 8),
            (8, -8, 8),
            (8, "a", 8),
            "8",
            "888",
            "abc",
            b"abc",
            {"z": 8, "y": 8, "x": 8},
            1j,
            np.ones((3, 3)),
            object,
            True,
        ],
        ids=repr,
    )
    def test_anything_else_is_refused_in_plain_words(self, export: Path, voxel_size: Any) -> None:
        with pytest.raises((ExportError, TypeError, ValueError), match="one positive number, or three"):
            DvidStore(export, voxel_size=voxel_size)


class TestNoExport:
    @pytest.mark.parametrize("scheme", ["", "file://"])
    def test_no_such_directory(self, tmp_path: Path, scheme: str) -> None:
        with pytest.raises(
            ExportError, match=r"there is no export here: expected a directory with s0, s1.*No such file"
        ) as caught:
            zarr_dvid.open(f"{scheme}{tmp_path / 'nowhere'}")
        assert caught.value.path == str(tmp_path / "nowhere")
        assert "export-shards" in str(caught.value)

    def test_a_file(self, export: Path) -> None:
        with pytest.raises(ExportError, match=r"there is no export here.*Not a directory"):
            zarr_dvid.open(export / "s0" / "0_0_0.arrow")

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ExportError, match="found an empty directory"):
            zarr_dvid.open(tmp_path)

    def test_another_directory(self, tmp_path: Path) -> None:
        write_files(tmp_path, {"s0.txt": b"", "S0/x": b"", "photos/1.jpg": b""})
        with pytest.raises(ExportError, match=r"found S0, photos, s0\.txt"):
            zarr_dvid.open(tmp_path)

    def test_a_scale_of_an_export(self, export: Path) -> None:
        with pytest.raises(ExportError, match="there is no export here"):
            zarr_dvid.open(export / "s0")

    @pytest.mark.parametrize("url", ["nosuchprotocol://x", "nosuchprotocol::file:///x"])
    def test_a_url_of_no_known_protocol(self, url: str) -> None:
        with pytest.raises(ExportError, match="nosuchprotocol"):
            zarr_dvid.open(url)

    def test_a_scale_without_shards_is_0_where_a_document_tells_its_size(self, tmp_path: Path) -> None:
        (tmp_path / "s0").mkdir()
        labels = array_of(zarr_dvid.open(tmp_path, info=volume_info((100, 70, 64)))["s0/labels"])
        assert labels.shape == (64, 70, 100)
        assert labels.nchunks_initialized == 0
        assert not np.any(labels[:])

    def test_a_scale_without_shards_is_refused_where_nothing_tells_its_size(self, tmp_path: Path) -> None:
        (tmp_path / "s0").mkdir()
        with warnings.catch_warnings(), pytest.raises(ExportError):
            zarr_dvid.open(tmp_path)


class TestBrokenExports:
    """What is known to be broken is never read as 0, by Zarr neither."""

    def labels(self, folder: Path) -> zarr.Array[Any]:
        return array_of(zarr_dvid.open(folder, info=INFO)["s0/labels"])

    def test_a_shard_that_vanishes_after_opening(self, tmp_path: Path) -> None:
        labels = self.labels(write_files(tmp_path, sample_files()))
        window = window_of_chunk((3, 0, 2))
        np.testing.assert_array_equal(labels[window], sample_volume(0, "labels")[window])
        path = shard_path(0, (3, 0, 2))
        (tmp_path / path).unlink()
        with pytest.raises(ShardError, match=path) as caught:
            labels[window]
        assert caught.value.chunk_xyz == (3, 0, 2)

    def test_a_shard_that_vanishes_before_its_index_is_read(self, tmp_path: Path) -> None:
        labels = self.labels(write_files(tmp_path, sample_files()))
        path = shard_path(0, (3, 0, 2))
        (tmp_path / path).unlink()
        (tmp_path / path).with_suffix(".csv").unlink()
        with pytest.raises(ShardError, match=path):
            labels[window_of_chunk((3, 0, 2))]

    def test_a_shard_that_is_cut_after_opening(self, tmp_path: Path) -> None:
        labels = self.labels(write_files(tmp_path, sample_files()))
        window = window_of_chunk((1, 1, 1))
        assert np.any(labels[window])
        path = tmp_path / shard_path(0, (1, 1, 1))
        path.write_bytes(path.read_bytes()[:900])
        with pytest.raises(ShardError, match="ends inside"):
            labels[window]

    @pytest.mark.parametrize("chunk_xyz", [(3, 0, 2), (2, 0, 2)], ids=["there", "absent"])
    def test_an_index_that_is_empty(self, tmp_path: Path, chunk_xyz: tuple[int, int, int]) -> None:
        files = sample_files()
        files[shard_path(0, (3, 0, 2)).replace(".arrow", ".csv")] = b""
        labels = self.labels(write_files(tmp_path, files))
        for selection in (window_of_chunk(chunk_xyz), (64 * chunk_xyz[2], 0, 64 * chunk_xyz[0])):
            with pytest.raises(ShardIndexError, match=r"s0/128_0_128\.csv.*the index is empty"):
                labels[selection]
        # The other shards are read all the same.
        np.testing.assert_array_equal(labels[:64, :64, :128], sample_volume(0, "labels")[:64, :64, :128])

    def test_a_shard_without_an_index_is_read_and_reported(self, tmp_path: Path) -> None:
        files = sample_files()
        del files["s0/128_0_128.csv"]
        labels = self.labels(write_files(tmp_path, files))
        with pytest.warns(ExportWarning, match=r"s0/128_0_128\.arrow: the shard has no index"):
            found = labels[window_of_chunk((3, 0, 2))]
        np.testing.assert_array_equal(found, sample_volume(0, "labels")[window_of_chunk((3, 0, 2))])

    def test_a_broken_block_names_its_file_and_chunk(self, tmp_path: Path) -> None:
        files = sample_files(Dialect(raw_blocks=True, has_size=False, index="json"))
        chunk = make_chunks((3, 2, 2))[0]
        at = files["s0/128_128_128.arrow"].index(chunk.block)
        torn = bytearray(files["s0/128_128_128.arrow"])
        torn[at + 16 + 8 * len(chunk.table)] ^= 0xFF  # how many labels the first sub-block has
        files["s0/128_128_128.arrow"] = bytes(torn)
        labels = self.labels(write_files(tmp_path, files))
        with pytest.raises(BlockError, match=r"s0/128_128_128\.arrow, chunk \(3, 2, 2\) \(x, y, z\)"):
            labels[149, 129, 199]
