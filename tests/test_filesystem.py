"""The fsspec filesystem `dvid`: as files, chained over others, under Zarr."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import zarr
import zstandard
from exports import Dialect, make_chunk, make_chunks, moved, volume_info, write_shard
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from sample import BOTH, CHUNKS, INFO, SHAPES, SHARDS, sample_files, sample_volume, shard_path, window_of_chunk, write_files
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from zarr_dvid import (
    DvidFileSystem,
    DvidStore,
    ExportError,
    MissingFileError,
    ReadOnlyError,
    ShardError,
    ShardIndexError,
    ZarrDvidError,
)

FILES = sample_files() | {"info": json.dumps(INFO).encode()}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("filesystem") / "sample", FILES)


@pytest.fixture(scope="module")
def in_memory() -> Iterator[str]:
    """The export in fsspec's memory filesystem."""
    memory = fsspec.filesystem("memory")
    for name, data in FILES.items():
        memory.pipe(f"/test-filesystem/sample/{name}", data)
    yield "test-filesystem/sample"
    memory.rm("/test-filesystem", recursive=True)


class SlowMemoryFileSystem(MemoryFileSystem):
    """Memory whose files take a moment to download."""

    protocol = "slowmemory"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped = MemoryFileSystem._strip_protocol(path.removeprefix("slowmemory://"))
        assert isinstance(stripped, str)
        return stripped

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        data = self.cat_file(rpath)
        with Path(lpath).open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            time.sleep(0.02)
            file.write(data[len(data) // 2 :])


@pytest.fixture
def fs(export: Path) -> DvidFileSystem:
    return DvidFileSystem(str(export))


@pytest.fixture(scope="module")
def keys(export: Path) -> list[str]:
    return sorted(DvidStore(export).hierarchy.keys())


def chunk_key(level: int, values: str, chunk_xyz: tuple[int, int, int]) -> str:
    x, y, z = chunk_xyz
    return f"s{level}/{values}/c/{z}/{y}/{x}"


def array_of(node: Any) -> zarr.Array[Any]:
    assert isinstance(node, zarr.Array)
    return node


PRESENT, ABSENT = "s0/labels/c/0/0/0", "s0/labels/c/0/1/0"


class TestUrls:
    @pytest.fixture(
        params=[
            "dvid::file://{path}",
            "dvid::local://{path}",
            "dvid::{path}",
            "dvid://{path}",
            "dvid://::file://{path}",
            "dvid::memory://{memory}",
            "dvid::simplecache::memory://{memory}",
        ]
    )
    def url(self, request: pytest.FixtureRequest, export: Path, in_memory: str) -> str:
        url = request.param.format(path=export, memory=in_memory)
        assert isinstance(url, str)
        return url

    def test_zarr_opens_them(self, url: str) -> None:
        root = zarr.open(url, mode="r")
        assert isinstance(root, zarr.Group)
        for level in SHAPES:
            for values in BOTH:
                np.testing.assert_array_equal(array_of(root[f"s{level}/{values}"])[...], sample_volume(level, values))

    def test_a_cache_that_is_being_filled(self, in_memory: str, tmp_path: Path) -> None:
        # While one thread downloads a shard, others want chunks of it.
        fsspec.register_implementation("slowmemory", SlowMemoryFileSystem, clobber=True)
        for i in range(3):
            options = {"simplecache": {"cache_storage": str(tmp_path / str(i))}}
            root = zarr.open_group(f"dvid::simplecache::slowmemory://{in_memory}", mode="r", storage_options=options)
            np.testing.assert_array_equal(array_of(root["s0/labels"])[...], sample_volume(0, "labels"))

    def test_fsspec_opens_files(self, url: str) -> None:
        if not url.startswith("dvid::"):
            pytest.skip("names a root, not a file")
        inside = url.removeprefix("dvid::")
        with fsspec.open(f"dvid://zarr.json::{inside}", "rt") as file:
            assert json.load(file)["node_type"] == "group"
        with fsspec.open(f"dvid://{PRESENT}::{inside}") as file:
            head = file.read(4)
            file.seek(-3, 2)
            assert head == b"\xff\xff\xff\xff"
            assert len(file.read()) == 3

    def test_a_mapper(self, url: str) -> None:
        mapper = fsspec.get_mapper(url)
        assert json.loads(mapper["s0/zarr.json"])["node_type"] == "group"
        assert PRESENT in mapper
        assert ABSENT not in mapper
        with pytest.raises(KeyError):
            mapper[ABSENT]
        root = zarr.open_group(mapper, mode="r")
        np.testing.assert_array_equal(array_of(root["s1/labels"])[...], sample_volume(1, "labels"))

    @pytest.mark.parametrize("path", ["s0", "s0/", "s1/labels", "s0/z"])
    def test_a_part_of_the_hierarchy(self, export: Path, path: str) -> None:
        node = zarr.open(f"dvid://{path}::file://{export}", mode="r")
        if path in ("s0", "s0/"):
            assert isinstance(node, zarr.Group)
            np.testing.assert_array_equal(array_of(node["labels"])[...], sample_volume(0, "labels"))
        else:
            assert array_of(node).shape == (SHAPES[1] if path == "s1/labels" else (150,))

    def test_paths_with_spaces_and_signs(self, tmp_path: Path) -> None:
        folder = write_files(tmp_path / "an export, 100% of it", FILES)
        for url in (f"dvid::file://{folder}", f"dvid://{folder}"):
            assert array_of(zarr.open_group(url, mode="r")["s0/labels"])[0, 0, 0] == sample_volume(0, "labels")[0, 0, 0]

    def test_options_by_protocol(self, export: Path, tmp_path: Path, in_memory: str) -> None:
        (tmp_path / "spec").write_text(json.dumps(volume_info((200, 130, 100), n_scales=2)))
        options = {"dvid": {"info": str(tmp_path / "spec"), "voxel_size": [40, 4, 4]}, "file": {"auto_mkdir": False}}
        root = zarr.open_group(f"dvid::file://{export}", mode="r", storage_options=options)
        assert array_of(root["s0/labels"]).shape == (100, 130, 200)
        assert array_of(root["s0/z"])[1] == 40
        cache = tmp_path / "cache"
        options = {"simplecache": {"cache_storage": str(cache)}}
        fs, _ = url_to_fs(f"dvid::simplecache::memory://{in_memory}", **options)
        assert fs.cat(PRESENT)
        assert any(cache.iterdir())

    @pytest.mark.parametrize("url", ["dvid://", "dvid://s0"])
    def test_a_url_that_names_no_export_is_refused(self, url: str) -> None:
        with pytest.raises(ExportError, match="names no export"):
            zarr.open(url, mode="r")

    @pytest.mark.parametrize(
        "url", ["dvid:///nowhere", "dvid::file:///nowhere", "dvid::memory://nowhere", "dvid::simplecache::memory://nowhere"]
    )
    def test_an_export_that_is_not_there_is_refused(self, url: str) -> None:
        with pytest.raises(ExportError, match="there is no export here"):
            zarr.open(url, mode="r")
        with pytest.raises(ExportError, match="there is no export here"):
            fsspec.get_mapper(url)["zarr.json"]


class TestFiles:
    def test_ls(self, fs: DvidFileSystem) -> None:
        assert fs.ls("", detail=False) == ["zarr.json", "s0", "s1"]
        assert fs.ls("s1", detail=False) == [f"s1/{name}" for name in ("zarr.json", *BOTH, "z", "y", "x")]
        assert fs.ls("s1/labels/c/", detail=False) == ["s1/labels/c/0", "s1/labels/c/1"]
        assert fs.ls("s1/labels/c/0/1", detail=False) == ["s1/labels/c/0/1/1"]
        [entry] = fs.ls("s1/labels/c/0/1")
        assert entry == {"name": "s1/labels/c/0/1/1", "size": len(fs.cat(entry["name"])), "type": "file"}
        assert fs.ls("s1/labels/c/0/1/1", detail=False) == ["s1/labels/c/0/1/1"]
        assert {entry["name"]: entry["type"] for entry in fs.ls("")} == {
            "zarr.json": "file",
            "s0": "directory",
            "s1": "directory",
        }
        for path in (ABSENT, "s0/labels/c/9", "s2", "foo", "s0/labels/c/0/0/0/0"):
            with pytest.raises(FileNotFoundError):
                fs.ls(path)

    def test_every_key_is_a_file(self, fs: DvidFileSystem, keys: list[str]) -> None:
        assert fs.find("") == keys
        assert fs.find("/") == keys
        details = fs.find("", detail=True)
        for key in keys:
            data = fs.cat_file(key)
            assert details[key] == fs.info(key) == {"name": key, "size": len(data), "type": "file"}
            assert fs.exists(key)
            assert fs.isfile(key)
            assert not fs.isdir(key)
            assert fs.size(key) == len(data)

    @pytest.mark.parametrize(
        "path",
        ["", "s0", "s0/labels", "s0/labels/c", "s0/labels/c/1", "s0/labels/c/1/1", "s1/x", "s1/x/c", "/s0/", "dvid://s0"],
    )
    def test_directories(self, fs: DvidFileSystem, path: str) -> None:
        assert fs.exists(path)
        assert fs.isdir(path)
        assert not fs.isfile(path)
        assert fs.info(path)["type"] == "directory"

    @pytest.mark.parametrize(
        "path", [ABSENT, "foo", "s2", "s0/foo", "s0/labels/c/9", "s0/labels/c/0/0/9", ".zgroup", "s0_0_0.arrow", "info"]
    )
    def test_what_is_not_there(self, fs: DvidFileSystem, path: str) -> None:
        assert not fs.exists(path)
        assert not fs.isdir(path)
        assert not fs.isfile(path)
        for ask in (fs.info, fs.cat_file, fs.open, fs.size):
            with pytest.raises(FileNotFoundError):
                ask(path)

    @pytest.mark.parametrize("path", ["", "s0", "s0/labels/c/1"])
    def test_a_directory_has_no_bytes(self, fs: DvidFileSystem, path: str) -> None:
        with pytest.raises((FileNotFoundError, IsADirectoryError)):
            fs.cat_file(path)

    def test_find_below_a_directory(self, fs: DvidFileSystem, keys: list[str]) -> None:
        for path in ("s0", "s0/labels", "s0/labels/c", "s0/labels/c/1", "s1/z"):
            assert fs.find(path) == [key for key in keys if key.startswith(f"{path}/")]
        assert fs.find("s0", maxdepth=1) == ["s0/zarr.json"]
        assert fs.find("foo") == []
        with_directories = fs.find("s1/labels/c", withdirs=True)
        assert set(with_directories) == {key for key in keys if key.startswith("s1/labels/c")} | {
            f"s1/labels/c{part}" for part in ("", "/0", "/1", "/0/0", "/0/1", "/1/0")
        }

    def test_find_of_a_file_is_that_file(self, tmp_path: Path) -> None:
        chunk = make_chunk((1, 0, 0))
        shard = write_shard([chunk, moved(chunk, (10, 0, 0)), moved(chunk, (11, 0, 0))])
        fs = DvidFileSystem(str(write_files(tmp_path, shard.files())))
        assert fs.find("s0/labels/c/0/0/1") == ["s0/labels/c/0/0/1"]
        assert fs.du("s0/labels/c/0/0/1") == len(fs.cat_file("s0/labels/c/0/0/1"))

    def test_glob(self, fs: DvidFileSystem, keys: list[str]) -> None:
        assert fs.glob("*/zarr.json") == ["s0/zarr.json", "s1/zarr.json"]
        assert fs.glob("s0/labels/c/1/*/1") == [key for key in keys if key in {f"s0/labels/c/1/{y}/1" for y in range(3)}]
        assert set(keys) < set(fs.glob("**"))

    def test_walk(self, fs: DvidFileSystem, keys: list[str]) -> None:
        found = [f"{root}/{name}" if root else name for root, _, names in fs.walk("") for name in names]
        assert sorted(found) == keys
        root, directories, files = next(fs.walk("s1"))
        assert (root, sorted(directories), files) == ("s1", sorted([*BOTH, "z", "y", "x"]), ["zarr.json"])

    def test_du(self, fs: DvidFileSystem, keys: list[str]) -> None:
        sizes = {key: len(fs.cat_file(key)) for key in keys}
        assert fs.du("") == sum(sizes.values())
        assert fs.du("s1/labels", total=False) == {key: size for key, size in sizes.items() if key.startswith("s1/labels/")}

    def test_open(self, fs: DvidFileSystem) -> None:
        whole = fs.cat_file(PRESENT)
        with fs.open(PRESENT) as file:
            assert file.read() == whole
            file.seek(10)
            assert file.read(5) == whole[10:15]
            assert file.tell() == 15
        with fs.open("zarr.json", "r") as file:
            assert json.load(file)["zarr_format"] == 3
        assert fs.head(PRESENT, 7) == whole[:7]
        assert fs.tail(PRESENT, 7) == whole[-7:]
        assert fs.read_block(PRESENT, 3, 9) == whole[3:12]
        assert json.loads(fs.read_text("s0/zarr.json"))["node_type"] == "group"

    def test_copies_to_local_files(self, fs: DvidFileSystem, keys: list[str], tmp_path: Path) -> None:
        fs.get("s1/", str(tmp_path / "copy"), recursive=True)
        copied = {
            str(path.relative_to(tmp_path / "copy")): path.read_bytes()
            for path in (tmp_path / "copy").rglob("*")
            if path.is_file()
        }
        assert copied == {key.removeprefix("s1/"): fs.cat_file(key) for key in keys if key.startswith("s1/")}
        group = zarr.open_group(tmp_path / "copy", mode="r")
        np.testing.assert_array_equal(array_of(group["labels"])[...], sample_volume(1, "labels"))


class TestCat:
    @pytest.mark.parametrize(
        ("start", "end"), [(None, None), (0, 4), (3, None), (None, 8), (-8, None), (4, -4), (7, 7), (0, 10**9)]
    )
    def test_a_part_of_a_file(self, fs: DvidFileSystem, start: int | None, end: int | None) -> None:
        for key in ("zarr.json", "s0/y/c/0", PRESENT):
            whole = bytes(fs.cat_file(key))
            assert fs.cat_file(key, start=start, end=end) == whole[start:end]
            assert fs.cat_ranges([key], [start], [end]) == [whole[start:end]]

    def test_many(self, fs: DvidFileSystem, keys: list[str]) -> None:
        assert fs.cat(keys) == {key: fs.cat_file(key) for key in keys}
        assert fs.cat("*/z/zarr.json") == {key: fs.cat_file(key) for key in ("s0/z/zarr.json", "s1/z/zarr.json")}
        assert fs.cat_ranges(["zarr.json", "s0/zarr.json"], 0, 1) == [b"{", b"{"]

    @pytest.mark.parametrize("missing", [ABSENT, "foo"])
    def test_on_error(self, fs: DvidFileSystem, missing: str) -> None:
        some = ["zarr.json", missing, PRESENT]
        with pytest.raises(FileNotFoundError):
            fs.cat(some, on_error="raise")
        assert fs.cat(some, on_error="omit").keys() == {"zarr.json", PRESENT}
        assert isinstance(fs.cat(some, on_error="return")[missing], FileNotFoundError)
        with pytest.raises(FileNotFoundError):
            fs.cat_ranges(some, [0, 0, 0], [4, 4, 4], on_error="raise")
        first, second, third = fs.cat_ranges(some, [0, 0, 0], [1, 4, 4], on_error="return")
        assert (first, third) == (b"{", b"\xff\xff\xff\xff")
        assert isinstance(second, FileNotFoundError)


class TestPayloads:
    def test_values_are_those_of_the_store(self, fs: DvidFileSystem, export: Path, keys: list[str]) -> None:
        store = DvidStore(export)
        for key in keys:
            value = sync(store.get(key, default_buffer_prototype()))
            assert value is not None
            assert fs.cat_file(key) == value.to_bytes()

    def test_a_record_of_its_own_message_is_the_bytes_of_the_file(self, fs: DvidFileSystem) -> None:
        for (level, _), chunks in SHARDS.items():
            shard = write_shard(make_chunks(*chunks, seed=level))
            for xyz, (at, size, _) in zip(chunks, shard.ranges, strict=True):
                data = FILES[shard_path(level, xyz)][at : at + size]
                for values in BOTH:
                    assert fs.cat_file(chunk_key(level, values, xyz)) == data

    @pytest.mark.parametrize(
        "dialect",
        [
            Dialect(),
            Dialect(rows_a_batch=2),
            Dialect(rows_a_batch=100, body_compression="zstd"),
            Dialect(raw_blocks=True, has_size=False, index="json", has_end_mark=False),
            Dialect(raw_blocks=True, rows_a_batch=3, index="footer"),
        ],
        ids=["one row", "two rows", "compressed bodies", "raw blocks", "raw, three rows"],
    )
    def test_every_value_is_a_message_of_one_row_that_pyarrow_reads(self, tmp_path: Path, dialect: Dialect) -> None:
        fs = DvidFileSystem(str(write_files(tmp_path, sample_files(dialect) | {"info": FILES["info"]})))
        full = Dialect().schema()
        for chunk in make_chunks(*CHUNKS[0]):
            data = fs.cat_file(chunk_key(0, "labels", chunk.xyz))
            schema = full
            if not dialect.has_size and dialect.rows_a_batch == 1:
                schema = pa.schema(list(full)[:-1])  # as it stands in the file
            batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
            batch.validate(full=True)
            [row] = batch.to_pylist()
            assert tuple(row[f"chunk_{axis}"] for axis in "xyz") == chunk.xyz
            assert tuple(row["labels"]) == chunk.labels
            assert tuple(row["supervoxels"]) == chunk.table
            assert row.get("uncompressed_size", len(chunk.block)) == len(chunk.block)
            stored = row["dvid_compressed_block"]
            assert stored == chunk.block if dialect.raw_blocks else stored[:4] == b"\x28\xb5\x2f\xfd"
            assert len(data) % 8 == 0

    def test_the_real_shard_with_100_rows_a_batch(self, shared_data: Path) -> None:
        one = DvidFileSystem(str(shared_data / "mcns" / "reexport-head"))
        many = DvidFileSystem(str(shared_data / "exports" / "batch-100-rows"))
        keys = one.find("s1/supervoxels/c")
        assert len(keys) == 258
        assert many.find("s1/supervoxels/c") == keys
        for key in keys[::17]:
            expected, found = (
                pa.ipc.read_record_batch(pa.py_buffer(fs.cat_file(key)), Dialect().schema()).to_pylist()
                for fs in (one, many)
            )
            assert len(expected) == len(found) == 1
            for row in (*expected, *found):
                del row["labels"]  # only one of the two servers had the mapping
                row["dvid_compressed_block"] = zstandard.decompress(row["dvid_compressed_block"], max_output_size=1 << 22)
            assert found == expected


class TestBroken:
    """Zarr takes FileNotFoundError for its fill value, so nothing that is broken may raise it."""

    @pytest.fixture(params=["filesystem", "mapper", "memory", "simplecache"])
    def opened(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[tuple[zarr.Array[Any], Callable[[str], None]]]:
        """An array over a copy of the export, and what deletes a file of that."""
        if request.param in ("filesystem", "mapper"):
            folder = write_files(tmp_path, FILES)
            url = f"dvid::file://{folder}"
            target: Any = fsspec.get_mapper(url) if request.param == "mapper" else url
            yield array_of(zarr.open_group(target, mode="r")["s0/labels"]), lambda path: (folder / path).unlink()
            return
        memory = MemoryFileSystem()
        for name, data in FILES.items():
            memory.pipe(f"{tmp_path}/{name}", data)  # a path of its own, since simplecache keeps what it has seen
        chain = "simplecache::" if request.param == "simplecache" else ""
        yield (
            array_of(zarr.open_group(f"dvid::{chain}memory://{tmp_path}", mode="r")["s0/labels"]),
            lambda path: memory.rm(f"{tmp_path}/{path}"),
        )
        memory.rm(str(tmp_path), recursive=True)

    def test_a_shard_deleted_after_opening_is_not_zeros(
        self, opened: tuple[zarr.Array[Any], Callable[[str], None]], request: pytest.FixtureRequest
    ) -> None:
        array, delete = opened
        delete(shard_path(0, (3, 0, 2)))
        with pytest.raises((ShardError, ShardIndexError)) as caught:
            array[window_of_chunk((3, 0, 2))]
        assert shard_path(0, (3, 0, 2)) in str(caught.value)
        assert not isinstance(caught.value, FileNotFoundError)

    def test_a_shard_deleted_after_reading_is_not_zeros(
        self, opened: tuple[zarr.Array[Any], Callable[[str], None]], request: pytest.FixtureRequest
    ) -> None:
        array, delete = opened
        window = window_of_chunk((3, 0, 2))
        np.testing.assert_array_equal(array[window], sample_volume(0, "labels")[window])
        delete(shard_path(0, (3, 0, 2)))
        if "simplecache" in request.node.name:  # which holds the file still
            np.testing.assert_array_equal(array[window], sample_volume(0, "labels")[window])
            return
        with pytest.raises(MissingFileError) as caught:
            array[window]
        assert (caught.value.path, caught.value.chunk_xyz) == (shard_path(0, (3, 0, 2)), (3, 0, 2))

    def test_an_index_deleted_is_not_zeros(self, opened: tuple[zarr.Array[Any], Callable[[str], None]]) -> None:
        array, delete = opened
        delete(shard_path(0, (3, 0, 2)).replace(".arrow", ".csv"))
        for chunk_xyz in ((3, 0, 2), (2, 0, 2)):  # one that it has, and one that only it could say is absent
            with pytest.raises(ZarrDvidError) as caught:
                array[window_of_chunk(chunk_xyz)]
            assert "s0/128_0_128.csv" in str(caught.value)

    def test_whether_a_chunk_exists_is_no_no_where_nobody_knows(self, tmp_path: Path) -> None:
        files = FILES | {"s0/128_0_128.csv": b""}
        fs = DvidFileSystem(str(write_files(tmp_path, files)))
        for ask in (fs.exists, fs.info, fs.cat_file):
            with pytest.raises(ShardIndexError, match="the index is empty"):
                ask(chunk_key(0, "labels", (2, 0, 2)))
        with pytest.raises(ShardIndexError, match="the index is empty"):
            chunk_key(0, "labels", (3, 0, 2)) in fs.get_mapper("")  # noqa: B015 - asking is what raises


WRITES: dict[str, Callable[[Any, Path], Any]] = {
    "pipe": lambda fs, _: fs.pipe({"a": b"1", "b": b"2"}),
    "pipe_file": lambda fs, _: fs.pipe_file("zarr.json", b"1"),
    "write_bytes": lambda fs, _: fs.write_bytes("a", b"1"),
    "write_text": lambda fs, _: fs.write_text("a", "1"),
    "put": lambda fs, path: fs.put(str(path), "a"),
    "put_file": lambda fs, path: fs.put_file(str(path), "a"),
    "upload": lambda fs, path: fs.upload(str(path), "a"),
    "cp_file": lambda fs, _: fs.cp_file("zarr.json", "a"),
    "copy": lambda fs, _: fs.copy("zarr.json", "a"),
    "mv": lambda fs, _: fs.mv("zarr.json", "a"),
    "move": lambda fs, _: fs.move("zarr.json", "a"),
    "rename": lambda fs, _: fs.rename("zarr.json", "a"),
    "rm": lambda fs, _: fs.rm("s0", recursive=True),
    "rm_file": lambda fs, _: fs.rm_file("zarr.json"),
    "delete": lambda fs, _: fs.delete("zarr.json"),
    "mkdir": lambda fs, _: fs.mkdir("a"),
    "makedirs": lambda fs, _: fs.makedirs("a"),
    "rmdir": lambda fs, _: fs.rmdir("s0"),
    "touch": lambda fs, _: fs.touch("a"),
    "open wb": lambda fs, _: fs.open("a", "wb"),
    "open ab": lambda fs, _: fs.open("zarr.json", "ab"),
    "open xb": lambda fs, _: fs.open("a", "xb"),
    "open r+b": lambda fs, _: fs.open("zarr.json", "r+b"),
    "open w": lambda fs, _: fs.open("a", "w"),
    "mapper": lambda fs, _: fs.get_mapper("").__setitem__("a", b"1"),
    "mapper clear": lambda fs, _: fs.get_mapper("").clear(),
}


class TestReadOnly:
    @pytest.mark.parametrize("name", WRITES)
    def test_writing_is_refused(self, fs: DvidFileSystem, export: Path, name: str) -> None:
        before = sorted(path for path in export.rglob("*"))
        if name == "mapper clear":
            # fsspec's mapping takes any error for success here.
            WRITES[name](fs, export / "info")
        else:
            with pytest.raises(ReadOnlyError, match="an export can't be written to"):
                WRITES[name](fs, export / "info")
        assert sorted(path for path in export.rglob("*")) == before
        assert (export / "info").read_bytes() == FILES["info"]

    def test_zarr_can_not_write(self, export: Path) -> None:
        url = f"dvid::file://{export}"
        array = array_of(zarr.open_group(url, mode="r")["s1/labels"])
        with pytest.raises((ReadOnlyError, ValueError), match=r"read.only|can't"):
            array[0, 0, 0] = 1
        with pytest.raises((ReadOnlyError, ValueError), match=r"read.only|can't"):
            zarr.open_group(url, mode="a").create_group("a")


class TestIdentity:
    def test_pickling(self, export: Path) -> None:
        fs = DvidFileSystem(str(export), voxel_size=(8, 8, 8))
        fs.cat_file(PRESENT)
        data = pickle.dumps(fs)
        assert len(data) < 400
        twin = pickle.loads(data)
        assert twin == fs
        assert twin.cat_file(PRESENT) == fs.cat_file(PRESENT)

    def test_json(self, export: Path) -> None:
        fs, _ = url_to_fs(f"dvid::file://{export}")
        twin = fsspec.AbstractFileSystem.from_json(fs.to_json())
        assert isinstance(twin, DvidFileSystem)
        assert twin.cat_file(PRESENT) == fs.cat_file(PRESENT)

    def test_pickled_arrays_read_the_same(self, export: Path, in_memory: str) -> None:
        for url in (f"dvid::file://{export}", f"dvid::memory://{in_memory}"):
            array = array_of(zarr.open_group(url, mode="r")["s1/supervoxels"])
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(array))[...], sample_volume(1, "supervoxels"))

    def test_making_one_looks_at_nothing(self) -> None:
        fs = DvidFileSystem("/nowhere/at/all", info="/nowhere/info")
        with pytest.raises(FileNotFoundError):
            fs.cat_file(".zgroup")
        with pytest.raises(ExportError):
            fs.exists("zarr.json")

    def test_credentials_are_not_told(self) -> None:
        fs = DvidFileSystem("bucket/export", target_protocol="s3", target_options={"key": "AKIA", "secret": "hush"})
        assert "hush" not in repr(fs)
        with pytest.raises(ReadOnlyError) as caught:
            fs.rm("zarr.json")
        assert "hush" not in str(caught.value)

    def test_an_export_into_the_same_directory_is_seen(self, tmp_path: Path) -> None:
        one, other = (write_shard(make_chunks((0, 0, 0), (1, 0, 0), seed=seed)) for seed in (0, 1))
        for seed, shard in enumerate((one, other)):
            write_files(tmp_path, shard.files())
            found = array_of(zarr.open_group(f"dvid::file://{tmp_path}", mode="r")["s0/labels"])[:, :, :64]
            np.testing.assert_array_equal(found, make_chunk((0, 0, 0), seed=seed).voxels["labels"])

    def test_it_is_registered(self) -> None:
        assert fsspec.get_filesystem_class("dvid") is DvidFileSystem
        assert not issubclass(DvidFileSystem, AsyncFileSystem)
