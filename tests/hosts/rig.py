"""Hosts imitated in namespaces of this kernel, with cables between them that can be pulled.

A host has a network, a name, process numbers, shared memory, ``/tmp``, ``/etc/hosts``, a boot id
and an ssh server of its own; it shares the other files of the machine. All of it ends with the
process that holds it, which ends when the tests' process does. This needs root, as in containers;
`skip_reason` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.hosts.switch import mac_address
from tests.processes import HANG_SECONDS, ROOT, START_SECONDS, environment, wait_until

_NAMESPACES = "--net --mount --uts --ipc --pid".split()
_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
# Above this the switch in Python is the limit, and the kernel's bridge takes its place.
_BRIDGE_MBIT = 2000.0
# What a host's queue counts of a full frame, as a part of what the frame occupies on a wire.
_OF_FRAME = 1514 / 1538


@dataclass(frozen=True)
class Link:
    """What the wires between hosts do.

    Args:
        rate_mbit: the rate of each host's interface, in both directions; None for no limit. Above
            2000 the hosts are on a bridge of the kernel: without delay, cuts of pairs.
        delay_ms: from one host to another: half of what a round trip takes.
    """

    rate_mbit: float | None = None
    delay_ms: float = 0.0

    @property
    def bridged(self) -> bool:
        """Whether the kernel switches."""
        return (self.rate_mbit or 0.0) > _BRIDGE_MBIT

    @property
    def queue_kib(self) -> float:
        """What waits for a host's wire at most: 512 KiB and what a round trip carries."""
        return 512 + (self.rate_mbit or 0.0) * 2 * self.delay_ms / 8.192


@functools.cache
def skip_reason(ssh: bool = True) -> str:
    """Return why hosts cannot be imitated here, or nothing."""
    if os.geteuid():
        return "imitated hosts need root"
    absent = [name for name in "unshare nsenter ip tc".split() if shutil.which(name) is None]
    if ssh and not (os.access(_SSHD, os.X_OK) and shutil.which("ssh")):
        absent.append("sshd (apt-get install openssh-server)")
    if not os.path.exists("/dev/net/tun"):
        absent.append("/dev/net/tun")
    if absent:
        return f"imitated hosts need {', '.join(absent)}"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "ip", "link", "add", "x0", "type", "bridge"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    return (
        f"imitated hosts are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""
    )


class Process(subprocess.Popen[Any]):
    """A process in a host; `pid` is that of the `nsenter` which started it and ends with it."""

    def inner_pid(self) -> int | None:
        """Return the process's number outside the host, or None if it has ended."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")

        born: list[str] = []

        def settled() -> bool:
            with contextlib.suppress(OSError):
                born[:] = children.read_text().split()
            return bool(born) or self.poll() is not None

        wait_until(settled)
        return int(born[0]) if born else None

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process itself."""
        if (pid := self.inner_pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)


class Host:
    """One of the hosts of a `Rig`: `name`, `address` and `addresses`, one in each network."""

    def __init__(self, rig: Rig, index: int) -> None:
        self.rig, self.index = rig, index
        self.name = rig.names.format(index)
        self.addresses = [rig.address(network, index) for network in range(rig.networks)]
        self.address = self.addresses[0]
        self._holder: subprocess.Popen[str] | None = None
        self._started: list[Process] = []

    @property
    def pid(self) -> int:
        """The first process of the host."""
        if self._holder is None:
            raise RuntimeError(f"{self.name} is off")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        return int(children.read_text())

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] = {},
        cwd: str | os.PathLike[str] = ROOT,
        **more: Any,
    ) -> Process:
        """Start a command in the host, as `subprocess.Popen` would with the other arguments."""
        enter = ["nsenter", "--target", str(self.pid), *_NAMESPACES, "--", "env", "-C", str(cwd)]
        more.setdefault("stdin", subprocess.DEVNULL)
        process = Process([*enter, *argv], env=environment(env), process_group=0, **more)
        self._started.append(process)
        return process

    def run(
        self, argv: Sequence[str], timeout: float = HANG_SECONDS, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host to its end, and return what it wrote."""
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.start(argv, **{**pipe, **more}) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def bytes_sent(self, network: int | None = None) -> int:
        """Return how many bytes have left the host in one network or all."""
        rows = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        prefix = "eth" if network is None else f"eth{network}:"
        return sum(int(row.split()[9]) for row in rows if row.strip().startswith(prefix))

    def boot(self) -> None:
        """Start the host, with nothing in its memory, ``/tmp`` and networks."""
        self.power_on()
        self.set_up()

    def power_on(self) -> None:
        """Begin to start, so that hosts start beside each other; `set_up` ends it."""
        self._holder = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
            + ["sh", "-ec", self._script()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            text=True,
        )

    def _script(self) -> str:
        """Return what the first process of the host does before it waits for its end."""
        own = self.rig.folder / self.name
        own.mkdir(exist_ok=True)
        (own / "hosts").write_text(self.rig.hosts_file(self))
        (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (own / "nsswitch.conf").write_text(
            "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
        )
        lines = [f"hostname {self.name}", "mount -t tmpfs tmpfs /dev/shm"]
        lines += [f"mount --bind {own}/hosts /etc/hosts"]
        lines += [f"mount --bind {own}/boot_id /proc/sys/kernel/random/boot_id"]
        lines += [
            f"[ ! -e /etc/nsswitch.conf ] || mount --bind {own}/nsswitch.conf /etc/nsswitch.conf"
        ]
        if self.rig.ssh:
            lines.append(f"mount --bind {self.rig.folder}/ssh /etc/ssh")
        # /tmp becomes the host's own, but for the folders that the tests share with it.
        lines += ["mount -t tmpfs tmpfs /run", "mkdir /run/sshd"]
        for number, path in enumerate(self.rig.shared):
            lines += [f"mkdir /run/{number}", f"mount --bind {shlex.quote(path)} /run/{number}"]
        lines.append("mount -t tmpfs -o mode=1777 tmpfs /tmp")
        for number, path in enumerate(self.rig.shared):
            lines += [
                f"mkdir -p {shlex.quote(path)}",
                f"mount --move /run/{number} {shlex.quote(path)}",
            ]
        lines.append("ip link set lo up")
        # It reaps whom others leave behind, as the first process has to.
        return "\n".join([*lines, "echo ready", "trap '' CHLD", "exec cat >/dev/null"])

    def set_up(self) -> None:
        """Wait until the host is there, plug its cables in and start its ssh server."""
        holder = self._holder
        if holder is None or holder.stdout is None:
            raise RuntimeError(f"{self.name} is off")
        said = select.select([holder.stdout], [], [], START_SECONDS)[0]
        if not said or holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"{self.name} did not start; see above.")
        for network in range(self.rig.networks):
            self.rig.plug(self, network)
        self._run_batch("ip", self._interfaces())
        if self.rig.ssh:
            keys = self.rig.folder / "ssh"
            self.run(
                [_SSHD, "-f", f"{keys}/sshd_config", "-h", f"{keys}/{self.name}"]
            ).check_returncode()

    def _interfaces(self) -> Iterator[str]:
        """Yield what `ip` is to do in the host."""
        rig = self.rig
        if rig.own_address and not rig.own_address.startswith("127."):
            yield "link add inner0 type bridge"
            yield f"address add {rig.own_address}/24 dev inner0"
            yield "link set inner0 up"
        for network, address in enumerate(self.addresses):
            mac = mac_address(network, self.index).hex(":")
            yield f"link set eth{network} address {mac}"
            length = "64 nodad" if rig.ipv6 else "24"
            yield f"address add {address}/{length} noprefixroute dev eth{network}"
            yield f"link set eth{network} up"
            # What most systems have by default, whatever this kernel's is.
            first = rig.address(network, -1)
            yield f"route add {first}/{length[:2]} dev eth{network} src {address} congctl cubic"
        # A router that is not there, as in most tests nobody answers from outside.
        yield f"route add default via {rig.address(0, 253)}"

    def _run_batch(self, program: str, lines: Iterator[str]) -> None:
        enter = ["nsenter", "--target", str(self.pid), "--net"]
        _feed([*enter, program, "-batch", "-"], lines)
        if rate := self.rig.link.rate_mbit:
            for network in range(self.rig.networks):
                subprocess.run(
                    [*enter, *_queue(f"eth{network}", rate)], check=True, timeout=HANG_SECONDS
                )

    def vanish(self) -> None:
        """Pull the cables, then end the host with all its processes, which nobody learns."""
        self.rig.unplug(self)
        self.power_off()

    def power_off(self) -> None:
        """End all processes of the host."""
        if holder := self._holder:
            holder.communicate(timeout=HANG_SECONDS)  # The end of its input is the end of the host.
            self._holder = None
        self.end_processes()

    def end_processes(self) -> None:
        """Kill those that `start` has started and that still run; what they write is lost."""
        for process in self._started:
            if self._holder:
                process.kill()
            process.wait(HANG_SECONDS)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        self._started.clear()


class Rig:
    """Some hosts and the network between them.

    Args:
        hosts: how many.
        link: what the wires do.
        ipv6: whether addresses are of IPv6, and of nothing else.
        networks: how many networks there are; each host has an interface in each: eth0, eth1.
        names: the hosts' names, with ``{}`` for the number.
        own_address: what a host's own name is in its ``/etc/hosts``, for example ``127.0.1.1``, as
            Debian writes it, or ``172.17.0.1``, an inner bridge that every host has.
        ssh: whether they have ssh servers.
        shared: folders below ``/tmp`` that the hosts share, besides those of this project.
    """

    def __init__(
        self,
        hosts: int,
        link: Link = Link(),
        *,
        ipv6: bool = False,
        networks: int = 1,
        names: str = "node{}",
        own_address: str | None = None,
        ssh: bool = True,
        shared: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self.link, self.ipv6, self.networks = link, ipv6, networks
        self.names, self.own_address, self.ssh = names, own_address, ssh
        self.folder = Path(tempfile.mkdtemp(prefix="rig-"))
        visible = [self.folder, ROOT, sys.prefix, sys.base_prefix, *shared]
        self.shared = [path for path in map(str, visible) if path.startswith("/tmp/")]
        self.hosts = [Host(self, index) for index in range(hosts)]
        self._hub: subprocess.Popen[str] | None = None

    def __enter__(self) -> Rig:
        try:
            if self.ssh:
                self._write_ssh()
            for host in self.hosts:
                host.power_on()
            self._hub = self._start_bridge() if self.link.bridged else self._start_switch()
            for host in self.hosts:
                host.set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts and the network."""
        for host in self.hosts:
            host.power_off()
        if self._hub:
            self._hub.communicate(timeout=HANG_SECONDS)
        shutil.rmtree(self.folder)

    def address(self, network: int, index: int) -> str:
        """Return the address of a host in a network."""
        return f"fd77:{network}::{index + 1}" if self.ipv6 else f"10.77.{network}.{index + 1}"

    def hosts_file(self, owner: Host) -> str:
        """Return the ``/etc/hosts`` of a host."""
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for host in self.hosts:
            own = self.own_address if host is owner else None
            lines.append(f"{own or host.address} {host.name}")
            # In further networks a host has further names: node0-1.
            lines += [f"{one} {host.name}-{n}" for n, one in enumerate(host.addresses) if n]
        return "\n".join(lines) + "\n"

    def cut(
        self, a: Host, b: Host | None = None, *, one_way: bool = False, network: int | None = None
    ) -> None:
        """Lose silently what passes between two hosts, or between one and all others.

        With `one_way`, only what `a` sends is lost.
        """
        if self.link.bridged:
            self._carry(a, b, "nomaster")
        else:
            self._order(do="cut", pairs=self._directions(a, b, one_way, network))

    def heal(
        self, a: Host, b: Host | None = None, *, one_way: bool = False, network: int | None = None
    ) -> None:
        """Carry again what `cut` with the same arguments loses."""
        if self.link.bridged:
            self._carry(a, b, "master br{network}")
        else:
            self._order(do="heal", pairs=self._directions(a, b, one_way, network))

    def limit_frames(self, a: Host, b: Host, size: int | None) -> None:
        """Lose packets of more than `size` bytes between two hosts silently; None: no longer."""
        for source, target in ((a, b), (b, a)):
            self._order(do="limit", source=source.index, target=target.index, size=size)

    @contextlib.contextmanager
    def recorded(self, path: Path) -> Iterator[None]:
        """Write all frames on the wires to a file meanwhile."""
        self._order(do="write", path=str(path))
        yield
        self._order(do="write", path=None)

    def _directions(self, a: Host, b: Host | None, one_way: bool, network: int | None) -> list[Any]:
        networks = range(self.networks) if network is None else [network]
        others = [b] if b else [host for host in self.hosts if host is not a]
        there = [(n, a.index, other.index) for n in networks for other in others]
        return there + ([] if one_way else [(n, to, by) for n, by, to in there])

    def plug(self, host: Host, network: int) -> None:
        """Give a host its interface in a network."""
        name = f"eth{network}"
        if not self.link.bridged:
            self._order(do="plug", host=host.index, network=network, pid=host.pid, name=name)
            return
        port = f"p{host.index}-{network}"
        self._bridge(f"link add {port} type veth peer name {name} netns {host.pid}")
        self._bridge(f"link set {port} master br{network} up")
        queue = [*self._in_hub(), *_queue(port, self.link.rate_mbit)]
        subprocess.run(queue, check=True, timeout=HANG_SECONDS)

    def unplug(self, host: Host) -> None:
        """Remove a host's interfaces."""
        if not self.link.bridged:
            self._order(do="unplug", host=host.index)
            return
        for network in range(self.networks):
            self._bridge(f"link delete p{host.index}-{network}")

    def _start_switch(self) -> subprocess.Popen[str]:
        program = str(Path(__file__).with_name("switch.py"))
        link = json.dumps({**asdict(self.link), "queue_kib": self.link.queue_kib})
        return _pipes([sys.executable, "-I", "-S", program, link])

    def _order(self, **order: Any) -> None:
        hub = self._hub
        if hub is None or hub.stdin is None or hub.stdout is None or self.link.bridged:
            raise RuntimeError("this needs a switch: a rate of at most 2000 Mbit/s")
        hub.stdin.write(json.dumps(order) + "\n")
        hub.stdin.flush()
        said = select.select([hub.stdout], [], [], HANG_SECONDS)[0]
        if not said or hub.stdout.readline() != "done\n":
            raise RuntimeError("the switch has ended, or does not answer; see above.")

    def _start_bridge(self) -> subprocess.Popen[str]:
        hub = _pipes(["unshare", "--net", "sh", "-c", "echo ready; exec cat"])
        if hub.stdout is not None:
            hub.stdout.readline()
        self._hub = hub
        for network in range(self.networks):
            self._bridge(f"link add br{network} type bridge")
            self._bridge(f"link set br{network} up")
        return hub

    def _in_hub(self) -> list[str]:
        if self._hub is None:
            raise RuntimeError("the rig has not been entered")
        return ["nsenter", "--target", str(self._hub.pid), "--net"]

    def _bridge(self, line: str) -> None:
        subprocess.run([*self._in_hub(), "ip", *line.split()], check=True, timeout=HANG_SECONDS)

    def _carry(self, host: Host, other: Host | None, how: str) -> None:
        if other:
            raise RuntimeError("a pair is cut by a switch: a rate of at most 2000 Mbit/s")
        for network in range(self.networks):
            self._bridge(f"link set p{host.index}-{network} {how.format(network=network)}")

    def _write_ssh(self) -> None:
        """Write what makes ``/etc/ssh`` in each host: keys of their own, known to nobody else."""
        folder = self.folder / "ssh"
        folder.mkdir(mode=0o755)
        make = "ssh-keygen -q -t ed25519 -N".split()
        for name in ["user", *(host.name for host in self.hosts)]:
            subprocess.run(
                [*make, "", "-C", name, "-f", str(folder / name)], check=True, timeout=HANG_SECONDS
            )
        (folder / "ssh_config").write_text(
            f"IdentityFile {folder}/user\nStrictHostKeyChecking no\nLogLevel ERROR\n"
            "UserKnownHostsFile /dev/null\n"
        )
        (folder / "sshd_config").write_text(
            f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nPidFile none\nUsePAM no\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\nUseDNS no\n"
        )


def _pipes(command: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0, text=True)


def _feed(command: Sequence[str], lines: Iterator[str]) -> None:
    text = "\n".join(lines) + "\n"
    subprocess.run(command, input=text, check=True, timeout=HANG_SECONDS, text=True)


def _queue(interface: str, rate_mbit: float | None) -> list[str]:
    rate = f"{(rate_mbit or 0.0) * _OF_FRAME:.3f}mbit"
    # More than the largest segment with the headers of its packets. At 10 Gbit/s much more, as the
    # timer that refills it comes late: 8.1 Gbit/s passed with the smaller one, 9.4 with this.
    burst = "256kb" if (rate_mbit or 0.0) > _BRIDGE_MBIT else "80kb"
    words = f"tc qdisc replace dev {interface} root tbf rate {rate} burst {burst} limit 4mb"
    return words.split()
