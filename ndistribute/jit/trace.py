"""`StepTrace`: what a step reads, writes and needs from outside while it is traced.

Variables, optimizers and random generators ask the thread's current trace in place of their own
state: a read gives a box, a write changes it, and at the end the program has every state that the
step read as an argument and every one that it wrote as a result. Numbers that change from call to
call, such as a learning rate, are inputs, computed plainly before each call.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute import context, tree
from ndistribute.autodiff.diagnostics import user_line
from ndistribute.devices import jax_module
from ndistribute.errors import TracingError
from ndistribute.jit.box import Box, boxed
from ndistribute.jit.refusals import refuse_leak
from ndistribute.values import PerReplica

_READ_ONLY = "is what a variable was when it was read, which never changes: compute a new array"


class StepTrace:
    """One trace of a step.

    Args:
        values: JAX's value of each state that an earlier trace found; None: this trace looks for
            them, and reads zeros.
        inputs: JAX's values of the inputs that it found, in order.
        key: JAX's random key of this call and replica.
    """

    def __init__(
        self,
        values: Mapping[Any, Any] | None = None,
        inputs: Sequence[Any] = (),
        key: Any = None,
    ) -> None:
        self.states: dict[Any, Box] = {}  # By `CellGroup`.
        self.written: dict[Any, None] = {}  # The states that the step wrote, in order.
        self.before: list[Callable[[], Any]] = []  # The inputs, computed plainly.
        # What is called when the program has run, and the values that it passes.
        self.after: list[tuple[Callable[..., None], Sequence[Box]]] = []
        self.constants: list[Callable[[], Any]] = []
        self.checks: list[tuple[Any, Callable[..., Exception]]] = []
        self.limits: dict[int, tuple[Any, Any]] = {}  # What some errors say, by the check's place.
        self.arguments: dict[int, tuple[Any, int]] = {}  # By the id of JAX's value, with its place.
        self.ranges: list[Any] = []  # Of arguments: place, start, stop and error.
        self.created = 0  # The variables that were made.
        self.draws = 0
        self.counts: dict[int, int] = {}  # Steps of each optimizer, by id.
        self.outside: dict[int, OutsideArray] = {}  # By the id of their memory's owner.
        self.loops = 0  # The open loops.
        self._values, self._inputs, self._key = values, inputs, key
        self._level: list[Any] = []  # Open branches and loops, see `nested`.

    # What variables call.

    def read(self, cell: Any) -> Box:
        """Return a cell's value now, which cannot be written."""
        return Box(self._state(cell).value, refusal=_READ_ONLY)

    def writable(self, cell: Any) -> Box:
        """Return the box that holds a cell's value, to write to."""
        state = self._state(cell)
        self.check_level(state, "a variable")
        self.written[cell.group] = None
        return state

    def _state(self, cell: Any) -> Box:
        group = cell.group
        if cell is not group.cells[0]:
            raise TracingError(
                f"the values of several replicas are read at {user_line()} in a compiled step, "
                "where each replica has its own only: read them outside of run."
            )
        state = self.states.get(group)
        if state is None:
            numpy = jax_module().numpy
            if self._values is None:
                value = numpy.zeros(cell.array.shape, cell.array.dtype)
            elif group in self._values:
                value = self._values[group]
            else:
                raise TracingError(
                    f"a compiled step read other variables at {user_line()} when it was traced "
                    "again: which ones it reads may not change from call to call."
                )
            state = self.states[group] = Box(value)
            state.level = None  # Also if a branch is the first to read it.
        return state

    # What optimizers and layers call.

    def input(self, compute: Callable[[], Any]) -> Any:
        """Return a number, or a tuple of numbers, that is computed plainly before each call."""
        k = len(self.before)
        self.before.append(compute)
        with context.tracing(None):
            known = self._inputs[k] if k < len(self._inputs) else compute()
        return tree.map_leaves(lambda number: Box(jax_module().numpy.asarray(number)), known)

    def constant(self, compute: Callable[[], Any]) -> Any:
        """Return a value that is computed plainly before each call; each compiles a program."""
        self.constants.append(compute)
        with context.tracing(None):
            return compute()

    @contextlib.contextmanager
    def only_if(self, condition: Box) -> Iterator[None]:
        """Let writes to variables and effects in a ``with`` block depend on a condition."""
        before = {group: state.value for group, state in self.states.items()}
        outer, self.after = self.after, []
        yield
        for group in self.written:
            state, old = self.states[group], before.get(group, (self._values or {}).get(group))
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
        """Record an array from outside of the step, which may not change from now on."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        if array.flags.writeable and id(array) not in self.outside:
            self.outside[id(array)] = OutsideArray(array)

    def check(self, is_valid: Box, error: Callable[..., Exception], *limits: Box) -> None:
        """Raise an error when the step has run, unless a condition held in it.

        No variable changes then. The error is made of the limits, if there are any: the least and
        the largest number of all replicas.
        """
        if limits and self.level is None:
            self.limits[len(self.checks)] = limits[0].value, limits[1].value
        self.checks.append((jax_module().numpy.all(is_valid.value), error))

    @contextlib.contextmanager
    def explaining(self, explain: Callable[[Exception], Exception]) -> Iterator[None]:
        """Let checks in a ``with`` block raise what a function makes of their errors."""
        start, first = len(self.checks), len(self.ranges)
        yield
        self.checks[start:] = [
            (flag, lambda *limits, error=error: explain(error(*limits)))
            for flag, error in self.checks[start:]
        ]
        self.ranges[first:] = [
            (*allowed, lambda *limits, error=error: explain(error(*limits)))
            for *allowed, error in self.ranges[first:]
        ]

    def check_range(
        self, numbers: Box, start: int, stop: int, error: Callable[..., Exception]
    ) -> None:
        """Raise an error unless all numbers are in ``[start, stop)``; no variable changes then.

        Arguments of the step are checked before it runs, because a step whose results depend on a
        check must keep the old values of all variables until it knows.
        """
        base: Any = numbers
        while base.base is not None and base.base.size == base.size:
            base = base.base
        _, place = self.arguments.get(id(base.value), (None, None))
        if place is not None and self.level is None:
            self.ranges.append((place, start, stop, error))
            return
        array: Any = numbers
        low, high = array.min(), array.max()
        self.check((low >= start) & (high < stop), error, low, high)

    def follow(self, value: Any, converted: Any) -> None:
        """Record that a value of JAX has the numbers of another one, if that is an argument."""
        if id(value) in self.arguments:
            self.arguments[id(converted)] = converted, self.arguments[id(value)][1]

    def check_index(self, index: Box, length: int) -> None:
        """Check that indices into an axis are in range; JAX would use others without an error."""
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
        if self.loops:
            raise TracingError(
                f"random numbers are drawn at {user_line()} inside nd.while_loop, where each "
                "iteration would draw the same ones: draw all of them before the loop."
            )
        self.draws += 1
        random, key = jax_module().random, self._key
        if key is None:  # A trace that looks for the state needs only its shape.
            key = np.zeros(2, np.uint32)
        return random.fold_in(random.wrap_key_data(key), self.draws)

    # Branches and loops.

    def nested(self, body: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        """Return the function for JAX of a branch or a loop's body, which takes and gives values.

        Its second result is whether all checks inside held.
        """

        @functools.wraps(body)
        def call(*values: Any) -> tuple[Any, Any]:
            outer, self.checks = self.checks, []
            self._level.append(object())
            try:
                result = body(*map(boxed, values))
                leaves = tree.map_leaves(_value_of, result)
                held = [flag for flag, _ in self.checks]
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
        """Raise an error for a write inside a branch or a loop to what was made outside of it."""
        if box.level is not self.level:
            raise TracingError(
                f"{what} is written at {user_line()} inside nd.cond or nd.while_loop, but was made "
                "outside of it: return the new value from the branch or body, and assign it after."
            )


def _call_if(effect: Callable[..., None], condition: Any, *values: Any) -> None:
    if condition:
        effect(*values)


def _value_of(leaf: Any) -> Any:
    if isinstance(leaf, Box):
        return leaf.value
    value = getattr(leaf, "value", None)
    return value.value if isinstance(value, Box) else jax_module().numpy.asarray(leaf)


def check_argument(leaf: Any, start: int, stop: int, error: Callable[..., Exception]) -> None:
    """Raise an error unless the numbers of an argument of all replicas are in ``[start, stop)``."""
    parts = [
        part for part in (leaf.values if isinstance(leaf, PerReplica) else [leaf]) if part.size
    ]
    if not parts:
        return
    limits = [(part.min(), part.max()) for part in parts]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    if not start <= low <= high < stop:
        raise error(low, high)


class OutsideArray:
    """An array that a program has as a constant, to tell whether it has changed since."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array, self._line = weakref.ref(array), user_line()
        self._sum = _checksum(array)

    def check(self) -> None:
        """Raise an error if the array exists and has other values now."""
        array = self._array()
        if array is not None and _checksum(array) != self._sum:
            raise TracingError(
                f"the {array.dtype} array of shape {array.shape} that a compiled step uses at "
                f"{self._line} has changed since the step was compiled, which has its values as "
                "constants: pass it as an argument, or make it a variable."
            )

    @property
    def is_temporary(self) -> bool:
        """Whether the array does not exist any more."""
        return self._array() is None


def _checksum(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


class TracedGenerator:
    """The random generator of a compiled step, with the methods of NumPy's that layers use.

    Its numbers are JAX's, drawn from a key that the replica's own generator gives for each call.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace

    def _draw(self, name: str, *args: Any, **kwargs: Any) -> Box:
        if context.current_trace() is not self._trace:
            refuse_leak(self._trace)
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
        """Return numbers of the standard normal distribution."""
        return self._draw("normal", _shape(size), np.dtype(dtype))

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        """Return numbers of a normal distribution."""
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
        """Return numbers of an exponential distribution."""
        return scale * self._draw("exponential", _shape(_size(size, scale)), np.dtype(float))

    def permutation(self, x: Any, axis: int = 0) -> Box:
        """Return a range of integers, or an array along an axis, in random order."""
        value = x if isinstance(x, int) else _value_of(x)
        return self._draw("permutation", value, axis)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(n for n in vars(TracedGenerator) if not n.startswith("_"))
        raise AttributeError(
            f"the random generator of a compiled step, used at {user_line()}, has no {name!r}: it "
            f"has {known}. Draw outside of the step and pass the numbers, or run it plainly."
        )


def _shape(size: Any) -> tuple[int, ...]:
    if size is None:
        return ()
    return tuple(size) if isinstance(size, Sequence) else (operator.index(size),)


def _size(size: Any, *parameters: Any) -> Any:
    return np.broadcast_shapes(*map(np.shape, parameters)) if size is None else size
