"""The Zarr codec `dvid_block`, in arrays and stores that have nothing to do with an export."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
import zstandard
from conftest import expected_sha256, volume_sha256
from exports import Dialect, make_chunk, make_chunks, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import naive_decode, naive_encode_libdvid
from sample import BOTH
from zarr.abc.store import Store
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.dtype import UInt64
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore

from zarr_dvid import BlockError, DvidBlockCodec, ReadOnlyError, RecordError
from zarr_dvid.codec import window_of

Voxels = npt.NDArray[np.uint64]


def volume(shape: tuple[int, ...], *, seed: int = 0) -> Voxels:
    """Lumps of a few labels with noise in them, and parts that are all of one."""
    rng = np.random.default_rng(seed)
    labels = np.array([0, 1, 2, 700, 2**40, 2**64 - 1], np.uint64)
    lumps = rng.choice(labels, [-(-side // 11) for side in shape])
    voxels = np.kron(lumps, np.ones((11,) * len(shape), np.uint64))[tuple(slice(side) for side in shape)]
    noisy = rng.random(shape) < 0.01
    voxels[noisy] = rng.choice(labels, np.count_nonzero(noisy))
    return voxels


def create(store: Store | None = None, **options: Any) -> zarr.Array[Any]:
    defaults: dict[str, Any] = {
        "shape": (64, 64, 64),
        "chunks": (64, 64, 64),
        "dtype": "uint64",
        "serializer": DvidBlockCodec(),
        "compressors": None,
    }
    return zarr.create_array(MemoryStore() if store is None else store, **(defaults | options))


def raw_chunk(array: zarr.Array[Any], key: str) -> bytes:
    data = sync(array.store.get(f"c/{key}", default_buffer_prototype()))
    assert data is not None
    return data.to_bytes()


def put_chunk(array: zarr.Array[Any], key: str, data: bytes) -> None:
    sync(array.store.set(f"c/{key}", default_buffer_prototype().buffer.from_bytes(data)))


def run_in_a_fresh_process(code: str, *arguments: object) -> str:
    """Runs Python that can't have zarr_dvid but by its entry points, and gives what it prints."""
    check = "import sys\nassert 'zarr_dvid' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", check + code, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestConfiguration:
    @pytest.mark.parametrize(
        ("configuration", "values", "framing"),
        [
            ({}, "supervoxels", "block"),
            ({"framing": "block"}, "supervoxels", "block"),
            ({"framing": "record"}, "labels", "record"),
            ({"values": "supervoxels"}, "supervoxels", "block"),
            ({"values": "supervoxels", "framing": "block"}, "supervoxels", "block"),
            ({"values": "labels", "framing": "record"}, "labels", "record"),
            ({"values": "supervoxels", "framing": "record"}, "supervoxels", "record"),
        ],
    )
    def test_json_round_trip(self, configuration: dict[str, Any], values: str, framing: str) -> None:
        codec = DvidBlockCodec(**configuration)
        assert (codec.values, codec.framing) == (values, framing)
        document = codec.to_dict()
        assert document == {"name": "dvid_block", "configuration": {"values": values, "framing": framing}}
        assert DvidBlockCodec.from_dict(json.loads(json.dumps(document))) == codec
        assert DvidBlockCodec.from_dict({"name": "dvid_block", "configuration": configuration}) == codec

    def test_metadata_may_leave_the_configuration_out(self) -> None:
        assert DvidBlockCodec.from_dict({"name": "dvid_block"}) == DvidBlockCodec()

    @pytest.mark.parametrize(
        "configuration",
        [
            {"values": "label"},
            {"values": 1},
            {"values": []},
            {"framing": "records"},
            {"framing": None},
            {"framing": {}},
            {"values": "labels"},
            {"values": "labels", "framing": "block"},
        ],
        ids=repr,
    )
    def test_others_are_refused(self, configuration: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"values must be|framing must be|a bare block holds supervoxels"):
            DvidBlockCodec(**configuration)
        with pytest.raises(ValueError, match=r"values must be|framing must be|a bare block holds supervoxels"):
            DvidBlockCodec.from_dict({"name": "dvid_block", "configuration": configuration})

    def test_unknown_options_are_refused(self) -> None:
        with pytest.raises((TypeError, ValueError), match="level"):
            DvidBlockCodec.from_dict({"name": "dvid_block", "configuration": {"level": 3}})

    def test_another_codecs_metadata_is_refused(self) -> None:
        with pytest.raises(ValueError, match="dvid_block"):
            DvidBlockCodec.from_dict({"name": "bytes", "configuration": {}})

    def test_it_is_a_value(self) -> None:
        codec = DvidBlockCodec(framing="record")
        assert codec == DvidBlockCodec(values="labels", framing="record") != DvidBlockCodec()
        assert len({codec, DvidBlockCodec(framing="record"), DvidBlockCodec()}) == 2
        assert pickle.loads(pickle.dumps(codec)) == copy.deepcopy(codec) == codec
        with pytest.raises(AttributeError):
            codec.values = "supervoxels"

    def test_zarr_finds_it_by_its_entry_point(self, tmp_path: Path) -> None:
        array = create(LocalStore(tmp_path))
        array[...] = volume(array.shape)
        code = """
import zarr
array = zarr.open_array(sys.argv[1], mode="r")
print(array.serializer.to_dict()["name"], int(array[...].sum()))
"""
        assert run_in_a_fresh_process(code, tmp_path) == f"dvid_block {int(volume(array.shape).sum())}\n"


class TestRefusedArrays:
    @pytest.mark.parametrize("dtype", ["uint32", "int64", "float64", "bool", ">u8"])
    def test_other_types(self, dtype: str) -> None:
        with pytest.raises(ValueError, match="dvid_block holds uint64 labels, not"):
            create(dtype=dtype)

    @pytest.mark.parametrize("n_axes", [1, 2, 4])
    def test_other_numbers_of_axes(self, n_axes: int) -> None:
        with pytest.raises(ValueError, match=f"holds three dimensions .z, y, x., not {n_axes}"):
            create(shape=(16,) * n_axes, chunks=(16,) * n_axes)

    @pytest.mark.parametrize("chunks", [(64, 64, 60), (4, 64, 64), (1, 64, 64), (64, 1032, 64)])
    def test_chunks_that_are_no_blocks(self, chunks: tuple[int, int, int]) -> None:
        with pytest.raises(ValueError, match="needs chunks of a multiple of 8 voxels, 8 to 1024"):
            create(shape=(2000, 2000, 2000), chunks=chunks)

    def test_inner_chunks_that_are_no_blocks(self) -> None:
        # Zarr 3.1 looks at what is inside of shards only when it writes them.
        with pytest.raises(ValueError, match="multiple of 8"):
            create(shape=(120, 120, 120), chunks=(60, 60, 60), shards=(120, 120, 120))[...] = 1


class TestBlocksInArrays:
    @pytest.mark.parametrize(
        "compressors", [None, "auto", zarr.codecs.ZstdCodec(level=1), zarr.codecs.GzipCodec()], ids=str
    )
    @pytest.mark.parametrize("in_memory", [True, False])
    def test_written_and_read_back(self, tmp_path: Path, compressors: Any, in_memory: bool) -> None:
        store = MemoryStore() if in_memory else LocalStore(tmp_path)
        array = create(store, shape=(100, 65, 130), compressors=compressors)
        voxels = volume(array.shape)
        array[...] = voxels
        again = zarr.open_array(store, mode="r")
        np.testing.assert_array_equal(again[...], voxels)
        np.testing.assert_array_equal(again[3:97:5, 64], voxels[3:97:5, 64])
        np.testing.assert_array_equal(
            again.oindex[[99, 0, 3], :, [129, 2]], voxels[np.ix_([99, 0, 3], range(65), [129, 2])]
        )

    @pytest.mark.parametrize("chunks", [(8, 8, 8), (8, 16, 128), (24, 40, 56), (64, 64, 64), (128, 128, 128)])
    def test_any_size_of_chunks(self, chunks: tuple[int, int, int]) -> None:
        array = create(shape=(130, 50, 140), chunks=chunks)
        voxels = volume(array.shape, seed=chunks[0])
        array[...] = voxels
        np.testing.assert_array_equal(array[...], voxels)
        np.testing.assert_array_equal(array[7:9, 15:17, 127:129], voxels[7:9, 15:17, 127:129])

    def test_chunks_are_bare_blocks_in_libdvids_order(self) -> None:
        array = create(shape=(64, 64, 128))
        voxels = volume(array.shape)
        array[...] = voxels
        for i, part in enumerate((voxels[..., :64], voxels[..., 64:])):
            assert raw_chunk(array, f"0/0/{i}") == naive_encode_libdvid(part)

    def test_a_chunk_at_the_edge_is_a_whole_block_padded_with_the_fill_value(self) -> None:
        array = create(shape=(70, 64, 64), fill_value=9)
        array[...] = volume(array.shape)
        padded = np.full((64, 64, 64), 9, np.uint64)
        padded[:6] = volume(array.shape)[64:]
        np.testing.assert_array_equal(naive_decode(raw_chunk(array, "1/0/0")), padded)

    @pytest.mark.parametrize("fill_value", [0, 7, 2**64 - 1])
    def test_absent_chunks_have_the_fill_value(self, fill_value: int) -> None:
        array = create(shape=(64, 64, 192), fill_value=fill_value)
        array[:, :, 70:80] = 3
        expected = np.full(array.shape, fill_value, np.uint64)
        expected[:, :, 70:80] = 3
        np.testing.assert_array_equal(array[...], expected)
        assert array.nchunks_initialized == 1
        assert array[0, 0, 0] == fill_value
        array[:, :, 70:80] = fill_value
        assert array.nchunks_initialized == 0  # Zarr writes no chunk that is all fill value

    @settings(max_examples=25)
    @given(data=st.data())
    def test_writing_parts_is_like_numpy(self, data: st.DataObject) -> None:
        array = create(shape=(30, 20, 40), chunks=(16, 8, 24), fill_value=data.draw(st.sampled_from([0, 5])))
        expected = np.full(array.shape, array.fill_value, np.uint64)
        for seed in range(data.draw(st.integers(1, 4))):
            window = tuple(slice(*sorted(data.draw(st.tuples(*[st.integers(0, side)] * 2)))) for side in array.shape)
            part = volume(tuple(s.stop - s.start for s in window), seed=seed) if data.draw(st.booleans()) else 8
            array[window] = part
            expected[window] = part
        np.testing.assert_array_equal(array[...], expected)

    @pytest.mark.parametrize("order", ["C", "F"])
    def test_any_order_in_memory(self, order: Any) -> None:
        array = create(shape=(50, 40, 30), chunks=(16, 24, 8), config={"order": order})
        voxels = volume(array.shape)
        array[...] = np.asarray(voxels, order=order)
        np.testing.assert_array_equal(array[...], voxels)

    def test_behind_a_transposition(self) -> None:
        array = create(shape=(50, 40, 30), chunks=(16, 24, 8), filters=[zarr.codecs.TransposeCodec(order=(2, 0, 1))])
        voxels = volume(array.shape)
        array[...] = voxels
        np.testing.assert_array_equal(array[...], voxels)
        assert naive_decode(raw_chunk(array, "0/0/0")).shape == (8, 16, 24)

    @pytest.mark.parametrize("compressors", [None, "auto"])
    def test_inside_of_shards(self, compressors: Any) -> None:
        array = create(shape=(100, 70, 90), chunks=(32, 16, 32), shards=(64, 64, 64), compressors=compressors)
        voxels = volume(array.shape)
        array[...] = voxels
        np.testing.assert_array_equal(array[...], voxels)
        np.testing.assert_array_equal(array[31:33, 5, ::7], voxels[31:33, 5, ::7])
        array[10:20, 10:20, 10:20] = 4
        voxels[10:20, 10:20, 10:20] = 4
        np.testing.assert_array_equal(zarr.open_array(array.store, mode="r")[...], voxels)

    def test_zarrs_own_conversions_apply(self) -> None:
        array = create(chunks=(8, 8, 8), shape=(8, 8, 8))
        array[0] = np.arange(64, dtype=np.int32).reshape(8, 8)
        assert array[0, 7, 7] == 63

    def test_dvids_own_blocks(self, shared_data: Path) -> None:
        entries = json.loads((shared_data / "blocks" / "valid" / "manifest.json").read_text())
        for entry in entries:
            if not entry["strict_ok"]:
                continue
            shape = tuple(entry["shape_zyx"])
            block = (shared_data / "blocks" / "valid" / f"{entry['name']}.block").read_bytes()
            array = create(shape=shape, chunks=shape)
            for stored in (block, zstandard.compress(block)):
                put_chunk(array, "0/0/0", stored)
                assert volume_sha256(np.asarray(array[...])) == entry["volume_sha256"], entry["name"]


class TestBrokenChunks:
    @pytest.mark.parametrize("selection", [..., (3, 4, 5), slice(0, 2)], ids=repr)
    @pytest.mark.parametrize(
        "damage",
        [
            lambda block: b"",
            lambda block: block[:-1],
            lambda block: block + b"\0",
            lambda block: b"\xff" * 100,
            lambda block: naive_encode_libdvid(np.ones((32, 32, 32), np.uint64)),
            lambda block: zstandard.compress(block)[:-5],
        ],
        ids=["empty", "cut", "longer", "garbage", "another size", "cut frame"],
    )
    def test_they_are_never_the_fill_value(self, damage: Callable[[bytes], bytes], selection: Any) -> None:
        array = create()
        put_chunk(array, "0/0/0", damage(naive_encode_libdvid(volume((64, 64, 64)))))
        with pytest.raises(BlockError):
            array[selection]

    def test_a_record_is_no_block_and_a_block_no_record(self) -> None:
        chunk = make_chunk((0, 0, 0))
        shard = write_shard([chunk])
        at, size, _ = shard.ranges[0]
        record = create(serializer=DvidBlockCodec(framing="record"))
        block = create()
        put_chunk(record, "0/0/0", chunk.block)
        put_chunk(block, "0/0/0", shard.arrow[at : at + size])
        with pytest.raises(RecordError):
            record[...]
        with pytest.raises(BlockError):
            block[...]


class TestRecords:
    def test_both_views_of_a_record(self) -> None:
        chunk = make_chunk((5, 6, 7))
        shard = write_shard([chunk])
        at, size, _ = shard.ranges[0]
        for values in BOTH:
            array = create(serializer=DvidBlockCodec(values=values, framing="record"))
            put_chunk(array, "0/0/0", shard.arrow[at : at + size])
            np.testing.assert_array_equal(array[...], chunk.voxels[values])
            np.testing.assert_array_equal(array[9, 3:60, ::7], chunk.voxels[values][9, 3:60, ::7])

    @pytest.mark.parametrize("values", BOTH)
    def test_they_are_not_written(self, values: Any) -> None:
        array = create(serializer=DvidBlockCodec(values=values, framing="record"))
        with pytest.raises(ReadOnlyError, match="can't encode records"):
            array[...] = 1
        assert array.nchunks_initialized == 0

    def test_a_batch_of_several_rows_is_refused(self) -> None:
        shard = write_shard(make_chunks((0, 0, 0), (1, 0, 0)), Dialect(rows_a_batch=2))
        at, size, _ = shard.ranges[0]
        array = create(serializer=DvidBlockCodec(framing="record"))
        put_chunk(array, "0/0/0", shard.arrow[at : at + size])
        with pytest.raises(RecordError, match="one record"):
            array[...]


class TestWindows:
    """What is decoded for a selection within a chunk."""

    @pytest.mark.parametrize(
        ("selection", "window"),
        [
            ((slice(None), slice(None), slice(None)), (slice(0, 64), slice(0, 64), slice(0, 64))),
            ((slice(3, 9), slice(0, 64), slice(5, 6)), (slice(3, 9), slice(0, 64), slice(5, 6))),
            ((slice(3, 9, 4), slice(0, 64), slice(5, 60, 9)), (slice(3, 8), slice(0, 64), slice(5, 60))),
            ((4, np.int64(5), slice(1, 2)), (slice(4, 5), slice(5, 6), slice(1, 2))),
            ((np.array([7, 3, 3]), slice(0, 1), np.array([[63]])), (slice(3, 8), slice(0, 1), slice(63, 64))),
            ((slice(5, 5), slice(0, 1), slice(0, 1)), (slice(0, 0), slice(0, 1), slice(0, 1))),
            ((np.array([], int), slice(0, 1), slice(0, 1)), (slice(0, 0), slice(0, 1), slice(0, 1))),
            ((slice(9, 3, -2), slice(0, 1), slice(0, 1)), (slice(5, 10), slice(0, 1), slice(0, 1))),
        ],
        ids=repr,
    )
    def test_the_smallest_that_holds_it(self, selection: tuple[Any, ...], window: tuple[slice, ...]) -> None:
        assert window_of(selection, (64, 64, 64)) == window

    @pytest.mark.parametrize(
        "selection",
        [
            (slice(None),),
            (Ellipsis, 0, 0),
            (np.zeros(64, bool), slice(None), slice(None)),
            (np.array([-1]), slice(None), slice(None)),
            (np.array([64]), slice(None), slice(None)),
            (-1, 0, 0),
            (64, 0, 0),
            (0.5, 0, 0),
        ],
        ids=repr,
    )
    def test_other_selections_take_the_whole_chunk(self, selection: tuple[Any, ...]) -> None:
        assert window_of(selection, (64, 64, 64)) is None

    @settings(max_examples=60)
    @given(data=st.data())
    def test_partial_decoding_is_decoding_and_selecting(self, data: st.DataObject) -> None:
        shape = (16, 24, 8)
        voxels = volume(shape)
        spec = ArraySpec(
            shape, UInt64(), np.uint64(0), ArrayConfig(order="C", write_empty_chunks=True), default_buffer_prototype()
        )
        block = spec.prototype.buffer.from_bytes(naive_encode_libdvid(voxels))

        def part(size: int) -> st.SearchStrategy[Any]:
            bound = st.none() | st.integers(-size, size)
            steps = st.integers(-5, 5).filter(bool)
            return st.integers(0, size - 1) | st.builds(slice, bound, bound, st.none() | steps)

        whole_mask = st.sampled_from([voxels == 1, voxels == voxels])
        indices = st.lists(st.tuples(*(st.integers(0, side - 1) for side in shape)), min_size=1).map(
            lambda points: tuple(np.array(points).T)
        )
        selection = data.draw(st.tuples(*map(part, shape)) | whole_mask | indices | part(shape[0]))
        found = DvidBlockCodec()._decode_selection(block, selection, spec).as_numpy_array()
        np.testing.assert_array_equal(found, voxels[selection])


def references(chunks: dict[tuple[int, ...], tuple[str, int, int]], values: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """A kerchunk document (version 1, Zarr v3 keys) whose chunks are ranges of files."""
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "uint64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [64, 64, 64]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "dvid_block", "configuration": {"values": values, "framing": "record"}}],
        "attributes": {},
    }
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    refs: dict[str, Any] = {"zarr.json": json.dumps(group), f"{values}/zarr.json": json.dumps(document)}
    for (x, y, z), place in chunks.items():
        refs[f"{values}/c/{z}/{y}/{x}"] = list(place)
    return {"version": 1, "refs": refs}


READ_REFERENCES = """
import hashlib, json
import zarr
array = zarr.open_group("reference://", mode="r", storage_options={"fo": sys.argv[1]})[sys.argv[2]]
for x, y, z in json.loads(sys.argv[3]):
    voxels = array[64 * z : 64 * z + 64, 64 * y : 64 * y + 64, 64 * x : 64 * x + 64]
    print(hashlib.sha256(voxels.tobytes()).hexdigest())
"""


class TestReferences:
    """Chunks of a reference filesystem that point straight into a shard; no code of ours opens anything."""

    @pytest.mark.parametrize("values", BOTH)
    def test_to_a_synthetic_shard(self, tmp_path: Path, values: Any) -> None:
        chunks = make_chunks((0, 0, 0), (1, 0, 2), (2, 1, 1))
        shard = write_shard(chunks)
        path = tmp_path / "0_0_0.arrow"
        path.write_bytes(shard.arrow)
        places = {c.xyz: (str(path), at, size) for c, (at, size, _) in zip(chunks, shard.ranges, strict=True)}
        (tmp_path / "refs.json").write_text(json.dumps(references(places, values, (192, 128, 192))))
        asked = [*(chunk.xyz for chunk in chunks), (0, 1, 0)]
        lines = run_in_a_fresh_process(READ_REFERENCES, tmp_path / "refs.json", values, json.dumps(asked)).split()
        absent = np.zeros((64, 64, 64), np.uint64)
        assert lines == [volume_sha256(v) for v in (*(chunk.voxels[values] for chunk in chunks), absent)]

    def test_to_the_real_shard(self, tmp_path: Path, shared_data: Path) -> None:
        folder = shared_data / "mcns"
        [path] = (folder / "export" / "s1").glob("*.arrow")
        [index] = folder.glob("*-newformat.csv")
        rows = [tuple(map(int, line.split(","))) for line in index.read_text().splitlines()[2:]]
        places = {(x, y, z): (str(path), at, size) for x, y, z, at, size, _ in rows}
        expected = expected_sha256(folder, "s1")
        assert places.keys() == expected.keys()
        (tmp_path / "refs.json").write_text(json.dumps(references(places, "labels", (67288, 39159, 47044))))
        asked = sorted(places)[::20]
        lines = run_in_a_fresh_process(READ_REFERENCES, tmp_path / "refs.json", "labels", json.dumps(asked)).split()
        assert lines == [expected[xyz]["labels"] for xyz in asked]
