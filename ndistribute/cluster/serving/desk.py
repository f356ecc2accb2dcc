"""What a server answers: a parameter server by its store, another one that it has nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ndistribute.cluster.protocol.replies import Failure, Reply, encode_reply
from ndistribute.cluster.protocol.requests import Leave, Request, decode_request
from ndistribute.cluster.store import Store
from ndistribute.cluster.wire.tensors import Buffer
from ndistribute.cluster.wire.waiting_room import Replies

__all__ = ["EmptyDesk", "StoreDesk"]

_NOBODY = "server"
_NO_TICKET = 0


class StoreDesk:
    """Answer by a store.

    Args:
        store: what holds the variables.
        limit_bytes: the longest message.
    """

    def __init__(self, store: Store, limit_bytes: int = 4 << 30) -> None:
        self.store = store
        self._limit = limit_bytes

    def bind(self, deliver: Callable[[Replies], None]) -> None:
        """Take what late answers are given to: a store needs nothing of the kind."""

    def read(self, message: memoryview) -> Request:
        """Return the request that a message holds."""
        return decode_request(message, self._limit)

    def handle(self, client: str, ticket: int, request: Request) -> list[tuple[int, Reply]]:
        """Do what a request asks."""
        answers = self.store.handle(client, ticket, request)
        return [(answer.ticket, answer.reply) for answer in answers]

    def leave(self, client: str, died: bool) -> list[tuple[int, Reply]]:
        """Tell the store that a client left or died; to it that is the same."""
        return self.handle(_NOBODY, _NO_TICKET, Leave(client))

    def write(self, reply: Reply) -> Sequence[Buffer]:
        """Return a reply as buffers; a part of a store's array goes out as it is."""
        return encode_reply(reply)

    def shared_file(self) -> int | None:
        """Return the file that clients of this host may read, where there is one."""
        shelf = self.store.shelf
        return None if shelf is None else shelf.shared_file()

    def close(self) -> None:
        """Let go of what the desk holds; a second call does nothing."""
        if self.store.shelf is not None:
            self.store.shelf.close()


class EmptyDesk(StoreDesk):
    """Answer that this process holds no variables.

    Args:
        task: how this process is called.
    """

    def __init__(self, task: str) -> None:
        super().__init__(Store())
        self._task = task

    def handle(self, client: str, ticket: int, request: Request) -> list[tuple[int, Reply]]:
        """Say whom to ask instead."""
        message = f"{self._task} holds no variables: ask a task of the job 'ps'."
        return [(ticket, Failure("unknown", message))]
