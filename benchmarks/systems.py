"""The systems that are held against each other. Each reads boxes of the same volume, in its own form.

A process uses one of them, and imports no more than that one needs.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from benchmarks.operations import FIRST, FRESH, INTO, TITLES

if TYPE_CHECKING:
    from benchmarks.volumes import Box, Tiled, Voxels


def n_threads() -> int:
    """Cores that this process may use, and threads that each system is given."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class System(ABC):
    """Reads one volume.

    Attributes:
        name: In tables.
        packages: Distributions that it needs; their versions are reported.
        leaves_out: Operations that it has no call for.
        gives_voxels: Whether what it reads is the volume, or just memory.
        setting: How it reads, for the report: threads, caches.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    leaves_out: ClassVar[frozenset[str]] = frozenset()
    gives_voxels: ClassVar[bool] = True
    setting: str

    @abstractmethod
    def __init__(self, folder: Path) -> None:
        """Opens the volume in the folder that `write_forms` wrote."""

    def prepare(self, box: Box, volume: Tiled) -> None:  # noqa: B027 - most need nothing
        """Whatever must not be timed of reading a box."""

    @abstractmethod
    def read(self, box: Box) -> Voxels:
        """The voxels of a box, shape (z, y, x), in fresh memory."""

    def read_into(self, box: Box, out: Voxels) -> None:
        """The same into given memory, unless `leaves_out` has it."""
        raise NotImplementedError(f"{self.name} has no call that reads into given memory")

    @classmethod
    def absent(cls) -> str:
        """Why it can't be measured here; empty if it can."""
        from importlib.metadata import PackageNotFoundError, version

        for package in cls.packages:
            try:
                version(package)
            except PackageNotFoundError:
                return f"{package} is not installed"
        return ""


class _ZarrArray(System):
    """Whatever zarr-python reads: systems differ in how they open the array."""

    _array: Any

    def read(self, box: Box) -> Voxels:
        voxels: Voxels = self._array[box]
        return voxels

    def read_into(self, box: Box, out: Voxels) -> None:
        from zarr.buffer.cpu import NDBuffer

        self._array.get_basic_selection(box, out=NDBuffer.from_numpy_array(out))

    def _pipeline(self) -> str:
        return type(self._array.async_array.codec_pipeline).__name__


class ZarrDvid(_ZarrArray):
    name = "zarr-dvid"
    packages = ("zarr-dvid", "zarr")

    def __init__(self, folder: Path) -> None:
        import zarr_dvid

        self._array = zarr_dvid.open(folder / "export")["s0/labels"]
        self.setting = f"through zarr.open, {self._pipeline()}, {n_threads()} threads"


class ZarrDvidCall(System):
    name = "zarr-dvid's own call"
    packages = ("zarr-dvid",)

    def __init__(self, folder: Path) -> None:
        import zarr_dvid

        self._store = zarr_dvid.DvidStore(folder / "export")
        self.setting = f"DvidStore.read, {n_threads()} threads"

    def read(self, box: Box) -> Voxels:
        return self._store.read(0, box)

    def read_into(self, box: Box, out: Voxels) -> None:
        self._store.read(0, box, out=out)


class ZarrDvidDefaultPipeline(_ZarrArray):
    name = "zarr-dvid, zarr's pipeline"
    packages = ("zarr-dvid", "zarr")

    def __init__(self, folder: Path) -> None:
        import zarr

        import zarr_dvid

        zarr.config.set({"dvid.pipeline": False})
        self._array = zarr_dvid.open(folder / "export")["s0/labels"]
        self.setting = f"{self._pipeline()}, zarr's default threads"


class _TensorStore(System):
    packages = ("tensorstore",)
    _driver: ClassVar[str]
    _form: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        import tensorstore as ts

        self._ts = ts
        # The cache holds decoded chunks: with one, a repeated read would not decode.
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": n_threads()}})
        spec = {"driver": self._driver, "kvstore": {"driver": "file", "path": f"{folder / self._form}/"}}
        self._array = self._zyx(ts.open(spec, read=True, context=context).result())
        self.setting = f"{n_threads()} threads, cache_pool of 0 bytes"

    def _zyx(self, array: Any) -> Any:
        return array

    def read(self, box: Box) -> Voxels:
        voxels: Voxels = self._array[box].read().result()
        return voxels

    def read_into(self, box: Box, out: Voxels) -> None:
        source = self._array[box][self._ts.d[:].translate_to[0]]
        self._ts.array(out).write(source).result()


class TensorStorePrecomputed(_TensorStore):
    name = "TensorStore, precomputed"
    _driver = "neuroglancer_precomputed"
    _form = "precomputed"

    def _zyx(self, array: Any) -> Any:
        return array[self._ts.d["channel"][0]][self._ts.d["z", "y", "x"].transpose[:]]


class TensorStoreZarr3(_TensorStore):
    name = "TensorStore, zarr3"
    _driver = "zarr3"
    _form = "zarr3"


class ZarrPython(_ZarrArray):
    name = "zarr-python, zarr3"
    packages = ("zarr", "tensorstore")  # TensorStore has written the volume

    def __init__(self, folder: Path) -> None:
        import zarr

        self._array = zarr.open_array(folder / "zarr3", mode="r")
        self.setting = f"{self._pipeline()}, zarr's default threads"


class ZarrPythonZarrs(_ZarrArray):
    name = "zarr-python + zarrs, zarr3"
    packages = ("zarr", "zarrs", "tensorstore")

    def __init__(self, folder: Path) -> None:
        import zarr

        zarr.config.set(
            {
                "codec_pipeline.path": "zarrs.ZarrsCodecPipeline",
                "codec_pipeline.strict": True,  # else it may hand over to zarr's own, and not say so
                "threading.max_workers": n_threads(),
            }
        )
        self._array = zarr.open_array(folder / "zarr3", mode="r")
        self.setting = f"{self._pipeline()}, {n_threads()} threads"


class CloudVolume(System):
    name = "cloud-volume, precomputed"
    packages = ("cloud-volume", "tensorstore")
    leaves_out = frozenset({INTO})

    def __init__(self, folder: Path) -> None:
        from cloudvolume import CloudVolume

        self._volume = CloudVolume(f"file://{folder / 'precomputed'}", cache=False, lru_bytes=0, progress=False)
        # Its other setting, several processes, is slower at all that is measured here.
        self.setting = "parallel=1 with threads of its own, no cache"

    def read(self, box: Box) -> Voxels:
        voxels: Voxels = np.asarray(self._volume[box[::-1]])[..., 0].T
        return voxels


class Memcpy(System):
    name = "memcpy"
    packages = ("numpy",)
    leaves_out = frozenset({FIRST})

    def __init__(self, folder: Path) -> None:
        self.setting = "numpy.copyto of as many bytes, 1 thread"
        self._box: Box | None = None

    def prepare(self, box: Box, volume: Tiled) -> None:
        if box != self._box:
            self._box, self._source = box, volume[box]

    def read(self, box: Box) -> Voxels:
        return self._source.copy()

    def read_into(self, box: Box, out: Voxels) -> None:
        np.copyto(out, self._source)


class _FreshMemory(System):
    packages = ("numpy",)
    gives_voxels = False
    leaves_out = frozenset(TITLES) - {FRESH}
    _what: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.setting = self._what


class TouchMemory(_FreshMemory):
    name = "touching memory"
    _what = "a number into each page of a new array, 1 thread"

    def read(self, box: Box) -> Voxels:
        voxels = np.empty([part.stop - part.start for part in box], np.uint64)
        voxels.reshape(-1)[:: mmap.PAGESIZE // voxels.itemsize] = 0
        return voxels


class FillMemory(_FreshMemory):
    name = "filling memory"
    _what = "a number into each item of a new array, 1 thread"

    def read(self, box: Box) -> Voxels:
        voxels = np.empty([part.stop - part.start for part in box], np.uint64)
        voxels.fill(1)
        return voxels


SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (
        ZarrDvid,
        ZarrDvidCall,
        ZarrDvidDefaultPipeline,
        TensorStorePrecomputed,
        TensorStoreZarr3,
        ZarrPython,
        ZarrPythonZarrs,
        CloudVolume,
        Memcpy,
        TouchMemory,
        FillMemory,
    )
}
