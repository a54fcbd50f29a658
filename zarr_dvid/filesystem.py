"""The fsspec filesystem `dvid`: the hierarchy of an export as files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NoReturn

import fsspec
from fsspec.spec import AbstractFileSystem

from zarr_dvid.configuration import use_pipeline
from zarr_dvid.errors import ExportError, ReadOnlyError
from zarr_dvid.export import InfoLike
from zarr_dvid.export_index import IndexLike, index_location, index_opener
from zarr_dvid.hierarchy import Hierarchy, VoxelSize, export_name
from zarr_dvid.keys import parse_key
from zarr_dvid.reader import FsspecReader, LocalReader, Reader, open_reader, without_credentials

_LOCAL = ("file", "local")


class _OpenFile(io.BytesIO):
    @property
    def size(self) -> int:
        """Length in bytes; fsspec asks its files for it."""
        return self.getbuffer().nbytes


class DvidFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Read-only files over what DVID's `export-shards` wrote: the keys of `zarr_dvid.DvidStore`.

    Chained over any filesystem (``dvid::s3://bucket/export``, ``dvid://s0::file:///export`` for a scale), or by itself
    over a local directory (``dvid:///export``). A chunk that the export does not have raises FileNotFoundError, which
    Zarr takes for its fill value; whatever is broken or vanished raises something else.

    Args:
        fo: The export's directory, on the target filesystem.
        target_protocol: Of the target filesystem; by default what `fo` says, else local files.
        target_options: Of the target filesystem.
        info: A neuroglancer volume description: its path or URL, or the document itself.
        voxel_size: Nanometres at scale 0, one number or (z, y, x); overrides that of `info`.
        threads: Threads that decode selections of arrays opened over this filesystem; see `DvidStore`.
        index: The directory of the export's compact index; see `DvidStore`.
        **options: As of any fsspec filesystem.
    """

    protocol = "dvid"
    root_marker = ""
    cachable = False  # a directory may be exported into again; loaded shards are cached by what they are

    def __init__(
        self,
        fo: str | None = None,
        *,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        info: InfoLike | None = None,
        voxel_size: VoxelSize | None = None,
        threads: int | None = None,
        index: IndexLike | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        use_pipeline()
        if not fo:
            raise ExportError("the URL names no export", expected="dvid::URL or dvid:///PATH", found="dvid://")
        self.fo = fo
        self.target_protocol = target_protocol
        self.target_options = dict(target_options or {})
        self.hierarchy = Hierarchy(
            self._open_reader,
            name=export_name(fo),
            info=info,
            voxel_size=voxel_size,
            threads=threads,
            index=index_opener(index_location(index), fo if "://" in fo else f"{target_protocol}://", self.target_options),
        )

    def _open_reader(self) -> Reader:
        if self.target_protocol is None:
            return open_reader(self.fo, self.target_options)
        target = fsspec.filesystem(self.target_protocol, **self.target_options)
        root = target._strip_protocol(self.fo)
        return LocalReader(root) if self.target_protocol in _LOCAL else FsspecReader(target, root)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(part) for part in path]
        inside = str(path).split("::", 1)[0]
        if inside == cls.protocol:
            return ""
        if inside.startswith("dvid://"):
            inside = inside.removeprefix("dvid://")
            if inside.startswith("/"):
                return ""  # dvid:///path names the export itself
        return inside.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        alone = path.removeprefix("dvid://")
        return {"fo": alone} if path.startswith("dvid:///") and "::" not in path else {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type of a file or directory.

        Raises:
            FileNotFoundError: There is none.
        """
        key = self._strip_protocol(path)
        if parse_key(key):
            nbytes = self.hierarchy.nbytes(key)
            if nbytes is not None:
                return {"name": key, "size": nbytes, "type": "file"}
        elif self.hierarchy.children(key) is not None:
            return {"name": key, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002 - fsspec's signature
        """What lies directly below a directory; chunks come from the index.

        Raises:
            FileNotFoundError: There is no such path.
        """
        key = self._strip_protocol(path)
        if parse_key(key):
            return [self.info(key)] if detail else [self.info(key)["name"]]
        names = self.hierarchy.children(key)
        if names is None:
            raise FileNotFoundError(path)
        paths = [f"{key}/{name}" if key else name for name in names]
        return [self.info(path) for path in paths] if detail else paths

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,  # noqa: FBT001, FBT002 - fsspec's signature
        detail: bool = False,  # noqa: FBT001, FBT002
        **options: Any,
    ) -> Any:
        """All files below a path; chunks come shard by shard from the index."""
        if maxdepth is not None or withdirs:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **options)
        key = self._strip_protocol(path)
        if parse_key(key):
            keys = [key] if self.hierarchy.exists(key) else []
        else:
            keys = sorted(self.hierarchy.keys(f"{key}/" if key else ""))
        return {key: self.info(key) for key in keys} if detail else keys

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """A file's bytes, or a part of them.

        Raises:
            FileNotFoundError: There is no such file, or no such chunk in a sound index.
            ZarrDvidError: The chunk should be there and can't be read.
        """
        value = self.hierarchy.get(self._strip_protocol(path))
        if value is None:
            raise FileNotFoundError(path)
        return value if start is None and end is None else value[start:end]

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is such a file or directory. Unlike fsspec's own, this does not take an error for a no."""
        key = self._strip_protocol(path)
        return self.hierarchy.exists(key) if parse_key(key) else self.hierarchy.children(key) is not None

    def isfile(self, path: str, **_: Any) -> bool:
        """Whether there is such a file; errors stay errors, as in `exists`."""
        key = self._strip_protocol(path)
        return parse_key(key) is not None and self.hierarchy.exists(key)

    def isdir(self, path: str, **_: Any) -> bool:
        """Whether there is such a directory; errors stay errors, as in `exists`."""
        key = self._strip_protocol(path)
        return parse_key(key) is None and self.hierarchy.children(key) is not None

    def _open(self, path: str, mode: str = "rb", **_: Any) -> _OpenFile:
        if mode != "rb":
            self._refuse()
        return _OpenFile(self.cat_file(path))

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise ReadOnlyError("an export can't be written to", path=without_credentials(self.fo))

    pipe_file = put_file = cp_file = rm_file = rm = _rm = mkdir = makedirs = rmdir = touch = mv = _refuse
