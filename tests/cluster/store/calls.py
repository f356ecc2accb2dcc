"""Calls of a store as a transport makes them, for tests."""

from __future__ import annotations

import json

import numpy as np

from ndistribute.cluster.protocol.replies import Changed
from ndistribute.cluster.protocol.requests import Apply, Create, Origin, Read, Transaction
from ndistribute.cluster.store import Store


class Calls:
    """Call a store and keep all answers by client and ticket."""

    def __init__(self, store=None):
        self.store = store or Store()
        self.answers = {}
        self._ticket = 0

    def ask(self, client, request):
        """Return the answer, None if the call waits; of a single change its outcome."""
        reply = self.answers.get(self.send(client, request))
        single = isinstance(reply, Changed) and len(reply.outcomes) == 1
        return reply.outcomes[0] if single else reply

    def create(self, **values):
        """Make variables."""
        for name, value in values.items():
            self.ask("chief", Create(name, value))

    def send(self, client, request):
        """Return the key under which the answer is, or will be."""
        self._ticket += 1
        for answer in self.store.handle(client, self._ticket, request):
            key = (answer.client, answer.ticket)
            assert key not in self.answers, "a call was answered twice"
            self.answers[key] = answer.reply
        return client, self._ticket

    def value(self, name):
        """Return a variable's value, and keep no answer that holds it."""
        return self.answers.pop(self.send("reader", Read(name))).array


def content(store):
    """Return all that a store holds as something that can be compared."""
    head, tensors = store.snapshot()
    return json.dumps(head), [(t.shape, t.dtype, t.tobytes()) for t in tensors]


def one(origin, *changes):
    """Return a transaction."""
    return Transaction(origin, changes)


def apply(rule, name, gradient, rate=0.1, slots=(), **hyperparameters):
    """Return the step of an optimizer, counted by the variable ``n``, over one variable."""
    return Apply((name,), (gradient,), (slots,), "n", rule, rate, hyperparameters)


def origins(series):
    """Return the origins of a series, one after the other."""
    return iter(Origin(series, number) for number in range(1, 10_000))


def rows(*indices):
    """Return indices of rows."""
    return np.array(indices, np.int64)
