"""A progress bar for long work, where somebody is there to see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, label: str, *, enabled: bool = True) -> Iterator[Callable[[int], object]]:
    """Shows a bar on stderr while the `with` block runs.

    There is none where stderr is no terminal, and none without tqdm (``pip install 'zarr-dvid[cli]'``).

    Args:
        total: Steps of the whole work.
        label: What is being done.
        enabled: Whether to show a bar at all.

    Yields:
        A function that takes how many steps were made since it was last called.
    """
    if enabled and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            with tqdm(total=total, desc=label) as bar:
                yield bar.update
            return
    yield lambda n_steps: None
