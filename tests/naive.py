"""DVID blocks the slow and obvious way, written from the format's description alone: the tests' oracle."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Voxels = npt.NDArray[np.uint64]

SUBBLOCK_VOXELS = 512


def value_bits(count: int) -> int:
    """Bits of each packed value of a sub-block that has this many labels."""
    return 0 if count < 2 else (count - 1).bit_length()


def pack_values(values: npt.ArrayLike, count: int) -> bytes:
    """The 512 values of a sub-block with `count` labels as its big-endian bit string."""
    bits = value_bits(count)
    shifts = np.arange(bits - 1, -1, -1)
    return np.packbits((np.asarray(values)[:, None] >> shifts & 1).astype(np.uint8)).tobytes()


def unpack_values(raw: bytes, count: int) -> npt.NDArray[np.int64]:
    """The 512 values that `pack_values` packed."""
    bits = value_bits(count)
    ones = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="big").reshape(SUBBLOCK_VOXELS, bits)
    return ones.astype(np.int64) @ (1 << np.arange(bits - 1, -1, -1))


def assemble_block(
    grid_xyz: tuple[int, int, int],
    table: Sequence[int],
    counts: Sequence[int] = (),
    indices: Sequence[int] = (),
    values: bytes = b"",
    *,
    n_labels: int | None = None,
) -> bytes:
    """Puts a block's sections one after another, whether or not they fit together."""
    header = struct.pack("<4I", *grid_xyz, len(table) if n_labels is None else n_labels)
    sections = struct.pack(f"<{len(table)}Q", *table), struct.pack(f"<{len(counts)}H", *counts)
    return header + b"".join(sections) + struct.pack(f"<{len(indices)}I", *indices) + values


def naive_decode(block: bytes) -> Voxels:
    """Decodes a bare block to its voxels (z, y, x).

    Raises:
        ValueError: The block breaks one of the rules 1 to 7 of the format.
    """
    if len(block) < 24:
        raise ValueError("rule 1: shorter than 24 bytes")
    gx, gy, gz, n_labels = struct.unpack_from("<4I", block)
    if not all(1 <= side <= 128 for side in (gx, gy, gz)):
        raise ValueError("rule 1: a side of 0 or of more than 128 sub-blocks")
    if n_labels == 0:
        raise ValueError("rule 1: no labels")
    n_subblocks = gx * gy * gz
    if n_labels > SUBBLOCK_VOXELS * n_subblocks:
        raise ValueError("rule 2: more labels than voxels")
    counts_at = 16 + 8 * n_labels
    if counts_at > len(block):
        raise ValueError("rule 2: the label table runs past the end")
    table = struct.unpack_from(f"<{n_labels}Q", block, 16)

    if n_labels == 1:
        legacy = b"\x01\x00" * n_subblocks + b"\x00\x00\x00\x00" * n_subblocks
        if block[24:] not in (b"", legacy):
            raise ValueError("rule 3: something behind the label of a solid block")
        return np.full((8 * gz, 8 * gy, 8 * gx), table[0], np.uint64)

    indices_at = counts_at + 2 * n_subblocks
    if indices_at > len(block):
        raise ValueError("rule 4: the counts run past the end")
    counts = struct.unpack_from(f"<{n_subblocks}H", block, counts_at)
    if max(counts) > SUBBLOCK_VOXELS:
        raise ValueError("rule 5: more labels than voxels in a sub-block")
    values_at = indices_at + 4 * sum(counts)
    if values_at > len(block):
        raise ValueError("rule 4: the indices run past the end")
    if values_at + 64 * sum(map(value_bits, counts)) != len(block):
        raise ValueError("rule 4: the values run past the end, or something is behind them")
    indices = struct.unpack_from(f"<{sum(counts)}I", block, indices_at)
    if any(index >= n_labels for index in indices):
        raise ValueError("rule 6: an index past the label table")

    volume = np.empty((8 * gz, 8 * gy, 8 * gx), np.uint64)
    first = 0
    for s, count in enumerate(counts):
        own = np.array([table[index] for index in indices[first : first + count]] or [0], np.uint64)
        first += count
        nbytes = 64 * value_bits(count)
        values = np.zeros(SUBBLOCK_VOXELS, np.int64)
        if nbytes:
            values = unpack_values(block[values_at : values_at + nbytes], count)
        values_at += nbytes
        if values.max() >= len(own):
            raise ValueError("rule 7: a value past its sub-block's labels")
        volume[subblock_window((gx, gy, gz), s)] = own[values].reshape(8, 8, 8)
    return volume


def naive_encode_libdvid(volume: Voxels) -> bytes:
    """Encodes voxels (z, y, x) as libdvid-cpp orders them: sub-block tables ascending, the table by first sub-block."""
    grid_xyz = (volume.shape[2] // 8, volume.shape[1] // 8, volume.shape[0] // 8)
    table: dict[int, int] = {}
    counts: list[int] = []
    indices: list[int] = []
    packed: list[bytes] = []
    for s in range(grid_xyz[0] * grid_xyz[1] * grid_xyz[2]):
        own, values = np.unique(volume[subblock_window(grid_xyz, s)].reshape(-1), return_inverse=True)
        indices += [table.setdefault(label, len(table)) for label in own.tolist()]
        counts.append(len(own))
        packed.append(pack_values(values, len(own)))
    if len(table) == 1:
        return assemble_block(grid_xyz, list(table))
    return assemble_block(grid_xyz, list(table), counts, indices, b"".join(packed))


def subblock_window(grid_xyz: tuple[int, int, int], s: int) -> tuple[slice, slice, slice]:
    """Voxels (z, y, x) of sub-block `s`."""
    gx, gy, _ = grid_xyz
    x, y, z = 8 * (s % gx), 8 * (s // gx % gy), 8 * (s // (gx * gy))
    return slice(z, z + 8), slice(y, y + 8), slice(x, x + 8)
