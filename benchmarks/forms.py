"""The forms in which one volume lies on disk: a DVID export, neuroglancer's precomputed, and Zarr v3."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.operations import CHUNK
from zarr_dvid import write_export

if TYPE_CHECKING:
    from benchmarks.volumes import Tiled

EXPORT, PRECOMPUTED, ZARR3 = "export", "precomputed", "zarr3"
SETTINGS = {
    EXPORT: "DVID export: Arrow shards of 64^3 blocks, zstd",
    PRECOMPUTED: "neuroglancer precomputed: sharded compressed_segmentation, 64^3 chunks of 8^3 blocks, gzip",
    ZARR3: "Zarr v3: sharding_indexed, 64^3 inner chunks, zstd level 3",
}
_SHARD = 512  # voxels a side of peers' shards, or the volume's where that is less: 512 chunks, as favours small indexes
_NANOMETRES = [8, 8, 8]


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a volume on disk.

    Attributes:
        name: Of its folder.
        n_bytes: All its files.
        n_files: How many.
    """

    name: str
    n_bytes: int
    n_files: int


def write_forms(volume: Tiled, folder: Path) -> list[Form]:
    """Writes a volume in each form, and checks that the forms are what `SETTINGS` says.

    The peers' forms are left out where TensorStore, which writes them, is not installed.

    Raises:
        ValueError: A form came out otherwise.
    """
    write_export(volume, folder / EXPORT, voxel_size=_NANOMETRES, progress=False)
    names = [EXPORT]
    try:
        import tensorstore as ts
    except ImportError:
        pass  # The systems that need it say that it is not installed.
    else:
        shard = [min(_SHARD, n) for n in volume.shape]
        precomputed = ts.open(_precomputed_spec(volume, shard, folder / PRECOMPUTED)).result()
        _write(precomputed[ts.d["channel"][0]][ts.d["z", "y", "x"].transpose[:]], volume, shard)
        _write(ts.open(_zarr3_spec(volume, shard, folder / ZARR3)).result(), volume, shard)
        check_precomputed(json.loads((folder / PRECOMPUTED / "info").read_text()))
        check_zarr3(json.loads((folder / ZARR3 / "zarr.json").read_text()))
        names += [PRECOMPUTED, ZARR3]
    return [_form(folder / name) for name in names]


def check_precomputed(info: dict[str, Any]) -> None:
    """Compares an `info` document with what `SETTINGS` says of it.

    Raises:
        ValueError: It differs.
    """
    (scale,) = info["scales"]
    found = {name: scale[name] for name in ("encoding", "chunk_sizes", "compressed_segmentation_block_size")}
    sharding = scale["sharding"]
    found |= {name: sharding[name] for name in ("@type", "data_encoding", "minishard_index_encoding")}
    _check(
        found,
        {
            "encoding": "compressed_segmentation",
            "chunk_sizes": [[CHUNK] * 3],
            "compressed_segmentation_block_size": [8, 8, 8],
            "@type": "neuroglancer_uint64_sharded_v1",
            "data_encoding": "gzip",
            "minishard_index_encoding": "gzip",
        },
    )


def check_zarr3(metadata: dict[str, Any]) -> None:
    """Compares an array's `zarr.json` with what `SETTINGS` says of it.

    Raises:
        ValueError: It differs.
    """
    (sharding,) = metadata["codecs"]
    inner = sharding["configuration"]
    found = {
        "codec": sharding["name"],
        "chunk_shape": inner["chunk_shape"],
        "codecs": [codec["name"] for codec in inner["codecs"]],
        "level": inner["codecs"][-1]["configuration"]["level"],
    }
    _check(found, {"codec": "sharding_indexed", "chunk_shape": [CHUNK] * 3, "codecs": ["bytes", "zstd"], "level": 3})


def _check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    if found != expected:
        raise ValueError(f"TensorStore wrote {found}, where the benchmark means to read {expected}")


def _precomputed_spec(volume: Tiled, shard: list[int], path: Path) -> dict[str, Any]:
    # How a shard is divided is left to TensorStore.
    return {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {"type": "segmentation", "data_type": "uint64", "num_channels": 1},
        "scale_metadata": {
            "size": list(volume.shape[::-1]),
            "resolution": _NANOMETRES,
            "encoding": "compressed_segmentation",
            "compressed_segmentation_block_size": [8, 8, 8],
        },
        "schema": {
            "chunk_layout": {
                "read_chunk": {"shape": [CHUNK] * 3 + [1]},
                "write_chunk": {"shape": [*shard[::-1], 1]},
            }
        },
        "create": True,
    }


def _zarr3_spec(volume: Tiled, shard: list[int], path: Path) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [CHUNK] * 3,
        "codecs": [little, {"name": "zstd", "configuration": {"level": 3, "checksum": False}}],
        "index_codecs": [little, {"name": "crc32c"}],
    }
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {
            "shape": list(volume.shape),
            "data_type": "uint64",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
        "create": True,
    }


def _write(array: Any, volume: Tiled, shard: list[int]) -> None:
    """Writes shard by shard, since a part of one is written by reading the rest of it again."""
    for corner in product(*(range(0, n, side) for n, side in zip(volume.shape, shard, strict=True))):
        z, y, x = (slice(at, at + side) for at, side in zip(corner, shard, strict=True))
        array[z, y, x].write(volume[z, y, x]).result()


def _form(folder: Path) -> Form:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return Form(folder.name, sum(sizes), len(sizes))
