"""How a server waits for the end of its work: it keeps account of its clients, and watches.

`Attendance` knows what departures mean; here are the clock, the lock, and the signal by which a
process is asked to end.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from ndistribute.cluster.serving.attendance import Attendance, Outlook
from ndistribute.cluster.wire.service import Desk
from ndistribute.cluster.wire.tensors import Buffer
from ndistribute.cluster.wire.waiting_room import Replies

__all__ = ["AttendedDesk", "Sigterm", "Vigil"]

_LOOK_SECONDS = 3600.0


class Vigil:
    """Wait until clients have come and gone; any thread may say that they do.

    Args:
        attendance: what concludes from it; nobody else may change it any more.
    """

    def __init__(self, attendance: Attendance) -> None:
        self._attendance = attendance
        self._changed = threading.Condition()
        self._released = False

    def came(self, client: str) -> None:
        """Note that a client is here."""
        with self._changed:
            self._attendance.came(client)

    def left(self, client: str, died: bool) -> None:
        """Note that a client left, or that its process died."""
        with self._changed:
            self._attendance.left(client, died, time.monotonic())
            self._changed.notify_all()

    def release(self) -> None:
        """Let go who waits, from now on."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> Outlook | None:
        """Return how the work ended; None where it did not, and this was released or ran out.

        Args:
            timeout: seconds to wait; None: as long as it takes.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._released:
                now = time.monotonic()
                outlook = self._attendance.outlook()
                if outlook is not None and outlook.at <= now:
                    return outlook
                if deadline is not None and deadline <= now:
                    return None
                times = [deadline, None if outlook is None else outlook.at, now + _LOOK_SECONDS]
                self._changed.wait(timeout=min(at for at in times if at is not None) - now)
        return None


class AttendedDesk:
    """Let another desk answer, and tell a vigil who comes and goes.

    Args:
        desk: what answers.
        vigil: what is told.
    """

    def __init__(self, desk: Desk, vigil: Vigil) -> None:
        self._desk = desk
        self._vigil = vigil

    def bind(self, deliver: Callable[[Replies], None]) -> None:
        """Take what late answers are given to."""
        self._desk.bind(deliver)

    def read(self, message: memoryview) -> Any:
        """Return what a message asks for."""
        return self._desk.read(message)

    def handle(self, client: str, ticket: int, request: Any) -> Replies:
        """Let the desk answer."""
        self._vigil.came(client)
        return self._desk.handle(client, ticket, request)

    def leave(self, client: str, died: bool) -> Replies:
        """Let the desk forget a client."""
        self._vigil.left(client, died)
        return self._desk.leave(client, died)

    def write(self, reply: Any) -> Sequence[Buffer]:
        """Return a reply as buffers."""
        return self._desk.write(reply)

    def shared_file(self) -> int | None:
        """Return the file that clients of this host may read, where there is one."""
        return self._desk.shared_file()

    def close(self) -> None:
        """Close the desk."""
        self._desk.close()


class Sigterm:
    """Make SIGTERM a ``SystemExit`` in the block, so that what is open can be closed in order.

    Once it is disarmed, by the first signal for one, further ones change nothing: what closes then
    is not to be broken off. Where the program handles the signal itself, or in another thread than
    the main one, this does nothing.
    """

    def __init__(self) -> None:
        self._armed = True
        self._handling = False

    def disarm(self) -> None:
        """Let signals change nothing, up to the end of the block."""
        self._armed = False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._handling = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handling:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise SystemExit(128 + signum)
