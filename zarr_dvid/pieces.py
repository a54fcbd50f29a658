"""Windows of chunks, and where in an array they go. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.block import CHUNK_SHAPE, ShapeZYX

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What a selection needs of each chunk that it touches: int64 arrays with one row for each.

    Attributes:
        chunks_xyz: The chunks, shape (n, 3).
        start_zyx: First voxel of the window in its chunk, shape (n, 3).
        shape_zyx: Voxels of the window, shape (n, 3).
        target: Which of some arrays (z, y, x) it goes to, shape (n,).
        to_zyx: Where in that array it starts, shape (n, 3).
    """

    chunks_xyz: Ints
    start_zyx: Ints
    shape_zyx: Ints
    target: Ints
    to_zyx: Ints

    def __len__(self) -> int:
        return len(self.target)

    def window(self, i: int) -> tuple[slice, slice, slice]:
        """The window of piece `i`, in its chunk."""
        return _slices(self.start_zyx[i], self.shape_zyx[i])

    def place(self, i: int) -> tuple[slice, slice, slice]:
        """Where piece `i` goes, in its target."""
        return _slices(self.to_zyx[i], self.shape_zyx[i])

    def chunk_xyz(self, i: int) -> tuple[int, int, int]:
        """The chunk of piece `i`."""
        x, y, z = self.chunks_xyz[i].tolist()
        return x, y, z


def _slices(start: Ints, shape: Ints) -> tuple[slice, slice, slice]:
    z, y, x = (slice(a, a + n) for a, n in zip(start.tolist(), shape.tolist(), strict=True))
    return z, y, x


def box_of(box: Sequence[slice], shape: ShapeZYX) -> tuple[slice, slice, slice]:
    """A box as three slices (z, y, x) with bounds that are numbers.

    Args:
        box: Slices with step 1 in voxels; as in numpy, bounds may be left out, negative, or past the end.
        shape: Of the array.

    Raises:
        ValueError: It is no such thing.
    """
    parts = tuple(box)
    if len(parts) != 3 or not all(isinstance(part, slice) and part.step in (None, 1) for part in parts):
        raise ValueError(f"box must be three slices (z, y, x) with step 1, not {box!r}")
    bounds = [part.indices(size) for part, size in zip(parts, shape, strict=True)]
    z, y, x = (slice(start, max(start, stop)) for start, stop, _ in bounds)
    return z, y, x


def pieces_of_box(box: tuple[slice, slice, slice]) -> Pieces:
    """The pieces that make up a box of voxels, for one target of its shape."""
    axes = []
    for part, side in zip(box, CHUNK_SHAPE, strict=True):
        first, last = part.start // side, -(-part.stop // side)
        chunks = np.arange(first, last if part.stop > part.start else first)
        low = np.maximum(chunks * side, part.start)
        high = np.minimum((chunks + 1) * side, part.stop)
        axes.append(np.stack([chunks, low - chunks * side, high - low, low - part.start], axis=1))
    table = np.empty((*(len(axis) for axis in axes), 4, 3), np.int64)
    for d, axis in enumerate(axes):
        table[..., d] = axis.reshape([-1 if d == other else 1 for other in range(3)] + [4])
    chunks_zyx, start, shape, to = table.reshape(-1, 4, 3).transpose(1, 0, 2)
    return Pieces(chunks_zyx[:, ::-1], start, shape, np.zeros(len(chunks_zyx), np.int64), to)
