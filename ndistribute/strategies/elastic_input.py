"""The input of a loop in an elastic job: each batch is divided among the current members.

When members change, the input goes back to the batch that not all members have completed. The code
that computes with this batch holds `PerReplica` objects, which then contain the new parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ndistribute import tree
from ndistribute.data import DistributedDataset, DistributedIterator
from ndistribute.data.iterator import TensorFlowIterator
from ndistribute.errors import WorkerLostError
from ndistribute.values import PerReplica

_END, _NOTHING = object(), object()


class ElasticBatches:
    """The batches of a distributed dataset, in a job whose members may change.

    Args:
        session: the session of the strategy.
        dataset: the distributed dataset.

    Attributes:
        admits: whether newcomers may join at each batch of an iteration that is part of a loop. An
            iteration that is not part of a loop is itself a loop that newcomers may join.
    """

    admits = False

    def __init__(self, session: Any, dataset: DistributedDataset) -> None:
        self._session, self.dataset = session, dataset

    def cardinality(self) -> int:
        """Return the number of steps; see `DistributedDataset.cardinality`."""
        return self.dataset.cardinality()

    @property
    def element_spec(self) -> Any:
        """The structure of each batch; see `DistributedDataset.element_spec`."""
        return self.dataset.element_spec

    def __iter__(self) -> ElasticIterator:
        return ElasticIterator(self._session, self.dataset, admits=self.admits)


class ElasticIterator(TensorFlowIterator):
    """An iterator over batches, which are divided again when members change.

    Attributes:
        number: the number of batches taken so far.
        batch: the batch that was taken last.
    """

    def __init__(self, session: Any, dataset: DistributedDataset, *, admits: bool) -> None:
        self._session, self._dataset, self._is_loop = session, dataset, not session.in_loop
        self._admits = admits or self._is_loop
        self._inner: DistributedIterator | None = None
        self._mark: Any = None  # The position before the batch, or before the next one.
        self._kept: dict[str, Any] | None = None  # The state at `_mark`, during a reopening.
        self._next: Any = _NOTHING  # The next batch, if a change has taken it already.
        self.number = 0
        self.batch: Any = None
        self._in_body = self._ended = self._over = False
        self._changes = session.changes  # `session.changes` when the input was opened.
        session.use(self)
        if self._is_loop:
            session.begin_loop(self)
            self._over = not session.join()
        if not self._over:
            session.collect(self._open)

    @property
    def wanted(self) -> int:
        """The number of the batch in use, or of the next one."""
        return self.number if self._in_body else self.number + 1

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        self._in_body = False
        self._session.use(self)
        batch = self._session.collect(self._fetch)
        if batch is _END:  # All members reach the end together.
            batch = self._session.attempt(lambda: _END if self._ended else self._fetch())
        if batch is _END:
            self._over, self.batch = True, None
            if self._is_loop:
                self._session.end_loop()
            raise StopIteration
        self.number, self.batch, self._in_body = self.number + 1, batch, True
        self._session.at_batch = self._admits
        return batch

    def state(self) -> dict[str, Any] | None:
        """Return the input's state before the wanted batch; None if it has not begun."""
        return self._kept if self._inner is None else self._inner.state_at(self._mark)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the consumer, as `DistributedIterator.state_dict` does."""
        return self._begun().state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state of `state_dict`."""
        self._begun().load_state_dict(state)
        self._mark, self._next, self._ended = self._begun().mark(), _NOTHING, False

    def cut_anew(self, number: int, state: dict[str, Any] | None) -> None:
        """Go back to a batch and divide it among the current members, which all call this.

        Args:
            number: the number of the wanted batch, or of the one before.
            state: the state of the input before that batch; None: no member has begun.
        """
        if self._over:
            return
        self._kept = self.state()
        self.close()
        self._inner = None
        if state is None:
            return
        try:
            self._go_back(number, state)
        except WorkerLostError:  # Another member was lost: all repeat this from `_kept`.
            self.close()
            self._inner = None
            raise

    def _go_back(self, number: int, state: dict[str, Any]) -> None:
        self._open()
        inner = self._begun()
        inner.load_state_dict(state)
        self._mark = inner.mark()
        taken = next(inner, _END)
        if number < self.wanted:  # This worker has completed that batch.
            self._mark = inner.mark()
            if not self._in_body:
                return
            taken = next(inner, _END)
        self._ended = taken is _END
        if self._in_body:
            for leaf, cut in zip(tree.flatten(self.batch), tree.flatten(taken), strict=True):
                leaf._values = cut.values  # The step's arguments contain these objects.
        else:
            self._next = taken

    def catch_up(self) -> None:
        """Divide the batch again if members changed while another input was in use."""
        if self._in_body and self._changes != self._session.changes:
            state = self._kept = self.state()
            self.close()
            self._inner = None
            if state is not None:
                self._go_back(self.number, state)

    def holds(self, values: Sequence[PerReplica]) -> bool:
        """Return True if all values are parts of the batch in use."""
        parts = {id(leaf) for leaf in tree.flatten(self.batch)} if self._in_body else set()
        return all(id(value) in parts for value in values)

    def close(self) -> None:
        """End the iteration, and stop its threads."""
        if self._inner is not None:
            self._inner.close()

    def _open(self) -> None:
        """Begin the input, or continue it if members changed while another one was in use."""
        state = None
        if self._inner is not None:
            if self._changes == self._session.changes:
                return
            state = self._inner.state_dict() if self._next is _NOTHING else self.state()
            self._inner.close()
            self._next = _NOTHING
        session = self._session
        self._inner = iter(self._dataset.divided_among(session.topology(), session.batch_scale))
        self._changes = self._session.changes
        self._inner.check_can_go_back(session.limits.batch == "scaled")
        if state is not None:
            self._inner.load_state_dict(state)
        self._mark = self._inner.mark()

    def _fetch(self) -> Any:
        self._open()
        batch, self._next = self._next, _NOTHING
        if batch is _NOTHING:
            inner = self._begun()
            self._mark = inner.mark()
            batch = next(inner, _END)
        self._ended = batch is _END
        return batch

    def _begun(self) -> DistributedIterator:
        if self._inner is None:
            self._session.collect(self._open)
        return self._inner  # type: ignore[return-value]
