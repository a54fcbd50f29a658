"""An export as keys and bytes: what the Zarr store and the fsspec filesystem both show."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from zarr_dvid.errors import ExportError
from zarr_dvid.export import Export, InfoLike
from zarr_dvid.metadata import AXES, Grid, documents
from zarr_dvid.reader import Reader
from zarr_dvid.voxels import VALUES

VoxelSize = float | Sequence[float]

_KEY = re.compile(
    r"(?:s(?P<level>0|[1-9]\d?)/)?"
    r"(?:(?P<array>labels|supervoxels|[zyx])/)?"
    r"(?:zarr\.json|c/(?P<chunk>(?:0|[1-9]\d{0,7})(?:/(?:0|[1-9]\d{0,7})){0,2}))"
)
"""Every key that may exist; others are known not to, with no look at the export."""


class Hierarchy:
    """The keys of a Zarr v3 hierarchy over an export, and their values.

    Args:
        open_reader: Gives the reader of the export's files; called when something is first read.
        name: The export's name, for the OME metadata.
        info: A neuroglancer volume description: its path or URL, or the document itself.
        voxel_size: Nanometres at scale 0, one number or (z, y, x); overrides that of `info`.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader],
        *,
        name: str,
        info: InfoLike | None = None,
        voxel_size: VoxelSize | None = None,
    ) -> None:
        self._open_reader = open_reader
        self._name = name
        self._info = info
        self.voxel_size = _three_sizes(voxel_size)

    @cached_property
    def export(self) -> Export:
        """The export; nothing of it has been read yet."""
        return Export(self._open_reader(), info=self._info)

    @cached_property
    def grid(self) -> Grid:
        """Where the voxels of all scales are."""
        info = self.export.info
        shapes = {level: scale.size_xyz[::-1] for level, scale in self.export.scales.items()}
        voxel_size = self.voxel_size
        if voxel_size is None and info is not None and info.voxel_size_xyz is not None:
            voxel_size = info.voxel_size_xyz[::-1]
        return Grid(shapes, voxel_size or (1.0, 1.0, 1.0), "nanometer" if voxel_size else "voxel")

    @cached_property
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
        match = _KEY.fullmatch(key)
        if match is None or (match["array"] and not match["level"]) or (match["chunk"] and not match["array"]):
            return None
        level, array, chunk = match["level"], match["array"], match["chunk"]
        if chunk is None:
            return self._documents.get("/".join(part for part in (level and f"s{level}", array) if part))
        if int(level) not in self.grid.shapes:
            return None
        indices = [int(part) for part in chunk.split("/")]
        if array in AXES:
            return self.grid.coordinates(int(level), array).tobytes() if indices == [0] else None
        if len(indices) != 3:
            return None
        z, y, x = indices
        if any(c >= n for c, n in zip((x, y, z), self.export.scales[int(level)].grid_xyz, strict=True)):
            return None
        return self.export.read_chunk(int(level), (x, y, z))

    def nbytes(self, key: str) -> int | None:
        """Length of a key's value, or None where it has none; a chunk's comes from the index where that can tell."""
        match = _KEY.fullmatch(key)
        if match is not None and match["array"] in VALUES and match["chunk"] is not None and self.exists(key):
            z, y, x = (int(part) for part in match["chunk"].split("/"))
            known = self.export.payload_nbytes(int(match["level"]), (x, y, z))
            if known is not None:
                return known
        value = self.get(key)
        return None if value is None else len(value)

    def exists(self, key: str) -> bool:
        """Whether a key has a value; a chunk's is answered from the index alone."""
        match = _KEY.fullmatch(key)
        if match is None or match["array"] not in VALUES or match["chunk"] is None:
            return self.get(key) is not None
        if match["level"] is None or int(match["level"]) not in self.grid.shapes or match["chunk"].count("/") != 2:
            return False
        z, y, x = (int(part) for part in match["chunk"].split("/"))
        scale = self.export.scales[int(match["level"])]
        return all(c < n for c, n in zip((x, y, z), scale.grid_xyz, strict=True)) and bool(scale.find((x, y, z)))

    def keys(self, prefix: str = "") -> Iterator[str]:
        """All keys that start with a prefix: documents and coordinates, then the chunks, shard by shard from the index."""
        fixed = [posixpath.join(path, "zarr.json") for path in self._documents]
        fixed += [f"s{level}/{axis}/c/0" for level in self.grid.shapes for axis in AXES]
        yield from (key for key in fixed if key.startswith(prefix))
        for level in self.grid.shapes:
            for values in VALUES:
                root = f"s{level}/{values}/c/"
                if not (root.startswith(prefix) or prefix.startswith(root)):
                    continue
                for chunks_xyz in self.export.scales[level].occupied():
                    for x, y, z in chunks_xyz.tolist():
                        key = f"{root}{z}/{y}/{x}"
                        if key.startswith(prefix):
                            yield key

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
        if len(indices) > 2 or not all(re.fullmatch(r"0|[1-9]\d{0,7}", part) for part in indices):
            return None
        names: set[int] = set()
        for chunks_xyz in self.export.scales[int(parts[0][1:])].occupied():
            zyx = chunks_xyz[:, ::-1]
            for i, part in enumerate(indices):
                zyx = zyx[zyx[:, i] == int(part)]
            names.update(np.unique(zyx[:, len(indices)]).tolist())
        return [str(name) for name in sorted(names)] if names or not indices else None

    def is_leaf(self, key: str) -> bool:
        """Whether a key names a value rather than what lies below it, by its form alone."""
        match = _KEY.fullmatch(key)
        if match is None:
            return False
        chunk = match["chunk"]
        return chunk is None or match["array"] in AXES or chunk.count("/") == 2


def export_name(url: str) -> str:
    """The last part of an export's path."""
    return posixpath.basename(url.split("::")[-1].split("?")[0].rstrip("/")) or "export"


def _three_sizes(voxel_size: VoxelSize | None) -> tuple[float, float, float] | None:
    if voxel_size is None:
        return None
    sizes = [
        float(size) for size in (voxel_size if isinstance(voxel_size, Sequence | np.ndarray) else [voxel_size] * 3)
    ]
    if len(sizes) != 3 or not all(0 < size < float("inf") for size in sizes):
        raise ExportError(
            "the voxel size can't be used", expected="one positive number, or three (z, y, x)", found=voxel_size,
            advice="Give nanometres at scale 0",
        )  # fmt: skip
    z, y, x = sizes
    return z, y, x
