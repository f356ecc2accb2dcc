"""Predictions of all-reduces between hosts, from those of two hosts on the fastest network.

A wire carries the bytes with their headers. The processor works for each of them in all hosts: real
hosts have cores of their own, imitated ones share those of one machine. The longer of the two
counts, and each step adds the network's delay and what a message takes in the hosts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness import OURS
from ndistribute.collective.ring import SMALL_BYTES, SMALL_BYTES_OF_TWO
from ndistribute.collective.tcp import TcpTransport

# Of a full Ethernet frame on a wire, with preamble and gap, 1448 bytes are data.
HEADERS = 1538 / 1448
NAME = "ring over tcp"


@dataclass(frozen=True)
class Network:
    """What lies between hosts.

    Args:
        delay: seconds from one host to another.
        byte: seconds for a byte on a wire, in each direction.
        cores: which all hosts share; None: each has enough of its own.
    """

    delay: float
    byte: float
    cores: int | None = None


@dataclass(frozen=True)
class HostsModel:
    """What was measured with two hosts.

    Args:
        sizes: bytes, rising.
        seconds: of an all-reduce.
        work: processor seconds of an all-reduce, of both hosts.
    """

    sizes: Sequence[float]
    seconds: Sequence[float]
    work: Sequence[float]

    def predict(self, hosts: int, size: float, network: Network) -> float:
        """Return the seconds of an all-reduce of a size between some hosts."""
        if hosts == 1:
            return 0.0
        message = min(self.seconds)
        if size <= (SMALL_BYTES_OF_TWO if hosts == 2 else SMALL_BYTES):
            steps = _doublings(hosts)
            wire = steps * size * network.byte * HEADERS
            path = steps * (network.delay + self._at(self.seconds, size)) + wire
            return max(path, self._shared(hosts * steps / 2, hosts, size, network))
        steps, share = 2 * (hosts - 1), 2 * (hosts - 1) / hosts
        wire = share * size * network.byte * HEADERS + steps * message
        path = max(wire, share * self._at(self.seconds, size))
        # Each of the hosts sends that share; two hosts send the array twice.
        # In a step each works on the blocks of a part, and a block is one core's.
        blocks = hosts * math.ceil(size / hosts / TcpTransport.block_bytes)
        work = self._shared(hosts - 1, hosts, size, network, blocks)
        return steps * network.delay + max(path, work)

    @property
    def work_per_byte(self) -> float:
        """The processor seconds of one host for a byte that it sends and one that it receives."""
        return self.work[-1] / self.sizes[-1] / 2

    def _shared(
        self, times: float, hosts: int, size: float, network: Network, blocks: int = 0
    ) -> float:
        """Return the seconds of some times the work of two hosts, on the cores that hosts share.

        With a number of blocks, some cores are idle while others work on the last ones.
        """
        cores = network.cores
        if cores is None or cores >= hosts:
            return 0.0
        busy = blocks / math.ceil(blocks / cores) if blocks else cores
        return times * self._at(self.work, size) / busy

    def _at(self, measured: Sequence[float], size: float) -> float:
        return float(np.interp(size, self.sizes, measured)) * max(1.0, size / self.sizes[-1])


def fit(entries: Sequence[Mapping[str, Any]], switched: bool = False) -> HostsModel | None:
    """Return the model of what `all_reduce --hosts` measured of two hosts on the fastest network.

    Nothing, if it did not. The work for the smallest size is that of `_smallest`.
    """
    fitted = _fastest(entries, 2, switched=False)
    if not fitted:
        return None
    work = [one["processor"]["own"] for one in fitted]
    for one in _smallest(entries, switched):
        hosts, whose = one["hosts"], "machine" if switched else "own"
        work[0] = 2 * one["processor"][whose] / hosts / _doublings(hosts)
    sizes = [float(one["bytes"]) for one in fitted]
    return HostsModel(sizes, [one["figure"]["median"] / 1e6 for one in fitted], work)


def is_fitted(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an entry is of those that the model is fitted to."""
    fitted = _fastest(entries, 2, switched=False)
    fitted += [*_smallest(entries, switched=False), *_smallest(entries, switched=True)]
    return any(entry is one for one in fitted)


def _smallest(entries: Sequence[Mapping[str, Any]], switched: bool) -> list[Mapping[str, Any]]:
    """Return what tells the work for a small message where cores are shared, if it was measured.

    Two hosts with a core each spin until a message is there. Three on two cores sleep and wake up,
    and a switch that shares the cores works for each frame.
    """
    return _fastest(entries, 2 if switched else 3, switched)[:1]


def _fastest(
    entries: Sequence[Mapping[str, Any]], hosts: int, switched: bool
) -> list[Mapping[str, Any]]:
    """Return what was measured on the fastest network with or without a switch, by size."""
    found = [
        one
        for one in entries
        if predictable(one) and one["hosts"] == hosts and one["switched"] is switched
    ]
    rate = max((one["rate_mbit"] for one in found), default=0.0)
    return sorted((o for o in found if o["rate_mbit"] == rate), key=lambda one: one["bytes"])


def _doublings(hosts: int) -> int:
    """Return the steps of an all-reduce of a small array."""
    return math.ceil(math.log2(hosts))


def predictable(entry: Mapping[str, Any]) -> bool:
    """Return whether it is of ours, and float32 on the wire."""
    return bool(entry["side"] == OURS and entry["name"] == NAME)


def predictions(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Return name, measured and predicted seconds of what the model is not fitted to."""
    rows = []
    for one in entries:
        model = fit(entries, one["switched"])
        if model and predictable(one) and not is_fitted(one, entries):
            network = Network(one["delay_ms"] / 1e3, 8e-6 / one["rate_mbit"], one["cores"])
            predicted = model.predict(one["hosts"], one["bytes"], network)
            rows.append((one["group"], one["figure"]["median"] / 1e6, predicted))
    return rows
