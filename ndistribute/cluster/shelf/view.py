"""A server's variables seen through the memory that it shares with the processes of its host.

Whatever can not be had that way is asked of the server: it is on another host, shares nothing, or
was too busy to let anybody look.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ndistribute.cluster.links.copy import Copy, known_version
from ndistribute.cluster.protocol.replies import Located
from ndistribute.cluster.protocol.requests import Locate
from ndistribute.cluster.shelf.layout import Place
from ndistribute.cluster.shelf.reader import ShelfReader
from ndistribute.cluster.wire.client import Client

__all__ = ["ShelfView"]

_log = logging.getLogger("ndistribute")


class ShelfView:
    """Read variables from the shelf of a server, where it has one that this process can map.

    Args:
        client: of the server.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._reader: ShelfReader | None = None
        self._tried = False
        self._places: dict[str, Place] = {}

    def pull(self, copies: Sequence[Copy], restarts: int) -> bool:
        """Bring copies up to date, all as they were at one moment, and say whether that was done.

        Args:
            copies: of variables of the server.
            restarts: how often the server was started again.
        """
        reader = self._reader or self._open()
        places = None if reader is None else self._locate(copies)
        if reader is None or places is None:
            return False
        known = [known_version(copy, restarts) for copy in copies]
        versions = reader.read(places, [copy.writable for copy in copies], known)
        if versions is None:
            return False
        for copy, version, old in zip(copies, versions, known, strict=True):
            if version != old:
                copy.receive(None, (restarts, version))
        return True

    def forget(self) -> None:
        """Let go of the shelf of a server that is no more; the next one may have another."""
        self.close()
        self._tried = False
        self._places = {}

    def close(self) -> None:
        """Let go of the shelf."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _open(self) -> ShelfReader | None:
        if self._tried:
            return None
        self._tried = True
        try:
            file = self._client.shared_file()
            if file is None:
                return None
            try:
                self._reader = ShelfReader(file)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            _log.info("Variables of %s come over the wire: %s", self._client.address, error)
        return self._reader

    def _locate(self, copies: Sequence[Copy]) -> list[Place] | None:
        """Return where variables lie; those that were never read from here are asked for."""
        known = self._places
        names = tuple(copy.server_name for copy in copies if copy.server_name not in known)
        if names:
            found = self._client.request(Locate(names))
            if not isinstance(found, Located):
                return None
            places = zip(found.slots, found.offsets, found.nbytes, strict=True)
            known.update({name: Place(*place) for name, place in zip(names, places, strict=True)})
        return [known[copy.server_name] for copy in copies]
