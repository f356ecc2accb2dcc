"""Two copies of a shard in a simulated time: whoever leads has all that was acknowledged.

The copies and their witness are the real ones; their clock and network are simulated, with delays,
overload and deaths at any moment. A run ends when a copy gives up its state.
"""

import contextlib
import functools
import heapq
import itertools
import random

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.errors import WorkerLostError
from ndistribute.parameter_server import copies
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.store import Store
from ndistribute.task.server import ServedTask
from ndistribute.transport.secret import credentials_of

CLUSTER = nd.cluster.ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["c:1"]})
SECRET = {"NDISTRIBUTE_SECRET": "a secret of thirty-two characters"}
SECONDS = 6.0
ADD = m.VariableUpdate("v", "assign_add", np.ones(()))


class KilledError(Exception):
    """What ends a thread of a process that was killed."""


class World:
    """A clock, and the events at its moments."""

    def __init__(self, seed):
        self.rng, self.now, self.is_over = random.Random(seed), 1000.0, False
        self._events, self._order = [], itertools.count()

    def monotonic(self):
        return self.now

    time = monotonic

    def at(self, moment, act):
        heapq.heappush(self._events, (moment, next(self._order), act))

    def wait(self, until=float("inf"), ready=lambda: False):
        """Let events happen until a moment, or until something is ready."""
        while not ready() and self._events and self._events[0][0] <= until and self.now < until:
            moment, _, act = heapq.heappop(self._events)
            self.now = max(self.now, moment)
            act()
        if not ready() and until < float("inf"):
            self.now = max(self.now, until)


class Node:
    """A process, which is dead or busy for a while, or only slow to serve others."""

    def __init__(self, world, handle=None):
        self.world, self.handle = world, handle
        self.is_dead, self.busy, self.serves = False, 0.0, 0.0

    def soon(self, *moments):
        return max(self.world.now, self.busy, *moments) + 0.0005 * 2 ** self.world.rng.uniform(0, 6)


class Line:
    """The client of one process for another; a request may arrive when nobody waits for it."""

    title = "the other copy"

    def __init__(self, here, there):
        self.here, self.there = here, there

    def start(self, request, timeout):
        return Exchange(self.here, self.there, request)

    def call(self, request, timeout):
        until = self.here.world.now + min(timeout, copies.SILENCE_SECONDS)
        if (reply := self.start(request, timeout).result(until)) is None:
            raise WorkerLostError("it is silent")
        return reply


class Exchange:
    """A request, and its reply."""

    def __init__(self, here, there, request):
        if here.is_dead:
            raise KilledError
        self.here, self.there, self.request = here, there, request
        self.reply, self.is_lost = None, there.is_dead
        here.world.at(there.soon(there.serves), self.arrive)

    def arrive(self):
        world, there = self.here.world, self.there
        if there.is_dead:
            self.is_lost = True
        elif world.now < max(there.busy, there.serves):  # Since it was sent.
            world.at(there.soon(there.serves), self.arrive)
        else:
            reply = there.handle(None, 0, self.request)
            world.at(self.here.soon(), lambda: setattr(self, "reply", reply))

    def result(self, until):
        world = self.here.world
        world.wait(until, lambda: self.reply is not None or self.is_lost)
        world.wait(self.here.busy)
        if self.here.is_dead:
            raise KilledError
        if self.is_lost and self.reply is None:
            error, error.__cause__ = WorkerLostError("it is lost"), ConnectionError()
            error.__cause__.__cause__ = ConnectionRefusedError()
            raise error
        return self.reply

    def cancel(self):
        pass


class Shard:
    """The first copy leads, and the second one follows; a client adds, and reads."""

    def __init__(self, world):
        self.world, self.acknowledged, self.sent, self.asks = world, set(), 0, False
        self.witness = Node(world, copies.Witness().handle)
        self.nodes = [Node(world), Node(world)]
        self.copies = [self._copy(number) for number in (0, 1)]
        for number, copy in enumerate(self.copies):
            copy.store.handle("", 0, m.NewEpoch(5))
            copy.store.handle("", 0, m.Create((m.NewVariable("v", (), "float64", 0.0),)))
            copy._heard = copy._filled = world.now
            copy._turn("follows" if number else "leads", whole=not number)
        self.copies[0].store.keeps_pending = True

    def _copy(self, number):
        node, world = self.nodes[number], self.world
        task = ServedTask(
            *("ps", number, CLUSTER, SECRET, credentials_of(CLUSTER.addresses(), SECRET)),
            *(None, 30.0, "snapshot"),
        )
        copy = copies.ShardCopy(task, 0, number)
        copy._other.close()
        copy._witness.close()
        copy._other = Line(node, self.nodes[1 - number])
        copy._witness = Line(node, self.witness)
        copy._news.wait_for = lambda ready, seconds: world.wait(world.now + seconds, ready)
        copy.store = Store()
        copy._turn("new")
        copy._fill = copy._join = lambda: None  # The run ends.
        node.handle = copy.handle
        return copy

    def made(self, copy):
        applied = copy.store.applied.get("c")
        return set() if applied is None else set(applied.last)

    def step(self, number):
        """Let a copy look at the other one, as its thread does."""
        node, copy = self.nodes[number], self.copies[number]
        if node.is_dead or self.world.is_over:
            return
        if self.world.now >= node.busy:
            copy._suspects = False
            try:
                copy._step()
            except KilledError:
                return
            self.world.is_over |= copy._said.role == "joins"
            if copy._said.role == "leads" and not copy._said.whole:
                lost = self.acknowledged - self.made(copy)
                # Clients learn of a loss by the new start.
                assert copy.store.start or not lost, f"copy {number} leads without {lost}"
        again = node.soon(self.world.now + 0.1 * self.world.rng.random())
        self.world.at(again, lambda: self.step(number))

    def ask(self):
        """Add, or read, at a copy that leads."""
        world = self.world
        for node, copy in zip(self.nodes, self.copies, strict=True):
            free = not (node.is_dead or self.asks or world.now < max(node.busy, node.serves))
            if free and copy._said.role == "leads":
                self.asks = True
                with contextlib.suppress(KilledError):
                    self._ask(node, copy, world.rng.random() < 0.5)
                self.asks = False
        world.at(world.now + 0.1 * world.rng.random(), self.ask)

    def _ask(self, node, copy, reads):
        before = set(self.acknowledged)
        if not reads:
            self.sent += 1
            copy.store.handle("", 0, m.Transaction("c", self.sent, 0, (ADD,)))
        seen = self.made(copy)
        if copy._sync(copy._logs(reads)) is None and not node.is_dead:
            assert copy.store.start or before <= seen, "an old state was read"
            self.acknowledged |= set() if reads else {self.sent}

    def disturb(self):
        """Let something go wrong."""
        world, rng = self.world, self.world.rng
        node = rng.choice(self.nodes)
        until = world.now + rng.choice([0.2, 0.5, 0.7, 1.0])
        what = rng.random()
        if what < 0.35:
            node.busy = until
        elif what < 0.6:
            node.serves = until
        elif what < 0.7:
            self.witness.handle = copies.Witness().handle
        elif what < 0.8:
            self.witness.busy = until
        elif dead := [number for number in (0, 1) if self.nodes[number].is_dead]:
            self.nodes[dead[0]] = fresh = Node(world)
            self.copies[dead[0]], other = self._copy(dead[0]), self.copies[1 - dead[0]]
            other._other.there = fresh
            world.at(world.now, lambda: self.step(dead[0]))
        else:
            leads = [n for n, copy in enumerate(self.copies) if copy._said.role == "leads"]
            self.nodes[rng.choice(leads or [0, 1])].is_dead = True
        world.at(world.now + rng.uniform(0, 0.8), self.disturb)


def run(monkeypatch, seed):
    """Return a shard after some seconds in which much went wrong."""
    world = World(seed)
    monkeypatch.setattr(copies, "time", world)
    shard, begun = Shard(world), world.now
    for number in (0, 1):
        world.at(begun, functools.partial(shard.step, number))
    world.at(begun, shard.ask)
    world.at(begun + world.rng.random(), shard.disturb)
    try:
        world.wait(begun + SECONDS, lambda: world.is_over)
    except AssertionError as error:
        raise AssertionError(f"seed {seed} after {world.now - begun:.3f} s: {error}") from error
    return shard


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_whoever_leads_has_all_that_was_acknowledged(monkeypatch, first):
    shards = [run(monkeypatch, seed) for seed in range(first, first + 100)]
    assert sum(any(copy._said.epoch > 5 for copy in shard.copies) for shard in shards) > 10
    assert sum(len(shard.acknowledged) for shard in shards) > 300
