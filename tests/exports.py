"""Small synthetic exports in every dialect, written by pyarrow from the dialects' description alone.

Nothing here uses zarr_dvid's writer. `Chunk` is what an export holds, `Dialect` how it is written, `write_shard` the
bytes; `MemoryReader` and `CountingReader` give them to an `Export`.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard
from naive import naive_encode_libdvid

from zarr_dvid.errors import MissingFileError
from zarr_dvid.export import Export
from zarr_dvid.reader import FileInfo, Reader
from zarr_dvid.voxels import Values, decode_payload

Voxels = npt.NDArray[np.uint64]
XYZ = tuple[int, int, int]
IndexKind = Literal[
    "none", "json", "footer", "rec", "rec,morton", "batch_offset", "offset", "offset from 688", "rec,offset,size"
]

SHAPE = (64, 64, 64)
END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"
COLUMNS = ("chunk_x", "chunk_y", "chunk_z", "labels", "supervoxels", "dvid_compressed_block", "uncompressed_size")
COORDINATE_BUFFERS, LABELS_BUFFER, BLOCK_BUFFER = (1, 3, 5), 9, 16  # values, among the buffers of `COLUMNS`
INDEX_KINDS: tuple[IndexKind, ...] = (
    "none",
    "json",
    "footer",
    "rec",
    "rec,morton",
    "batch_offset",
    "offset",
    "offset from 688",
    "rec,offset,size",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """One chunk of a synthetic export.

    Attributes:
        xyz: Its coordinates, in chunks.
        voxels: What it reads as, by `values`: uint64 of 64^3.
        table: Its block's label table.
        labels: The agglomerated label of each of these.
        block: The bare block.
    """

    xyz: XYZ
    voxels: Mapping[Values, Voxels]
    table: tuple[int, ...]
    labels: tuple[int, ...]
    block: bytes


@cache
def make_chunk(xyz: XYZ, *, seed: int = 0) -> Chunk:
    """A chunk with labels of its own, so that no other reads the same: sub-blocks of one label, some of several."""
    rng = np.random.default_rng([seed, *xyz])
    first = 1 + 100 * (seed + 50 * (xyz[0] + 4096 * (xyz[1] + 4096 * xyz[2])))
    pool = np.arange(first, first + 7, dtype=np.uint64)
    supervoxels = np.kron(rng.choice(pool, (8, 8, 8)), np.ones((8, 8, 8), np.uint64))
    supervoxels[8:14, 16:30, 3:25] = rng.choice(pool, (6, 14, 22))
    block = naive_encode_libdvid(supervoxels)
    n_labels = struct.unpack_from("<I", block, 12)[0]
    table = struct.unpack_from(f"<{n_labels}Q", block, 16)
    bodies = {label: 2**63 + first + label % 3 for label in table}
    bodies[table[0]] = 0
    labels = supervoxels.copy()
    for label, body in bodies.items():
        labels[supervoxels == label] = body
    for voxels in (supervoxels, labels):
        voxels.flags.writeable = False
    return Chunk(
        xyz=xyz,
        voxels={"labels": labels, "supervoxels": supervoxels},
        table=table,
        labels=tuple(bodies[label] for label in table),
        block=block,
    )


def make_chunks(*all_xyz: XYZ, seed: int = 0) -> list[Chunk]:
    """`make_chunk` of each."""
    return [make_chunk(xyz, seed=seed) for xyz in all_xyz]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How a shard is written; the defaults are DVID's of today.

    Attributes:
        container: An Arrow stream, or an Arrow file, which only conversions are.
        rows_a_batch: Records of each message; the last has what is left.
        body_compression: Arrow's own: "zstd" or "lz4".
        raw_blocks: Bare blocks in place of zstd frames.
        has_size: Whether there is a column `uncompressed_size`.
        has_end_mark: Whether the stream is closed.
        index: Which index is written.
        units: What coordinates count, in keys and in columns.
        columns: Their order; names that are none of `COLUMNS` become columns of a conversion, most of them of text.
        large: Lists and binaries with 64-bit offsets.
    """

    container: Literal["stream", "file"] = "stream"
    rows_a_batch: int = 1
    body_compression: str | None = None
    raw_blocks: bool = False
    has_size: bool = True
    has_end_mark: bool = True
    index: IndexKind = "offset"
    units: Literal["chunks", "voxels"] = "chunks"
    columns: tuple[str, ...] = COLUMNS
    large: bool = False

    def schema(self) -> pa.Schema:
        """The shard's."""
        to_list, binary = (pa.large_list, pa.large_binary()) if self.large else (pa.list_, pa.binary())
        types = {
            "chunk_x": pa.int32(),
            "chunk_y": pa.int32(),
            "chunk_z": pa.int32(),
            "labels": to_list(pa.uint64()),
            "supervoxels": to_list(pa.uint64()),
            "dvid_compressed_block": binary,
            "uncompressed_size": pa.uint32(),
            "tags": pa.list_(pa.string()),
            "where": pa.struct([("x", pa.float64()), ("y", pa.bool_())]),
            "nothing": pa.null(),
            "hash": pa.binary(4),
        }
        # The first documents' schema says nothing about a codec; DVID's has told it ever since.
        codec = None if self.raw_blocks else {"compression": "true", "codec": "zstd"}
        return pa.schema(
            pa.field(
                name,
                types.get(name, pa.string()),
                nullable=name not in COLUMNS,
                metadata=codec if name == "dvid_compressed_block" else None,
            )
            for name in self.columns
            if self.has_size or name != "uncompressed_size"
        )


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A written shard.

    Attributes:
        arrow: Its file.
        indexes: Ending of each index file beside it, and its content.
        ranges: Start and length in bytes of each record's message, and the record's row in it.
        schema_range: Start and length of the schema message.
    """

    arrow: bytes
    indexes: Mapping[str, bytes]
    ranges: Sequence[tuple[int, int, int]]
    schema_range: tuple[int, int]

    def files(self, name: str = "s0/0_0_0") -> dict[str, bytes]:
        """All its files by path."""
        return {f"{name}.arrow": self.arrow} | {name + ending: data for ending, data in self.indexes.items()}


def write_shard(chunks: Sequence[Chunk], dialect: Dialect | None = None) -> Shard:
    """Writes chunks in their order."""
    dialect = dialect or Dialect()
    schema = dialect.schema()
    options = pa.ipc.IpcWriteOptions(compression=dialect.body_compression)
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_file if dialect.container == "file" else pa.ipc.new_stream
    writer = new(sink, schema, options=options)
    schema_at = 8 if dialect.container == "file" else 0
    schema_range = (schema_at, schema.serialize().size)
    ranges = []
    for start in range(0, len(chunks), dialect.rows_a_batch):
        some = chunks[start : start + dialect.rows_a_batch]
        at = sink.tell() or sum(schema_range)  # pyarrow writes the schema with the first batch
        writer.write_batch(_batch(some, dialect, schema))
        ranges += [(at, sink.tell() - at, row) for row in range(len(some))]
    writer.close()
    arrow = sink.getvalue().to_pybytes()
    if not dialect.has_end_mark:
        assert arrow.endswith(END_MARK)
        arrow = arrow[:-8]
    xyz = [coordinates(chunk, dialect) for chunk in chunks]
    if dialect.index == "footer":
        arrow += footer(json_index(xyz))
    return Shard(
        arrow=arrow,
        indexes=_indexes(xyz, ranges, schema_range, dialect),
        ranges=ranges,
        schema_range=schema_range,
    )


def coordinates(chunk: Chunk, dialect: Dialect) -> XYZ:
    """A chunk's coordinates as the dialect writes them."""
    x, y, z = ((64 if dialect.units == "voxels" else 1) * c for c in chunk.xyz)
    return x, y, z


def footer(document: bytes) -> bytes:
    """The JSON footer of DVID's first documents."""
    return document + struct.pack("<Q", len(document)) + b"CHUNKIDX"


def json_index(all_xyz: Iterable[XYZ]) -> bytes:
    """A JSON index of records in this order; a chunk that occurs twice keeps the last, as in DVID's Go map."""
    return json.dumps({"_".join(map(str, xyz)): record for record, xyz in enumerate(all_xyz)}, indent=2).encode()


def csv_index(header: str, rows: Iterable[Sequence[int]], *, comment: str = "") -> bytes:
    """A CSV index."""
    return (comment + "".join(line + "\n" for line in [header, *(",".join(map(str, row)) for row in rows)])).encode()


def _indexes(
    xyz: list[XYZ], ranges: list[tuple[int, int, int]], schema_range: tuple[int, int], dialect: Dialect
) -> dict[str, bytes]:
    schema_end = sum(schema_range)
    # DVID's writer emits the schema with the first batch, whose range then starts at 0 and holds both.
    lazy = [
        (schema_range[0], at + size - schema_range[0], row) if at == schema_end else (at, size, row)
        for at, size, row in ranges
    ]
    rec = [(*c, i) for i, c in enumerate(xyz)]
    if dialect.index == "json":
        return {".json": json_index(xyz)}
    if dialect.index == "rec":
        return {".csv": csv_index("x,y,z,rec", rec)}
    if dialect.index == "rec,morton":
        return {".csv": csv_index("x,y,z,rec,morton", rec)}
    if dialect.index == "batch_offset":
        batches = {at: i for i, at in enumerate(dict.fromkeys(at for at, _, _ in ranges))}
        one = [(*r, batches[at], row) for r, (at, _, row) in zip(rec, ranges, strict=True)]
        other = [(*r, *p) for r, p in zip(rec, lazy, strict=True)]
        return {
            ".csv": csv_index("x,y,z,rec,batch_offset,batch_idx", one),
            "-offsets.csv": csv_index("x,y,z,rec,offset,size,batch_idx", other, comment="# schema_size=0\n"),
        }
    if dialect.index == "offset":
        rows = [(*c, *p) for c, p in zip(xyz, lazy, strict=True)]
        return {".csv": csv_index("x,y,z,offset,size,batch_idx", rows, comment="# schema_size=0\n")}
    if dialect.index == "offset from 688":
        rows = [(*c, *p) for c, p in zip(xyz, ranges, strict=True)]
        return {".csv": csv_index("x,y,z,offset,size,batch_idx", rows, comment=f"# schema_size={schema_end}\n")}
    if dialect.index == "rec,offset,size":
        rows = [(*r, *p[:2]) for r, p in zip(rec, ranges, strict=True)]
        return {".csv": csv_index("x,y,z,rec,offset,size", rows, comment=f"# schema_size={schema_end}\n")}
    return {}


def _batch(chunks: Sequence[Chunk], dialect: Dialect, schema: pa.Schema) -> pa.RecordBatch:
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    xyz = [coordinates(chunk, dialect) for chunk in chunks]
    values: dict[str, list[Any]] = {
        "chunk_x": [x for x, _, _ in xyz],
        "chunk_y": [y for _, y, _ in xyz],
        "chunk_z": [z for _, _, z in xyz],
        "labels": [chunk.labels for chunk in chunks],
        "supervoxels": [chunk.table for chunk in chunks],
        "dvid_compressed_block": [c.block if dialect.raw_blocks else compressor.compress(c.block) for c in chunks],
        "uncompressed_size": [len(chunk.block) for chunk in chunks],
        "tags": [["a", None, "bcd"] for _ in chunks],
        "where": [{"x": 0.5, "y": True} for _ in chunks],
        "nothing": [None for _ in chunks],
        "hash": [b"abcd" for _ in chunks],
    }
    notes = [None, *(f"chunk {chunk.xyz}" for chunk in chunks[1:])][: len(chunks)]
    columns = [pa.array(values.get(field.name, notes), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def message_buffers(data: bytes, at: int) -> tuple[int, list[tuple[int, int]], range]:
    """End of the record-batch message at `at`, its buffers in the file, and its metadata's bytes."""

    def field(table: int, index: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        return table + struct.unpack_from("<H", data, vtable + 4 + 2 * index)[0]

    def follow(place: int) -> int:
        return place + struct.unpack_from("<I", data, place)[0]

    n_metadata = struct.unpack_from("<i", data, at + 4)[0]
    body = at + 8 + n_metadata
    message = follow(at + 8)
    end = body + struct.unpack_from("<q", data, field(message, 3))[0]
    vector = follow(field(follow(field(message, 2)), 2))
    n_buffers = struct.unpack_from("<I", data, vector)[0]
    extents = [struct.unpack_from("<qq", data, vector + 4 + 16 * i) for i in range(n_buffers)]
    return end, [(body + offset, size) for offset, size in extents], range(at, body)


_keys = itertools.count()


class MemoryReader:
    """Files in memory, by path."""

    url = "memory"

    def __init__(self, files: Mapping[str, bytes], *, window_bytes: int = 1024, concurrency: int = 1) -> None:
        self.files = dict(files)
        self.window_bytes, self.concurrency = window_bytes, concurrency
        self.key: Hashable = f"test {next(_keys)}"

    def list(self, path: str) -> Sequence[FileInfo]:
        prefix = f"{path}/" if path else ""
        inside = [name.removeprefix(prefix) for name in self.files if name.startswith(prefix)]
        if not inside and path:
            raise MissingFileError("there is no such directory", path=path)
        folders = {name.split("/")[0] for name in inside if "/" in name}
        files = [FileInfo(name, len(self.files[prefix + name]), False) for name in inside if "/" not in name]
        return [*files, *(FileInfo(name, 0, True) for name in folders)]

    def size(self, path: str) -> int:
        return len(self._file(path))

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        data = self._file(path)
        assert all(at >= 0 and size > 0 and at + size <= len(data) for at, size in ranges), (path, ranges, len(data))
        return [data[at : at + size] for at, size in ranges]

    def _file(self, path: str) -> bytes:
        if path not in self.files:
            raise MissingFileError("there is no such file", path=path)
        return self.files[path]


class CountingReader:
    """Another reader that remembers what it was asked: (method, path, ranges)."""

    def __init__(self, reader: Reader, *, before_read: Callable[[str], None] | None = None) -> None:
        self._reader = reader
        self._before_read = before_read
        self.url, self.window_bytes, self.concurrency = reader.url, reader.window_bytes, reader.concurrency
        self.key: Hashable = f"test {next(_keys)}"
        self.calls: list[tuple[str, str, tuple[tuple[int, int], ...]]] = []

    def list(self, path: str) -> Sequence[FileInfo]:
        self.calls.append(("list", path, ()))
        return self._reader.list(path)

    def size(self, path: str) -> int:
        self.calls.append(("size", path, ()))
        return self._reader.size(path)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        self.calls.append(("read", path, tuple(ranges)))
        if self._before_read is not None:
            self._before_read(path)
        return self._reader.read_ranges(path, ranges)

    def taken(self) -> list[tuple[str, str]]:
        """Methods and paths of the calls since the last time, whose ranges are forgotten."""
        calls = [call[:2] for call in self.calls]
        self.calls.clear()
        return calls

    def n_bytes(self, path: str) -> int:
        """Bytes read of a file so far."""
        return sum(size for _, name, ranges in self.calls for _, size in ranges if name == path)


def open_export(files: Mapping[str, bytes], *, info: Mapping[str, Any] | None = None) -> Export:
    """An export of files in memory."""
    return Export(MemoryReader(files), info=info)


def volume_info(size_xyz: XYZ, *, sharding: tuple[int, int, int] | None = None, n_scales: int = 1) -> dict[str, Any]:
    """A neuroglancer volume description; `sharding` is preshift, minishard and shard bits."""
    names = ("preshift_bits", "minishard_bits", "shard_bits")
    scales = [
        {
            "key": f"s{level}",
            "size": [-(-side // 2**level) for side in size_xyz],
            "resolution": [8 * 2**level] * 3,
            "chunk_sizes": [[64, 64, 64]],
            **({} if sharding is None else {"sharding": dict(zip(names, sharding, strict=True))}),
        }
        for level in range(n_scales)
    ]
    return {"@type": "neuroglancer_multiscale_volume", "data_type": "uint64", "num_channels": 1, "scales": scales}


def read_voxels(export: Export, xyz: XYZ, *, values: Values = "labels", level: int = 0) -> Voxels | None:
    """A chunk's voxels as a user gets them, or None where the export says that it has no such chunk."""
    payload = export.read_chunk(level, xyz)
    return None if payload is None else decode_payload(payload, values=values, shape=SHAPE)


def assert_reads(export: Export, chunks: Iterable[Chunk], *, level: int = 0) -> None:
    """All chunks read right, as labels and as supervoxels."""
    for chunk in chunks:
        for values, expected in chunk.voxels.items():
            found = read_voxels(export, chunk.xyz, values=values, level=level)
            assert found is not None, (chunk.xyz, values)
            np.testing.assert_array_equal(found, expected, err_msg=f"{chunk.xyz} {values}")


def relabelled(chunk: Chunk, *, seed: int) -> Chunk:
    """Another chunk at the same place."""
    return make_chunk(chunk.xyz, seed=seed)


def moved(chunk: Chunk, xyz: XYZ) -> Chunk:
    """The same voxels at another place."""
    return replace(chunk, xyz=xyz)
