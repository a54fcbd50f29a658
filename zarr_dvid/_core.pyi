from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Bytes = bytes | bytearray | memoryview
_Range = tuple[int, int]

class Fault(ValueError):  # noqa: N818 - it is caught and turned into an error with a place
    """Arguments: field, rule, offset in bytes, expected, found."""

class Field:
    name: bytes
    type: int
    bit_width: int
    is_signed: bool
    has_dictionary: bool
    children: list[Field]
    metadata: list[tuple[bytes, bytes]]

class Layout:
    n_nodes: int
    n_buffers: int

class Message:
    kind: int
    codec: int
    body_bytes: int
    n_rows: int
    buffers: list[_Range]

    def coordinate_buffers(self, layout: Layout) -> list[_Range]: ...
    def with_buffers(self, body_bytes: int, buffers: Sequence[_Range]) -> Message: ...
    def row(self, body: _Bytes, layout: Layout, row: int) -> tuple[tuple[int, int, int], _Range, _Range, _Range, int]: ...

def decode_block(
    block: _Bytes,
    labels: npt.NDArray[np.uint64] | _Bytes | None,
    start_zyx: tuple[int, int, int],
    out: npt.NDArray[np.uint64],
) -> None: ...
def decode_batch(
    sources: Sequence[_Bytes],
    jobs: npt.NDArray[np.int64],
    targets: Sequence[npt.NDArray[np.uint64]],
    layout: Layout,
    as_labels: bool,
    max_threads: int,
) -> bytes: ...
def inspect_block(block: _Bytes) -> tuple[tuple[int, int, int], int, int, bool]: ...
def frame_nbytes(frame: _Bytes) -> int: ...
def encode_block(volume: npt.NDArray[np.uint64]) -> bytes: ...
def make_layout(n_nodes: int, n_buffers: int, columns: Sequence[tuple[int, int, bool]]) -> Layout: ...
def parse_message(metadata: _Bytes) -> Message: ...
def parse_schema(metadata: _Bytes) -> list[Field]: ...
