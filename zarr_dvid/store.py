"""The Zarr store over an export."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from zarr_dvid.block import Voxels
from zarr_dvid.configuration import use_pipeline
from zarr_dvid.errors import ReadOnlyError
from zarr_dvid.export import InfoLike
from zarr_dvid.export_index import IndexLike, index_location, index_opener
from zarr_dvid.hierarchy import Hierarchy, VoxelSize, export_name, three_sizes
from zarr_dvid.reader import open_reader, without_credentials
from zarr_dvid.selection import read_box
from zarr_dvid.voxels import Values

if TYPE_CHECKING:
    import numpy as np
    import zarr
    from zarr.core.buffer import Buffer, BufferPrototype

T = TypeVar("T")
_LISTED_AT_ONCE = 1000


class DvidStore(Store):
    """A read-only Zarr v3 store over what DVID's `export-shards` wrote.

    The hierarchy has a group `s0`, `s1`, … for each scale, with arrays `labels` (agglomerated) and `supervoxels`, uint64
    (z, y, x) in chunks of 64^3, fill value 0, and coordinates `z`, `y`, `x`. Chunk values are records of the export.

    A chunk that a sound index does not have is absent. One that it has and that can't be read raises, as does every
    chunk of a shard that is missing, or whose index is empty, cut or contradictory. A whole shard without any index is
    indexed from its records, with an `ExportWarning`.

    Args:
        url: The export's directory: a path, or a URL of any fsspec filesystem.
        info: A neuroglancer volume description: its path or URL, or the document itself. Gives the volume's size and
            voxel size; without it `info` in the export, `export.log` or the index tell what they can.
        voxel_size: Nanometres at scale 0, one number or (z, y, x); overrides that of `info`.
        storage_options: Options of the URL's filesystem, in fsspec's terms.
        threads: Threads that decode selections; by default what zarr's configuration says (`dvid.threads`), or all
            processors. In a dask worker never more than that was given.
        index: The directory of the export's compact index (`zarr_dvid.index_export`): its path or URL. By default one is
            looked for beside the export and in the user's cache; False does without.

    Raises:
        ExportError: Once something is read: there is no export, or its parts contradict each other.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        info: InfoLike | None = None,
        voxel_size: VoxelSize | None = None,
        storage_options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        index: IndexLike | None = None,
    ) -> None:
        super().__init__(read_only=True)
        use_pipeline()
        self._options: dict[str, Any] = {
            "info": dict(info) if isinstance(info, Mapping) else os.fspath(info) if info is not None else None,
            "voxel_size": None if voxel_size is None else three_sizes(voxel_size),
            "storage_options": dict(storage_options) if storage_options else None,
            "threads": threads,
            "index": index_location(index),
        }
        # A worker may run in another directory.
        path = os.fspath(url)
        is_url = isinstance(url, str) and ("://" in url or "::" in url) and not url.startswith("/")
        self.url = path if is_url else str(Path(path).expanduser().absolute())
        self.hierarchy = Hierarchy(
            functools.partial(open_reader, self.url, self._options["storage_options"]),
            name=export_name(self.url),
            info=self._options["info"],
            voxel_size=self._options["voxel_size"],
            threads=threads,
            index=index_opener(self._options["index"], self.url, self._options["storage_options"]),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, **{name: value for name, value in self._options.items() if value is not None}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DvidStore.__init__(self, **state)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment] # options may be any JSON

    def __repr__(self) -> str:
        return f"{type(self).__name__}({without_credentials(self.url)!r})"

    def with_read_only(self, read_only: bool = False) -> DvidStore:  # noqa: FBT001, FBT002 - zarr's signature
        """A store over the same export; it can't be made writable."""
        if not read_only:
            self._check_writable()
        return type(self)(self.url, **self._options)

    def read(self, scale: int, box: Sequence[slice], *, values: Values = "labels", out: Voxels | None = None) -> Voxels:
        """Reads a box of voxels: what ``zarr.open(store)[f"s{scale}/{values}"][box]`` gives, with less on the way.

        Args:
            scale: Scale.
            box: Slices (z, y, x) in voxels of that scale, with step 1; bounds as in numpy.
            values: "labels" (agglomerated) or "supervoxels".
            out: Array to read into: uint64, of the box's shape, contiguous along x.

        Returns:
            uint64 voxels (z, y, x); `out` itself where it was given.

        Raises:
            ZarrDvidError: A chunk can't be read. What `out` holds then is undefined.
            ValueError: `box`, `values` or `out` do not fit.
        """
        return read_box(self.hierarchy, scale, box, values=values, out=out)

    def occupied(
        self, scale: int, box: Sequence[slice] | None = None
    ) -> Iterator[np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
        """The blocks that exist, from the index alone; nothing of the blocks is read.

        Args:
            scale: Scale.
            box: Slices (z, y, x) in voxels of that scale, with step 1; bounds as in numpy. Blocks that overlap it count;
                only shards that may hold one are loaded. By default the whole volume.

        Yields:
            Chunk coordinates (z, y, x) at that scale, shard by shard: int64, shape (n, 3). Each block comes once.

        Raises:
            ShardError: A shard that may hold such a block can't be read.
            ShardIndexError: Its index can't be trusted.
        """
        yield from self.hierarchy.occupied(scale, box)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """See `zarr.abc.store.Store.get`."""
        value = await asyncio.to_thread(self.hierarchy.get, key)
        return None if value is None else prototype.buffer.from_bytes(cut(value, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """See `zarr.abc.store.Store.get_partial_values`."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        """See `zarr.abc.store.Store.exists`. For a chunk the index answers; its record is not read."""
        return await asyncio.to_thread(self.hierarchy.exists, key)

    async def list(self) -> AsyncIterator[str]:
        """All keys; those of chunks come shard by shard from the index."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All keys that start with a prefix."""
        keys = self.hierarchy.keys(prefix)
        while part := await asyncio.to_thread(_take, keys, _LISTED_AT_ONCE):
            for key in part:
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names of what lies directly below a prefix."""
        for name in await asyncio.to_thread(self.hierarchy.children, prefix) or ():
            yield name

    def _check_writable(self) -> None:
        raise ReadOnlyError("an export can't be written to", path=without_credentials(self.url))

    async def set(self, key: str, value: Buffer) -> NoReturn:
        """Refused.

        Raises:
            ReadOnlyError: Always.
        """
        self._refuse(key)

    async def delete(self, key: str) -> NoReturn:
        """Refused.

        Raises:
            ReadOnlyError: Always.
        """
        self._refuse(key)

    async def delete_dir(self, prefix: str) -> NoReturn:
        """Refused.

        Raises:
            ReadOnlyError: Always.
        """
        self._refuse(prefix)

    async def clear(self) -> NoReturn:
        """Refused.

        Raises:
            ReadOnlyError: Always.
        """
        self._refuse("")

    def _refuse(self, key: str) -> NoReturn:
        raise ReadOnlyError(f"an export can't be written to; tried {key!r}", path=without_credentials(self.url))


def cut(value: bytes, byte_range: ByteRequest | None) -> bytes:
    """The part of a value that a byte request of zarr's asks for.

    Raises:
        ValueError: It is no byte request.
    """
    match byte_range:
        case None:
            return value
        case RangeByteRequest(start, end):
            return value[start:end]
        case OffsetByteRequest(offset):
            return value[offset:]
        case SuffixByteRequest(suffix):
            return value[max(0, len(value) - suffix) :]
        case _:
            raise ValueError(f"Unexpected byte_range, got {byte_range}.")


def _take(items: Iterator[T], n: int) -> list[T]:
    return list(itertools.islice(items, n))


def open(  # noqa: A001 - as zarr.open
    url: str | os.PathLike[str], **options: Any
) -> zarr.Group:
    """Opens an export as a Zarr group.

    Args:
        url: The export's directory: a path, or a URL of any fsspec filesystem.
        **options: As of `DvidStore`: `info`, `voxel_size`, `storage_options`, `threads`, `index`.

    Returns:
        The root group; `group["s0/labels"]` is the array of scale 0.

    Raises:
        ExportError: There is no export, or its parts contradict each other.
    """
    import zarr

    return zarr.open_group(DvidStore(url, **options), mode="r")
