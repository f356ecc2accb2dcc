"""`Sequence`: the number by which who reads shared memory sees whether it was changed meanwhile.

It is odd while somebody writes, and rises with each change. Who finds it even, reads, and finds it
the same afterwards, has read nothing that was half written.
"""

from __future__ import annotations

import threading

__all__ = ["Sequence"]


class Sequence:
    """Guard memory that one process writes and others read.

    Args:
        word: the number, 8 bytes of shared memory, aligned; only the writer's may be written to.

    >>> memory = memoryview(bytearray(8)).cast("Q")
    >>> writer, reader = Sequence(memory), Sequence(memory.toreadonly())
    >>> before = reader.look()
    >>> writer.begin()
    >>> reader.look() is None, reader.still(before)
    (True, False)
    >>> writer.end()
    >>> reader.look(), reader.still(before)
    (2, False)
    """

    def __init__(self, word: memoryview) -> None:
        self._word = word
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Say that memory is being written to."""
        self._word[0] |= 1
        self._fence()  # What is written from now on is seen after the odd number.

    def end(self) -> None:
        """Say that it no longer is."""
        self._fence()  # What was written is seen before the even number.
        self._word[0] = (self._word[0] | 1) + 1

    def look(self) -> int | None:
        """Return the number, before reading; None: somebody writes."""
        number: int = self._word[0]
        self._fence()  # Nothing that is read afterwards is from before.
        return None if number % 2 else number

    def still(self, number: int) -> bool:
        """Say, after reading, whether nobody has written since the number was so."""
        self._fence()  # Nothing that was read before is from afterwards.
        return bool(self._word[0] == number)

    def _fence(self) -> None:
        """Keep the processor from exchanging what it loads or stores before and after.

        A lock's release keeps what stands before it there, its acquisition what stands after it,
        and processors do not exchange a release with a later acquisition. (The other way round
        both could slip in between.) An aligned word is loaded and stored in one piece.
        """
        with self._lock:
            pass
        with self._lock:
            pass
