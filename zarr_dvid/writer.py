"""Writes a label volume as an export, the way DVID does."""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from zarr_dvid.downsample import downsample_majority
from zarr_dvid.errors import ExportWarning
from zarr_dvid.export_log import ScaleSummary, export_log
from zarr_dvid.export_plan import ScalePlan, info_document
from zarr_dvid.progress import progress_bar
from zarr_dvid.shard_writer import LabelMapping, ReadWindow, ShardEncoder, write_shard
from zarr_dvid.store import open as open_export
from zarr_dvid.unfinished import UnfinishedExport, replace_file

if TYPE_CHECKING:
    import zarr

    from zarr_dvid.block import ShapeZYX, Voxels, Window

_FORMAT_VERSION = 1  # of the output: an export must not be begun with one and gone on with in another
_MAX_THREADS = 8
_PIECE = 128  # voxels a side that are halved at once, from 256


class VolumeLike(Protocol):
    """What can be written: a NumPy, Zarr, dask or TensorStore array, or anything that can be sliced like them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels along (z, y, x)."""

    @property
    def dtype(self) -> Any:
        """uint64."""

    def __getitem__(self, window: Window, /) -> Any:
        """The voxels of three slices, as something that `numpy.asarray` takes."""


def write_export(
    source: VolumeLike,
    destination: str | os.PathLike[str],
    *,
    mapping: Mapping[int, int] | None = None,
    scales: int = 1,
    shard_chunks: int = 32,
    voxel_size: float | Sequence[float] | None = None,
    progress: bool = True,
) -> None:
    """Writes a volume of supervoxels as an export in DVID's present dialect.

    The folder gets ``s<scale>/<X>_<Y>_<Z>.arrow`` and ``.csv`` for each shard that has a block, an ``info`` document,
    and at the very end ``export.log``. The same volume and options always give the same bytes. Chunks whose voxels are
    all 0 are left out. Those whose supervoxels are merely mapped to 0 are not, though DVID leaves them out too: their
    supervoxels would be lost.

    A run that was interrupted is gone on with by calling this again with the same volume and options, and then gives
    what an undisturbed one would have given. That the volume is the same one is not checked. Files appear under their
    names only when they are whole. One process at a time may write to a folder.

    Args:
        source: uint64 supervoxels, shape (z, y, x); read once, in boxes of up to 256^3 voxels, so that it may be larger
            than memory.
        destination: Local folder; made where it does not exist, else without an export in it.
        mapping: Label of each supervoxel that has another label than its own id.
        scales: How many to write; each halves the one before, by majority among 2x2x2 voxels of supervoxels.
        shard_chunks: Chunks of 64^3 voxels a side of a shard's cube; a power of two.
        voxel_size: Nanometres at scale 0: one number, or (z, y, x). Goes into ``info``, which has no resolution without
            it; Neuroglancer then asks for one, DVID and zarr-dvid do not.
        progress: Whether to show a bar, where stderr is a terminal and tqdm is installed.

    Raises:
        TypeError: `source` is no array, or not uint64; or an option is of another type.
        ValueError: Its shape, or an option, is out of range.
        ExportError: `destination` is a file, holds an export, or one that was begun with other options.
    """
    shape_zyx = _checked_shape(source)
    if "://" in os.fspath(destination):
        raise ValueError(f"an export is written to a local folder, not to {destination!r}; copy it there afterwards")
    scales, shard_chunks = operator.index(scales), operator.index(shard_chunks)
    if scales < 1:
        raise ValueError(f"scales must be at least 1, not {scales}")
    if shard_chunks < 1 or shard_chunks & (shard_chunks - 1):
        raise ValueError(f"shard_chunks must be a power of two, not {shard_chunks}")
    size_zyx = _checked_voxel_size(voxel_size)
    label_of = LabelMapping.of(mapping or {})

    plans = [ScalePlan(0, shape_zyx, shard_chunks)]
    while len(plans) < scales:
        plans.append(plans[-1].coarser())
    parameters = {
        "format": _FORMAT_VERSION,
        "shape_zyx": list(shape_zyx),
        "mapping_sha256": label_of.sha256(),
        "scales": scales,
        "shard_chunks": shard_chunks,
        "voxel_size_zyx": size_zyx and list(size_zyx),
    }
    folder = Path(destination)
    unfinished = UnfinishedExport.begin(folder, parameters)
    # Before the shards, since coarser scales are made from what can be read of the export itself.
    replace_file(folder / "info", f"{json.dumps(info_document(plans, size_zyx), indent=2)}\n".encode())
    with (
        ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "zarr-dvid-write") as pool,
        progress_bar(sum(plan.n_chunks for plan in plans), f"Writing {folder.name}", enabled=progress) as advance,
    ):
        for plan in plans:
            read = _source_reader(source) if plan.scale == 0 else _halving_reader(folder, plans[plan.scale - 1])
            # Even where it gets no shard, so that a scale of nothing but 0 can be told from one that was not written.
            (folder / f"s{plan.scale}").mkdir(exist_ok=True)
            encoder = ShardEncoder(read, plan.shape_zyx, label_of, pool, advance)
            for shard in plan.shards():
                if unfinished.is_done(shard.name):
                    advance(shard.n_chunks)
                elif not write_shard(folder / shard.name, encoder.records(shard)):
                    unfinished.note_empty(shard.name)
    replace_file(folder / "export.log", export_log([_summary(folder, plan) for plan in plans]).encode())
    unfinished.finish()


def _checked_shape(source: VolumeLike) -> ShapeZYX:
    if not all(hasattr(source, name) for name in ("shape", "dtype", "__getitem__")):
        raise TypeError(f"source must be an array with shape, dtype and slicing, not {type(source).__name__}")
    if not _is_uint64(source.dtype):
        raise TypeError(f"source must be uint64, not {source.dtype}; cast it, for instance with .astype('uint64')")
    if len(source.shape) != 3:
        raise ValueError(f"source must have three dimensions (z, y, x), not shape {tuple(source.shape)}")
    z, y, x = (int(n) for n in source.shape)
    if not z * y * x:
        raise ValueError(f"source has no voxels: its shape (z, y, x) is {(z, y, x)}")
    return z, y, x


def _is_uint64(dtype: Any) -> bool:
    """Whether a dtype, NumPy's or one that compares with NumPy's as TensorStore's does, is uint64 in any byte order."""
    return any(dtype == known for known in (np.dtype("<u8"), np.dtype(">u8")))


def _checked_voxel_size(voxel_size: float | Sequence[float] | None) -> tuple[float, float, float] | None:
    if voxel_size is None:
        return None
    sizes = np.asarray(voxel_size, float)
    if sizes.shape not in ((), (3,)) or not (np.isfinite(sizes) & (sizes > 0)).all():
        raise ValueError(f"voxel_size must be one or three (z, y, x) positive numbers, nanometres, not {voxel_size!r}")
    z, y, x = np.broadcast_to(sizes, 3).tolist()
    return z, y, x


def _source_reader(source: VolumeLike) -> ReadWindow:
    def read(window: Window) -> Voxels:
        voxels = np.asarray(source[window])
        expected = tuple(part.stop - part.start for part in window)
        if voxels.shape != expected or not _is_uint64(voxels.dtype):
            raise ValueError(f"source gave {voxels.dtype} of shape {voxels.shape}, not uint64 of shape {expected}")
        return voxels.astype(np.uint64, copy=False)

    return read


def _halving_reader(folder: Path, finer: ScalePlan) -> ReadWindow:
    """Reads a scale as the halves of the one before, which has been written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)  # of an export that is being written: the finer scale is done
        array = cast("zarr.Array[Any]", open_export(folder)[f"s{finer.scale}/supervoxels"])
    read_finer = _source_reader(array)

    def read(window: Window) -> Voxels:
        origin = [part.start for part in window]
        halved = np.empty([part.stop - part.start for part in window], np.uint64)
        for piece in product(*map(_pieces, window)):
            z, y, x = (slice(2 * p.start, min(2 * p.stop, n)) for p, n in zip(piece, finer.shape_zyx, strict=True))
            target = tuple(slice(p.start - n, p.stop - n) for p, n in zip(piece, origin, strict=True))
            halved[target] = downsample_majority(read_finer((z, y, x)))
        return halved

    return read


def _pieces(part: slice) -> list[slice]:
    return [slice(start, min(start + _PIECE, part.stop)) for start in range(part.start, part.stop, _PIECE)]


def _summary(folder: Path, plan: ScalePlan) -> ScaleSummary:
    indexes = [folder / f"{shard.name}.csv" for shard in plan.shards()]
    written = [path for path in indexes if path.exists()]
    return ScaleSummary(
        plan.scale,
        plan.shape_zyx,
        records=[path.read_bytes().count(b"\n") - 2 for path in written],
        sizes_bytes=[path.with_suffix(".arrow").stat().st_size for path in written],
    )
