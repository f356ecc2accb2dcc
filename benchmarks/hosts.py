"""All-reduces between hosts, imitated in network namespaces, with one process on each.

`python -m benchmarks.all_reduce --hosts 2 3 4` runs it. The hosts are those of `tests/hosts`: up to
2 Gbit/s a switch in user space carries their frames, above a bridge of the kernel. They share the
cores of this machine, and so does the switch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import MPICH, OURS, TORCH, Benchmark, Contender, Group
from benchmarks.hosts_model import NAME, predictions
from benchmarks.report import markdown, shown
from tests.hosts.rig import Link, Rig, skip_reason
from tests.processes import find_mpiexec, tf_config

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, MIB, 64 * MIB)
NETWORKS = {
    "100 Mbit/s and 5 ms": Link(100.0, 2.5),
    "1 Gbit/s and 0.2 ms": Link(1000.0, 0.1),
    "10 Gbit/s": Link(10000.0),
}
# The addresses of jobs; each has its own, below those that the kernel gives to connections.
_PORTS = itertools.count(21000)
_DTYPES = "float16", "bfloat16"


class Hosts:
    """The hosts that are up: those of one network and number at a time."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self._folders = folders
        self._up = contextlib.ExitStack()
        self._key: tuple[str, int] | None = None
        self._rig: Rig | None = None

    def rig(self, network: str, count: int) -> Rig:
        """Return the hosts of a network, instead of those that were up."""
        if self._rig is None or self._key != (network, count):
            self.close()
            shared = [tempfile.gettempdir(), *self._folders]
            self._rig = self._up.enter_context(Rig(count, NETWORKS[network], shared=shared))
            self._key = network, count
        return self._rig

    def close(self) -> None:
        """End all hosts."""
        self._rig = None
        self._up.close()


@dataclass(frozen=True)
class Starter:
    """Starts a process on each host, by `TF_CONFIG` or by `mpiexec` over ssh."""

    hosts: Hosts
    network: str
    over_mpi: bool = False

    def __call__(
        self, jobs: Sequence[str], each: Sequence[Mapping[str, str]], command: Sequence[str]
    ) -> list[Any]:
        rig = self.hosts.rig(self.network, len(jobs))
        if self.over_mpi:
            mpiexec = find_mpiexec(command[0])
            if mpiexec is None:
                raise FileNotFoundError(f"there is no mpiexec beside {command[0]}")
            names = ",".join(host.name for host in rig.hosts)
            words = [mpiexec, "-launcher", "ssh", "-hosts", names, "-n", str(len(jobs)), *command]
            return [rig.hosts[0].start(words, each[0])]
        port, secret = next(_PORTS), secrets.token_hex(16)
        cluster = {"worker": [f"{host.name}:{port}" for host in rig.hosts]}
        common = {"NDISTRIBUTE_SECRET": secret, "RANKS_SIZE": str(len(jobs))}
        common |= {"GLOO_SOCKET_IFNAME": "eth0"}
        return [
            host.start(
                command,
                {
                    **common,
                    **own,
                    "RANKS_RANK": str(rank),
                    "TF_CONFIG": tf_config(cluster, "worker", rank),
                },
            )
            for rank, (host, own) in enumerate(zip(rig.hosts, each, strict=True))
        ]


def groups(hosts: Hosts, counts: Sequence[int], quick: bool) -> Iterator[Group]:
    """Return the contenders for each network, number of hosts and size."""
    sizes = SIZES[:1] if quick else SIZES
    for network, count, size in itertools.product(NETWORKS, counts, sizes):
        facts = {"bytes": size, "network": network, "hosts": count}
        link = NETWORKS[network]
        facts |= {"rate_mbit": link.rate_mbit, "delay_ms": link.delay_ms}
        facts |= {"switched": not link.bridged, "cores": len(os.sched_getaffinity(0))}
        common: dict[str, Any] = {"jobs": ("worker",) * count, "facts": facts, "alone": True}
        ours = {"size": size, "way": "tcp", "call": "all_reduce"}
        by_config, by_mpi = (Starter(hosts, network, over_mpi) for over_mpi in (False, True))
        ways: list[harness.Way] = [(NAME, OURS, "between_processes", ours)]
        ways += [("gloo", TORCH, "gloo", {"size": size})]
        if size == SIZES[-1]:
            ways += [
                (dtype, OURS, "between_processes", {**ours, "wire_dtype": dtype})
                for dtype in _DTYPES
            ]
        over_mpi: list[harness.Way] = [("Allreduce", MPICH, "mpi", {"size": size})]
        found: list[Contender] = [
            *harness.contenders("all_reduce", ways, wire=by_config, **common),
            *harness.contenders("all_reduce", over_mpi, wire=by_mpi, **common),
        ]
        yield Group(f"{count} hosts at {network}, {size // KIB:,} KiB", found)


def limit(entry: Mapping[str, Any]) -> float:
    """Return the microseconds that the wires need for the bytes of a ring, without headers."""
    hosts = entry["hosts"]
    return 2 * (hosts - 1) / hosts * float(entry["bytes"]) * 8 / float(entry["rate_mbit"])


def conclude(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each all-reduce: the wire's limit, all contenders and the prediction."""
    predicted = {name: seconds for name, _, seconds in predictions(entries)}
    names = list(dict.fromkeys((one["side"], one["name"]) for one in entries))
    grouped: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for one in entries:
        grouped.setdefault(one["group"], {})[one["side"], one["name"]] = one
    rows = []
    for group, found in grouped.items():
        row = [group, shown(limit(next(iter(found.values()))) / 1e3)]
        for name in names:
            one = found.get(name)
            cell = ""
            if one:
                work = 1e9 * one["processor"]["machine"] / one["bytes"]
                cell = f"{shown(one['figure']['median'] / 1e3)} ({shown(work)})"
            row.append(cell)
        told = shown(1e3 * predicted[group]) if group in predicted else ""
        rows.append([*row, told])
    heads = [": ".join(name) for name in names]
    head = ["ms (processor's ns a byte)", "limit", *heads, "ring over tcp, predicted"]
    return markdown(head, rows)


def main(arguments: Sequence[str]) -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--hosts", nargs="+", type=int)
    own, rest = parser.parse_known_args(arguments)
    # The peers' interpreters may lie below /tmp, where hosts see nothing else.
    folders = [Path(word).absolute().parent.parent for word in rest if word.endswith("python")]
    if reason := skip_reason():
        parser.error(reason)
    with contextlib.closing(Hosts(folders)) as hosts:
        benchmark = Benchmark(
            "hosts",
            "All-reduce between imitated hosts, float32",
            "us",
            lambda quick: list(groups(hosts, own.hosts, quick)),
            rate=False,
            conclude=conclude,
        )
        harness.main(benchmark, rest)
