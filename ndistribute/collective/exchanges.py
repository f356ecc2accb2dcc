"""What processes tell each other when a group is set up: small blobs, one from each process.

Kept apart by generation: what was begun before a failure and never ended is not taken for the
same exchange after it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from ndistribute.errors import CollectiveTimeoutError

__all__ = ["Exchanges"]


class Exchanges:
    """Keep what has come of each exchange, and wait for what has not.

    Args:
        rank: which process this is.
        size: how many processes there are.
        changed: notified when something comes, or when waiting may have become vain.

    >>> exchanges = Exchanges(1, 2, threading.Condition())
    >>> key = exchanges.begin(0, "names")
    >>> exchanges.put(key, 0, b"me")
    >>> exchanges.meet(key, b"you", 1.0, lambda missing: None)
    [b'me', b'you']
    """

    def __init__(self, rank: int, size: int, changed: threading.Condition) -> None:
        self._rank = rank
        self._size = size
        self._changed = changed
        self._begun: dict[str, int] = defaultdict(int)
        self._blobs: dict[str, dict[int, bytes]] = defaultdict(dict)

    def begin(self, generation: int, kind: str) -> str:
        """Return the key of the next exchange of a kind, the same on every process."""
        with self._changed:
            self._begun[kind] += 1
            return f"{generation}:{kind}:{self._begun[kind]}"

    def put(self, key: str, rank: int, blob: bytes) -> None:
        """Keep what a process passed."""
        with self._changed:
            self._blobs[key][rank] = blob
            self._changed.notify_all()

    def meet(
        self,
        key: str,
        blob: bytes,
        timeout: float,
        refuse: Callable[[Sequence[int]], None],
        *,
        keep: bool = False,
    ) -> list[bytes]:
        """Wait for what the others pass under a key, and return it in rank order.

        Args:
            key: of the exchange.
            blob: what this process passes.
            timeout: how long to wait, in seconds.
            refuse: called with the ranks that are missing; raises where waiting is in vain.
            keep: whether this process may come once more, as after an interrupt.

        Raises:
            CollectiveTimeoutError: the time is up.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._blobs[key][self._rank] = blob
            while missing := [r for r in range(self._size) if r not in self._blobs[key]]:
                refuse(missing)
                left = deadline - time.monotonic()
                if left <= 0:
                    kind = key.split(":")[1]
                    raise CollectiveTimeoutError(
                        f"{kind}: worker {self._rank} waited {timeout:g} s for worker(s) "
                        f"{', '.join(map(str, missing))}.",
                        rank=missing[0],
                        op=kind,
                    )
                self._changed.wait(timeout=min(left, 1.0))
            blobs = self._blobs[key] if keep else self._blobs.pop(key)
        return [blobs[rank] for rank in range(self._size)]

    def start_over(self, generation: int) -> None:
        """Forget every exchange of generations before this one, and count anew."""
        with self._changed:
            self._begun.clear()
            for key in [key for key in self._blobs if int(key.partition(":")[0]) < generation]:
                del self._blobs[key]
