"""What zarr-dvid is to reach, against the other systems of the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.operations import CUTOUT, FIRST, FRESH, INTO, RANDOM
from benchmarks.systems import Memcpy, TensorStorePrecomputed, TensorStoreZarr3, TouchMemory, ZarrDvid

TENSORSTORE = (TensorStorePrecomputed.name, TensorStoreZarr3.name)


def best_tensorstore(medians: Mapping[str, float]) -> float | None:
    """Seconds of the form that TensorStore reads fastest; None if it was not measured."""
    return min((medians[name] for name in TENSORSTORE if name in medians), default=None)


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of one operation on one volume.

    Attributes:
        subject: Name of the volume.
        operation: What is read of it.
        bound: How many times as fast as TensorStore's best form it is to be at least; or how many times as long as the
            reference it may take at most.
        reference: Another system that it is held against instead of TensorStore.
        system: Which is to reach it.
    """

    subject: str
    operation: str
    bound: float
    reference: str = ""
    system: str = ZarrDvid.name

    def ratio(self, medians: Mapping[str, float]) -> float | None:
        """The ratio that `bound` bounds, from median seconds by system; None where one of the two was not measured."""
        ours = medians.get(self.system)
        theirs = medians.get(self.reference) if self.reference else best_tensorstore(medians)
        if ours is None or theirs is None:
            return None
        return ours / theirs if self.reference else theirs / ours

    @property
    def ratio_of(self) -> str:
        """What the ratio is of, in words."""
        return f"its time / that of {self.reference}" if self.reference else "times as fast as TensorStore"

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio keeps the bound."""
        return ratio <= self.bound if self.reference else ratio >= self.bound


TARGETS: Sequence[Target] = (
    Target("sparse", INTO, 3.0),
    Target("sparse", INTO, 1.6, Memcpy.name),
    Target("sparse", FRESH, 1.7),
    Target("sparse", FRESH, 1.3, TouchMemory.name),
    Target("sparse", RANDOM, 2.0),
    Target("sparse", CUTOUT, 2.5),
    Target("dense", INTO, 2.5),
    Target("dense", FRESH, 1.8),
    Target("dense", RANDOM, 1.8),
    Target("dense", CUTOUT, 2.5),
    Target("sparse", FIRST, 1.0),
)
