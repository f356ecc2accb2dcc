"""An Ethernet switch in user space: rate, delay and cuts between imitated hosts.

It runs in a process of its own. Each port is a TAP device that it makes inside a host's network;
segments of 64 KiB pass in one read, with their virtio header, so that a gigabit costs little.
Orders come as lines of JSON on standard input, and the end of that input ends it.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFORMATION, _VIRTIO_HEADER = 0x0002, 0x1000, 0x4000
_OFFLOAD = 0x01 | 0x02 | 0x04  # Checksums and segments.
_NEW_NETWORK, _TIMER_SLACK = 0x40000000, 29
_HEADER = struct.Struct("=BBHHHH")  # virtio_net_hdr
_ETHERNET = 14
# Preamble, checksum and gap: what a frame occupies on a wire besides its bytes.
_GAP = 24
_LARGEST = 1 << 17
# What the switch and the hosts' systems take for a frame that waits: half of 120 us a round trip.
_OWN_SECONDS = 60e-6
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Port:
    """Where a host is plugged in."""

    fd: int
    network: int
    host: int
    mac: bytes
    free_at: float = 0.0  # When the wire to the host has carried what waits for it.


def mac_address(network: int, host: int) -> bytes:
    """Return the hardware address of a host's interface."""
    return bytes([2, 0, 0, 0, network, host])


def open_tap(pid: int, name: str) -> int:
    """Make a TAP device in the network of a process, and return the file that is its other end."""
    with open("/proc/self/ns/net") as home, open(f"/proc/{pid}/ns/net") as there:
        _enter_network(there.fileno())
        try:
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            flags = _TAP | _NO_PACKET_INFORMATION | _VIRTIO_HEADER
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOAD)
        finally:
            _enter_network(home.fileno())
    return fd


def _enter_network(fd: int) -> None:
    if _LIBC.setns(fd, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def on_wire(frame: bytes) -> tuple[int, int]:
    """Return how many bytes a frame takes on a wire, and the length of its longest packet."""
    _, kind, _, segment, transport, _ = _HEADER.unpack_from(frame)
    length = len(frame) - _HEADER.size
    if not kind:
        return length + _GAP, length - _ETHERNET
    headers = transport + (frame[_HEADER.size + transport + 12] >> 4) * 4
    segments = -(-(length - headers) // segment)
    return length + (segments - 1) * headers + segments * _GAP, headers + segment - _ETHERNET


class Switch:
    """Carries frames between its ports as a link's settings say."""

    def __init__(self, link: dict[str, Any]) -> None:
        self.delay = max(0.0, link["delay_ms"] / 1e3 - _OWN_SECONDS)
        self.seconds_per_byte = 8e-6 / link["rate_mbit"] if link["rate_mbit"] else 0.0
        self.queue_bytes = link["queue_kib"] * 1024
        self.ports: dict[int, Port] = {}  # By their files.
        self.by_mac: dict[bytes, Port] = {}
        self.cuts: set[tuple[int, int, int]] = set()  # network, from host, to host
        self.limits: dict[tuple[int, int], int] = {}
        self.flying: list[tuple[float, int, Port, bytes]] = []
        self.record: BinaryIO | None = None
        self._number = 0

    def run(self) -> None:
        """Switch until standard input ends."""
        orders = b""
        while True:
            pause = self.deliver()
            ready, _, _ = select.select([0, *self.ports], [], [], pause)
            if ready and ready[0] == 0:
                read = os.read(0, 1 << 16)
                if not read:
                    return
                *lines, orders = (orders + read).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    getattr(self, order.pop("do"))(**order)
                    os.write(1, b"done\n")
                continue  # The ports may be others now.
            for fd in ready:
                self.receive(self.ports[fd])

    def deliver(self) -> float | None:
        """Hand over the frames that are due, and return the seconds until the next one is."""
        flying = self.flying
        while flying:
            left = flying[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, port, frame = heapq.heappop(flying)
            if port.fd in self.ports:
                with contextlib.suppress(OSError):  # The host is going away.
                    os.write(port.fd, frame)
        return None

    def receive(self, port: Port) -> None:
        """Take what a host has sent."""
        for _ in range(32):
            try:
                frame = os.read(port.fd, _LARGEST)
            except BlockingIOError:
                return
            except OSError:  # The host is going away, and the rig unplugs it soon.
                self.unplug(port.host)
                return
            target = frame[_HEADER.size : _HEADER.size + 6]
            if target[0] & 1:
                for other in list(self.ports.values()):
                    if other is not port and other.network == port.network:
                        self.send(port, other, frame)
            elif other := self.by_mac.get(target):
                self.send(port, other, frame)

    def send(self, source: Port, target: Port, frame: bytes) -> None:
        """Put a frame on the wire to a host, unless it is to be lost."""
        if self.record:
            self.record.write(frame[_HEADER.size :])
        if (source.network, source.host, target.host) in self.cuts:
            return
        size, packet = on_wire(frame)
        if packet > self.limits.get((source.host, target.host), packet):
            return
        now = time.monotonic()
        due = now + self.delay
        if self.seconds_per_byte:
            begin = max(now, target.free_at)
            if (begin - now) > self.queue_bytes * self.seconds_per_byte:
                return
            target.free_at = begin + size * self.seconds_per_byte
            due += target.free_at - now
        self._number += 1
        heapq.heappush(self.flying, (due, self._number, target, frame))

    def plug(self, host: int, network: int, pid: int, name: str) -> None:
        """Make a host's interface."""
        mac = mac_address(network, host)
        port = Port(open_tap(pid, name), network, host, mac)
        self.ports[port.fd] = self.by_mac[mac] = port

    def unplug(self, host: int) -> None:
        """Remove all interfaces of a host."""
        for port in [port for port in self.ports.values() if port.host == host]:
            del self.ports[port.fd], self.by_mac[port.mac]
            os.close(port.fd)

    def cut(self, pairs: list[tuple[int, int, int]]) -> None:
        """Lose all frames of these directions (network, from, to), also those under way."""
        self.cuts.update(map(tuple, pairs))  # type: ignore[arg-type]

    def heal(self, pairs: list[tuple[int, int, int]]) -> None:
        """Carry frames of these directions again."""
        self.cuts.difference_update(map(tuple, pairs))  # type: ignore[arg-type]

    def limit(self, source: int, target: int, size: int | None) -> None:
        """Lose packets of more than `size` bytes of one direction."""
        self.limits.pop((source, target), None)
        if size is not None:
            self.limits[source, target] = size

    def write(self, path: str | None) -> None:
        """Append all frames that come in to a file."""
        if self.record:
            self.record.close()
        self.record = open(path, "ab") if path else None  # noqa: SIM115


if __name__ == "__main__":
    _LIBC.prctl(_TIMER_SLACK, 1)
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    Switch(json.loads(sys.argv[1])).run()
