"""An export's compact index: a small directory that tells, without a look at the shards' own indexes, where each record is.

docs/index.md has its format. What stands in it is believed only of shards that are what they were when it was made.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from zarr_dvid import errors
from zarr_dvid.errors import MissingFileError, RecordError, ShardError, ShardIndexError, ZarrDvidError
from zarr_dvid.index_tables import SHARDS, damaged, read_table
from zarr_dvid.reader import LocalReader, Reader, open_reader
from zarr_dvid.record import RecordLayout, read_layout
from zarr_dvid.scale_index import BROKEN, COMPACT, WIDE_FORM, ScaleIndex
from zarr_dvid.shard_files import ShardFiles
from zarr_dvid.volume import XYZ

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid.index_tables import Table

DIRECTORY = "zarr-dvid-index"  # in an export's root
MANIFEST = "index.json"
FORMAT, VERSION = "zarr-dvid-index", 1
FILES = ("shards", "blocks", "wide")

_MAX_MANIFEST_BYTES = 1 << 28
_FILE_OF_FORM = {COMPACT: "blocks", WIDE_FORM: "wide"}
_PROBLEMS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ZarrDvidError)
}

IndexLike = str | os.PathLike[str] | Literal[False]
"""Where an index is: its directory's path or URL; or False for none."""


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """The directory that an index is in.

    Attributes:
        reader: Of a directory.
        directory: The index's path in that; "" is the directory itself.
    """

    reader: Reader
    directory: str = ""

    def path(self, name: str) -> str:
        """Of a file, for messages."""
        return f"{self.reader.url.rstrip('/')}/{self._inside(name)}"

    def read_manifest(self) -> bytes | None:
        """The document that names all else, or None where there is none.

        Raises:
            ShardIndexError: It is empty or far too large.
        """
        try:
            size = self.reader.size(self._inside(MANIFEST))
            if 0 < size <= _MAX_MANIFEST_BYTES:
                return self.reader.read_ranges(self._inside(MANIFEST), [(0, size)])[0]
        except MissingFileError:
            return None
        raise damaged(self.path(MANIFEST), "the file has an impossible length", found=f"{size} bytes")

    def read(self, name: str, offset: int, size: int) -> bytes:
        """A part of a file.

        Raises:
            ShardIndexError: It is not there.
        """
        if size == 0:
            return b""
        try:
            return self.reader.read_ranges(self._inside(name), [(offset, size)])[0]
        except ShardError as error:
            raise damaged(self.path(name), error.problem, expected=f"{size} bytes at {offset}", found=error.found) from None

    def _inside(self, name: str) -> str:
        return f"{self.directory}/{name}" if self.directory else name


@dataclass(frozen=True, slots=True, eq=False)
class ExportIndex:
    """An index as it was opened.

    Attributes:
        files: Where it is.
        key: Equal for the same index only.
        parameters: What it was made with, beside the shards.
        names: Its files, "shards", "blocks" and "wide", by the names that they have.
        checksums: Length and checksum of each file by its name.
        dialects: All that its shards have.
        schemas: All schema messages that they have.
        layouts: Of these.
        problems: Why shards could not be indexed.
        rows: Its table of shards.
    """

    files: IndexFiles
    key: Hashable
    parameters: Mapping[str, Any]
    names: Mapping[str, str]
    checksums: Mapping[str, tuple[int, int]]
    dialects: Sequence[str]
    schemas: Sequence[bytes]
    layouts: Sequence[RecordLayout]
    problems: Sequence[ZarrDvidError]
    rows: Table

    def read(self, form: int, offset: int, size: int) -> tuple[bytes, str]:
        """A shard's entries as they stand in the file of its form, and that file's path."""
        name = self.names[_FILE_OF_FORM[form]]
        return self.files.read(name, offset, size), self.files.path(name)

    def scale(self, level: int, shards: Mapping[XYZ, ShardFiles]) -> ScaleIndex:
        """What it tells of the shards that a scale has now."""
        return self._rows_of(self.rows["scale"] == level, shards)

    def shard(self, level: int, files: ShardFiles) -> ScaleIndex:
        """The same of one shard alone."""
        which = self.rows["scale"] == level
        for axis, voxel in zip("xyz", files.origin_voxel, strict=True):
            which &= self.rows[f"origin_{axis}"] == voxel
        return self._rows_of(which, {files.origin_voxel: files})

    def _rows_of(self, which: npt.NDArray[np.bool_], shards: Mapping[XYZ, ShardFiles]) -> ScaleIndex:
        return ScaleIndex(self, {name: values[which] for name, values in self.rows.items()}, shards)


def open_index(files: IndexFiles) -> ExportIndex:
    """Opens an index: reads its manifest and its table of shards.

    Raises:
        ShardIndexError: It is missing, damaged, or of a later version.
    """
    data = files.read_manifest()
    if data is None:
        raise ShardIndexError(
            "there is no index here", path=files.path(MANIFEST), advice="Give the directory that `zarr-dvid index` wrote"
        )
    return _opened(files, data)


def find_index(reader: Reader, *, is_beside: bool) -> ExportIndex | None:
    """The index of an export where nobody says where it is: beside it, or in the user's cache; None if there is none.

    Args:
        reader: Of the export.
        is_beside: Whether its root has a directory of that name.

    Raises:
        ShardIndexError: It is damaged, or of a later version.
    """
    places = [IndexFiles(reader, DIRECTORY)] if is_beside else []
    cached = cache_directory(reader.url)
    if os.path.isfile(cached / MANIFEST):  # noqa: PTH113 - Path's raises where the cache can't be entered
        places.append(IndexFiles(LocalReader(cached)))
    for files in places:
        data = files.read_manifest()
        if data is not None:
            return _opened(files, data)
    return None


def _opened(files: IndexFiles, data: bytes) -> ExportIndex:
    path = files.path(MANIFEST)
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "the file is no JSON document", found=str(error) or type(error).__name__) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise damaged(path, "the file is no manifest of an index", expected=f'"format": "{FORMAT}"')
    if isinstance(manifest.get("version"), int) and manifest["version"] > VERSION:
        raise ShardIndexError(
            "the export's index is of a later version",
            path=path,
            expected=f"version {VERSION}",
            found=f"version {manifest['version']}",
            advice="Install a later zarr-dvid; or delete the index, or run `zarr-dvid index` again",
        )
    crc32 = manifest.pop("crc32", None)
    if crc32 != manifest_crc32(manifest):
        raise damaged(
            path, "the file is not what was written", expected=f"checksum {manifest_crc32(manifest)}", found=crc32
        )
    try:
        return _open(files, manifest)
    except (KeyError, TypeError, ValueError, IndexError, binascii.Error) as error:
        raise damaged(path, f"an entry of the manifest can't be used: {type(error).__name__}: {error}") from None


def _open(files: IndexFiles, manifest: dict[str, Any]) -> ExportIndex:
    names = {kind: str(manifest["files"][kind]["name"]) for kind in FILES}
    sizes = {kind: int(manifest["files"][kind]["size_bytes"]) for kind in FILES}
    if any("/" in name or not name.endswith(".arrow") for name in names.values()) or min(sizes.values()) < 0:
        raise ValueError(f"impossible files: {names}, {sizes}")
    path = files.path(names["shards"])
    data = files.read(names["shards"], 0, sizes["shards"])
    if zlib.crc32(data) != manifest["files"]["shards"]["crc32"]:
        raise damaged(path, "the file is not what was written", found=f"checksum {zlib.crc32(data)}")
    rows = read_table(SHARDS, data, path)
    schemas = [base64.b64decode(text, validate=True) for text in manifest["schemas"]]
    try:
        layouts = [read_layout(schema)[0] for schema in schemas]
    except RecordError as error:
        raise damaged(files.path(MANIFEST), f"a schema can't be used: {error.problem}") from None
    problems = [problem_from_json(document) for document in manifest["problems"]]
    dialects = [str(dialect) for dialect in manifest["dialects"]]
    _check_rows(rows, sizes, (len(schemas), len(dialects), len(problems)), path)
    return ExportIndex(
        files,
        (files.reader.key, files.directory, manifest_crc32(manifest)),
        {"cubes_voxels": manifest["cubes_voxels"]},
        names,
        {names[kind]: (sizes[kind], manifest["files"][kind]["crc32"]) for kind in FILES},
        dialects,
        schemas,
        layouts,
        problems,
        rows,
    )


def _check_rows(rows: Table, sizes: Mapping[str, int], counts: tuple[int, int, int], path: str) -> None:
    """Checks what a look-up relies on before it reads a shard's entries."""
    is_broken = rows["form"] == BROKEN
    n_schemas, n_dialects, n_problems = counts
    is_sound = (rows["form"] <= BROKEN) & (rows["n_records"] >= 0) & (rows["n_streams"] >= 1)
    is_sound &= np.where(
        is_broken,
        (rows["problem"] >= 0) & (rows["problem"] < n_problems),
        (rows["schema"] >= 0)
        & (rows["schema"] < n_schemas)
        & (rows["dialect"] >= 0)
        & (rows["dialect"] < n_dialects)
        & (rows["n_chunks"] >= 0)
        & (rows["n_chunks"] <= rows["n_records"]),
    )
    size = np.where(rows["form"] == COMPACT, sizes["blocks"], sizes["wide"])
    offset, length = rows["batch_offset"], rows["batch_bytes"]
    is_sound &= is_broken | ((offset >= 0) & (length > 0) & (length <= size) & (offset <= size - length))
    for axis in "xyz":
        is_sound &= rows[f"origin_{axis}"] >= 0
        is_sound &= (rows["n_records"] == 0) | (rows[f"low_{axis}"] <= rows[f"high_{axis}"])
    names = list(zip(*(rows[name].tolist() for name in ("scale", "origin_x", "origin_y", "origin_z")), strict=True))
    if not is_sound.all() or len(set(names)) != len(names):
        raise damaged(path, "a shard's row is impossible, or there twice")


def manifest_crc32(manifest: Mapping[str, Any]) -> int:
    """Checksum of a manifest's content, without the one that it has in itself."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


def problem_to_json(error: ZarrDvidError) -> dict[str, Any]:
    """An error, so that it can be raised again."""
    facts = {name: fact for name, fact in error.facts.items() if fact is not None}
    return {
        "error": type(error).__name__,
        "problem": error.problem,
        "facts": {name: fact if isinstance(fact, int | str) else str(fact) for name, fact in facts.items()},
    }


def problem_from_json(document: Mapping[str, Any]) -> ZarrDvidError:
    """The error again; its tuples are text."""
    facts: dict[str, Any] = {str(name): fact for name, fact in document["facts"].items()}
    return _PROBLEMS[document["error"]](str(document["problem"]), **facts)


def cache_directory(url: str) -> Path:
    """Where the index of an export is that can't be written to: a directory of the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and Path(base).is_absolute() else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111
    return root / "zarr-dvid" / hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def out_of_date(index: ExportIndex, scales: Sequence[ScaleIndex]) -> str | None:
    """What to say of an index that does not have all shards of an export as they are; None if it does."""
    changed, new, gone = (sum(getattr(scale, f"n_{what}") for scale in scales) for what in ("changed", "new", "gone"))
    if not changed and not new and not gone:
        return None
    return (
        f"{index.files.path(MANIFEST)}: the index is out of date: since it was made, {changed} shards changed, {new} came"
        f" and {gone} went; those that are there are read as without an index. Run `zarr-dvid index` to bring it up to date"
    )


def index_location(index: IndexLike | None) -> str | Literal[False] | None:
    """Where an index is, as it can be given to another process."""
    if index is None or index is False:
        return index
    text = os.fspath(index)
    return text if isinstance(index, str) and "://" in text else str(Path(text).expanduser().absolute())


def index_opener(
    location: str | Literal[False] | None, url: str, storage_options: Mapping[str, Any] | None
) -> Callable[[], Reader] | Literal[False] | None:
    """What gives the reader of an index; the export's options are its own too where both are of one protocol."""
    if location is None or location is False:
        return location
    is_same = location.split("://", 1)[0] == url.split("://", 1)[0]
    return functools.partial(open_reader, location, storage_options if is_same else None)
