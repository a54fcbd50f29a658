"""Times an export's records read through references, which need its codec and no more, against its store.

`python -m benchmarks.references EXPORT` reads scale 0, which has to fit into memory twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.storage import FsspecStore

from benchmarks.table import Row, render
from benchmarks.timing import interleaved
from zarr_dvid import DvidStore
from zarr_dvid.configuration import PIPELINE

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from zarr_dvid.voxels import Values

XYZ = tuple[int, int, int]
ZARR_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"
_REFERENCE = "DvidStore, zarr's default pipeline"
_ROUNDS = 5
_CHUNK_VOXELS = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is.

    Attributes:
        path: Its shard, relative to the export.
        offset_bytes: Start of its message there.
        size_bytes: Length of that.
    """

    path: str
    offset_bytes: int
    size_bytes: int


Places = Mapping[XYZ, Place]


def places_of(store: DvidStore, level: int) -> dict[XYZ, Place]:
    """Where the records of a scale's chunks (x, y, z) are, from its index alone.

    Raises:
        ValueError: A chunk's value is no range of a shard: it shares a message with others, has another layout than DVID's,
            or several records claim it.
    """
    scale = store.hierarchy.export.scales[level]
    places = {}
    for chunks_zyx in store.occupied(level):
        chunks_xyz = chunks_zyx[:, ::-1]
        located, several = scale.locate(chunks_xyz)
        if len(several):
            raise ValueError(f"several records claim chunk {tuple(chunks_xyz[several[0]].tolist())} (x, y, z)")
        for part in located:
            found, framing = part.found, part.shard.framing
            if not framing.layout.is_dvid or (found.n_rows != 1).any():
                raise ValueError(f"{framing.path}: the records are not messages of one row, as DVID writes them today")
            columns = (chunks_xyz[part.which], found.offset_bytes, found.size_bytes)
            for (x, y, z), offset, size in zip(*(column.tolist() for column in columns), strict=True):
                places[x, y, z] = Place(framing.path, offset, size)
    return places


def kerchunk_store(export: Path, level: int, values: Values, places: Places, *, zarr_format: int = 3) -> Store:
    """A store over references of kerchunk's form, in memory, whose only array is at the root."""
    array = zarr.open_array(DvidStore(export), path=f"s{level}/{values}", mode="r")
    refs: dict[str, Any]
    if zarr_format == 3:
        refs, prefix, separator = {"zarr.json": json.dumps(array.metadata.to_dict(), default=int)}, "c/", "/"
    else:
        codec = {"id": "dvid_block", "values": values, "framing": "record"}
        document = {"zarr_format": 2, "shape": array.shape, "chunks": array.chunks, "dtype": "<u8", "order": "C"}
        document |= {"fill_value": 0, "filters": None, "compressor": codec}
        refs, prefix, separator = {".zarray": json.dumps(document)}, "", "."
    for (x, y, z), place in places.items():
        key = prefix + separator.join(map(str, (z, y, x)))
        refs[key] = [f"file://{export.absolute()}/{place.path}", place.offset_bytes, place.size_bytes]
    return FsspecStore.from_url("reference://", storage_options={"fo": {"version": 1, "refs": refs}}, read_only=True)


def icechunk_store(export: Path, level: int, values: Values, places: Places) -> Store:
    """A store over Icechunk's virtual references in memory, whose only array is at the root.

    They hold the time of the last change of their shards, so that Icechunk refuses shards that were written to since.
    """
    import icechunk

    url = f"file://{export.absolute()}"
    config = icechunk.RepositoryConfig.default()
    container = icechunk.VirtualChunkContainer(f"{url}/", icechunk.local_filesystem_store(str(export.absolute())))
    config.set_virtual_chunk_container(container)
    access = getattr(icechunk.Credentials, "LocalFileSystemAccess", lambda: None)()  # since Icechunk 2
    repository = icechunk.Repository.create(
        icechunk.in_memory_storage(),
        config=config,
        authorize_virtual_chunk_access=icechunk.containers_credentials({f"{url}/": access}),
    )
    session = repository.writable_session("main")
    array = zarr.open_array(DvidStore(export), path=f"s{level}/{values}", mode="r")
    zarr.from_array(session.store, data=array, write_data=False)
    # Icechunk keeps whole seconds, and takes a file that was changed within the last one for a later file.
    changed = {
        path: datetime.fromtimestamp(math.ceil((export / path).stat().st_mtime), UTC)
        for path in {place.path for place in places.values()}
    }
    specs = [
        icechunk.VirtualChunkSpec(
            [z, y, x],
            f"{url}/{place.path}",
            place.offset_bytes,
            place.size_bytes,
            last_updated_at_checksum=changed[place.path],
        )
        for (x, y, z), place in places.items()
    ]
    refused = session.store.set_virtual_refs("/", specs, validate_containers=True)
    if refused:  # they would read as 0
        raise ValueError(f"Icechunk takes no references to files below {url}: {len(refused)} refused")
    session.commit("references")
    store: Store = repository.readonly_session("main").store
    return store


@contextmanager
def _pipeline(path: str) -> Iterator[None]:
    with zarr.config.set({"codec_pipeline.path": path, "dvid.pipeline": False}):
        yield


def open_systems(export: Path, places: Places) -> dict[str, zarr.Array[Any]]:
    """The labels of scale 0 as each system opens them, by its name."""
    with _pipeline(PIPELINE):
        arrays = {"DvidStore": zarr.open_array(DvidStore(export), path="s0/labels", mode="r")}
    with _pipeline(ZARR_PIPELINE):
        arrays[_REFERENCE] = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
        if find_spec("icechunk") is not None:
            arrays["Icechunk references"] = zarr.open_array(icechunk_store(export, 0, "labels", places), mode="r")
        for zarr_format, name in ((3, "kerchunk references"), (2, "kerchunk references, Zarr v2")):
            store = kerchunk_store(export, 0, "labels", places, zarr_format=zarr_format)
            arrays[name] = zarr.open_array(store, mode="r")
    return arrays


def measure(export: Path) -> list[Row]:
    """Rows for the whole of scale 0, its middle z plane, and one chunk that is there, through each system.

    Raises:
        AssertionError: Two systems read different voxels.
    """
    places = places_of(DvidStore(export), 0)
    arrays = open_systems(export, places)
    whole = np.asarray(arrays[_REFERENCE][...])
    for name, array in arrays.items():
        assert np.array_equal(array[...], whole), name
    middle = whole.shape[0] // 2
    chunks = list(places)
    random.Random(0).shuffle(chunks)
    del whole

    def one_chunk(array: zarr.Array[Any]) -> Callable[[], object]:
        order = itertools.cycle(chunks)  # the same for all systems
        return lambda: array[tuple(slice(_CHUNK_VOXELS * c, _CHUNK_VOXELS * (c + 1)) for c in reversed(next(order)))]

    operations: dict[str, Callable[[zarr.Array[Any]], Callable[[], object]]] = {
        "whole volume": lambda array: lambda: array[...],
        "one z plane": lambda array: lambda: array[middle],
        "one chunk": one_chunk,
    }
    rows = []
    for title, operation in operations.items():
        seconds = interleaved({name: operation(array) for name, array in arrays.items()}, rounds=_ROUNDS)
        for name, taken in seconds.items():
            of_reference = taken / seconds[_REFERENCE]
            rows.append(
                Row(
                    name=f"{title}: {name}",
                    microseconds=1e6 * taken,
                    ratio=None if name == _REFERENCE else of_reference,
                    ratio_of="" if name == _REFERENCE else f"it / {_REFERENCE}",
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.references", description="Times an export read through references, and by its store."
    )
    parser.add_argument("export", type=Path, metavar="EXPORT", help="directory of a small export with a scale 0")
    export = parser.parse_args().export
    if find_spec("icechunk") is None:
        print("Icechunk is not installed: left out")
    print(render(f"scale 0 of {export}", measure(export)))


if __name__ == "__main__":
    main()
