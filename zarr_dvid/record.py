"""Records: one row for each block, in Arrow IPC messages.

A shard is an Arrow stream of such messages. What a reader gets from a shard is parsed by the native core, which checks
every length and offset; pyarrow only builds messages here, from values that are already known to be good, since its IPC
reader may abort the process on torn bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from zarr_dvid._native import core
from zarr_dvid.block import BytesLike
from zarr_dvid.body import NO_CODEC, decompress_body, decompress_buffer
from zarr_dvid.errors import RecordError

if TYPE_CHECKING:
    import numpy.typing as npt

CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + bytes(4)
PREFIX_BYTES = 8
MAX_METADATA_BYTES = 1 << 20

RECORD_BATCH = 3  # kind of message

MAX_ROWS = 1 << 20  # of one batch; a whole shard of the male CNS has 32,768

# org.apache.arrow.flatbuf.Type -> buffers of the field itself, for the types that a converted shard may have beside ours.
_BUFFERS_OF_TYPE = {
    1: 0,
    2: 2,
    3: 2,
    4: 3,
    5: 3,
    6: 2,
    7: 2,
    8: 2,
    9: 2,
    10: 2,
    12: 2,
    13: 1,
    15: 2,
    16: 1,
    18: 2,
    19: 3,
    20: 3,
    21: 2,
}
_INT, _BINARY, _LIST, _LARGE_BINARY, _LARGE_LIST = 2, 4, 12, 19, 21

_ARROW_SCHEMA = pa.schema(
    [
        pa.field("chunk_x", pa.int32(), nullable=False),
        pa.field("chunk_y", pa.int32(), nullable=False),
        pa.field("chunk_z", pa.int32(), nullable=False),
        pa.field("labels", pa.list_(pa.uint64()), nullable=False),
        pa.field("supervoxels", pa.list_(pa.uint64()), nullable=False),
        pa.field("dvid_compressed_block", pa.binary(), nullable=False, metadata={"compression": "true", "codec": "zstd"}),
        pa.field("uncompressed_size", pa.uint32(), nullable=False),
    ]
)
_COLUMNS = tuple(_ARROW_SCHEMA.names)


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where the columns of a schema are among a record batch's field nodes and buffers.

    Attributes:
        native: The same for the native core.
        says_zstd: Whether the schema says that its blocks are zstd frames.
        is_dvid: Whether columns and their order are DVID's own, so that a message can be read without its schema.
    """

    native: core.Layout
    says_zstd: bool
    is_dvid: bool


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a shard.

    Attributes:
        chunk_xyz: Coordinates as the row has them; chunk units in all that DVID wrote.
        labels: Agglomerated label of each entry of the block's label table: uint64, little-endian.
        supervoxels: The block's own label table, likewise.
        block: The block, bare or as a zstd frame.
        uncompressed_size: Length of the bare block in bytes, or None where the dialect has no such column.
    """

    chunk_xyz: tuple[int, int, int]
    labels: BytesLike
    supervoxels: BytesLike
    block: BytesLike
    uncompressed_size: int | None


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """A parsed record-batch message: `header` and an uncompressed `body` that belongs to it."""

    header: core.Message
    body: BytesLike
    layout: RecordLayout

    @property
    def n_rows(self) -> int:
        """Records in this batch."""
        return self.header.n_rows

    def record(self, row: int) -> Record:
        """The record at `row`.

        Raises:
            RecordError: The row is torn, or no DVID record.
        """
        try:
            xyz, labels, supervoxels, block, size = self.header.row(self.body, self.layout.native, row)
        except core.Fault as fault:
            raise record_error(fault) from None
        body = memoryview(self.body)
        part = [body[offset : offset + n] for offset, n in (labels, supervoxels, block)]
        return Record(xyz, part[0], part[1], part[2], size if size >= 0 else None)


class RecordBytes(bytes):
    """A chunk's payload, a record-batch message of one row, that remembers where it came from.

    Attributes:
        path: Of its shard.
        chunk_xyz: Of its chunk.
    """

    path: str
    chunk_xyz: tuple[int, int, int]

    def __new__(cls, data: BytesLike, *, path: str, chunk_xyz: tuple[int, int, int]) -> RecordBytes:
        """Copies `data`."""
        self = super().__new__(cls, data)
        self.path, self.chunk_xyz = path, chunk_xyz
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[bytes], dict[str, Any]]:
        return (bytes(self),), {"path": self.path, "chunk_xyz": self.chunk_xyz}


def record_error(fault: core.Fault) -> RecordError:
    """The native core's complaint about a message as a `RecordError`."""
    field, rule, offset_bytes, expected, found = fault.args
    return RecordError(f"{field} {rule}", offset_bytes=offset_bytes, expected=expected, found=found)


def split_message(message: BytesLike) -> tuple[memoryview, memoryview]:
    """Metadata and the bytes behind it, of an encapsulated message.

    Raises:
        RecordError: There is no whole message at the start of these bytes.
    """
    view = memoryview(message)
    metadata_bytes = metadata_length(view)
    end = PREFIX_BYTES + metadata_bytes
    if view.nbytes < end:
        raise RecordError("the message's metadata is cut", offset_bytes=PREFIX_BYTES, expected=end, found=view.nbytes)
    return view[PREFIX_BYTES:end], view[end:]


def metadata_length(prefix: BytesLike) -> int:
    """Length of the metadata in bytes, as the first 8 bytes of a message say; 0 for an end-of-stream mark.

    Raises:
        RecordError: These are not the first bytes of a message.
    """
    view = memoryview(prefix)
    if view.nbytes < PREFIX_BYTES or view[:4] != CONTINUATION:
        raise RecordError("no Arrow message starts here", expected="FFFFFFFF", found=bytes(view[:4]).hex() or "nothing")
    length: int = struct.unpack_from("<i", view, 4)[0]
    if not 0 <= length <= MAX_METADATA_BYTES:
        raise RecordError(
            "the message's metadata has an impossible length",
            offset_bytes=4,
            expected=f"0 to {MAX_METADATA_BYTES} bytes",
            found=length,
        )
    return length


def read_layout(message: BytesLike) -> tuple[RecordLayout, int]:
    """Layout of the record batches that follow a schema message, and that message's length in bytes.

    Raises:
        RecordError: The message is broken, or is not the schema of a DVID export.
    """
    metadata, _ = split_message(message)
    return _layout_of_schema(bytes(metadata)), PREFIX_BYTES + metadata.nbytes


@lru_cache(maxsize=16)
def _layout_of_schema(metadata: bytes) -> RecordLayout:
    """One layout for each schema: shards of one schema can then be decoded together."""
    try:
        return _layout(core.parse_schema(metadata))
    except core.Fault as fault:
        raise record_error(fault) from None


def _layout(fields: Sequence[core.Field]) -> RecordLayout:
    places: dict[str, tuple[int, int, bool]] = {}
    by_name: dict[str, core.Field] = {}
    node = buffer = 0
    for field in fields:
        name = field.name.decode("utf-8", "backslashreplace")
        if name in by_name:
            raise RecordError(f"the schema has column {name!r} twice")
        by_name[name] = field
        places[name] = (node, buffer, field.type in (_LARGE_BINARY, _LARGE_LIST))
        n_nodes, n_buffers = _extent(field)
        node, buffer = node + n_nodes, buffer + n_buffers
    for name in _COLUMNS:
        if name in by_name:
            _check_type(name, by_name[name])
        elif name != "uncompressed_size":
            raise RecordError("the schema lacks a column", expected=name, found=", ".join(by_name) or "no columns")
    metadata = dict(by_name["dvid_compressed_block"].metadata)
    columns = [places.get(name, (-1, -1, False)) for name in _COLUMNS]
    names = tuple(by_name)
    return RecordLayout(
        native=core.make_layout(node, buffer, columns),
        says_zstd="uncompressed_size" in by_name or metadata.get(b"codec") == b"zstd",
        is_dvid=names in (_COLUMNS, _COLUMNS[:-1]) and not any(large for _, _, large in columns),
    )


def _extent(field: core.Field) -> tuple[int, int]:
    """Field nodes and buffers that a column takes, its children included."""
    if field.has_dictionary or field.type not in _BUFFERS_OF_TYPE:
        raise RecordError(
            f"column {field.name.decode('utf-8', 'backslashreplace')!r} has a type that is not known here",
            found=f"Arrow type {field.type}",
        )
    nodes, buffers = 1, _BUFFERS_OF_TYPE[field.type]
    for child in field.children:
        n_nodes, n_buffers = _extent(child)
        nodes, buffers = nodes + n_nodes, buffers + n_buffers
    return nodes, buffers


def _check_type(name: str, field: core.Field) -> None:
    if name in ("labels", "supervoxels"):
        item = field.children[0] if len(field.children) == 1 else None
        good = field.type in (_LIST, _LARGE_LIST) and item is not None and _is_int(item, 64, signed=False)
        expected = "a list of uint64"
    elif name == "dvid_compressed_block":
        good, expected = field.type in (_BINARY, _LARGE_BINARY), "binary"
    elif name == "uncompressed_size":
        good, expected = _is_int(field, 32, signed=False), "uint32"
    else:
        good, expected = _is_int(field, 32, signed=True), "int32"
    if not good:
        raise RecordError(f"column {name!r} has another type", expected=expected, found=f"Arrow type {field.type}")


def _is_int(field: core.Field, bits: int, *, signed: bool) -> bool:
    return field.type == _INT and field.bit_width == bits and field.is_signed == signed


def parse_batch(message: BytesLike, layout: RecordLayout) -> RecordBatch:
    """Parses a record-batch message; a compressed body is decompressed.

    Args:
        message: The whole message, from its FFFFFFFF to the end of its body, and nothing behind it.
        layout: From the schema of its stream.

    Raises:
        RecordError: The message is torn or broken.
    """
    metadata, body = split_message(message)
    try:
        header = core.parse_message(metadata)
    except core.Fault as fault:
        raise record_error(fault) from None
    if header.kind != RECORD_BATCH:
        raise RecordError("the message is no record batch", expected="type 3", found=f"type {header.kind}")
    if header.n_rows > MAX_ROWS:
        raise RecordError("the batch has too many rows", expected=f"at most {MAX_ROWS}", found=header.n_rows)
    if header.body_bytes != body.nbytes:
        raise RecordError("the message's body has another length", expected=header.body_bytes, found=body.nbytes)
    if header.codec == NO_CODEC:
        return RecordBatch(header, body, layout)
    plain, buffers = decompress_body(header, body)
    return RecordBatch(header.with_buffers(len(plain), buffers), plain, layout)


def parse_payload(message: BytesLike) -> Record:
    """Parses a chunk's payload: a record-batch message of one row in DVID's own layout.

    Raises:
        RecordError: It is none.
    """
    metadata, body = split_message(message)
    for layout in dvid_layouts():
        batch = parse_batch(message, layout)
        if batch.n_rows != 1:
            raise RecordError("a chunk's payload has one record", expected=1, found=batch.n_rows)
        if len(batch.header.buffers) == layout.native.n_buffers:
            return batch.record(0)
    raise RecordError(
        "the record has another number of columns than DVID writes", found=f"{metadata.nbytes + body.nbytes} bytes"
    )


@cache
def dvid_layouts() -> tuple[RecordLayout, RecordLayout]:
    """DVID's layouts: since 2025-09-07 with `uncompressed_size`, before that without."""
    older = pa.schema([_ARROW_SCHEMA.field(name) for name in _COLUMNS[:-1]])
    return read_layout(schema_message())[0], read_layout(older.serialize().to_pybytes())[0]


def read_coordinates(header: core.Message, buffers: Sequence[memoryview]) -> npt.NDArray[np.int64]:
    """Coordinates of a batch's records, from its buffers of chunk_x, chunk_y and chunk_z: int64, shape (n_rows, 3).

    Raises:
        RecordError: A compressed buffer is broken, or they are not as many as the batch has rows.
    """
    n_rows = header.n_rows
    if n_rows > MAX_ROWS:
        raise RecordError("the batch has too many rows", expected=f"at most {MAX_ROWS}", found=n_rows)
    xyz = np.empty((n_rows, 3), np.int64)
    for axis, buffer in enumerate(buffers):
        plain: BytesLike = buffer
        if header.codec != NO_CODEC:
            plain = decompress_buffer(header.codec, buffer, 8 * n_rows + 64, 0) if buffer else b""
            if len(plain) < 4 * n_rows:
                raise RecordError("chunk coordinates are cut", expected=f"{4 * n_rows} bytes", found=len(plain))
        xyz[:, axis] = np.frombuffer(plain, "<i4", n_rows)
    return xyz


def schema_message() -> bytes:
    """DVID's schema as an Arrow message, as it stands at the head of a stream."""
    return bytes(_ARROW_SCHEMA.serialize())


def record_message(
    chunk_xyz: tuple[int, int, int],
    *,
    labels: npt.NDArray[np.uint64] | BytesLike,
    supervoxels: npt.NDArray[np.uint64] | BytesLike,
    block: BytesLike,
    uncompressed_size: int,
) -> bytes:
    """Builds a record-batch message of one row in DVID's layout.

    Args:
        chunk_xyz: Chunk coordinates at the block's scale.
        labels: Agglomerated label of each entry of the block's label table.
        supervoxels: The block's own label table.
        block: The block as a zstd frame.
        uncompressed_size: Length of the bare block in bytes.
    """
    columns = [pa.array([c], pa.int32()) for c in chunk_xyz]
    columns += [_list_column(labels), _list_column(supervoxels)]
    columns += [pa.array([bytes(block)], pa.binary()), pa.array([uncompressed_size], pa.uint32())]
    return bytes(pa.RecordBatch.from_arrays(columns, schema=_ARROW_SCHEMA).serialize())


def _list_column(values: npt.NDArray[np.uint64] | BytesLike) -> pa.Array:
    items = pa.array(np.frombuffer(values, "<u8"))
    return pa.ListArray.from_arrays(pa.array([0, len(items)], pa.int32()), items)
