"""Settings of this process: keys `dvid.…` of zarr's configuration.

| key | default | means |
| --- | --- | --- |
| `dvid.pipeline` | True | opening an export puts `DvidPipeline` in the place of zarr's default pipeline |
| `dvid.threads` | None | threads that decode; None: as many as there are processors |
| `dvid.max_in_flight_bytes` | 64 MiB | compressed bytes that a selection holds at any time |
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from typing import Any

import zarr

PIPELINE = "zarr_dvid.pipeline.DvidPipeline"
_ZARR_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"
_MAX_IN_FLIGHT_BYTES = 64 << 20
_MAX_THREADS = 1024
_ENDED = ("closing", "closed", "failed")  # states of dask workers, which stay around for a while


def use_pipeline() -> None:
    """Puts the pipeline in place of zarr's default one, for arrays that are opened from now on in this process.

    Does nothing where zarr's configuration names another pipeline than its default, or where its key `dvid.pipeline` is
    False.
    """
    if zarr.config.get("codec_pipeline.path") == _ZARR_PIPELINE and zarr.config.get("dvid.pipeline", True):
        zarr.config.set({"codec_pipeline.path": PIPELINE})


def max_in_flight_bytes() -> int:
    """Compressed bytes that a selection may hold at any time: the key `dvid.max_in_flight_bytes`.

    Raises:
        ValueError: It is no such number.
    """
    wanted = zarr.config.get("dvid.max_in_flight_bytes", _MAX_IN_FLIGHT_BYTES)
    return _positive("dvid.max_in_flight_bytes", wanted)


def n_decode_threads(wanted: int | None = None) -> int:
    """Threads that may decode at the same time in this process.

    The key `dvid.threads` tells, where `wanted` does not; else it is the processors that this process
    may use. In a dask worker there are never more than the worker itself was given, which are counted over all workers
    of the process: dask runs that many tasks at once, and they share the threads.

    Args:
        wanted: As a store was told, or None.

    Raises:
        ValueError: It is no such number.
    """
    if wanted is None:
        wanted = zarr.config.get("dvid.threads", None)
    n_threads = _n_processors() if wanted is None else min(_positive("threads", wanted), _MAX_THREADS)
    of_workers = _n_dask_threads()
    return min(n_threads, of_workers) if of_workers else n_threads


def _positive(name: str, value: Any) -> int:
    number = 0
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} must be 1 or more, not {value!r}")
    return number


def _n_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _n_dask_threads() -> int:
    """Threads of all dask workers that live in this process; 0 where there are none."""
    worker = sys.modules.get("distributed.worker")
    if worker is None:
        return 0
    workers = [instance for instance in list(worker.Worker._instances) if instance.status.name not in _ENDED]
    return sum(instance.state.nthreads for instance in workers)
