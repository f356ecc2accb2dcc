"""An imitation of `cupy.cuda.nccl` in host memory, for what NCCL is asked to do, without a GPU.

It takes the same calls, by address, and the names of the constants stand for NumPy's dtypes and
functions.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class FakeError(RuntimeError):
    """Stands for cupy.cuda.nccl.NcclError."""


class FakeNccl:
    """Play `cupy.cuda.nccl` on host memory: what a group holds takes place when the group ends.

    A group that is not the same on every rank, which NCCL would hang on, is an AssertionError.
    """

    NcclError = FakeError
    NCCL_SUM, NCCL_PROD, NCCL_MIN, NCCL_MAX = np.add, np.multiply, np.minimum, np.maximum
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32 = np.int8, np.uint8, np.int32, np.uint32
    NCCL_INT64, NCCL_UINT64, NCCL_FLOAT32, NCCL_FLOAT64 = (
        np.int64,
        np.uint64,
        np.float32,
        np.float64,
    )

    def __init__(self) -> None:
        self.NcclCommunicator = self
        self.comms: list[FakeComm] = []
        self.queues: dict[int, list[Any]] | None = None
        self.launched: list[str] = []
        self.fail = False
        self._operations = {
            "allReduce": self._all_reduce,
            "allGather": self._all_gather,
            "broadcast": self._broadcast,
        }

    def initAll(self, devices: list[int]) -> list[FakeComm]:  # noqa: N802
        self.comms = [FakeComm(self, rank) for rank in range(len(devices))]
        return list(self.comms)

    def groupStart(self) -> None:  # noqa: N802
        assert self.queues is None
        self.queues = collections.defaultdict(list)

    def groupEnd(self) -> None:  # noqa: N802
        queues, self.queues = self.queues, None
        if self.fail:
            raise FakeError("a link is down")
        assert queues is not None
        for calls in zip(*(queues[rank] for rank in range(len(self.comms))), strict=True):
            methods, args = zip(*calls, strict=True)
            assert len(set(methods)) == 1
            self.launched.append(methods[0])
            self._operations[methods[0]](args)

    def _all_reduce(self, args: Sequence[Any]) -> None:
        total = None
        assert len({arg[2:5] for arg in args}) == 1
        for source, _, count, dtype, op, _ in args:
            mine = _view(source, count, dtype)
            total = mine.copy() if total is None else op(total, mine)
        for _, target, count, dtype, *_ in args:
            _view(target, count, dtype)[...] = total

    def _all_gather(self, args: Sequence[Any]) -> None:
        assert len({arg[2:4] for arg in args}) == 1
        parts = [_view(source, count, dtype).copy() for source, _, count, dtype, _ in args]
        for _, target, count, dtype, _ in args:
            _view(target, count * len(args), dtype)[...] = np.concatenate(parts)

    def _broadcast(self, args: Sequence[Any]) -> None:
        assert len({arg[2:5] for arg in args}) == 1
        _, _, count, dtype, root, _ = args[0]
        value = _view(args[root][0], count, dtype).copy()
        for _, target, *_ in args:
            _view(target, count, dtype)[...] = value


class FakeComm:
    """One rank's communicator: what is called on it waits for the end of the group."""

    def __init__(self, world: FakeNccl, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.state = "open"

    def __getattr__(self, method: str) -> Callable[..., None]:
        def enqueue(*args: Any) -> None:
            assert self.state == "open"
            assert self.world.queues is not None
            self.world.queues[self.rank].append((method, args))

        return enqueue

    def abort(self) -> None:
        self.state = "aborted"

    def destroy(self) -> None:
        self.state = "destroyed"

    def check_async_error(self) -> None:
        assert self.state == "open"


def _view(address: int, count: int, dtype: Any) -> np.ndarray[Any, Any]:
    size = count * np.dtype(dtype).itemsize
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return raw.view(dtype)
