"""The files of a shard, as a listing of its scale's directory shows them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zarr_dvid.errors import ExportError
from zarr_dvid.reader import FileInfo
from zarr_dvid.shard_index import CHUNK_VOXELS
from zarr_dvid.volume import XYZ

_SHARD_FILE = re.compile(r"(0|[1-9][0-9]{0,9})_(0|[1-9][0-9]{0,9})_(0|[1-9][0-9]{0,9})(\.arrow|-offsets\.csv|\.csv|\.json)")


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The files of one shard, as a listing of its scale's directory shows them.

    Attributes:
        directory: Of the scale, relative to the export's root.
        origin_voxel: First voxel (x, y, z) of the shard's cube, which is its name.
        arrow: The shard itself, or None where only an index is there.
        indexes: Its index files: `.csv`, `-offsets.csv`, `.json`, whichever exist.
    """

    directory: str
    origin_voxel: XYZ
    arrow: FileInfo | None
    indexes: tuple[FileInfo, ...]

    @property
    def path(self) -> str:
        """Of the shard, relative to the export's root."""
        return f"{self.directory}/{'_'.join(map(str, self.origin_voxel))}.arrow"

    @property
    def version(self) -> tuple[tuple[str, int, str], ...]:
        """Changes when any of the files does, as far as the storage tells."""
        files = [self.arrow] if self.arrow else []
        return tuple((file.name, file.size_bytes, file.version) for file in (*files, *self.indexes))

    @property
    def fingerprint(self) -> int:
        """The version in 64 bits."""
        text = _mark(self.arrow) if self.arrow else ""
        for file in self.indexes:
            text += "\0" + _mark(file)
        return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")

    @property
    def names(self) -> list[str]:
        """Of the files that are there."""
        return [name for name, _, _ in self.version]

    @property
    def index_bytes(self) -> int:
        """Length of the index files together."""
        return sum(file.size_bytes for file in self.indexes)


def _mark(file: FileInfo) -> str:
    return f"{file.name}\0{file.size_bytes}\0{file.version}"


def group_files(directory: str, files: Sequence[FileInfo]) -> tuple[dict[XYZ, ShardFiles], list[str]]:
    """Sorts a scale directory's files into shards, by the voxel origin (x, y, z) in their names; and names the rest."""
    arrows: dict[XYZ, FileInfo] = {}
    indexes: dict[XYZ, list[FileInfo]] = {}
    others = []
    for file in files:
        match = None if file.is_dir else _SHARD_FILE.fullmatch(file.name)
        if match is None:
            others.append(file.name)
            continue
        x, y, z, ending = match.groups()
        origin = (int(x), int(y), int(z))
        if ending == ".arrow":
            arrows[origin] = file
        else:
            indexes.setdefault(origin, []).append(file)
    shards = {}
    for origin in sorted(arrows.keys() | indexes.keys()):
        found = tuple(sorted(indexes.get(origin, ()), key=lambda file: file.name))
        shards[origin] = ShardFiles(directory, origin, arrows.get(origin), found)
    return shards, sorted(others)


def version_of(shards: Iterable[ShardFiles]) -> bytes:
    """Changes when any of the shards does."""
    digest = hashlib.blake2b(digest_size=16)
    for files in shards:
        digest.update(files.fingerprint.to_bytes(8, "little"))
    return digest.digest()


def odd_name(shards: Mapping[XYZ, ShardFiles]) -> ExportError:
    """The error for shards one of which is not named for the place of a chunk."""
    origin = next(origin for origin in shards if any(side % CHUNK_VOXELS for side in origin))
    return ExportError(
        "a shard's name is no place of a chunk",
        path=f"{shards[origin].directory}/{shards[origin].names[0]}",
        expected="multiples of 64 voxels",
        found=origin,
        advice="Take the file out of the export",
    )
