"""The numcodecs codec `dvid_block`: by itself, in Zarr v2 arrays, in v2 references."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zstandard
from exports import make_chunk, make_chunks, write_shard
from naive import naive_decode, naive_encode_libdvid
from sample import BOTH
from test_codec import run_in_a_fresh_process, volume
from zarr.storage import LocalStore, MemoryStore

from zarr_dvid import BlockError, ReadOnlyError, RecordError
from zarr_dvid.numcodec import DvidBlock


def create(**options: Any) -> zarr.Array[Any]:
    defaults: dict[str, Any] = {
        "store": MemoryStore(),
        "shape": (100, 65, 130),
        "chunks": (64, 64, 64),
        "dtype": "uint64",
        "compressors": DvidBlock(),
        "zarr_format": 2,
    }
    return zarr.create_array(**(defaults | options))


class TestConfiguration:
    @pytest.mark.parametrize(
        ("given", "values", "framing"),
        [
            ({}, "supervoxels", "block"),
            ({"framing": "record"}, "labels", "record"),
            ({"values": "supervoxels", "framing": "record"}, "supervoxels", "record"),
        ],
    )
    def test_round_trip(self, given: dict[str, Any], values: str, framing: str) -> None:
        codec = numcodecs.get_codec({"id": "dvid_block", **given})
        assert isinstance(codec, DvidBlock)
        assert codec.get_config() == {"id": "dvid_block", "values": values, "framing": framing}
        twin = numcodecs.get_codec(json.loads(json.dumps(codec.get_config())))
        assert twin == codec == DvidBlock(**given) == pickle.loads(pickle.dumps(codec))
        assert (codec == DvidBlock()) is (given == {})

    @pytest.mark.parametrize(
        "given", [{"values": "x"}, {"framing": "x"}, {"values": "labels"}, {"values": "labels", "framing": "block"}]
    )
    def test_others_are_refused(self, given: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"values must be|framing must be|a bare block holds supervoxels"):
            DvidBlock(**given)

    def test_numcodecs_finds_it_by_its_entry_point(self) -> None:
        code = "import numcodecs\nprint(numcodecs.get_codec({'id': 'dvid_block'}).get_config()['framing'])"
        assert run_in_a_fresh_process(code) == "block\n"


class TestAlone:
    SHAPE = (16, 24, 8)

    def test_it_encodes_as_libdvid(self) -> None:
        voxels = volume(self.SHAPE)
        assert DvidBlock().encode(voxels) == naive_encode_libdvid(voxels)

    @pytest.mark.parametrize(
        "wrap", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8), zstandard.compress]
    )
    def test_it_decodes_any_buffer(self, wrap: Any) -> None:
        voxels = volume(self.SHAPE)
        found = DvidBlock().decode(wrap(naive_encode_libdvid(voxels)))
        assert (found.dtype, found.shape) == (np.uint64, self.SHAPE)
        np.testing.assert_array_equal(found, voxels)

    @pytest.mark.parametrize(
        "make",
        [
            lambda n: np.empty((16, 24, 8), np.uint64),
            lambda n: np.empty(n // 8, np.uint64),
            lambda n: np.empty(n, np.uint8),
            bytearray,
        ],
    )
    def test_it_decodes_into_a_buffer(self, make: Any) -> None:
        voxels = volume(self.SHAPE)
        out = make(voxels.nbytes)
        DvidBlock().decode(naive_encode_libdvid(voxels), out=out)
        assert bytes(memoryview(out).cast("B")) == voxels.tobytes()

    @pytest.mark.parametrize("out", [np.empty((2, 2), np.uint64), np.empty(0, np.uint8), bytearray(5)], ids=repr)
    def test_a_buffer_of_another_size_is_refused(self, out: Any) -> None:
        with pytest.raises(ValueError, match=r"."):
            DvidBlock().decode(naive_encode_libdvid(volume(self.SHAPE)), out=out)

    @pytest.mark.parametrize("values", BOTH)
    def test_records(self, values: Any) -> None:
        chunk = make_chunk((1, 2, 3))
        shard = write_shard([chunk])
        at, size, _ = shard.ranges[0]
        codec = DvidBlock(values=values, framing="record")
        np.testing.assert_array_equal(codec.decode(shard.arrow[at : at + size]), chunk.voxels[values])
        with pytest.raises(RecordError):
            codec.decode(chunk.block)
        with pytest.raises(ReadOnlyError, match="can't encode records"):
            codec.encode(chunk.voxels[values])

    @pytest.mark.parametrize(
        "array",
        [
            np.zeros((8, 8, 8), np.uint32),
            np.zeros((8, 8, 8), ">u8"),
            np.zeros((8, 8), np.uint64),
            np.zeros((8, 8, 9), np.uint64),
            b"12345678",
        ],
        ids=["uint32", "big-endian", "2-d", "9 voxels", "bytes"],
    )
    def test_what_no_block_can_hold_is_refused(self, array: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=r"a block|multiple of 8"):
            DvidBlock().encode(array)

    @pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b + b"\0", lambda b: b"\xff" * 99])
    def test_broken_blocks_are_refused(self, damage: Any) -> None:
        with pytest.raises(BlockError):
            DvidBlock().decode(damage(naive_encode_libdvid(volume(self.SHAPE))))


class TestZarrV2:
    def test_written_and_read_back(self, tmp_path: Path) -> None:
        array = create(store=LocalStore(tmp_path), fill_value=3)
        voxels = volume(array.shape)
        array[...] = voxels
        again = zarr.open_array(tmp_path, mode="r")
        np.testing.assert_array_equal(again[...], voxels)
        np.testing.assert_array_equal(again[63:66, 2, ::9], voxels[63:66, 2, ::9])
        assert json.loads((tmp_path / ".zarray").read_text())["compressor"]["id"] == "dvid_block"
        padded = np.full((64, 64, 64), 3, np.uint64)
        padded[:36, :1, :2] = voxels[64:, 64:, 128:]
        np.testing.assert_array_equal(naive_decode((tmp_path / "1.1.2").read_bytes()), padded)

    def test_parts(self) -> None:
        array = create(fill_value=0)
        expected = np.zeros(array.shape, np.uint64)
        for seed, window in enumerate([np.s_[3:90, 5:9, 60:70], np.s_[:, 64, :], np.s_[99, 0, 129]]):
            array[window] = expected[window] = volume(expected.shape, seed=seed)[window]
        np.testing.assert_array_equal(array[...], expected)
        assert not array[0, 0, 0]

    @pytest.mark.parametrize("dtype", ["uint32", ">u8", "int64"])
    def test_other_types_are_refused_when_written(self, dtype: str) -> None:
        array = create(dtype=dtype)
        with pytest.raises(TypeError, match="a block holds uint64 labels, not"):
            array[...] = 1

    def test_fortran_order_is_refused_rather_than_scrambled(self) -> None:
        # Zarr lays what decode gives out in the array's order, which decode can't know.
        array = create(order="F")
        with pytest.raises(ValueError, match="order"):
            array[...] = volume(array.shape)

    @pytest.mark.parametrize("values", BOTH)
    def test_references_to_a_shard(self, tmp_path: Path, values: Any) -> None:
        chunks = make_chunks((0, 0, 0), (1, 0, 1))
        shard = write_shard(chunks)
        (tmp_path / "0_0_0.arrow").write_bytes(shard.arrow)
        document = {
            "zarr_format": 2,
            "shape": [128, 64, 128],
            "chunks": [64, 64, 64],
            "dtype": "<u8",
            "order": "C",
            "fill_value": 0,
            "filters": None,
            "compressor": {"id": "dvid_block", "values": values, "framing": "record"},
        }
        refs: dict[str, Any] = {".zgroup": '{"zarr_format": 2}', f"{values}/.zarray": json.dumps(document)}
        for chunk, (at, size, _) in zip(chunks, shard.ranges, strict=True):
            x, y, z = chunk.xyz
            refs[f"{values}/{z}.{y}.{x}"] = [str(tmp_path / "0_0_0.arrow"), at, size]
        (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
        code = """
import zarr
array = zarr.open_group("reference://", mode="r", storage_options={"fo": sys.argv[1]})[sys.argv[2]]
sys.stdout.write(array[...].tobytes().hex())
"""
        expected = np.zeros((128, 64, 128), np.uint64)
        expected[:64, :, :64], expected[64:, :, 64:] = (chunk.voxels[values] for chunk in chunks)
        assert bytes.fromhex(run_in_a_fresh_process(code, tmp_path / "refs.json", values)) == expected.tobytes()
