"""Where an export's bytes come from: a few files' listings and byte ranges, nothing more."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.cached import CachingFileSystem

from zarr_dvid.errors import ExportError, MissingFileError, ShardError


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file or directory as a listing shows it.

    Attributes:
        name: Last part of its path.
        size_bytes: Length of a file; 0 for a directory.
        is_dir: Whether it is a directory.
        version: Whatever the storage changes when the file is replaced (times, ETag); empty where it tells nothing.
    """

    name: str
    size_bytes: int
    is_dir: bool
    version: str = ""


@runtime_checkable
class Reader(Protocol):
    """Reads an export's files; paths are relative to its root, with "/" between their parts."""

    @property
    def url(self) -> str:
        """The export's root, for messages. Never holds credentials."""
        ...

    @property
    def key(self) -> Hashable:
        """Equal for readers of the same files, and for those only."""
        ...

    @property
    def window_bytes(self) -> int:
        """How many bytes to fetch at a time when a file is gone through by its messages' headers."""
        ...

    @property
    def concurrency(self) -> int:
        """How many calls of `read_ranges` are worth making at the same time."""
        ...

    def list(self, path: str) -> Sequence[FileInfo]:
        """Entries of a directory, in no order. Raises MissingFileError where there is none."""
        ...

    def size(self, path: str) -> int:
        """Length of a file in bytes. Raises MissingFileError where there is none."""
        ...

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Reads byte ranges, given as (offset, size), each whole.

        Raises:
            MissingFileError: There is no such file.
            ShardError: The file ends before a range does.
        """
        ...


def short_read(path: str, offset: int, expected: int, found: int) -> ShardError:
    """The error for a file that ended before a range did."""
    return ShardError(
        "the file ends inside a range", path=path, offset_bytes=offset, expected=f"{expected} bytes", found=found
    )


@contextmanager
def _none_missing(path: str) -> Iterator[None]:
    """Turns what Zarr would take for an empty chunk into an error that it does not."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        reason = error.strerror or type(error).__name__
        raise MissingFileError("the file is missing", path=path, expected="a file of the export", found=reason) from None


class LocalReader:
    """A directory of this machine. Files are opened for each read: nothing stays open, nothing is mapped.

    A mapped file that somebody cuts while it is read would kill the process; `pread` only comes back short.
    """

    window_bytes = 1024
    concurrency = 1

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()
        self.url = str(self._root)
        self.key = self.url

    def list(self, path: str) -> Sequence[FileInfo]:
        """See `Reader`."""
        entries = []
        with _none_missing(path or self.url), os.scandir(self._root / path) as scan:
            for entry in scan:
                is_dir = entry.is_dir()
                # A link to nothing counts as an empty file, which no shard or index may be.
                is_there = is_dir or entry.is_file()
                stat = entry.stat(follow_symlinks=is_there)
                size = stat.st_size if is_there and not is_dir else 0
                entries.append(FileInfo(entry.name, size, is_dir, str(stat.st_mtime_ns)))
        return entries

    def size(self, path: str) -> int:
        """See `Reader`."""
        with _none_missing(path):
            return (self._root / path).stat().st_size

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """See `Reader`."""
        with _none_missing(path):
            file = os.open(self._root / path, os.O_RDONLY)
            try:
                return [_pread(file, path, offset, size) for offset, size in ranges]
            finally:
                os.close(file)


def _pread(file: int, path: str, offset: int, size: int) -> bytes:
    part = os.pread(file, size, offset)
    while len(part) < size and (more := os.pread(file, size - len(part), offset + len(part))):
        part += more
    if len(part) != size:
        raise short_read(path, offset, size, len(part))
    return part


class _Filling:
    """A lock that a forked child has anew."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.Lock()


_filling = _Filling()


class FsspecReader:
    """A directory of any fsspec filesystem."""

    window_bytes = 1 << 20
    concurrency = 16

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
        self.url = without_credentials(self._root if "://" in self._root else f"{protocol}://{self._root}")
        self.key = (filesystem._fs_token, self._root)

    def _one_at_a_time(self) -> AbstractContextManager[Any]:
        """Fsspec's caching filesystems let one thread read a file that another is still filling."""
        return _filling.lock if isinstance(self._filesystem, CachingFileSystem) else nullcontext()

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def list(self, path: str) -> Sequence[FileInfo]:
        """See `Reader`."""
        entries = []
        with _none_missing(path or self.url):
            listing = self._filesystem.ls(self._path(path), detail=True)
        for entry in listing:
            name = entry["name"].rstrip("/").rsplit("/", 1)[-1]
            marks = (entry.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "created"))
            version = next((str(mark) for mark in marks if mark is not None), "")
            is_dir = entry["type"] == "directory"
            size = 0 if is_dir else entry.get("size")
            if size is None:  # plain HTTP lists names alone
                size = self.size(f"{path}/{name}" if path else name)
            entries.append(FileInfo(name, size, is_dir, version))
        return entries

    def size(self, path: str) -> int:
        """See `Reader`."""
        with _none_missing(path):
            size = self._filesystem.info(self._path(path))["size"]
        if size is None:
            raise ExportError(
                "the storage does not tell a file's size", path=path, expected="a number of bytes", found="none"
            )
        return int(size)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """See `Reader`."""
        paths = [self._path(path)] * len(ranges)
        starts = [offset for offset, _ in ranges]
        ends = [offset + size for offset, size in ranges]
        with _none_missing(path), self._one_at_a_time():
            parts: Sequence[bytes] = self._filesystem.cat_ranges(paths, starts, ends, on_error="raise")
        for (offset, size), part in zip(ranges, parts, strict=True):
            if len(part) != size:
                raise short_read(path, offset, size, len(part))
        return parts


def without_credentials(url: str) -> str:
    """A URL, chained ones included, without what may be secret in it: user, password, and query."""
    return "::".join(re.sub(r"(?<=://)[^/@]*@", "", part.split("?", 1)[0]) for part in url.split("::"))


def open_reader(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Reader:
    """Gives the reader for an export's URL or path.

    Args:
        url: A local path, a ``file://`` URL, or a URL of any fsspec filesystem, chained ones included.
        storage_options: Options of that filesystem, in fsspec's terms.

    Raises:
        ExportError: `url` names no filesystem that is known, or its package is not installed.
    """
    text = os.fspath(url)
    if isinstance(url, os.PathLike) or text.startswith("/"):
        return LocalReader(Path(text).expanduser())
    if "::" not in text:
        if "://" not in text:
            return LocalReader(Path(text).expanduser())
        if text.startswith(("file://", "local://")):
            return LocalReader(text.split("://", 1)[1])
    try:
        filesystem, root = url_to_fs(text, **(storage_options or {}))
    except (ImportError, ValueError) as error:
        raise ExportError(
            "the URL can't be opened",
            path=without_credentials(text),
            found=str(error),
            advice="Install the package that it names",
        ) from None
    return FsspecReader(filesystem, root)
