"""Tensors in anonymous shared memory: there is no file that could be left behind."""

from __future__ import annotations

import mmap
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from feddumap.core.messages import Tensors

_ALIGN = 64
Layout = list[tuple[str, str, str, list[int], int]]
"""(group, name, dtype, shape, offset) of each tensor; JSON."""


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("feddumap")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Region:
    """A block of shared memory with a file descriptor that child processes inherit. It grows as needed."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _anonymous_file() if fd is None else fd
        self._memory: mmap.mmap | None = None

    def _map(self, size: int) -> mmap.mmap:
        """The mapping, renewed if this or another process has enlarged the file."""
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, size)
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        return self._memory

    def write(self, groups: Mapping[str, Tensors]) -> Layout:
        """Copy tensors into the region; returns their layout."""
        layout: Layout = []
        end = 0
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                layout.append((group, name, dtype, list(tensor.shape), end))
                end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        memory = self._map(max(end, 1))
        for group, name, dtype, shape, offset in layout:
            _view(memory, dtype, shape, offset).copy_(groups[group][name])
        return layout

    def read(self, layout: Layout) -> dict[str, Tensors]:
        """Views of the tensors written last, valid until the next write."""
        return self._views(self._memory_of(layout), layout)

    def lend(self, layout: Layout, on_release: Callable[[], None]) -> dict[str, Tensors]:
        """Views of the tensors written last; `on_release` is called when the last view is deleted."""
        buffer = memoryview(self._memory_of(layout))  # only the views keep it alive
        weakref.finalize(buffer, on_release)
        return self._views(buffer, layout)

    def _memory_of(self, layout: Layout) -> mmap.mmap:
        end = max((offset + _nbytes(dtype, shape) for _, _, dtype, shape, offset in layout), default=0)
        return self._map(max(end, 1))

    @staticmethod
    def _views(memory: Any, layout: Layout) -> dict[str, Tensors]:
        groups: dict[str, Tensors] = {}
        for group, name, dtype, shape, offset in layout:
            groups.setdefault(group, {})[name] = _view(memory, dtype, shape, offset)
        return groups

    def close(self) -> None:
        self._memory = None
        os.close(self.fd)


class RegionPool:
    """Regions for the results of workers. Results are views into a region, which is free again when they are
    deleted. The last `reserve` regions are never lent, so a caller holding views cannot deadlock the pool."""

    def __init__(self, count: int, reserve: int) -> None:
        self.all: Sequence[Region] = [Region() for _ in range(count)]
        self._free: queue.SimpleQueue[Region] = queue.SimpleQueue()
        for region in self.all:
            self._free.put(region)
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._lendable = count - reserve

    def acquire(self) -> Region:
        """A free region; blocks until there is one."""
        return self._free.get()

    def release(self, region: Region) -> None:
        self._free.put(region)

    def lend(self, region: Region, layout: Layout) -> dict[str, Tensors]:
        """The tensors written to a region: views or, if only the reserve is left, copies."""
        with self._lock:
            lent = self._lendable > 0
            self._lendable -= lent
        if lent:
            return region.lend(layout, lambda: self._release_lent(region))
        try:
            return clone_groups(region.read(layout))
        finally:
            self.release(region)

    def _release_lent(self, region: Region) -> None:
        with self._lock:
            self._lendable += 1
        self._free.put(region)

    def close(self) -> None:
        for region in self.all:
            region.close()


def clone_groups(groups: dict[str, Tensors]) -> dict[str, Tensors]:
    """Copies of the tensors."""
    return {
        group: {name: tensor.clone() for name, tensor in tensors.items()} for group, tensors in groups.items()
    }


def _nbytes(dtype: str, shape: list[int]) -> int:
    return int(torch.Size(shape).numel()) * _dtype(dtype).itemsize


def _view(memory: Any, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    if count == 0:
        return torch.empty(shape, dtype=_dtype(dtype))
    return torch.frombuffer(memory, dtype=_dtype(dtype), count=count, offset=offset).view(shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
