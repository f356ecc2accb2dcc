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
from ndistribute.optimizers import GradientAccumulation, LossScale, Optimizer


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
        _check_sums(model)
        session.begin_loop(position)
        try:
            batches.admits = True
            if session.is_newcomer:
                position.iterator, position.has_joined = iter(batches), True
            yield session.join()
        finally:
            session.end_loop()


def _check_sums(model: Any) -> None:
    for part in _parts(model):
        if isinstance(part, LossScale) and isinstance(part.inner, GradientAccumulation):
            raise ValueError(
                "LossScale(GradientAccumulation(...)): each replica has the sums of all, which do "
                "not fit another number of workers. With elastic workers, leave out one of them: "
                "float16 layers need LossScale, so pass a larger batch_size instead."
            )


def _parts(model: Any) -> list[Any]:
    """Return the optimizers of a model, with those that others wrap, and its callbacks."""
    values = [each if isinstance(each, list | tuple) else [each] for each in vars(model).values()]
    optimizers = [each for each in chain(*values) if isinstance(each, Optimizer)]
    optimizers += [each.inner for each in optimizers if hasattr(each, "inner")]
    return [*optimizers, *model.position.callbacks]


def _shared(model: Any) -> dict[str, Any]:
    position, parts = model.position, _parts(model)
    rates = [getattr(part, "learning_rate", None) for part in parts]
    return {
        "position": (position.epoch, position.step, position.steps_made),
        "history": (model.history.epoch, model.history.history),
        "states": [part.state_dict() if has_state(part) else None for part in parts],
        "rates": [rate if isinstance(rate, int | float) else None for rate in rates],
    }


def _take(model: Any, shared: Any) -> None:
    position, history, parts = model.position, model.history, _parts(model)
    position.epoch, position.step, position.steps_made = shared["position"]
    history.epoch, history.history = shared["history"]
    for part, state, rate in zip(parts, shared["states"], shared["rates"], strict=True):
        if rate is not None:
            part.learning_rate = rate
        if state is not None:
            part.load_state_dict(state)
