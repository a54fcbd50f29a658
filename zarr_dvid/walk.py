"""Walks a shard's messages by their headers: framing, schema, and where each record is.

A shard is an Arrow stream (FFFFFFFF, metadata, body, again and again, then an end mark), or the same inside Arrow's file
format where somebody converted it. Behind either may stand the JSON footer of DVID's first documents, closed by its
length and ``CHUNKIDX``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid._native import core
from zarr_dvid.errors import RecordError, ShardError, ShardIndexError
from zarr_dvid.reader import Reader
from zarr_dvid.record import (
    END_OF_STREAM,
    PREFIX_BYTES,
    RECORD_BATCH,
    RecordLayout,
    metadata_length,
    read_coordinates,
    read_layout,
    record_error,
)

if TYPE_CHECKING:
    import numpy.typing as npt

FOOTER_MAGIC = b"CHUNKIDX"
_FILE_MAGIC = b"ARROW1"
_FILE_HEAD_BYTES = 8  # the magic, padded
_HEAD_BYTES = 2048  # DVID's schema message and the header of its first record take about 1300
_TAIL_BYTES = 48

SEVERAL_STREAMS = (
    "It was exported twice into the same directory, or written by several writers at once; export it again into an empty"
    " directory, or run 'zarr-dvid index', which finds all records of such a file if they are whole"
)


@dataclass(frozen=True, slots=True)
class Framing:
    """How a shard's file is laid out around its record batches.

    Attributes:
        path: The file, relative to the export's root.
        size_bytes: Its length.
        is_file_format: Whether it is in Arrow's file format rather than a stream.
        layout: From the schema.
        schema_at: Start of the schema message.
        records_at: End of the schema message, where the record batches start.
        records_end: Where they must have ended, end mark included.
        footer: Start and length of the JSON footer, or None.
        head: The file's first bytes, as far as they are still held.
        tail: Its last ones, likewise.
    """

    path: str
    size_bytes: int
    is_file_format: bool
    layout: RecordLayout
    schema_at: int
    records_at: int
    records_end: int
    footer: tuple[int, int] | None
    head: bytes = b""
    tail: bytes = b""

    @property
    def schema(self) -> bytes:
        """The schema message."""
        return self.head[self.schema_at : self.records_at]

    def trimmed(self) -> Framing:
        """The same without the file's bytes."""
        return replace(self, head=b"", tail=b"")


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """All records of a shard, in the order of the file.

    Attributes:
        offset_bytes: Start of each record's message, int64, shape (n,).
        size_bytes: Length of that message.
        row: The record's row in its message.
        xyz: Coordinates as the records have them, int64, shape (n, 3).
        n_batches: Messages with records.
        has_end_mark: Whether the stream was closed.
    """

    offset_bytes: npt.NDArray[np.int64]
    size_bytes: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    xyz: npt.NDArray[np.int64]
    n_batches: int
    has_end_mark: bool


class _Windows:
    """Reads a file forwards in windows, so that small records share a read and large ones are skipped."""

    def __init__(self, reader: Reader, framing: Framing) -> None:
        self._reader, self._path, self._end = reader, framing.path, framing.records_end
        self._at, self._bytes = 0, framing.head

    def get(self, at: int, size: int) -> memoryview:
        """The bytes from `at` on; the caller has checked that they are there."""
        if not (self._at <= at and at + size <= self._at + len(self._bytes)):
            n = min(max(size, self._reader.window_bytes), self._end - at)
            self._at, self._bytes = at, self._reader.read_ranges(self._path, [(at, n)])[0]
        return memoryview(self._bytes)[at - self._at : at - self._at + size]


def read_framing(reader: Reader, path: str, size_bytes: int) -> Framing:
    """Reads a shard's head and tail.

    Raises:
        ShardError: The file is empty, or neither an Arrow stream nor an Arrow file of DVID records.
        ShardIndexError: Its footer is broken.
    """
    if size_bytes == 0:
        raise ShardError(
            "the shard is empty", path=path, expected="an Arrow stream", found="0 bytes",
            advice="DVID of 2025-08-29 made such files and never wrote to them; export it again",
        )  # fmt: skip
    tail_at = max(0, size_bytes - _TAIL_BYTES)
    head, tail = reader.read_ranges(path, [(0, min(_HEAD_BYTES, size_bytes)), (tail_at, size_bytes - tail_at)])
    end, footer = size_bytes, None
    if tail.endswith(FOOTER_MAGIC):
        end, footer = _footer(path, size_bytes, tail)
    is_file = head.startswith(_FILE_MAGIC)
    start = _FILE_HEAD_BYTES if is_file else 0
    if is_file:
        end = _end_of_arrow_file(reader, path, end)
    try:
        needed = start + PREFIX_BYTES
        if end >= needed:
            needed += metadata_length(head[start:needed])
        if needed > end:
            raise RecordError("the schema is cut", expected=f"{needed} bytes", found=end)
        if needed > len(head):
            head = reader.read_ranges(path, [(0, needed)])[0]
        layout, schema_bytes = read_layout(head[start:])
    except RecordError as error:
        raise ShardError(f"the shard does not start with a schema: {error}", path=path) from None
    return Framing(path, size_bytes, is_file, layout, start, start + schema_bytes, end, footer, head, tail)


def _footer(path: str, size_bytes: int, tail: bytes) -> tuple[int, tuple[int, int]]:
    length = struct.unpack_from("<Q", tail, len(tail) - 16)[0] if len(tail) >= 16 else size_bytes
    if length > size_bytes - 16:
        raise ShardIndexError(
            "the footer claims more bytes than the file has",
            path=path,
            expected=f"at most {size_bytes - 16}",
            found=length,
        )
    if length == 0:
        raise ShardIndexError("the footer is empty", path=path, expected="a JSON object", found="0 bytes")
    at = size_bytes - 16 - length
    return at, (at, length)


def _end_of_arrow_file(reader: Reader, path: str, end: int) -> int:
    trailer = 4 + len(_FILE_MAGIC)
    if end < _FILE_HEAD_BYTES + trailer:
        raise ShardError("the Arrow file is cut", path=path, expected="a footer", found=f"{end} bytes")
    last = reader.read_ranges(path, [(end - trailer, trailer)])[0]
    length = struct.unpack_from("<i", last)[0]
    if last[4:] != _FILE_MAGIC or not 0 < length <= end - trailer - _FILE_HEAD_BYTES:
        raise ShardError("the Arrow file has no footer", path=path, expected="a length and ARROW1", found=last.hex())
    return int(end - trailer - length)


def is_end_mark(reader: Reader, framing: Framing, at: int) -> bool:
    """Whether exactly an end-of-stream mark stands between `at` and the end of the record batches."""
    if framing.records_end - at != len(END_OF_STREAM):
        return False
    tail_at = framing.size_bytes - len(framing.tail)
    if at >= tail_at:
        mark = framing.tail[at - tail_at :][: len(END_OF_STREAM)]
    else:
        mark = reader.read_ranges(framing.path, [(at, len(END_OF_STREAM))])[0]
    return mark == END_OF_STREAM


def walk_records(reader: Reader, framing: Framing) -> Walk:
    """Finds all records by their messages' headers; of the bodies only the coordinates are read.

    Raises:
        ShardError: The stream is torn, has several schemas, or goes on behind its end mark.
    """
    batches, at, error = _whole_batches(reader, framing)
    if error is not None:
        raise _torn(framing, batches, at, error)
    if at < framing.records_end and not is_end_mark(reader, framing, at):
        raise ShardError(
            "the shard goes on behind its end mark",
            path=framing.path,
            offset_bytes=at,
            expected=f"the end at byte {at + len(END_OF_STREAM)}",
            found=f"{framing.records_end} bytes",
            advice=SEVERAL_STREAMS,
        )
    return _walk(batches, has_end_mark=at < framing.records_end)


def _walk(batches: list[_Batch], *, has_end_mark: bool) -> Walk:
    counts = [len(batch.xyz) for batch in batches]
    return Walk(
        np.repeat(np.array([batch.offset_bytes for batch in batches], np.int64), counts),
        np.repeat(np.array([batch.size_bytes for batch in batches], np.int64), counts),
        np.concatenate([np.arange(n, dtype=np.int64) for n in counts]) if counts else np.empty(0, np.int64),
        np.concatenate([batch.xyz for batch in batches]) if batches else np.empty((0, 3), np.int64),
        len(batches),
        has_end_mark,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """What a file holds that streams were written into one after another, or at the same time by several writers.

    Attributes:
        walk: All whole records up to the first that is torn.
        n_streams: Schemas that were met, which are all the same.
        error: What is wrong with the file, or None where all messages are whole and every stream was closed.
    """

    walk: Walk
    n_streams: int
    error: ShardError | None


def walk_streams(reader: Reader, framing: Framing) -> Streams:
    """Finds the records of all streams of a file, which a plain reader would take for torn behind the first.

    DVID appends to files that are there already. Shards that share a name are written by several writers at once, each
    of which writes its messages as wholes. Nothing is lost in such a file, unless messages were torn by one another.
    """
    windows = _Windows(reader, framing)
    batches: list[_Batch] = []
    schema = framing.schema
    at, n_schemas, n_ends, is_closed = framing.records_at, 1, 0, False
    error: RecordError | None = None
    while at < framing.records_end:
        try:
            if framing.records_end - at >= len(schema) and windows.get(at, len(schema)) == schema:
                n_schemas, at, is_closed = n_schemas + 1, at + len(schema), False
                continue
            batch = _read_header(windows, framing, at)
        except RecordError as torn:
            error = torn
            break
        if batch is None:
            n_ends, at, is_closed = n_ends + 1, at + len(END_OF_STREAM), True
        else:
            batches.append(batch)
            at, is_closed = at + batch.size_bytes, False
    if error is None and not (is_closed and n_ends == n_schemas):
        error = RecordError(
            "a stream was not closed", expected=f"{n_schemas} end marks, one of them at the end", found=f"{n_ends}"
        )
    walk = _walk(batches, has_end_mark=is_closed)
    return Streams(walk, n_schemas, None if error is None else _torn(framing, batches, at, error))


def _torn(framing: Framing, batches: list[_Batch], at: int, error: RecordError) -> ShardError:
    return ShardError(
        f"the shard is torn or overwritten behind {_count(batches)} whole records: {error.problem}",
        path=framing.path,
        offset_bytes=at,
        expected=error.expected,
        found=error.found,
    )


def n_whole_records(reader: Reader, framing: Framing) -> int:
    """How many whole records a shard starts with, however it goes on."""
    return _count(_whole_batches(reader, framing)[0])


def _whole_batches(reader: Reader, framing: Framing) -> tuple[list[_Batch], int, RecordError | None]:
    """The batches up to an end mark, the end, or the first that is torn; where that is; and what is wrong there."""
    windows = _Windows(reader, framing)
    batches: list[_Batch] = []
    at = framing.records_at
    while at < framing.records_end:
        try:
            batch = _read_header(windows, framing, at)
        except RecordError as error:
            return batches, at, error
        if batch is None:
            break
        batches.append(batch)
        at += batch.size_bytes
    return batches, at, None


def _count(batches: list[_Batch]) -> int:
    return sum(len(batch.xyz) for batch in batches)


def n_rows_of_first(reader: Reader, framing: Framing) -> int:
    """Records of the first batch; writers fill all batches alike but the last. 0 where there is none.

    Raises:
        ShardError: The shard is torn there.
    """
    if framing.records_at >= framing.records_end:
        return 0
    try:
        batch = _read_header(_Windows(reader, framing), framing, framing.records_at)
    except RecordError as error:
        raise ShardError(
            f"no whole record follows the schema: {error.problem}",
            path=framing.path,
            offset_bytes=framing.records_at,
            expected=error.expected,
            found=error.found,
        ) from None
    return 0 if batch is None else len(batch.xyz)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    offset_bytes: int
    size_bytes: int
    xyz: npt.NDArray[np.int64]


def _read_header(windows: _Windows, framing: Framing, at: int) -> _Batch | None:
    """The record batch at `at`, or None where an end mark stands."""
    left = framing.records_end - at
    if left < PREFIX_BYTES:
        raise RecordError("a message is cut", expected=f"{PREFIX_BYTES} bytes", found=left)
    length = metadata_length(windows.get(at, PREFIX_BYTES))
    if length == 0:
        return None
    body_at = at + PREFIX_BYTES + length
    if body_at > framing.records_end:
        raise RecordError("a message's metadata is cut", expected=f"{length} bytes", found=left - PREFIX_BYTES)
    try:
        header = core.parse_message(windows.get(at + PREFIX_BYTES, length))
        if header.kind != RECORD_BATCH:
            raise RecordError("a message is no record batch", expected="type 3", found=f"type {header.kind}")
        if header.body_bytes > framing.records_end - body_at:
            raise RecordError(
                "a message's body is cut", expected=f"{header.body_bytes} bytes", found=framing.records_end - body_at
            )
        extents = header.coordinate_buffers(framing.layout.native)
    except core.Fault as fault:
        raise record_error(fault) from None
    first = min(offset for offset, _ in extents)
    last = max(offset + size for offset, size in extents)
    columns = windows.get(body_at + first, last - first)
    buffers = [columns[offset - first : offset - first + size] for offset, size in extents]
    return _Batch(at, PREFIX_BYTES + length + header.body_bytes, read_coordinates(header, buffers))
