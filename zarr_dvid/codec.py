"""The Zarr v3 codec `dvid_block`: an array's chunk as a DVID block, or as the record of an export that holds one."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from zarr.abc.codec import ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin
from zarr.core.common import parse_named_configuration

from zarr_dvid.block import BytesLike, ShapeZYX, Voxels, decode_into, encode_block
from zarr_dvid.errors import ReadOnlyError, ZarrDvidError
from zarr_dvid.record import RecordBytes
from zarr_dvid.voxels import VALUES, Values, decode_payload

if TYPE_CHECKING:
    from zarr.abc.store import ByteGetter
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer

Framing = Literal["block", "record"]
CODEC_NAME = "dvid_block"
RECORD_ADVICE = (
    "An export can't be written to. A copy of its arrays needs another codec: serializer='auto' in Zarr, drop_encoding()"
    " before xarray's to_zarr"
)


def check_configuration(values: Any, framing: Any) -> tuple[Values, Framing]:
    """Fills in and checks a codec's configuration.

    Args:
        values: "labels" or "supervoxels", or None for what the framing has: a record labels, a bare block supervoxels.
        framing: "block" or "record".

    Raises:
        ValueError: There is no such configuration.
    """
    if framing not in get_args(Framing):
        raise ValueError(f"framing must be one of {get_args(Framing)}, not {framing!r}")
    if values is None:
        values = "labels" if framing == "record" else "supervoxels"
    if values not in VALUES:
        raise ValueError(f"values must be one of {VALUES}, not {values!r}")
    if framing == "block" and values == "labels":
        raise ValueError("a bare block holds supervoxels; its agglomerated labels stand in an export's record alone")
    return values, framing


def decode_chunk(
    data: BytesLike, *, values: Values, framing: Framing, shape: ShapeZYX, window: tuple[slice, ...] | None = None
) -> Voxels:
    """Decodes a chunk's bytes to uint64 voxels (z, y, x), or a window of them."""
    if framing == "block":
        return decode_into(data, window=window, expected_shape=shape)
    return decode_payload(data, values=values, shape=shape, window=window)


@dataclass(frozen=True)
class DvidBlockCodec(ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin):
    """Decodes, and for bare blocks encodes, chunks of a uint64 array of three dimensions.

    Args:
        values: "labels" (agglomerated) or "supervoxels"; by default what the framing has.
        framing: "block", a DVID block, bare or as a zstd frame, which it decodes alike and writes bare; or "record", an
            Arrow record-batch message of one row of an export, which it can only decode.
    """

    values: Values
    framing: Framing

    is_fixed_size = False

    def __init__(self, *, values: Values | None = None, framing: Framing = "block") -> None:
        values, framing = check_configuration(values, framing)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "framing", framing)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Builds the codec from array metadata."""
        _, configuration = parse_named_configuration(data, CODEC_NAME, require_configuration=False)
        return cls(**(configuration or {}))  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The codec as array metadata."""
        return {"name": CODEC_NAME, "configuration": {"values": self.values, "framing": self.framing}}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Refuses arrays that no block can hold a chunk of.

        Raises:
            ValueError: The array is not uint64, or not of three dimensions.
        """
        if dtype.to_native_dtype() != np.uint64:
            raise ValueError(f"{CODEC_NAME} holds uint64 labels, not {dtype.to_native_dtype()}")
        if len(shape) != 3:
            raise ValueError(f"{CODEC_NAME} holds three dimensions (z, y, x), not {len(shape)}")
        chunk_shape = getattr(chunk_grid, "chunk_shape", (8, 8, 8))
        if any(side % 8 or not 8 <= side <= 1024 for side in chunk_shape):
            raise ValueError(f"{CODEC_NAME} needs chunks of a multiple of 8 voxels, 8 to 1024, not {tuple(chunk_shape)}")

    def compute_encoded_size(self, input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        """Not known before a chunk is encoded."""
        raise NotImplementedError

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return _to_buffer(self._voxels(chunk_bytes, chunk_spec, None), chunk_spec)

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)

    def _encode_sync(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        if self.framing == "record":
            raise ReadOnlyError(
                f"{CODEC_NAME} can't encode records, which hold what only an export knows", advice=RECORD_ADVICE
            )
        return chunk_spec.prototype.buffer.from_bytes(encode_block(chunk_array.as_numpy_array()))

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._encode_sync, chunk_array, chunk_spec)

    def _decode_selection(self, chunk_bytes: Buffer, selection: Any, chunk_spec: ArraySpec) -> NDBuffer:
        window, inside = window_inside(selection, chunk_spec.shape)
        return _to_buffer(self._voxels(chunk_bytes, chunk_spec, window)[inside], chunk_spec)

    def _decode_partial_sync(self, byte_getter: Any, selection: Any, chunk_spec: ArraySpec) -> NDBuffer | None:
        chunk_bytes = byte_getter.get_sync(prototype=chunk_spec.prototype)
        return None if chunk_bytes is None else self._decode_selection(chunk_bytes, selection, chunk_spec)

    async def _decode_partial_single(
        self, byte_getter: ByteGetter, selection: Any, chunk_spec: ArraySpec
    ) -> NDBuffer | None:
        chunk_bytes = await byte_getter.get(prototype=chunk_spec.prototype)
        if chunk_bytes is None:
            return None
        return await asyncio.to_thread(self._decode_selection, chunk_bytes, selection, chunk_spec)

    def _voxels(self, chunk_bytes: Buffer, chunk_spec: ArraySpec, window: tuple[slice, ...] | None) -> Voxels:
        array = chunk_bytes.as_numpy_array()
        z, y, x = chunk_spec.shape
        try:
            return decode_chunk(array.data, values=self.values, framing=self.framing, shape=(z, y, x), window=window)
        except ZarrDvidError as error:
            # Bytes that a store or filesystem of ours handed out are still the same object, and know where they are from.
            origin = array.base
            if isinstance(origin, RecordBytes):
                # What a record itself says of its chunk may count voxels.
                facts = {**error.facts, "path": origin.path, "chunk_xyz": origin.chunk_xyz}
                raise type(error)(error.problem, **facts) from None
            raise


def window_inside(selection: Any, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], Any]:
    """The window of a chunk to decode for a selection of zarr's, and what of that window to take.

    Args:
        selection: For each axis a slice, an index, or an array of indices; or all that numpy takes.
        shape: Of the chunk.
    """
    parts = selection if isinstance(selection, tuple) else (selection,)
    window = window_of(parts, shape)
    if window is None:
        return tuple(slice(0, size) for size in shape), selection
    return window, tuple(_shifted(part, bounds.start) for part, bounds in zip(parts, window, strict=True))


def window_of(selection: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """The smallest window of a chunk that holds a selection of zarr's, or None where only the whole chunk will do.

    Args:
        selection: For each axis a slice, an index, or an array of indices.
        shape: Of the chunk.
    """
    if len(selection) != len(shape):
        return None
    window = []
    for part, size in zip(selection, shape, strict=True):
        if isinstance(part, slice):
            indices = range(*part.indices(size))
            low, high = (min(indices), max(indices) + 1) if indices else (0, 0)
        elif isinstance(part, np.ndarray):
            if part.dtype.kind not in "iu" or (part.size and part.min() < 0):
                return None
            low, high = (int(part.min()), int(part.max()) + 1) if part.size else (0, 0)
        else:
            try:
                low = operator.index(part)
            except TypeError:
                return None
            high = low + 1
        if not 0 <= low <= high <= size:
            return None
        window.append(slice(low, high))
    return tuple(window)


def _shifted(part: Any, start: int) -> Any:
    """One axis of a selection, relative to its window, which starts and ends with the selection."""
    return slice(None, None, part.step) if isinstance(part, slice) else part - start


def _to_buffer(voxels: Voxels, chunk_spec: ArraySpec) -> NDBuffer:
    return chunk_spec.prototype.nd_buffer.from_numpy_array(voxels)
