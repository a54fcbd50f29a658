"""What several test modules share: the real data beside the checkout, and oracles that do not use zarr_dvid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import zarr
from hypothesis import settings

ZARR_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# A test's time depends on what else its machine does.
settings.register_profile("zarr-dvid", deadline=None, print_blob=True)
settings.load_profile("zarr-dvid")


@contextmanager
def default_pipeline() -> Iterator[None]:
    """Arrays opened meanwhile have zarr's own pipeline, whatever was opened before."""
    with zarr.config.set({"codec_pipeline.path": ZARR_PIPELINE, "dvid.pipeline": False}):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Blocks and exports written by DVID's own code; a checkout alone does not have them."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the data beside the checkout, ../shared/data")
    return SHARED_DATA


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockVector:
    """A block of DVID's; of what it decodes to, only what is known of invalid ones is missing."""

    name: str
    path: Path
    shape_zyx: tuple[int, ...] = ()
    n_labels: int = 0
    volume_sha256: str = ""
    strict_ok: bool = False

    def read(self) -> bytes:
        return self.path.read_bytes()

    def volume(self) -> npt.NDArray[np.uint64] | None:
        """Its voxels (z, y, x), where they are kept beside it."""
        path = self.path.with_suffix(".npy")
        return np.load(path) if path.exists() else None


def valid_block_vectors() -> list[BlockVector]:
    """The blocks of blocks/valid for `pytest.mark.parametrize`; none where the data is absent."""
    folder = SHARED_DATA / "blocks" / "valid"
    if not folder.is_dir():
        return []
    return [
        BlockVector(
            name=entry["name"],
            path=folder / f"{entry['name']}.block",
            shape_zyx=tuple(entry["shape_zyx"]),
            n_labels=entry["n_labels"],
            volume_sha256=entry["volume_sha256"],
            strict_ok=entry["strict_ok"],
        )
        for entry in json.loads((folder / "manifest.json").read_text())
    ]


def invalid_block_vectors() -> list[BlockVector]:
    """The blocks of blocks/invalid for `pytest.mark.parametrize`; none where the data is absent."""
    return [BlockVector(name=path.stem, path=path) for path in sorted(SHARED_DATA.glob("blocks/invalid/*.block"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """A row of a shard as pyarrow reads it.

    Attributes:
        chunk_xyz: Chunk coordinates at the shard's scale.
        labels: Agglomerated label of each entry of the block's table.
        supervoxels: The block's table.
        block: The block as stored, in a zstd frame but for the oldest dialects.
    """

    chunk_xyz: tuple[int, int, int]
    labels: npt.NDArray[np.uint64]
    supervoxels: npt.NDArray[np.uint64]
    block: bytes


def read_shard_rows(path: Path) -> list[ShardRow]:
    """All rows of the first stream of a shard's .arrow file, in their order. Only for sound ones: pyarrow may abort."""
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        names = stream.schema.names
        columns = dict(zip(names, stream.read_all().columns, strict=True))
    chunks = zip(*(columns[f"chunk_{axis}"].to_pylist() for axis in "xyz"), strict=True)
    return [
        ShardRow(
            chunk_xyz=chunk_xyz,
            labels=np.array(columns["labels"][row].as_py(), np.uint64),
            supervoxels=np.array(columns["supervoxels"][row].as_py(), np.uint64),
            block=columns["dvid_compressed_block"][row].as_py(),
        )
        for row, chunk_xyz in enumerate(chunks)
    ]


def expected_sha256(folder: Path, scale: str) -> dict[tuple[int, ...], dict[str, str]]:
    """An expected.json: chunk (x, y, z) to the sha256 of its voxels as `labels` and as `supervoxels`."""
    chunks = json.loads((folder / "expected.json").read_text())[scale]
    return {tuple(map(int, name.split(","))): entry for name, entry in chunks.items()}


def volume_sha256(volume: npt.NDArray[np.uint64]) -> str:
    """The sha256 that manifests and expected.json files give for voxels: little-endian uint64 in C order."""
    return hashlib.sha256(volume.astype("<u8").tobytes()).hexdigest()
