"""A cache of loaded shards, bounded in bytes, for all stores and filesystems of a process."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Anything that knows how much memory it takes."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        ...


T = TypeVar("T", bound=Sized)


class ByteBoundedCache(Generic[T]):
    """Least recently used values, as many as fit into a number of bytes.

    A value that several threads ask for at once is made once; the others wait. A failure is not kept: the next one who
    asks tries again. A forked child starts with an empty cache, since a thread that was making something does not live
    on in it.

    Args:
        max_bytes: What all values may take together. The newest one stays even if it is larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._futures: OrderedDict[Hashable, Future[T]] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """What the values take now."""
        return self._nbytes

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`, made by `make` if it is not there."""
        with self._lock:
            future = self._futures.get(key)
            if future is not None:
                self._futures.move_to_end(key)
            else:
                mine = self._futures[key] = Future()
        if future is not None:
            return future.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                self._futures.pop(key, None)
            mine.set_exception(error)
            del mine  # it holds the error, which holds this frame
            raise
        mine.set_result(value)
        self._account(value.nbytes)
        return value

    def _account(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            while self._nbytes > self.max_bytes and len(self._futures) > 1:
                key = next((key for key, future in self._futures.items() if future.done()), None)
                if key is None or key == next(reversed(self._futures)):
                    break
                self._nbytes -= self._futures.pop(key).result().nbytes
