"""How `fit`, `evaluate` and `predict` go on in a job whose workers come and go.

Each of them is one loop of the job, in which newcomers join. Variables reach these by their names;
what else a newcomer needs, such as the position and the state of callbacks, is collected here.
Where workers do not change, nothing here does anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from ndistribute.data.sources import has_state
from ndistribute.optimizers import Optimizer


def is_outside(strategy: Any) -> bool:
    """Return True if this worker has not joined its job, which others train."""
    return strategy.session is not None and strategy.session.is_newcomer


@contextlib.contextmanager
def sharing(session: Any, share: Callable[[], Any], take: Callable[[Any], Any]) -> Iterator[None]:
    """Let newcomers of the next loop get what a function returns; in another loop, do nothing."""
    if session is None or session.in_loop:
        yield
        return
    before = session.share, session.take
    session.share, session.take = share, take
    try:
        yield
        session.note_share()
    finally:
        session.share, session.take = before


@contextlib.contextmanager
def training_loop(model: Any, batches: Any) -> Iterator[bool]:
    """Make a training one loop of the job; a newcomer goes on at the position of the others.

    It yields False if the job has ended the training before this worker came.
    """
    session, position = model.strategy.session, model.position
    if session is None:
        yield True
        return
    with sharing(session, partial(_shared, model), partial(_take, model)):
        session.begin_loop(position)
        try:
            batches.admits = True
            if session.is_newcomer:
                position.iterator, position.has_joined = iter(batches), True
            yield session.join()
        finally:
            session.end_loop()


def _optimizers(model: Any) -> list[Any]:
    """Return the optimizers in the attributes of a model."""
    values = [each if isinstance(each, list | tuple) else [each] for each in vars(model).values()]
    return [each for each in chain(*values) if isinstance(each, Optimizer)]


def _shared(model: Any) -> dict[str, Any]:
    position, rates = model.position, [each.learning_rate for each in _optimizers(model)]
    return {
        "position": (position.epoch, position.step, position.steps_made),
        "history": (model.history.epoch, model.history.history),
        "callbacks": [
            each.state_dict() if has_state(each) else None for each in position.callbacks
        ],
        "rates": [rate if isinstance(rate, int | float) else None for rate in rates],
    }


def _take(model: Any, shared: Any) -> None:
    position, history = model.position, model.history
    position.epoch, position.step, position.steps_made = shared["position"]
    history.epoch, history.history = shared["history"]
    for optimizer, rate in zip(_optimizers(model), shared["rates"], strict=True):
        if rate is not None:  # Else it is a schedule or a variable.
            optimizer.learning_rate = rate
    for callback, state in zip(position.callbacks, shared["callbacks"], strict=True):
        if state is not None:
            callback.load_state_dict(state)
