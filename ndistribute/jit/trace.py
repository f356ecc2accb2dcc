"""`StepTrace`: records what a step reads, writes and needs from outside while it is traced.

Variables, optimizers and random generators use the thread's current trace in place of their own
state: a read returns a box, and a write changes it. At the end, each state that the step read is an
argument of the program, and each state that it wrote is a result. Numbers that change from call to
call, such as a learning rate, are inputs; plain code computes them before each call.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ndistribute import context, tree
from ndistribute.autodiff.diagnostics import user_line
from ndistribute.devices import jax_module
from ndistribute.errors import TracingError
from ndistribute.jit.box import Box, boxed, value_of
from ndistribute.jit.refusals import refuse_leak

_READ_ONLY = (
    "is the value that a variable had when it was read, and cannot be changed: compute a new array"
)
EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Check(NamedTuple):
    """A condition of a compiled step: whether it held, and a function that makes the error."""

    held: Any
    error: Callable[..., Exception]
    numbers: Sequence[Any] = ()


class StepTrace:
    """One trace of a step.

    Args:
        values: JAX's value of each state that an earlier trace found; this trace reads other states
            as zeros.
        inputs: JAX's values of the inputs that the earlier trace found, in order.
        key: JAX's random key of this call and replica.
    """

    def __init__(
        self, values: Mapping[Any, Any] = EMPTY, inputs: Sequence[Any] = (), key: Any = None
    ) -> None:
        self.states: dict[Any, Box] = {}  # By `CellGroup`.
        self.written: dict[Any, None] = {}  # The states that the step wrote, in order.
        self.before: list[Callable[[], Any]] = []  # Functions that compute the inputs.
        # The functions that are called when the program has run, and the values that it passes to
        # them.
        self.after: list[tuple[Callable[..., None], Sequence[Box]]] = []
        self.constants: list[tuple[Callable[[], Any], Any]] = []
        self.checks: list[Check] = []
        self.arguments: dict[int, tuple[Any, int]] = {}  # By the id of JAX's value, with its place.
        self.ranges: list[Any] = []  # The checks of arguments: place, start, stop and error.
        self.created = 0  # The variables that were made.
        self.draws = 0
        self.counts: dict[int, int] = {}  # Steps of each optimizer, by id.
        self.outside: dict[int, Any] = {}  # Arrays, by id, with a checksum and the user's line.
        self._explain: Callable[[Exception], Exception] = lambda error: error
        self._values, self._inputs, self._key = values, inputs, key
        self._level: list[list[bool]] = []  # The open branches and loops: whether they repeat.

    def needs(self) -> Any:
        """Return what a program takes: the states, the number of inputs, and whether a key."""
        return self.states.keys(), self.written.keys(), len(self.before), self.draws > 0

    # Variables call these methods.

    def read(self, cell: Any) -> Box:
        """Return a cell's current value, which cannot be written."""
        return Box(self._state(cell).value, refusal=_READ_ONLY)

    def writable(self, cell: Any) -> Box:
        """Return the box that holds a cell's value; writing to it writes the cell."""
        state = self._state(cell)
        self.check_level(state, "a variable")
        self.written[cell.group] = None
        return state

    def _state(self, cell: Any) -> Box:
        group = cell.group
        if cell is not group.cells[0]:
            raise TracingError(
                f"the values of several replicas are read at {user_line()} in a compiled step, but "
                "there a replica can read only its own value: read them outside of run."
            )
        state = self.states.get(group)
        if state is None:
            value = self._values.get(group)
            if value is None:
                value = jax_module().numpy.zeros(cell.array.shape, cell.array.dtype)
            state = self.states[group] = Box(value)
            state.level = None  # This also holds if a branch is the first to read it.
        return state

    # Optimizers and layers call these methods.

    def input(self, compute: Callable[[], Any]) -> Any:
        """Return a number, or a tuple of numbers, that plain code computes before each call."""
        k = len(self.before)
        self.before.append(compute)
        with context.tracing(None):
            known = self._inputs[k] if k < len(self._inputs) else compute()
        return tree.map_leaves(lambda number: Box(jax_module().numpy.asarray(number)), known)

    def constant(self, compute: Callable[[], Any]) -> Any:
        """Return a value that plain code computes before each call; each value has a program."""
        with context.tracing(None):
            value = compute()
        self.constants.append((compute, value))
        return value

    @contextlib.contextmanager
    def only_if(self, condition: Box) -> Iterator[None]:
        """Let writes to variables and effects in a ``with`` block depend on a condition."""
        before = {group: state.value for group, state in self.states.items()}
        outer, self.after = self.after, []
        yield
        for group in self.written:
            state, old = self.states[group], before.get(group, self._values.get(group))
            if old is not None:
                state.value = jax_module().numpy.where(condition.value, state.value, old)
        self.after = outer + [
            (functools.partial(_call_if, effect), (condition, *values))
            for effect, values in self.after
        ]

    def count(self, owner: Any) -> int:
        """Return how many times this was called for an owner, from 1."""
        self.counts[id(owner)] = self.counts.get(id(owner), 0) + 1
        return self.counts[id(owner)]

    def use_outside(self, array: np.ndarray[Any, Any]) -> None:
        """Record an array from outside the step; it must not change from now on."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        if array.flags.writeable and id(array) not in self.outside:
            self.outside[id(array)] = array, checksum(array), user_line()

    def check(self, is_valid: Any, error: Callable[..., Exception], *limits: Box) -> None:
        """Raise an error when the step has run, unless a condition held in it.

        If the error is raised, no variable changes. If there are limits, the error is made from
        them: the smallest and the largest number of all replicas.
        """
        explain = self._explain
        numbers = [limit.value for limit in limits] if self.level is None else []
        held = jax_module().numpy.all(value_of(is_valid))
        self.checks.append(Check(held, lambda *args: explain(error(*args)), numbers))

    @contextlib.contextmanager
    def explaining(self, explain: Callable[[Exception], Exception]) -> Iterator[None]:
        """Let checks in a ``with`` block raise the errors that a function makes from theirs."""
        outer = self._explain
        self._explain = lambda error: outer(explain(error))
        try:
            yield
        finally:
            self._explain = outer

    def check_range(
        self, numbers: Box, start: int, stop: int, error: Callable[..., Exception]
    ) -> None:
        """Raise an error unless all numbers are in ``[start, stop)``; no variable changes then.

        Arguments of the step are checked before it runs, because a step whose results depend on a
        check must keep the old values of all variables until the check is done.
        """
        base: Any = numbers
        while base.base is not None and base.base.size == base.size:
            base = base.base
        _, place = self.arguments.get(id(base.value), (None, None))
        if place is not None and self.level is None:
            explain = self._explain
            self.ranges.append((place, start, stop, lambda *limits: explain(error(*limits))))
            return
        array: Any = numbers
        low, high = array.min(), array.max()
        self.check((low >= start) & (high < stop), error, low, high)

    def follow(self, value: Any, converted: Any) -> None:
        """Record that a JAX value has the numbers of another one, if that is an argument."""
        if id(value) in self.arguments:
            self.arguments[id(converted)] = converted, self.arguments[id(value)][1]

    def check_index(self, index: Box, length: int) -> None:
        """Check that indices into an axis are in range; JAX raises no error for others."""
        if index.is_checked or index.dtype.kind not in "iu" or not index.size:
            return
        where = user_line()

        def error(*limits: Any) -> Exception:
            return IndexError(f"an index at {where} is out of bounds for an axis of size {length}.")

        self.check_range(index, -length, length, error)

    @property
    def rng(self) -> TracedGenerator:
        """The random generator of this replica in this step."""
        return TracedGenerator(self)

    def next_key(self) -> Any:
        """Return a random key that was not used yet."""
        if any(repeats for (repeats,) in self._level):
            raise TracingError(
                f"random numbers are drawn at {user_line()} inside nd.while_loop, where each "
                "iteration would draw the same ones: draw all of them before the loop."
            )
        self.draws += 1
        random, key = jax_module().random, self._key
        if key is None:  # A trace that only finds the states needs only the shape of the key.
            key = np.zeros(2, np.uint32)
        return random.fold_in(random.wrap_key_data(key), self.draws)

    # Methods for branches and loops.

    def nested(
        self, body: Callable[..., Any], repeats: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        """Return JAX's function for a branch or a loop's body; it takes and returns values.

        The function's second result is whether all checks inside it held.
        """

        @functools.wraps(body)
        def call(*values: Any) -> tuple[Any, Any]:
            outer, self.checks = self.checks, []
            self._level.append([repeats])
            try:
                result = body(*map(boxed, values))
                leaves = tree.map_leaves(value_of, result)
                held = [check.held for check in self.checks]
            finally:
                self._level.pop()
                self.checks = outer
            return leaves, functools.reduce(operator.and_, held, np.bool_(True))

        return call

    @property
    def level(self) -> Any:
        """The innermost open branch or loop; None outside of them."""
        return self._level[-1] if self._level else None

    def check_level(self, box: Box, what: str) -> None:
        """Raise an error if a branch or a loop writes to an array that was made outside of it."""
        if box.level is not self.level:
            raise TracingError(
                f"{what} is written at {user_line()} inside nd.cond or nd.while_loop, but was made "
                "outside of it: return the new value from the branch or body, and assign it after."
            )


def _call_if(effect: Callable[..., None], condition: Any, *values: Any) -> None:
    if condition:
        effect(*values)


def checksum(array: np.ndarray[Any, Any]) -> int:
    """Return a checksum that shows whether an array has changed."""
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


class TracedGenerator:
    """The random generator of a compiled step, with the methods of NumPy's that layers use.

    JAX draws the numbers, from a key that the replica's own generator gives for each call.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace

    def _draw(self, name: str, *args: Any, **kwargs: Any) -> Box:
        if context.current_trace() is not self._trace:
            refuse_leak()
        made: Box = boxed(
            getattr(jax_module().random, name)(self._trace.next_key(), *args, **kwargs)
        )
        return made

    def random(self, size: Any = None, dtype: Any = np.float64) -> Box:
        """Return numbers in [0, 1)."""
        return self._draw("uniform", _shape(size), np.dtype(dtype))

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        """Return numbers in [low, high)."""
        return low + (high - low) * self.random(_size(size, low, high))

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> Box:
        """Return numbers from the standard normal distribution."""
        return self._draw("normal", _shape(size), np.dtype(dtype))

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        """Return numbers from a normal distribution."""
        return loc + scale * self.standard_normal(_size(size, loc, scale))

    def integers(
        self,
        low: int,
        high: int | None = None,
        size: Any = None,
        dtype: Any = np.int64,
        endpoint: bool = False,
    ) -> Box:
        """Return integers in [low, high), or with `endpoint` in [low, high]."""
        low, high = (0, low) if high is None else (low, high)
        return self._draw("randint", _shape(size), low, high + endpoint, np.dtype(dtype))

    def exponential(self, scale: Any = 1.0, size: Any = None) -> Any:
        """Return numbers from an exponential distribution."""
        return scale * self._draw("exponential", _shape(_size(size, scale)), np.dtype(float))

    def permutation(self, x: Any, axis: int = 0) -> Box:
        """Return a range of integers, or an array along an axis, in random order."""
        value = x if isinstance(x, int) else value_of(x)
        return self._draw("permutation", value, axis)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(n for n in vars(TracedGenerator) if not n.startswith("_"))
        raise AttributeError(
            f"the random generator of a compiled step, used at {user_line()}, has no {name!r}: it "
            f"has {known}. Draw outside of the step and pass the numbers, or run the step without "
            "compiling it."
        )


def _shape(size: Any) -> tuple[int, ...]:
    if size is None:
        return ()
    return tuple(size) if isinstance(size, Sequence) else (operator.index(size),)


def _size(size: Any, *parameters: Any) -> Any:
    return np.broadcast_shapes(*map(np.shape, parameters)) if size is None else size
