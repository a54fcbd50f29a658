"""The zarr codec pipeline: a whole selection at once, decoded straight into the array that the user gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from zarr.abc.codec import CodecPipeline
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.storage import FsspecStore

from zarr_dvid.codec import DvidBlockCodec
from zarr_dvid.filesystem import DvidFileSystem
from zarr_dvid.hierarchy import Hierarchy
from zarr_dvid.keys import ChunkKey, parse_key
from zarr_dvid.selection import read_selection
from zarr_dvid.store import DvidStore

if TYPE_CHECKING:
    from zarr.abc.codec import Codec
    from zarr.abc.store import Store
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer
    from zarr.core.metadata import ArrayMetadata
    from zarr.storage import StorePath

_QUICK_CHUNKS = 8
_PRESENT, _MISSING = {"status": "present"}, {"status": "missing"}


@dataclass(frozen=True)
class DvidPipeline(CodecPipeline):
    """Reads arrays of an export, through `DvidStore` or the filesystem `dvid`; all others have zarr's own pipeline.

    Attributes:
        codec: Of the array.
        zarr_pipeline: Zarr's own, for what this one does not do: encoding, and single chunks.
    """

    codec: DvidBlockCodec
    zarr_pipeline: BatchedCodecPipeline

    @classmethod
    def from_array_metadata_and_store(cls, array_metadata: ArrayMetadata, store: Store) -> Self:
        """The pipeline of an array of an export.

        Raises:
            NotImplementedError: It is none; zarr then asks `from_codecs`.
        """
        codecs: list[Codec] = list(getattr(array_metadata, "codecs", ()))
        if hierarchy_of(store) is None or len(codecs) != 1 or not isinstance(codecs[0], DvidBlockCodec):
            raise NotImplementedError("the array is not one of an export")
        return cls(codecs[0], BatchedCodecPipeline.from_codecs(codecs))

    @classmethod
    def from_codecs(cls, codecs: Iterable[Codec]) -> Any:
        """Zarr's own pipeline, for arrays that are not of an export."""
        return BatchedCodecPipeline.from_codecs(codecs)

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """The same: the codec is the same for all chunks."""
        return self

    def __iter__(self) -> Iterator[Codec]:
        return iter(self.zarr_pipeline)

    @property
    def supports_partial_decode(self) -> bool:
        """Parts of chunks are decoded alone."""
        return True

    @property
    def supports_partial_encode(self) -> bool:
        """Parts of chunks are not encoded."""
        return False

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """See `DvidBlockCodec.validate`."""
        self.zarr_pipeline.validate(shape=shape, dtype=dtype, chunk_grid=chunk_grid)

    def compute_encoded_size(self, byte_length: int, array_spec: ArraySpec) -> int:
        """Not known before a chunk is encoded."""
        return self.zarr_pipeline.compute_encoded_size(byte_length, array_spec)

    async def decode(self, chunk_bytes_and_specs: Iterable[tuple[Buffer | None, ArraySpec]]) -> Iterable[NDBuffer | None]:
        """Decodes chunks that somebody has read."""
        return await self.zarr_pipeline.decode(chunk_bytes_and_specs)

    async def encode(self, chunk_arrays_and_specs: Iterable[tuple[NDBuffer | None, ArraySpec]]) -> Any:
        """Refused by the codec."""
        return await self.zarr_pipeline.encode(chunk_arrays_and_specs)

    async def write(self, batch_info: Any, value: NDBuffer, drop_axes: tuple[int, ...] = ()) -> None:
        """Refused by the store."""
        await self.zarr_pipeline.write(batch_info, value, drop_axes)

    async def read(self, batch_info: Iterable[Any], out: NDBuffer, drop_axes: tuple[int, ...] = ()) -> Any:
        """Reads a selection into `out`.

        Args:
            batch_info: For each chunk: where its bytes are, its spec, the selection in it, where that goes in `out`, and
                whether it is the whole chunk.
            out: The array that the user gets.
            drop_axes: Axes of the chunks that `out` does not have.

        Returns:
            A dictionary for each chunk whose "status" is "present" or "missing", as zarr wants it since 3.2.

        Raises:
            ZarrDvidError: A chunk can't be read; the error names its shard and chunk.
        """
        batch = list(batch_info)
        array = out.as_ndarray_like()
        found = _chunk_of_export(batch[0][0]) if batch else None
        if found is None or not isinstance(array, np.ndarray):  # an array on a device, or moved to another store
            return await self.zarr_pipeline.read(batch, out, drop_axes)
        hierarchy, level = found
        arguments = (hierarchy, level, self.codec.values, batch, array, drop_axes)
        # Where nobody else waits for this loop, going to another thread and back would take longer than a few chunks do.
        is_quick = len(batch) <= _QUICK_CHUNKS and hierarchy.export.reader.concurrency == 1
        if is_quick and len(asyncio.all_tasks()) == 1:
            present = read_selection(*arguments)
        else:
            present = await asyncio.to_thread(read_selection, *arguments)
        return tuple([_PRESENT if is_there else _MISSING for is_there in present])


def _chunk_of_export(getter: StorePath) -> tuple[Hierarchy, int] | None:
    """The export and the scale of a chunk, or None where it is of something else."""
    found = hierarchy_of(getter.store)
    if found is None:
        return None
    hierarchy, root = found
    key = parse_key(f"{root}/{getter.path}".lstrip("/"))
    return (hierarchy, key.level) if isinstance(key, ChunkKey) else None


def hierarchy_of(store: Store) -> tuple[Hierarchy, str] | None:
    """The export behind a store of zarr's, and the path in it that the store starts at; None where there is none."""
    if isinstance(store, DvidStore):
        return store.hierarchy, ""
    if isinstance(store, FsspecStore):
        filesystem = getattr(store.fs, "sync_fs", store.fs)  # zarr wraps filesystems that are not asynchronous
        if isinstance(filesystem, DvidFileSystem):
            return filesystem.hierarchy, filesystem._strip_protocol(store.path)
    return None
