"""zarr's own suite for stores, on an export that every key was deleted from and that may be written to.

`DvidStore` itself can't be written to, which most of the suite's tests do; here writes and deletions go to a layer over
the real hierarchy. What the suite reads and lists goes through all of `DvidStore` and `Hierarchy`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exports import make_chunks, volume_info, write_shard
from sample import write_files
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.core.buffer.cpu import Buffer as CpuBuffer
from zarr.testing.store import StoreTests

from zarr_dvid import DvidStore
from zarr_dvid.hierarchy import Hierarchy


class LayeredHierarchy(Hierarchy):
    """A hierarchy with keys written and deleted over it; it starts with all of its own deleted."""

    def __init__(self, base: Hierarchy) -> None:
        vars(self).update(vars(base))
        self.written: dict[str, bytes] = {}
        self.deleted = set(base.keys())
        assert len(self.deleted) == 1 + 1 + 5 + 3 + 2  # root, scale, arrays, coordinates, a chunk in two views

    def get(self, key: str) -> bytes | None:
        if key in self.written:
            return self.written[key]
        return None if key in self.deleted else super().get(key)

    def exists(self, key: str) -> bool:
        return key in self.written or (key not in self.deleted and super().exists(key))

    def keys(self, prefix: str = "") -> Iterator[str]:
        yield from (key for key in self.written if key.startswith(prefix))
        yield from (key for key in super().keys(prefix) if key not in self.deleted | self.written.keys())

    def children(self, path: str) -> list[str] | None:
        prefix = f"{path.strip('/')}/" if path.strip("/") else ""
        names = [name for name in super().children(path) or () if self._holds(posixpath.join(path.strip("/"), name))]
        names += [key.removeprefix(prefix).split("/")[0] for key in self.written if key.startswith(prefix)]
        return list(dict.fromkeys(names)) or None

    def _holds(self, path: str) -> bool:
        return any(key == path or key.startswith(f"{path}/") for key in self.keys())


class WritableDvidStore(DvidStore):
    supports_writes = True
    supports_deletes = True
    delete_dir = Store.delete_dir
    clear = Store.clear
    hierarchy: LayeredHierarchy

    def __init__(self, url: str, *, read_only: bool = False, **options: Any) -> None:
        super().__init__(url, **options)
        self._read_only = read_only
        self.hierarchy = LayeredHierarchy(self.hierarchy)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "read_only": self.read_only}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def with_read_only(self, read_only: bool = False) -> DvidStore:
        return type(self)(self.url, read_only=read_only, **self._options)

    def _check_writable(self) -> None:
        Store._check_writable(self)

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()
        self.hierarchy.written[key] = value.to_bytes()

    async def delete(self, key: str) -> None:
        self._check_writable()
        self.hierarchy.written.pop(key, None)
        self.hierarchy.deleted.add(key)


class TestContract(StoreTests[WritableDvidStore, CpuBuffer]):
    store_cls = WritableDvidStore
    buffer_cls = CpuBuffer

    async def set(self, store: WritableDvidStore, key: str, value: Buffer) -> None:
        store.hierarchy.written[key] = value.to_bytes()

    async def get(self, store: WritableDvidStore, key: str) -> Buffer:
        return self.buffer_cls.from_bytes(store.hierarchy.written[key])

    @pytest.fixture(scope="class")
    @staticmethod
    def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
        shard = write_shard(make_chunks((0, 0, 0)))
        return write_files(tmp_path_factory.mktemp("contract"), shard.files())

    @pytest.fixture
    def store_kwargs(self, export: Path) -> dict[str, Any]:
        return {"url": str(export), "info": volume_info((64, 64, 64))}

    def test_store_repr(self, store: WritableDvidStore) -> None:
        assert repr(store) == f"WritableDvidStore({store.url!r})"

    def test_store_supports_writes(self, store: WritableDvidStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: WritableDvidStore) -> None:
        assert store.supports_listing
