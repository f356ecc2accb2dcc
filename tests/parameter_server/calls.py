"""Calls of a store and of its service as a transport makes them, for tests."""

import itertools
import json
import queue
from types import SimpleNamespace

import numpy as np

from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.snapshot import restore, take
from ndistribute.parameter_server.store import Store


def new(name, value):
    value = np.asarray(value)
    return m.NewVariable(name, value.shape, value.dtype.name, initial=value)


def assign(name, value, indices=None):
    return m.VariableUpdate(name, "assign", value, indices)


def add(name, value, indices=None):
    return m.VariableUpdate(name, "assign_add", value, indices)


def read(*names):
    return m.Read(tuple(map(m.Item, names)))


def apply(rule, name, gradient, rate=0.1, slots=(), **hyperparameters):
    return m.Apply((name,), (gradient,), (slots,), "n", rule, rate, hyperparameters)


def rows(*indices):
    return np.array(indices, np.int64)


class Calls:
    """Call a store, and keep all replies by call."""

    def __init__(self, store=None):
        self.store = store or Store()
        self.replies = {}
        self._calls = itertools.count(1)
        self._sequences = {}

    def send(self, client, request):
        call = next(self._calls)
        self._keep(self.store.handle(client, call, request))
        return call

    def ask(self, client, request):
        return self.replies.get(self.send(client, request))

    def change(self, client, *changes):
        sequence = self._sequences[client] = self._sequences.get(client, 0) + 1
        reply = self.ask(client, m.Transaction(client, sequence, sequence, changes))
        single = isinstance(reply, m.Changed) and len(reply.outcomes) == 1
        return reply.outcomes[0] if single else reply

    def create(self, **values):
        return self.ask(
            "chief", m.Create(tuple(new(name, value) for name, value in values.items()))
        )

    def leave(self, client):
        self._keep(self.store.left(client))

    def read(self, name, known=0):
        reply = self.replies.pop(self.send("reader", m.Read((m.Item(name, known),))))
        return SimpleNamespace(version=reply.versions[0], array=reply.arrays[0])

    def value(self, name):
        return self.read(name).array

    def restored(self, floor=0):
        tensors, data = take(self.store)
        copies = {name: tensor.copy() for name, tensor in tensors.items()}
        later = Calls(restore(copies, json.loads(json.dumps(data)), floor))
        later._sequences = self._sequences
        return later

    def _keep(self, answers):
        for call, reply in answers:
            assert call not in self.replies, "a call was answered twice"
            self.replies[call] = reply


def content(store):
    tensors, data = take(store)
    held = {name: (t.shape, t.dtype.name, t.tobytes()) for name, t in tensors.items()}
    return data, held


class Client:
    def __init__(self, service, name):
        self.service = service
        self.name = name
        self.sent = queue.SimpleQueue()
        self._sequences = itertools.count(1)
        service.connected(self)

    def send(self, record, call=0):
        self.sent.put((call, record))
        return True

    def ask(self, request, call=1):
        reply = self.service.handle(self, call, request)
        return reply if reply is not None else self.sent.get(timeout=50)[1]

    def change(self, *changes, sequence=None):
        sequence = sequence or next(self._sequences)
        return self.ask(m.Transaction(self.name, sequence, sequence, changes))

    def value(self, name):
        return self.ask(read(name)).arrays[0]
