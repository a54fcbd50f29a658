"""Tables of integers as Arrow messages: how an export's index lies on disk, and is read with every length checked.

Written by pyarrow, read by the native core and NumPy, since pyarrow's reader may abort the process on torn bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from zarr_dvid._native import core
from zarr_dvid.body import NO_CODEC
from zarr_dvid.errors import RecordError, ShardIndexError
from zarr_dvid.record import END_OF_STREAM, PREFIX_BYTES, RECORD_BATCH, metadata_length, record_error, split_message

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid.block import BytesLike

    Columns = Mapping[str, str]  # names, and NumPy's types
    Table = dict[str, npt.NDArray[Any]]

ADVICE = "Delete the index, or run `zarr-dvid index` again"

BLOCKS: Columns = {"cell": "u2", "size": "u2"}
"""Of a shard in compact form, in the order of its file: places in its box, and lengths in 8 bytes."""

WIDE: Columns = {"key": "i8", "offset": "i8", "size": "i8", "row": "i4", "n_rows": "i4"}
"""Of any other shard, by chunk."""

SHARDS: Columns = {
    "scale": "u1",
    "origin_x": "i8",
    "origin_y": "i8",
    "origin_z": "i8",
    "fingerprint": "u8",
    "arrow_bytes": "i8",
    "form": "u1",
    "flags": "u1",
    "schema": "i4",
    "dialect": "i4",
    "problem": "i4",
    "n_streams": "i4",
    "schema_at": "i8",
    "records_at": "i8",
    "records_end": "i8",
    "n_records": "i8",
    "n_chunks": "i8",
    "low_x": "i4",
    "low_y": "i4",
    "low_z": "i4",
    "high_x": "i4",
    "high_y": "i4",
    "high_z": "i4",
    "batch_offset": "i8",
    "batch_bytes": "i8",
    "batch_crc32": "u4",
}
"""Of a scale's shards, one row each; what they mean is in docs/index.md."""

_MAX_ROWS = 1 << 16  # of a batch of shards


def schema_message(columns: Columns) -> bytes:
    """The schema of a table, as it stands at the head of its file."""
    fields = [pa.field(name, pa.from_numpy_dtype(np.dtype(kind)), nullable=False) for name, kind in columns.items()]
    return bytes(pa.schema(fields).serialize())


def batch_message(columns: Columns, table: Table) -> bytes:
    """Some rows of a table."""
    arrays = [pa.array(np.ascontiguousarray(table[name], np.dtype(kind))) for name, kind in columns.items()]
    fields = [pa.field(name, array.type, nullable=False) for name, array in zip(columns, arrays, strict=True)]
    return bytes(pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)).serialize())


def write_table(columns: Columns, table: Table) -> bytes:
    """A whole table as a file."""
    n = len(next(iter(table.values())))
    parts = [
        batch_message(columns, {name: values[start : start + _MAX_ROWS] for name, values in table.items()})
        for start in range(0, n, _MAX_ROWS)
    ]
    return b"".join([schema_message(columns), *parts, END_OF_STREAM])


def read_batch(columns: Columns, message: BytesLike) -> Table:
    """The rows of one message.

    Raises:
        RecordError: It is torn, or no such message.
    """
    metadata, body = split_message(message)
    try:
        header = core.parse_message(metadata)
    except core.Fault as fault:
        raise record_error(fault) from None
    if header.kind != RECORD_BATCH or header.codec != NO_CODEC or header.body_bytes != body.nbytes:
        raise RecordError("the message is no plain record batch", expected="type 3", found=f"type {header.kind}")
    if len(header.buffers) != 2 * len(columns):
        raise RecordError("the batch has other columns", expected=2 * len(columns), found=len(header.buffers))
    table = {}
    for i, (name, kind) in enumerate(columns.items()):
        (_, n_validity), (offset, size) = header.buffers[2 * i : 2 * i + 2]
        needed = header.n_rows * np.dtype(kind).itemsize
        if n_validity or not (0 <= offset <= body.nbytes and needed <= size <= body.nbytes - offset):
            raise RecordError(f"column {name!r} does not fit its message", expected=f"{needed} bytes", found=size)
        table[name] = np.frombuffer(body, np.dtype(kind).newbyteorder("<"), header.n_rows, offset)
    return table


def read_table(columns: Columns, data: BytesLike, path: str) -> Table:
    """A whole table from its file.

    Raises:
        ShardIndexError: The file is torn, or holds another table.
    """
    try:
        return _read_table(columns, memoryview(data))
    except RecordError as error:
        raise damaged(path, error.problem, expected=error.expected, found=error.found) from None


def _read_table(columns: Columns, view: memoryview) -> Table:
    at = _message_bytes(view, body=False)
    try:
        fields = core.parse_schema(view[PREFIX_BYTES:at])
    except core.Fault as fault:
        raise record_error(fault) from None
    found = [(field.name.decode("utf-8", "replace"), field.type, field.bit_width, field.is_signed) for field in fields]
    types = [(name, np.dtype(kind)) for name, kind in columns.items()]
    if found != [(name, 2, 8 * dtype.itemsize, dtype.kind == "i") for name, dtype in types]:
        raise RecordError("the table has other columns", expected=list(columns), found=[name for name, *_ in found])
    parts = []
    while view[at:] != END_OF_STREAM:
        end = at + _message_bytes(view[at:], body=True)
        parts.append(read_batch(columns, view[at:end]))
        at = end
    return {
        name: np.concatenate([np.empty(0, np.dtype(kind)), *(part[name] for part in parts)])
        for name, kind in columns.items()
    }


def _message_bytes(view: memoryview, *, body: bool) -> int:
    """Length of the message that starts here, with or without its body."""
    size = PREFIX_BYTES + metadata_length(view[:PREFIX_BYTES])
    if size == PREFIX_BYTES or size > view.nbytes:
        raise RecordError("the table is cut", expected=f"{size} bytes", found=view.nbytes)
    if body:
        try:
            size += core.parse_message(view[PREFIX_BYTES:size]).body_bytes
        except core.Fault as fault:
            raise record_error(fault) from None
        if size > view.nbytes:
            raise RecordError("the table is cut", expected=f"{size} bytes", found=view.nbytes)
    return size


def damaged(path: str, problem: str, *, expected: object = None, found: object = None) -> ShardIndexError:
    """The error for an index that can't be used."""
    return ShardIndexError(
        f"the export's index is damaged: {problem}", path=path, expected=expected, found=found, advice=ADVICE
    )
