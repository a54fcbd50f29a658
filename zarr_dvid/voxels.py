"""From a record to voxels, in either of its two views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from zarr_dvid.block import BytesLike, ShapeZYX, Voxels, decode_into, plain_block
from zarr_dvid.errors import BlockError, ZarrDvidError
from zarr_dvid.record import Record, parse_payload

if TYPE_CHECKING:
    import numpy.typing as npt

Values = Literal["labels", "supervoxels"]
VALUES: tuple[Values, ...] = get_args(Values)
"""What voxels may hold: agglomerated labels, or the blocks' own supervoxels."""


def decode_record(
    record: Record, *, values: Values, shape: ShapeZYX, window: Sequence[slice] | None = None, out: Voxels | None = None
) -> Voxels:
    """Decodes a record's block.

    `labels[i]` of a record is the agglomerated label of entry i of its block's label table, and `supervoxels[i]` is that
    entry (DVID ``datatype/labelmap/export.go``): the agglomerated volume is the block decoded with its table replaced.

    Args:
        record: The record.
        values: Which of the two.
        shape: Voxels (z, y, x) that the block must have.
        window: Part to decode, as for `decode_block`.
        out: Array to decode into, as for `decode_block`.

    Raises:
        BlockError: The block is broken, or does not fit the rest of the record.
    """
    plain = memoryview(plain_block(record.block, expected_shape=shape))
    if record.uncompressed_size not in (None, plain.nbytes):
        raise BlockError(
            "the block has another length than its record says",
            field="uncompressed_size",
            expected=record.uncompressed_size,
            found=plain.nbytes,
        )
    labels: npt.NDArray[np.uint64] = np.frombuffer(record.labels, "<u8")
    if len(record.labels) != len(record.supervoxels):
        raise BlockError(
            "the record's labels and supervoxels are not as many as each other",
            field="labels",
            expected=len(record.supervoxels) // 8,
            found=len(labels),
        )
    voxels = decode_into(plain, labels=labels if values == "labels" else None, window=window, out=out, expected_shape=shape)
    if plain[16 : 16 + len(record.supervoxels)] != record.supervoxels or plain[12:16] != len(labels).to_bytes(4, "little"):
        raise BlockError(
            "the record's supervoxels are not its block's label table",
            field="supervoxels",
            expected=f"{int.from_bytes(plain[12:16], 'little')} labels, the block's",
            found=f"{len(labels)}, not the same",
        )
    return voxels


def decode_payload(
    payload: BytesLike,
    *,
    values: Values,
    shape: ShapeZYX,
    window: Sequence[slice] | None = None,
    out: Voxels | None = None,
) -> Voxels:
    """Decodes a chunk's payload, a record-batch message of one row; see `decode_record`.

    Raises:
        RecordError: The message is broken.
        BlockError: Its block is; the error names the record's chunk.
    """
    record = parse_payload(payload)
    try:
        return decode_record(record, values=values, shape=shape, window=window, out=out)
    except ZarrDvidError as error:
        raise error.located(chunk_xyz=record.chunk_xyz) from None
