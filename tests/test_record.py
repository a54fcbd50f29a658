"""Records against pyarrow: what it writes is read, what is torn is refused before any Arrow library sees it."""

from __future__ import annotations

import copy
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from conftest import read_shard_rows
from exports import (
    BLOCK_BUFFER,
    COLUMNS,
    END_MARK,
    SHAPE,
    Dialect,
    make_chunk,
    make_chunks,
    message_buffers,
    open_export,
    read_voxels,
    write_shard,
)
from hypothesis import given
from hypothesis import strategies as st

from zarr_dvid.errors import RecordError, ZarrDvidError
from zarr_dvid.record import (
    RecordBatch,
    RecordBytes,
    metadata_length,
    parse_batch,
    parse_payload,
    read_layout,
    record_message,
    schema_message,
    split_message,
)
from zarr_dvid.voxels import decode_payload

TOP = 2**64 - 1


def parts(table: pa.RecordBatch, *, compression: str | None = None) -> tuple[bytes, bytes]:
    """Schema and record-batch messages of a batch."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_batch(table)
    data = sink.getvalue().to_pybytes()
    schema = table.schema.serialize().to_pybytes()
    assert data.startswith(schema)
    assert data.endswith(END_MARK)
    return schema, data[len(schema) : -8]


def parsed(table: pa.RecordBatch, *, compression: str | None = None) -> RecordBatch:
    schema, message = parts(table, compression=compression)
    layout, schema_bytes = read_layout(schema)
    assert schema_bytes == len(schema)
    return parse_batch(message, layout)


def small_batch(n: int = 3, **replaced: pa.Array) -> pa.RecordBatch:
    """Rows of small values, as a batch of DVID's columns and more."""
    columns: dict[str, pa.Array] = {
        "chunk_x": pa.array(range(n), pa.int32()),
        "chunk_y": pa.array([-(2**31)] * n, pa.int32()),
        "chunk_z": pa.array([2**31 - 1] * n, pa.int32()),
        "labels": pa.array([[i, TOP][: i % 3] for i in range(n)], pa.list_(pa.uint64())),
        "supervoxels": pa.array([[7] * i for i in range(n)], pa.list_(pa.uint64())),
        "dvid_compressed_block": pa.array([b"block"[:i] for i in range(n)], pa.binary()),
        "uncompressed_size": pa.array([2**32 - 1 - i for i in range(n)], pa.uint32()),
    }
    columns |= replaced
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def assert_same(batch: RecordBatch, table: pa.RecordBatch) -> None:
    assert batch.n_rows == table.num_rows
    for i, row in enumerate(table.to_pylist()):
        record = batch.record(i)
        assert record.chunk_xyz == (row["chunk_x"], row["chunk_y"], row["chunk_z"])
        assert np.frombuffer(record.labels, "<u8").tolist() == row["labels"]
        assert np.frombuffer(record.supervoxels, "<u8").tolist() == row["supervoxels"]
        assert bytes(record.block) == row["dvid_compressed_block"]
        assert record.uncompressed_size == row.get("uncompressed_size")


# ---- what pyarrow writes is read


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("n", [0, 1, 3, 1000])
def test_batches_of_any_length(n: int, compression: str | None) -> None:
    table = small_batch(n)
    assert_same(parsed(table, compression=compression), table)


ROWS = st.lists(
    st.tuples(
        *[st.integers(-(2**31), 2**31 - 1)] * 3,
        st.lists(st.integers(0, TOP), max_size=5),
        st.lists(st.integers(0, TOP), max_size=5),
        st.binary(max_size=20),
        st.integers(0, 2**32 - 1),
    ),
    max_size=6,
)


@given(ROWS, st.booleans(), st.sampled_from([None, "zstd", "lz4"]), st.booleans(), st.randoms())
def test_any_rows_in_any_columns(rows: list[Any], large: bool, compression: str | None, sliced: bool, rng: Any) -> None:
    schema = Dialect(large=large).schema()
    columns = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(schema)]
    order = list(range(7))
    rng.shuffle(order)
    table = pa.RecordBatch.from_arrays([columns[i] for i in order], names=[COLUMNS[i] for i in order])
    if sliced:
        table = table.slice(len(rows) // 2)
    assert_same(parsed(table, compression=compression), table)


OTHER_TYPES = [
    pa.null(),
    pa.bool_(),
    pa.int8(),
    pa.uint64(),
    pa.float16(),
    pa.float64(),
    pa.decimal128(5, 2),
    pa.date32(),
    pa.date64(),
    pa.time32("s"),
    pa.time64("ns"),
    pa.timestamp("us", "UTC"),
    pa.duration("s"),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.binary(3),
    pa.list_(pa.string()),
    pa.large_list(pa.list_(pa.int16())),
    pa.list_(pa.float32(), 3),
    pa.struct([("a", pa.int8()), ("b", pa.list_(pa.struct([("c", pa.string())])))]),
    pa.struct([]),
]


@pytest.mark.parametrize("kind", OTHER_TYPES, ids=str)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_columns_of_a_conversion_are_passed_over(kind: pa.DataType, compression: str | None) -> None:
    table = small_batch()
    extra = pa.array([None] * 3, kind)
    for place in (0, 3, 4, 7):
        wider = table.add_column(place, "extra", extra)
        assert_same(parsed(wider, compression=compression), table)


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int32(), pa.string()),
        pa.sparse_union([pa.field("a", pa.int32())]),
        pa.dense_union([pa.field("a", pa.int32())]),
        pa.run_end_encoded(pa.int32(), pa.int64()),
        pa.string_view(),
        pa.binary_view(),
        pa.list_view(pa.int32()),
        pa.month_day_nano_interval(),
        pa.map_(pa.string(), pa.int32()),
        pa.struct([("a", pa.dictionary(pa.int32(), pa.string()))]),
    ],
    ids=str,
)
def test_columns_whose_buffers_are_not_known_are_refused(kind: pa.DataType) -> None:
    schema = small_batch().schema.append(pa.field("extra", kind))
    with pytest.raises(RecordError, match=r"column '(extra|a)' has a type that is not known"):
        read_layout(schema.serialize().to_pybytes())


def test_a_nested_schema_has_a_bottom() -> None:
    kind: pa.DataType = pa.int8()
    for _ in range(60):
        kind = pa.list_(kind)
    schema = small_batch().schema.append(pa.field("extra", kind))
    with pytest.raises(RecordError, match="nested too deeply"):
        read_layout(schema.serialize().to_pybytes())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("chunk_x", pa.int64()),
        ("chunk_y", pa.uint32()),
        ("chunk_z", pa.float32()),
        ("chunk_z", pa.string()),
        ("labels", pa.list_(pa.int64())),
        ("labels", pa.list_(pa.uint32())),
        ("labels", pa.uint64()),
        ("supervoxels", pa.list_(pa.uint64(), 2)),
        ("supervoxels", pa.list_(pa.list_(pa.uint64()))),
        ("dvid_compressed_block", pa.string()),
        ("dvid_compressed_block", pa.list_(pa.uint8())),
        ("uncompressed_size", pa.int64()),
        ("uncompressed_size", pa.int32()),
    ],
    ids=str,
)
def test_columns_of_other_types_are_refused_by_name(name: str, kind: pa.DataType) -> None:
    table = small_batch(0)
    schema = table.schema.set(table.schema.get_field_index(name), pa.field(name, kind))
    with pytest.raises(RecordError, match=f"column '{name}' has another type"):
        read_layout(schema.serialize().to_pybytes())


def test_missing_and_repeated_columns_are_refused_by_name() -> None:
    schema = small_batch().schema
    for name in COLUMNS[:-1]:
        less = pa.schema([field for field in schema if field.name != name])
        with pytest.raises(RecordError, match=f"lacks a column.*{name}"):
            read_layout(less.serialize().to_pybytes())
    for name in COLUMNS:
        more = schema.append(schema.field(name))
        with pytest.raises(RecordError, match=f"column '{name}' twice"):
            read_layout(more.serialize().to_pybytes())
    with pytest.raises(RecordError, match="no columns"):
        read_layout(pa.schema([]).serialize().to_pybytes())


@pytest.mark.parametrize("name", COLUMNS)
def test_nulls_are_refused(name: str) -> None:
    table = small_batch()
    column = table[name].to_pylist()
    nulls = pa.array([*column[:2], None], table[name].type)
    batch = parsed(small_batch(**{name: nulls}))
    for row in range(3):
        with pytest.raises(RecordError, match="null"):
            batch.record(row)


@pytest.mark.parametrize("name", ["labels", "supervoxels"])
def test_nulls_in_lists_are_refused(name: str) -> None:
    nulls = pa.array([[1], [None], [3]], pa.list_(pa.uint64()))
    batch = parsed(small_batch(**{name: nulls}))
    with pytest.raises(RecordError, match="null"):
        batch.record(1)


def test_rows_past_the_end_are_refused() -> None:
    batch = parsed(small_batch(3))
    for row in (3, 4, 2**31, 2**63):
        with pytest.raises(RecordError, match="past the end"):
            batch.record(row)


# ---- what is torn is refused


def test_a_message_cut_anywhere_is_refused() -> None:
    for compression in (None, "zstd", "lz4"):
        schema, message = parts(small_batch(5), compression=compression)
        layout, _ = read_layout(schema)
        for n in range(len(message)):
            with pytest.raises(RecordError):
                parse_batch(message[:n], layout)
        for more in (b"\x00", bytes(8), message):
            with pytest.raises(RecordError):
                parse_batch(message + more, layout)
        for n in range(len(schema)):
            with pytest.raises(RecordError):
                read_layout(schema[:n])


@pytest.mark.parametrize("length", [-1, -(2**31), 2**20 + 1, 2**31 - 1])
def test_impossible_metadata_lengths(length: int) -> None:
    prefix = b"\xff\xff\xff\xff" + struct.pack("<i", length)
    with pytest.raises(RecordError, match="impossible length") as caught:
        metadata_length(prefix + bytes(100))
    assert caught.value.found == length


def test_what_starts_no_message() -> None:
    for data in (b"", b"\xff", b"\xff\xff\xff\xff", bytes(8), b"\xff\xff\xff\xfe" + bytes(100), b"ARROW1\0\0"):
        with pytest.raises(RecordError, match="no Arrow message starts here"):
            metadata_length(data)
    assert metadata_length(END_MARK) == 0
    with pytest.raises(RecordError):
        split_message(b"\xff\xff\xff\xff\x08\x00\x00\x00" + bytes(7))


def test_messages_of_other_kinds() -> None:
    schema, message = parts(small_batch())
    layout, _ = read_layout(schema)
    with pytest.raises(RecordError, match="no record batch.*type 1"):
        parse_batch(schema, layout)
    with pytest.raises(RecordError):
        read_layout(message)
    with pytest.raises(RecordError):
        parse_batch(END_MARK, layout)
    dictionary = pa.RecordBatch.from_arrays([pa.array(["a", "b"]).dictionary_encode()], names=["a"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, dictionary.schema) as writer:
        writer.write_batch(dictionary)
    data = sink.getvalue().to_pybytes()[dictionary.schema.serialize().size :]
    end = 8 + struct.unpack_from("<i", data, 4)[0]
    while data[end : end + 4] != b"\xff\xff\xff\xff":
        end += 8
    with pytest.raises(RecordError, match="no record batch.*type 2"):
        parse_batch(data[:end], layout)


def test_the_batch_of_another_schema() -> None:
    _, message = parts(small_batch())
    fewer = pa.schema([field for field in small_batch().schema if field.name != "uncompressed_size"])
    layout, _ = read_layout(fewer.serialize().to_pybytes())
    with pytest.raises(RecordError, match="as many as in the schema"):
        parse_batch(message, layout).record(0)


def with_number(message: bytes, old: int, new: int, *, width: int = 8) -> bytes:
    """A message's metadata with every integer of this value replaced, one at a time."""
    end = 8 + struct.unpack_from("<i", message, 4)[0]
    wanted = (old % 256**width).to_bytes(width, "little")
    places = [at for at in range(8, end, width) if message[at : at + width] == wanted]
    assert places, old
    for at in places:
        message = message[:at] + (new % 256**width).to_bytes(width, "little") + message[at + width :]
    return message


@pytest.mark.parametrize("claim", [0, 2, 4, 2**20 + 1, 2**31, 2**32, 2**62, 2**63 - 1, -1])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_other_numbers_of_rows(claim: int, compression: str | None) -> None:
    """In the batch and all its columns alike."""
    schema, message = parts(small_batch(3), compression=compression)
    layout, _ = read_layout(schema)
    changed = with_number(message, 3, claim)
    if claim in (0, 2):
        # Fewer rows than are there: a batch may leave some of its buffers unused.
        assert parse_batch(changed, layout).n_rows == claim
        return
    with pytest.raises(RecordError):
        batch = parse_batch(changed, layout)
        batch.record(max(0, min(claim, 2**63 - 1) - 1))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("claim", [-2, -(2**63), 0, 1, 2**24, 2**31, 2**40, 2**63 - 1])
def test_compressed_buffers_that_lie_about_their_size(compression: str, claim: int) -> None:
    chunk = make_chunk((1, 2, 3))
    shard = write_shard([chunk], Dialect(body_compression=compression, raw_blocks=True, index="rec"))
    at, size, _ = shard.ranges[0]
    place, _ = message_buffers(shard.arrow, at)[1][BLOCK_BUFFER]
    assert struct.unpack_from("<q", shard.arrow, place) == (len(chunk.block),)
    arrow = shard.arrow[:place] + struct.pack("<q", claim) + shard.arrow[place + 8 :]
    export = open_export(shard.files() | {"s0/0_0_0.arrow": arrow})
    tracemalloc.start()
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    with pytest.raises(RecordError) as caught:
        read_voxels(export, (1, 2, 3))
    peak = tracemalloc.get_traced_memory()[1] + max(0, pool.bytes_allocated() - before)
    tracemalloc.stop()
    assert caught.value.chunk_xyz == (1, 2, 3)
    assert caught.value.offset_bytes is not None
    assert at <= caught.value.offset_bytes < at + size
    assert peak < 64 << 20


@pytest.mark.parametrize("n_rows", [1, 2**20, 2**40])
def test_a_zstd_bomb_is_not_blown_up(n_rows: int) -> None:
    """1 GiB of zeros in 33 kB, in a frame that does not tell its size, in a batch that claims many rows."""
    table = small_batch(1, dvid_compressed_block=pa.array([bytes(2**20)], pa.binary()))
    table = table.select([*COLUMNS[:5], COLUMNS[6], COLUMNS[5]])  # so that the block is the last buffer
    schema, message = parts(table, compression="zstd")
    layout, _ = read_layout(schema)
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    bomb = b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(1024)), compressor.flush()])
    body_at = 8 + struct.unpack_from("<i", message, 4)[0]
    at, n_old = message_buffers(message, 0)[1][-1]
    end = at + n_old + -n_old % 8
    assert end == len(message)
    new = struct.pack("<q", 2**30) + bomb
    padded = new + bytes(-len(new) % 8)
    changed = message[:at] + padded + message[end:]
    changed = with_number(changed, len(message) - body_at, len(changed) - body_at)
    changed = with_number(changed, n_old, len(new))
    if n_rows > 1:
        changed = with_number(changed, 1, n_rows)
    tracemalloc.start()
    with pytest.raises(RecordError, match="impossible size|too many rows"):
        parse_batch(changed, layout)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


# ---- payloads


def test_what_is_built_is_what_pyarrow_and_dvid_read(shared_data: Path) -> None:
    path = shared_data / "mcns/export/s1/30720_24576_28672.arrow"
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        schema = stream.schema
    assert pa.ipc.read_schema(pa.py_buffer(schema_message())).equals(schema, check_metadata=True)
    for row in read_shard_rows(path)[:20]:
        message = record_message(
            row.chunk_xyz, labels=row.labels, supervoxels=row.supervoxels, block=row.block, uncompressed_size=5
        )
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
        assert batch.to_pylist() == [
            {
                **dict(zip(COLUMNS[:3], row.chunk_xyz, strict=True)),
                "labels": row.labels.tolist(),
                "supervoxels": row.supervoxels.tolist(),
                "dvid_compressed_block": row.block,
                "uncompressed_size": 5,
            }
        ]
        record = parse_payload(message)
        assert record.chunk_xyz == row.chunk_xyz
        assert bytes(record.block) == row.block


@pytest.mark.parametrize("dialect", [Dialect(), Dialect(rows_a_batch=3), Dialect(raw_blocks=True, has_size=False)], ids=str)
def test_payloads_stand_alone(dialect: Dialect) -> None:
    """Whatever the dialect, a payload is a message of one row that decodes without its shard's schema."""
    chunks = make_chunks((0, 0, 0), (1, 2, 3), (3, 1, 0))
    shard = write_shard(chunks, dialect)
    export = open_export(shard.files())
    for chunk, (at, size, _) in zip(chunks, shard.ranges, strict=True):
        payload = export.read_chunk(0, chunk.xyz)
        assert payload is not None
        assert (payload.path, payload.chunk_xyz) == ("s0/0_0_0.arrow", chunk.xyz)
        if dialect.rows_a_batch == 1:
            assert payload == shard.arrow[at : at + size]
            assert export.payload_nbytes(0, chunk.xyz) == size
        for form in (payload, bytes(payload), bytearray(payload), memoryview(payload)):
            found = decode_payload(form, values="labels", shape=SHAPE)
            np.testing.assert_array_equal(found, chunk.voxels["labels"])
        for twin in (pickle.loads(pickle.dumps(payload)), copy.copy(payload), copy.deepcopy(payload)):
            assert twin == payload
            assert isinstance(twin, RecordBytes)
            assert (twin.path, twin.chunk_xyz) == (payload.path, payload.chunk_xyz)


def test_what_is_no_payload_is_refused() -> None:
    _, one = parts(small_batch(1))
    assert parse_payload(one).chunk_xyz == (0, -(2**31), 2**31 - 1)
    _, none = parts(small_batch(0))
    _, several = parts(small_batch(2))
    _, wider = parts(small_batch(1).add_column(0, "extra", pa.array([1])))
    for message in (none, several, wider, b"", END_MARK, schema_message(), one[:-1], one + bytes(8)):
        with pytest.raises(ZarrDvidError):
            parse_payload(message)


def test_the_window_of_a_payload() -> None:
    chunk = make_chunk((1, 2, 3))
    payload = open_export(write_shard([chunk]).files()).read_chunk(0, (1, 2, 3))
    assert payload is not None
    window = (slice(3, 20), slice(8, 9), slice(0, 63))
    out = np.zeros((17, 1, 63), np.uint64)
    found = decode_payload(payload, values="labels", shape=SHAPE, window=window, out=out)
    assert found is out
    np.testing.assert_array_equal(out, chunk.voxels["labels"][window])
