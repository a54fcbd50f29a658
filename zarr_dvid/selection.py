"""A selection of zarr's, as pieces of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zarr_dvid.block import CHUNK_SHAPE, Voxels
from zarr_dvid.codec import window_inside
from zarr_dvid.configuration import max_in_flight_bytes, n_decode_threads
from zarr_dvid.errors import ExportError
from zarr_dvid.gather import read_pieces
from zarr_dvid.hierarchy import Hierarchy
from zarr_dvid.pieces import Pieces, box_of, pieces_of_box
from zarr_dvid.voxels import VALUES, Values

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Batch = Sequence[tuple[Any, Any, Any, Any, bool]]


def read_selection(
    hierarchy: Hierarchy, level: int, values: Values, batch: Batch, out: npt.NDArray[Any], drop_axes: tuple[int, ...]
) -> npt.NDArray[np.bool_]:
    """Reads what zarr asks its codec pipeline for.

    Args:
        hierarchy: Of the export that the array is of.
        level: Scale.
        values: "labels" or "supervoxels".
        batch: For each chunk: where its bytes are, its spec, the selection in it, where that goes in `out`, and whether it
            is the whole chunk.
        out: The array that the user gets.
        drop_axes: Axes of the chunks that `out` does not have.

    Returns:
        Whether the export has each chunk.

    Raises:
        ZarrDvidError: A chunk can't be read; the error names its shard and chunk.
    """
    chunks_xyz = np.array([_chunk_xyz(getter.path) for getter, *_ in batch], np.int64)
    windows = _windows(batch)
    target = None if windows is None else _target(out, batch[0][2])
    if windows is not None and target is not None:
        start, shape, to = windows.transpose(1, 0, 2)
        pieces = Pieces(chunks_xyz, start, shape, np.zeros(len(batch), np.int64), to)
        return _read(hierarchy, level, values, pieces, [target])
    scratch = _Scratch(batch, out, drop_axes)
    return _read(hierarchy, level, values, scratch.pieces(chunks_xyz), scratch, scratch.hand_over)


def read_box(
    hierarchy: Hierarchy, level: int, box: Sequence[slice], *, values: Values = "labels", out: Voxels | None = None
) -> Voxels:
    """Reads a box of voxels; see `DvidStore.read`."""
    if values not in VALUES:
        raise ValueError(f"values must be one of {VALUES}, not {values!r}")
    if level not in hierarchy.grid.shapes:
        raise ExportError(
            "there is no such scale", path=f"s{level}", expected=f"one of {list(hierarchy.grid.shapes)}", found=level
        )
    bounds = box_of(box, hierarchy.grid.shapes[level])
    shape = tuple(part.stop - part.start for part in bounds)
    if out is None:
        out = np.empty(shape, np.uint64)
    elif out.shape != shape or _target(out, bounds) is None:
        raise ValueError(
            f"out must be a writable uint64 array of shape {shape}, contiguous along x, not {out.dtype} of {out.shape}"
        )
    _read(hierarchy, level, values, pieces_of_box(bounds), [out])
    return out


def _chunk_xyz(path: str) -> tuple[int, int, int]:
    _, z, y, x = path.rsplit("/", 3)
    return int(x), int(y), int(z)


def _read(
    hierarchy: Hierarchy,
    level: int,
    values: Values,
    pieces: Pieces,
    targets: Sequence[Voxels],
    hand_over: Callable[[Ints], None] | None = None,
) -> npt.NDArray[np.bool_]:
    return read_pieces(
        hierarchy.export,
        level,
        pieces,
        targets,
        values=values,
        max_threads=n_decode_threads(hierarchy.threads),
        max_in_flight_bytes=max_in_flight_bytes(),
        hand_over=hand_over,
    )


def _windows(batch: Batch) -> Ints | None:
    """Start and shape of each chunk's window, and where it goes: int64, shape (n, 3, 3).

    None where a selection is more than slices with step 1 and single indices.
    """
    rows = []
    for _, _, chunk_selection, out_selection, _ in batch:
        if len(chunk_selection) != 3 or not isinstance(out_selection, tuple):
            return None
        out_parts = iter(out_selection)
        start, shape, to = [0] * 3, [1] * 3, [0] * 3
        for axis, part in enumerate(chunk_selection):
            if isinstance(part, slice):
                place = next(out_parts, None)
                if part.step not in (None, 1) or not isinstance(place, slice) or place.step not in (None, 1):
                    return None
                start[axis], shape[axis], to[axis] = part.start, part.stop - part.start, place.start
            elif isinstance(part, (int, np.integer)):
                start[axis] = int(part)
            else:
                return None
        rows.append((start, shape, to))
    return np.array(rows, np.int64)


def _target(out: npt.NDArray[Any], chunk_selection: Sequence[Any]) -> Voxels | None:
    """`out` with the axes that it lacks for single indices, or None where the core can't write into it."""
    view = out[tuple(slice(None) if isinstance(part, slice) else np.newaxis for part in chunk_selection)]
    is_good = (
        view.dtype == np.uint64
        and view.flags.writeable
        and view.flags.aligned
        and (view.strides[2] == 8 or view.shape[2] == 1)
        and view.strides[0] % 8 == view.strides[1] % 8 == 0
    )
    return view if is_good else None


class _Scratch(Sequence[Voxels]):
    """Arrays for the smallest window of each chunk that holds its selection; NumPy takes the selection from there.

    They are made when they are asked for, and go when they are handed over.
    """

    def __init__(self, batch: Batch, out: npt.NDArray[Any], drop_axes: tuple[int, ...]) -> None:
        self._out, self._drop_axes = out, drop_axes
        self._to = [out_selection for _, _, _, out_selection, _ in batch]
        found = [window_inside(chunk_selection, CHUNK_SHAPE) for _, _, chunk_selection, _, _ in batch]
        self._inside = [inside for _, inside in found]
        self._start = np.array([[part.start for part in window] for window, _ in found], np.int64)
        self._shape = np.array([[part.stop - part.start for part in window] for window, _ in found], np.int64)
        self._made: dict[int, Voxels] = {}

    def pieces(self, chunks_xyz: Ints) -> Pieces:
        """The windows as pieces, each for an array of its own."""
        return Pieces(chunks_xyz, self._start, self._shape, np.arange(len(self)), np.zeros_like(self._start))

    def __len__(self) -> int:
        return len(self._to)

    def __getitem__(self, i: Any) -> Any:
        if i not in self._made:
            self._made[i] = np.empty(self._shape[i], np.uint64)
        return self._made[i]

    def hand_over(self, which: Ints) -> None:
        """Puts the selection of chunks into the array that the user gets."""
        for i in which.tolist():
            part = self._made.pop(i)[self._inside[i]]
            self._out[self._to[i]] = part.squeeze(axis=self._drop_axes) if self._drop_axes else part
