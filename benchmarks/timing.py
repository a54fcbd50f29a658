"""Times of several operations, taken in turns so that whatever slows the machine down slows all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

_TURN_SECONDS = 0.01


def interleaved(
    operations: Mapping[str, Callable[[], object]], *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median time of each operation, in seconds, over rounds in which each takes its turn.

    In each turn the first run is not counted, so that it does not matter whose data the operation before left in the
    cache; it also tells how many more runs make the turn long enough.

    Args:
        operations: What to time, by name.
        rounds: Turns of each.
        clock: Tells seconds. `time.thread_time` leaves out the time for which other programs had the processor.
    """
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, operation in operations.items():
                n_runs = max(1, round(_TURN_SECONDS / _time(operation, 1, clock)))
                seconds[name].append(_time(operation, n_runs, clock))
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _time(operation: Callable[[], object], n_runs: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(n_runs):
        operation()
    return (clock() - start) / n_runs
