"""Writes shards: voxels to blocks, blocks to records, records to an Arrow stream and its index."""

from __future__ import annotations

import hashlib
import operator
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import zstandard

from zarr_dvid.block import CHUNK_SHAPE, encode_block
from zarr_dvid.record import END_OF_STREAM, record_message, schema_message
from zarr_dvid.unfinished import part_path, sync_folder

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid.block import BytesLike, ShapeZYX, Voxels, Window
    from zarr_dvid.export_plan import BoxPlan, ShardPlan

    Labels: TypeAlias = npt.NDArray[np.uint64]

ReadWindow: TypeAlias = "Callable[[Window], Voxels]"

_CSV_HEAD = b"# schema_size=0\nx,y,z,offset,size,batch_idx\n"
_compressors = threading.local()


@dataclass(frozen=True, slots=True)
class LabelMapping:
    """Labels of those supervoxels that have another label than their own id.

    Attributes:
        supervoxels: uint64, ascending.
        labels: uint64, the label of each.
    """

    supervoxels: Labels
    labels: Labels

    @classmethod
    def of(cls, mapping: Mapping[int, int]) -> Self:
        """Takes over a mapping of supervoxel to label.

        Raises:
            TypeError: A key or value is no integer.
            ValueError: One is not within uint64.
        """
        supervoxels = np.fromiter(map(_checked_label, mapping.keys()), np.uint64, len(mapping))
        labels = np.fromiter(map(_checked_label, mapping.values()), np.uint64, len(mapping))
        order = np.argsort(supervoxels)
        return cls(supervoxels[order], labels[order])

    def labels_of(self, supervoxels: Labels) -> Labels:
        """The label of each supervoxel."""
        if not self.supervoxels.size:
            return supervoxels
        at = np.searchsorted(self.supervoxels, supervoxels).clip(max=self.supervoxels.size - 1)
        return np.where(self.supervoxels[at] == supervoxels, self.labels[at], supervoxels)

    def sha256(self) -> str:
        """Digest of the mapping, whatever order it was given in."""
        return hashlib.sha256(np.stack([self.supervoxels, self.labels]).astype("<u8").tobytes()).hexdigest()


def _checked_label(label: int) -> int:
    number = operator.index(label)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"mapping must be from and to numbers from 0 to 2**64 - 1, not {number}")
    return number


@dataclass(slots=True)
class ShardEncoder:
    """Makes the records of one scale's shards.

    Attributes:
        read: Gives voxels of the scale; called for one box at a time.
        shape_zyx: Voxels of the scale.
        mapping: Labels of supervoxels.
        pool: Where chunks are encoded.
        advance: Told how many chunks have been dealt with.
    """

    read: ReadWindow
    shape_zyx: ShapeZYX
    mapping: LabelMapping
    pool: Executor
    advance: Callable[[int], object]
    _box_zyx: ShapeZYX | None = field(default=None, init=False)
    _voxels: Voxels | None = field(default=None, init=False)

    def records(self, shard: ShardPlan) -> Iterator[tuple[ShapeZYX, bytes]]:
        """Chunk coordinates (z, y, x) and record-batch message of each chunk of a shard that is not all 0."""
        for box in shard.boxes():
            messages = self._encode(box)
            yield from ((chunk, message) for chunk, message in zip(box.chunks_zyx, messages, strict=True) if message)
            self.advance(len(messages))

    def _encode(self, box: BoxPlan) -> list[bytes | None]:
        if self._voxels is None or self._box_zyx != box.origin_zyx:
            self._voxels = None  # two boxes at once would be twice the memory
            self._voxels = self.read(box.window(self.shape_zyx))
            self._box_zyx = box.origin_zyx
        voxels = self._voxels

        def encode(chunk_zyx: ShapeZYX) -> bytes | None:
            return encode_chunk(voxels[box.chunk_window(chunk_zyx, voxels.shape)], chunk_zyx, self.mapping)

        return list(self.pool.map(encode, box.chunks_zyx))


def encode_chunk(voxels: Voxels, chunk_zyx: ShapeZYX, mapping: LabelMapping) -> bytes | None:
    """The record-batch message of a chunk, or None where its voxels are all 0.

    Args:
        voxels: uint64 supervoxels, 64^3 or less at the volume's end, where 0 is put in place of what is missing.
        chunk_zyx: Its chunk coordinates.
        mapping: Labels of supervoxels.
    """
    if not voxels.any():
        return None
    if voxels.shape != CHUNK_SHAPE:
        z, y, x = voxels.shape
        whole = np.zeros(CHUNK_SHAPE, np.uint64)
        whole[:z, :y, :x] = voxels
        voxels = whole
    block = encode_block(voxels)
    (n_labels,) = struct.unpack_from("<I", block, 12)
    supervoxels = np.frombuffer(block, "<u8", n_labels, offset=16)
    z, y, x = chunk_zyx
    return record_message(
        (x, y, z),
        labels=mapping.labels_of(supervoxels),
        supervoxels=supervoxels,
        block=_compress(block),
        uncompressed_size=len(block),
    )


def _compress(block: BytesLike) -> bytes:
    compressor: zstandard.ZstdCompressor | None = getattr(_compressors, "zstd", None)
    if compressor is None:  # one for each thread: they may not be shared, and are slow to make
        compressor = _compressors.zstd = zstandard.ZstdCompressor(write_content_size=True, write_checksum=True)
    return compressor.compress(block)


def write_shard(path: Path, records: Iterable[tuple[ShapeZYX, bytes]]) -> bool:
    """Writes a shard's files, each of which appears only when it is whole, the index last.

    Args:
        path: Path of the files without suffix, in a folder that exists.
        records: Chunk coordinates (z, y, x) and record-batch message of each record.

    Returns:
        Whether there was a record; without one there are no files.
    """
    rest = iter(records)
    first = next(rest, None)
    if first is None:
        return False
    targets = [path.with_name(f"{path.name}{suffix}") for suffix in (".arrow", ".csv")]
    parts = [part_path(target) for target in targets]
    try:
        with parts[0].open("wb") as arrow, parts[1].open("wb") as index:
            index.write(_CSV_HEAD)
            # As with DVID, which writes the schema together with the first record, the first range holds both.
            start, end = 0, arrow.write(schema_message())
            for (z, y, x), message in chain([first], rest):
                end += arrow.write(message)
                index.write(f"{x},{y},{z},{start},{end - start},0\n".encode())
                start = end
            arrow.write(END_OF_STREAM)
            for file in (arrow, index):
                file.flush()
                os.fsync(file.fileno())
        for part, target in zip(parts, targets, strict=True):
            part.replace(target)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True
