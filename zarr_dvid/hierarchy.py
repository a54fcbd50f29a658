"""An export as keys and bytes: what the Zarr store and the fsspec filesystem both show."""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from zarr_dvid.configuration import n_decode_threads
from zarr_dvid.errors import ExportError
from zarr_dvid.export import Export, InfoLike
from zarr_dvid.keys import ChunkKey, CoordinatesKey, DocumentKey, parse_key
from zarr_dvid.lazy import lazy
from zarr_dvid.metadata import AXES, Grid, documents
from zarr_dvid.reader import Reader
from zarr_dvid.shard_index import CHUNK_VOXELS
from zarr_dvid.voxels import VALUES

if TYPE_CHECKING:
    import numpy.typing as npt

VoxelSize = float | Sequence[float]

_CHUNK_INDEX = re.compile(r"0|[1-9][0-9]{0,7}")


class Hierarchy:
    """The keys of a Zarr v3 hierarchy over an export, and their values.

    Args:
        open_reader: Gives the reader of the export's files; called when something is first read.
        name: The export's name, for the OME metadata.
        info: A neuroglancer volume description: its path or URL, or the document itself.
        voxel_size: Nanometres at scale 0, one number or (z, y, x); overrides that of `info`.
        threads: Threads that decode selections, or None for what the configuration says.
        index: Gives the reader of the directory of the compact index; None to look for one, False to do without.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader],
        *,
        name: str,
        info: InfoLike | None = None,
        voxel_size: VoxelSize | None = None,
        threads: int | None = None,
        index: Callable[[], Reader] | Literal[False] | None = None,
    ) -> None:
        n_decode_threads(threads)  # refuses what is no number of threads
        self.threads = threads
        self._open_reader = open_reader
        self._name = name
        self._info = info
        self._index = index
        self.voxel_size = None if voxel_size is None else three_sizes(voxel_size)

    @lazy
    def export(self) -> Export:
        """The export; nothing of it has been read yet."""
        return Export(self._open_reader(), info=self._info, index=self._index() if self._index else self._index)

    @lazy
    def grid(self) -> Grid:
        """Where the voxels of all scales are."""
        info = self.export.info
        shapes = {level: scale.size_xyz[::-1] for level, scale in self.export.scales.items()}
        voxel_size = self.voxel_size
        if voxel_size is None and info is not None and info.voxel_size_xyz is not None:
            voxel_size = info.voxel_size_xyz[::-1]
        return Grid(shapes, voxel_size or (1.0, 1.0, 1.0), "nanometer" if voxel_size else "voxel")

    @lazy
    def _documents(self) -> dict[str, bytes]:
        found = documents(self.grid, self._name)
        return {path: json.dumps(document).encode() for path, document in found.items()}

    def get(self, key: str) -> bytes | None:
        """The value of a key: a document, coordinates, or a chunk's record.

        Returns:
            Bytes; for a chunk the Arrow record-batch message of its record. None where there is no such key, or no such
            chunk in a sound index.

        Raises:
            ZarrDvidError: The export can't say, or what it has is broken.
        """
        match parse_key(key):
            case DocumentKey(path):
                return self._documents.get(path)
            case CoordinatesKey(level, axis) if level in self.grid.shapes:
                return self.grid.coordinates(level, axis).tobytes()
            case ChunkKey() as chunk if self._is_in_grid(chunk):
                return self.export.read_chunk(chunk.level, chunk.chunk_xyz)
        return None

    def exists(self, key: str) -> bool:
        """Whether a key has a value; a chunk's is answered from the index alone."""
        match parse_key(key):
            case ChunkKey() as chunk:
                return self._is_in_grid(chunk) and bool(self.export.scales[chunk.level].find(chunk.chunk_xyz))
        return self.get(key) is not None

    def nbytes(self, key: str) -> int | None:
        """Length of a key's value, or None where it has none; a chunk's comes from the index where that can tell."""
        match parse_key(key):
            case ChunkKey() as chunk if self._is_in_grid(chunk):
                known = self.export.payload_nbytes(chunk.level, chunk.chunk_xyz)
                if known is not None:
                    return known
        value = self.get(key)
        return None if value is None else len(value)

    def _is_in_grid(self, chunk: ChunkKey) -> bool:
        if chunk.level not in self.grid.shapes:
            return False
        grid_xyz = self.export.scales[chunk.level].grid_xyz
        return all(c < n for c, n in zip(chunk.chunk_xyz, grid_xyz, strict=True))

    def keys(self, prefix: str = "") -> Iterator[str]:
        """All keys that start with a prefix: documents and coordinates, then the chunks, shard by shard from the index."""
        fixed = [posixpath.join(path, "zarr.json") for path in self._documents]
        fixed += [f"s{level}/{axis}/c/0" for level in self.grid.shapes for axis in AXES]
        yield from (key for key in fixed if key.startswith(prefix))
        for level, values in itertools.product(self.grid.shapes, VALUES):
            root = f"s{level}/{values}/c/"
            if root.startswith(prefix) or prefix.startswith(root):
                for chunks_xyz in self.export.scales[level].occupied():
                    keys = (str(ChunkKey(level, values, (x, y, z))) for x, y, z in chunks_xyz.tolist())
                    yield from (key for key in keys if key.startswith(prefix))

    def occupied(self, level: int, box: Sequence[slice] | None) -> Iterator[npt.NDArray[np.int64]]:
        """The chunks (z, y, x) of a scale that exist, from the index alone, shard by shard; see `DvidStore.occupied`."""
        if level not in self.export.scales:
            raise ExportError(
                "there is no such scale", path=f"s{level}", expected=f"one of {list(self.export.scales)}", found=level
            )
        scale = self.export.scales[level]
        if box is None:
            yield from (chunks_xyz[:, ::-1] for chunks_xyz in scale.occupied())
            return
        if len(box) != 3 or any(part.step not in (None, 1) for part in box):
            raise ValueError(f"box must be three slices (z, y, x) with step 1, not {box!r}")
        bounds = [part.indices(side) for part, side in zip(reversed(box), scale.size_xyz, strict=True)]
        if all(start < stop for start, stop, _ in bounds):
            x, y, z = ((start // CHUNK_VOXELS, (stop - 1) // CHUNK_VOXELS) for start, stop, _ in bounds)
            low, high = (x[0], y[0], z[0]), (x[1], y[1], z[1])
            yield from (chunks_xyz[:, ::-1] for chunks_xyz in scale.occupied(low, high) if len(chunks_xyz))

    def children(self, path: str) -> list[str] | None:
        """Names directly below a group, an array, or a prefix of chunk keys; None where there is no such thing."""
        parts = [part for part in path.split("/") if part]
        if not parts:
            return ["zarr.json", *(f"s{level}" for level in self.grid.shapes)]
        if "/".join(parts) not in self._documents:
            return self._children_of_chunks(parts)
        return ["zarr.json", *((*VALUES, *AXES) if len(parts) == 1 else ("c",))]

    def _children_of_chunks(self, parts: list[str]) -> list[str] | None:
        if len(parts) < 3 or parts[2] != "c" or "/".join(parts[:2]) not in self._documents:
            return None
        if parts[1] in AXES:
            return ["0"] if len(parts) == 3 else None
        indices = parts[3:]
        if len(indices) > 2 or not all(_CHUNK_INDEX.fullmatch(part) for part in indices):
            return None
        names: set[int] = set()
        for chunks_xyz in self.export.scales[int(parts[0][1:])].occupied():
            zyx = chunks_xyz[:, ::-1]
            for i, part in enumerate(indices):
                zyx = zyx[zyx[:, i] == int(part)]
            names.update(np.unique(zyx[:, len(indices)]).tolist())
        return [str(name) for name in sorted(names)] if names or not indices else None


def export_name(url: str) -> str:
    """The last part of an export's path."""
    target = url.split("::")[-1].split("?")[0]
    path = target.rstrip("/") if "://" in target else os.path.abspath(target)  # noqa: PTH100 - also of a path that is "."
    return posixpath.basename(path) or "export"


def three_sizes(voxel_size: VoxelSize) -> tuple[float, float, float]:
    """A voxel size as three numbers (z, y, x).

    Raises:
        ExportError: It is neither one positive number nor three.
    """
    sizes = np.asarray(voxel_size)
    if sizes.dtype.kind in "iuf" and sizes.shape in ((), (3,)) and bool(((sizes > 0) & np.isfinite(sizes)).all()):
        z, y, x = np.broadcast_to(sizes, 3).astype(float).tolist()
        return z, y, x
    raise ExportError(
        "the voxel size can't be used",
        expected="one positive number, or three (z, y, x)",
        found=repr(voxel_size),
        advice="Give nanometres at scale 0",
    )
