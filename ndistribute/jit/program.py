"""`CompiledStep`: a function that XLA compiles once for each shape of its arguments, and runs.

The first call with arguments of new shapes traces the function: once for the variables that it
reads and makes, and twice as JAX's program, because a value that differs between two traces, such
as a random number or the time, would be the same in all later calls, and is refused. The program
takes the states of the variables and gives new ones, in the same memory where it can. With several
devices it is one program for all of them, in which each replica has its part of the states.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute import tree
from ndistribute.autodiff import untrack
from ndistribute.autodiff.diagnostics import is_user_file
from ndistribute.context import current_trace, tracing
from ndistribute.devices import Array, is_device_array, jax_module
from ndistribute.errors import TracingError
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.jit.box import Box
from ndistribute.jit.identity import constant_key
from ndistribute.jit.same_steps import SameSteps
from ndistribute.jit.sparse_rows import NO_ROW
from ndistribute.jit.trace import OutsideArray, StepTrace, check_argument
from ndistribute.values import PerReplica

AXIS = "replica"
MOST_PROGRAMS = 64  # Of one function; the oldest one is dropped.
_MOST_ATTEMPTS = 4  # To trace a function that makes variables.
_PASSED = "is an argument, which a compiled step cannot change for its caller: change a copy of it"
_log = logging.getLogger("ndistribute")


class Compilation(NamedTuple):
    """A compilation: the shapes of the arguments, and the seconds until the first result."""

    arguments: str
    seconds: float


class Devices:
    """The devices of JAX on which programs run, one for each replica of all processes.

    Args:
        devices: JAX's; None: the first one.
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        jax = jax_module()
        self.all = [jax.devices()[0]] if devices is None else list(devices)
        self.local = [d for d in self.all if d.process_index == jax.process_index()]
        self.size = len(self.all)
        self.is_local = len(self.local) == self.size
        self.shares_memory = self.all[0].platform == "cpu"
        self.mesh = jax.sharding.Mesh(np.array(self.all), (AXIS,)) if self.size > 1 else None
        self.same_steps = None if self.is_local else SameSteps(self.all)

    def sharding(self, axis: int | None) -> Any:
        """Return where an array lies: on all devices, or divided along an axis (-1: the first)."""
        jax = jax_module()
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.all[0])
        return jax.sharding.NamedSharding(self.mesh, self.spec(axis))

    def spec(self, axis: int | None) -> Any:
        """Return the same for a program of several devices."""
        parts = () if axis is None else (None,) * max(axis, 0) + (AXIS,)
        return jax_module().sharding.PartitionSpec(*parts)

    def place(self, parts: Sequence[Array], axis: int | None) -> Any:
        """Return one of JAX's arrays of the values of this process's replicas."""
        jax = jax_module()
        if self.mesh is None:
            return jax.device_put(parts[0][None] if axis == -1 else parts[0], self.all[0])
        if axis is None:
            if len(self.local) == self.size:
                return jax.device_put(parts[0], self.sharding(None))
            shape, parts = parts[0].shape, [parts[0]] * len(self.local)
        else:
            parts = [part[None] for part in parts] if axis < 0 else parts
            shape = list(parts[0].shape)
            shape[max(axis, 0)] *= self.size
        placed = [jax.device_put(part, d) for part, d in zip(parts, self.local, strict=True)]
        return jax.make_array_from_single_device_arrays(tuple(shape), self.sharding(axis), placed)


class _Arguments(NamedTuple):
    """The arguments of a call: what the program gets, and what belongs to the program."""

    nest: Any
    leaves: list[Any]
    arrays: list[tuple[int, bool]]  # The leaves that are arrays, and whether replicas differ.
    key: Any


class _Program(NamedTuple):
    """A compiled program, and what it reads and gives."""

    run: Callable[..., Any]
    written: list[Any]
    read: list[Any]
    before: list[Callable[[], Any]]
    after: list[Callable[..., None]]
    errors: list[Callable[..., Exception]]
    result: Any  # The nest, in which each array is the place of its value.
    draws: bool
    outside: list[OutsideArray]
    ranges: list[Any]  # Of arguments: the place, the range of the numbers, and the error.


class CompiledStep:
    """A function that is traced and compiled; see the module.

    Args:
        function: computes with NumPy's functions, variables, tapes and optimizers.
        devices: where it runs.
        enter: returns the context in which it is traced.
        key: returns the seed of the random numbers of a call, for each replica of this process.
        together: calls a function that compiles, where all processes do.

    Attributes:
        compilations: the compilations, in order.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        devices: Devices,
        enter: Callable[[], contextlib.AbstractContextManager[Any]],
        key: Callable[[], list[Array]],
        together: Callable[[Callable[[], Any]], Any] = operator.call,
    ) -> None:
        self.compilations: list[Compilation] = []
        self._function, self._devices, self._enter, self._key = function, devices, enter, key
        self._together = together
        self._programs: collections.OrderedDict[Any, _Program] = collections.OrderedDict()
        self._constants: dict[Any, list[Callable[[], Any]]] = {}
        self._lock = threading.RLock()
        self._name = getattr(function, "__qualname__", repr(function))

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the results of the replicas of this process."""
        arguments = self._arguments((tuple(args), dict(kwargs)))
        with self._lock, _numpys_dtypes():
            program = self._programs.get(self._key_of(arguments))
            if program is not None:
                return self._run(program, arguments)
            began = time.perf_counter()
            program = self._together(functools.partial(self._compile, arguments))
            key = self._key_of(arguments)
            results = self._run(program, arguments)
            self._programs[key] = program
            if len(self._programs) > MOST_PROGRAMS:
                (dropped, _), _ = self._programs.popitem(last=False)
                self._constants.pop(dropped, None)
            self._report(arguments, time.perf_counter() - began)
            return results

    def _key_of(self, arguments: _Arguments) -> Any:
        computed = [compute() for compute in self._constants.get(arguments.key, ())]
        return arguments.key, tuple(computed)

    def _report(self, arguments: _Arguments, seconds: float) -> None:
        shown = ", ".join(_shown(leaf) for leaf in arguments.leaves)
        self.compilations.append(Compilation(shown, seconds))
        count = len(self.compilations)
        level = logging.WARNING if count in (8, 64) else logging.INFO
        text = "compiled %s for (%s) in %.2f s, compilation %d"
        if level == logging.WARNING:
            text += ": arrays of new shapes and other Python values are compiled anew each time"
        _log.log(level, text, self._name, shown, seconds, count)

    # Arguments.

    def _arguments(self, nest: Any) -> _Arguments:
        leaves = tree.flatten(nest)
        arrays, keys = [], []
        for k, passed in enumerate(leaves):
            leaf = leaves[k] = self._joined(passed) if isinstance(passed, PerReplica) else passed
            if isinstance(leaf, PerReplica):
                arrays.append((k, True))
                first = leaf.values[0]
                keys.append((first.shape, first.dtype, True))
            elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufcV":
                arrays.append((k, False))
                keys.append((leaf.shape, leaf.dtype, False))
            else:
                keys.append(constant_key(leaf))
        return _Arguments(nest, leaves, arrays, (tree.outline(nest), tuple(keys)))

    def _joined(self, value: PerReplica) -> Any:
        """Return the components as arrays of one shape, or the value that all of them are."""
        parts = value.values
        if len(parts) != len(self._devices.local):
            raise ValueError(
                f"a PerReplica of {len(parts)} component(s) was passed where there are "
                f"{len(self._devices.local)} replica(s): it needs one component for each replica "
                "of the strategy in this process."
            )
        if len(parts) == 1:
            return parts[0]
        if not isinstance(parts[0], np.ndarray | np.generic | int | float | bool):
            if all(part is parts[0] or part == parts[0] for part in parts[1:]):
                return parts[0]
            raise TypeError(
                f"a compiled step of several replicas got {parts[0]!r} and other values for them: "
                "pass arrays of numbers."
            )
        arrays = [np.asarray(part) for part in parts]
        for rank, array in enumerate(arrays):
            if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
                raise ValueError(
                    f"replica {rank} got {_shown(array)}, replica 0 {_shown(arrays[0])}: in a "
                    "compiled step the parts of all replicas have one shape. Pass a dataset, "
                    "Dataset.from_tensor_slices((x, y)).batch(n, drop_remainder=True), where n is "
                    "a multiple of the number of replicas, or pad the last batch."
                )
        return PerReplica(arrays)

    def _placed(self, arguments: _Arguments) -> list[Any]:
        leaves, place = arguments.leaves, self._devices.place
        return [place(leaves[k].values, -1) if d else leaves[k] for k, d in arguments.arrays]

    # Calls.

    def _run(self, program: _Program, arguments: _Arguments) -> list[Any]:
        devices = self._devices
        for array in program.outside:
            array.check()
        for place, *allowed in program.ranges:
            check_argument(arguments.leaves[place], *allowed)
        inputs = [compute() for compute in program.before]
        states = [[_current(group, devices) for group in groups] for groups in program[1:3]]
        arrays = self._placed(arguments)
        key = devices.place(self._key(), -1) if program.draws else None
        for group in program.written:
            group.in_use = self._lock
        results: list[Any] = []
        error = None
        try:  # An interrupt strikes after this call, when the program has run: the step is made.
            results.extend(itertools.starmap(program.run, [(*states, arrays, inputs, key)]))
        finally:
            for new, outputs, checks in results:
                error = self._keep(program, new, outputs, checks)
        if error is not None:
            raise error
        return self._results(program.result, outputs)

    def _keep(self, program: _Program, new: Any, outputs: Any, checks: Any) -> Exception | None:
        """Keep what a program gave, though an interrupt strikes; return the error of a check."""
        flags, limits, told = checks
        for group, value in zip(program.written, new, strict=True):
            group.store(value)
        error = interrupt = None
        if self._devices.shares_memory:  # The host may change the arguments' arrays from now on.
            arrays = jax_module().tree.leaves((new, outputs))
            try:
                collections.deque(map(operator.methodcaller("block_until_ready"), arrays), 0)
            except BaseException as raised:  # After the wait, which is one call.
                interrupt = raised
        if program.errors and not (held := np.asarray(flags)).all():
            first = int(np.argmin(held))
            error = program.errors[first](*limits.get(first, ()))
        else:
            for effect, values in zip(program.after, told, strict=True):
                effect(*map(np.asarray, values))
        if interrupt is not None:
            raise interrupt
        return error

    def _results(self, result: Any, outputs: Sequence[Any]) -> list[Any]:
        if self._devices.mesh is None:
            values = [[_host(output) for output in outputs]]
        else:
            shards = [sorted(o.addressable_shards, key=_start) for o in outputs]
            count = len(self._devices.local)
            values = [[_host(s[rank].data)[0] for s in shards] for rank in range(count)]

        def filled(parts: list[Any]) -> Any:
            return tree.map_leaves(lambda leaf: leaf.of(parts) if _is_slot(leaf) else leaf, result)

        return [filled(parts) for parts in values]

    # Compilation.

    def _compile(self, arguments: _Arguments) -> _Program:
        if current_trace() is not None:
            raise TracingError(f"{self._name}: a compiled step is called inside another one.")
        if self._devices.same_steps is not None:
            self._devices.same_steps.new_program()
        first = self._explored(arguments)
        groups = list(first.states)
        written = [group for group in groups if group in first.written]
        read = [group for group in groups if group not in first.written]
        inputs = [compute() for compute in first.before]
        states = [[_current(group, self._devices) for group in part] for part in (written, read)]
        key = self._devices.place(self._key_like(), -1) if first.draws else None
        arrays = self._placed(arguments)
        made: list[_Body] = []
        for _ in range(2):
            body = _Body(self, arguments, (written, read))
            run = jax_module().jit(body.spread(first), donate_argnums=(0,))
            body.traced = run.trace(*states, arrays, inputs, key)
            made.append(body)
        _refuse_differences(self._name, made)
        last = made[1]
        errors = [error for _, error in last.trace.checks]
        trace = last.trace
        if trace.constants:
            self._constants[arguments.key] = trace.constants
        return _Program(
            *(run, written, read, trace.before, [effect for effect, _ in trace.after], errors),
            result=last.result,
            draws=bool(first.draws),
            outside=[array for array in trace.outside.values() if not array.is_temporary],
            ranges=trace.ranges,
        )

    def _key_like(self) -> list[Array]:
        return [np.zeros(2, np.uint32) for _ in self._devices.local]

    def _explored(self, arguments: _Arguments) -> StepTrace:
        """Return a trace that has found all states, after the function has made its variables."""
        jax = jax_module()
        for _ in range(_MOST_ATTEMPTS):
            body = _Body(self, arguments, None)
            arrays = [
                _abstract(arguments.leaves[k], self._devices.size if differs else 0)
                for k, differs in arguments.arrays
            ]
            jax.eval_shape(body.spread(None), [], [], arrays, [], None)
            trace: StepTrace = body.trace
            if not trace.created:
                return trace
        raise TracingError(
            f"{self._name} makes variables in each call: a compiled step makes them in its first "
            "call only. Make them outside of it."
        )

    def traced(self, trace: StepTrace, nest: Any) -> Any:
        """Return the result of the function in a trace."""
        with tracing(trace), self._enter():
            args, kwargs = nest()
            return tree.map_leaves(_up_to_date, untrack(self._function(*args, **kwargs)))


class _Slot:
    """The place of an array among the outputs of a program."""

    def __init__(self, index: int, rows: tuple[int, ...] = ()) -> None:
        self.index = index
        self.rows = rows  # Of `IndexedSlices`: the place of the indices, and the shape.

    def of(self, outputs: Sequence[Any]) -> Any:
        if not self.rows:
            return outputs[self.index]
        values, indices = outputs[self.index], outputs[self.rows[0]]
        is_row = indices != NO_ROW
        return IndexedSlices(values[is_row], indices[is_row], self.rows[1:])


def _up_to_date(leaf: Any) -> Any:
    """Return a result after a view among it has read what was written to its base."""
    for box in (leaf.values, leaf.indices) if isinstance(leaf, IndexedSlices) else (leaf,):
        if isinstance(box, Box):
            box.value  # noqa: B018
    return leaf


def _is_slot(leaf: Any) -> bool:
    return type(leaf) is _Slot


class _Body:
    """The function that JAX traces: from states, arguments and inputs to new states and outputs."""

    def __init__(self, step: CompiledStep, arguments: _Arguments, groups: Any) -> None:
        self._step, self._arguments, self._groups = step, arguments, groups
        self.trace: Any = None
        self.result: Any = None
        self.traced: Any = None

    def spread(self, first: StepTrace | None) -> Callable[..., Any]:
        """Return it for all devices."""
        devices = self._step._devices
        if devices.mesh is None:
            return self._call
        spec, arrays = devices.spec, [-1 if d else None for _, d in self._arguments.arrays]
        states = [[g.axis for g in part] for part in self._groups] if self._groups else [[], []]
        number = spec(None)

        def several(written: Any, read: Any, values: Any, inputs: Any, key: Any) -> Any:
            in_specs = (
                *([spec(axis) for axis in axes] for axes in states),
                [spec(axis) for axis in arrays],
                number,
                spec(-1),
            )
            out_specs = ([spec(axis) for axis in states[0]], spec(-1), number)
            split = jax_module().shard_map(
                self._call,
                mesh=devices.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=False,
            )
            return split(written, read, values, inputs, key)

        return several

    def _call(self, written: Any, read: Any, arrays: Any, inputs: Any, key: Any) -> Any:
        several = self._step._devices.mesh is not None
        values = None
        if self._groups is not None:
            groups = [*self._groups[0], *self._groups[1]]
            pairs = zip(groups, [*written, *read], strict=True)
            values = {group: value[0] if group.axis == -1 else value for group, value in pairs}
        self.trace = trace = StepTrace(values, inputs, None if key is None else key[0])

        def nest() -> Any:
            leaves = list(self._arguments.leaves)
            for (k, differs), array in zip(self._arguments.arrays, arrays, strict=True):
                leaves[k] = box = Box(array[0] if differs else array, refusal=_PASSED)
                if self._step._devices.is_local:  # Else other processes would wait in the step.
                    trace.arguments[id(box.value)] = box.value, k
            return tree.unflatten(self._arguments.nest, leaves)

        result = self._step.traced(trace, nest)
        if (same_steps := self._step._devices.same_steps) is not None:
            same_steps.compare(trace, AXIS)
        outputs: list[Any] = []
        self.result = tree.map_leaves(lambda leaf: self._kept(leaf, outputs), result)
        if self._groups is None:
            return [], [], (None, {}, [])
        new = []
        flags = self._flags(trace, several)
        for group, old in zip(self._groups[0], written, strict=True):
            value = trace.states[group]._value
            value = value[None] if group.axis == -1 else value
            new.append(
                value if flags is None else jax_module().numpy.where(flags.all(), value, old)
            )
        told = [[value._value for value in values] for _, values in trace.after]
        limits = self._limits(trace, several)
        outputs = [output[None] for output in outputs] if several else outputs
        return new, outputs, (flags, limits, told)

    def _limits(self, trace: StepTrace, several: bool) -> dict[int, Any]:
        """Return the least and the largest numbers of checks, of all replicas."""
        if not several:
            return trace.limits
        lax = jax_module().lax
        pairs = trace.limits.items()
        return {k: (lax.pmin(low, AXIS), lax.pmax(high, AXIS)) for k, (low, high) in pairs}

    def _flags(self, trace: StepTrace, several: bool) -> Any:
        """Return which checks held on all replicas."""
        if not trace.checks:
            return None
        jax = jax_module()
        flags = jax.numpy.stack([jax.numpy.asarray(flag, bool) for flag, _ in trace.checks])
        if not several:
            return flags
        return jax.lax.pmin(flags.astype(np.int32), AXIS).astype(bool)

    def _kept(self, leaf: Any, outputs: list[Any]) -> Any:
        if isinstance(leaf, IndexedSlices):
            values, indices = self._kept(leaf.values, outputs), self._kept(leaf.indices, outputs)
            return _Slot(values.index, (indices.index, *leaf.dense_shape))
        if not isinstance(leaf, Box):
            return leaf
        outputs.append(leaf._value)
        return _Slot(len(outputs) - 1)


def _current(group: Any, devices: Devices) -> Any:
    """Return the value of a state on the devices."""
    if not group.has_array():
        parts = [cell.array for cell in group.cells]
        if is_device_array(parts[0]):
            raise TracingError(
                "a compiled function uses a variable on a GPU of CuPy: JAX computes on its own "
                "devices. Use nd.TPUStrategy, whose devices are all that JAX has."
            )
        group.array = devices.place(parts, group.axis)
    return group.array


def _abstract(leaf: Any, replicas: int) -> Any:
    """Return the shape and dtype of an array, or of one for each replica."""
    array = leaf.values[0] if replicas else leaf
    shape = (replicas, *array.shape) if replicas else array.shape
    return jax_module().ShapeDtypeStruct(shape, array.dtype)


def _host(output: Any) -> Any:
    return np.array(output)[()] if output.ndim == 0 else np.array(output)


def _start(shard: Any) -> int:
    return shard.index[0].start or 0


def _shown(leaf: Any) -> str:
    leaf = leaf.values[0] if isinstance(leaf, PerReplica) else leaf
    if isinstance(leaf, np.ndarray | np.generic):
        return f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"
    return repr(leaf)[:40]


@contextlib.contextmanager
def _numpys_dtypes() -> Any:
    """Compute in the dtypes of NumPy, whatever JAX is configured for."""
    jax = jax_module()
    owner = jax if hasattr(jax, "enable_x64") else jax.experimental  # There before JAX 0.8.
    with owner.enable_x64(True), jax.default_matmul_precision("float32"):
        yield


def _refuse_differences(name: str, made: Sequence[_Body]) -> None:
    """Raise an error if two traces of a step differ."""
    place = _difference(*(body.traced.jaxpr for body in made))
    if place is None:
        statics = [tree.flatten(body.result) for body in made]
        for old, new in zip(*statics, strict=True):
            if not _is_slot(old) and old is not new and not _equal(old, new):
                place = f"what it returns, {old!r} and then {new!r}"
                break
    if place is not None:
        raise TracingError(
            f"{name} computed other values when it was traced twice: {place}. A compiled step "
            "would use one of them for ever. Draw random numbers from get_replica_context().rng. "
            "Pass what changes from call to call, such as the time or a counter, as an argument, "
            "or keep it in a variable."
        )


def _difference(first: Any, second: Any) -> str | None:
    """Return where two programs have different constants; None if they have the same ones."""
    old_program, new_program = first.jaxpr, second.jaxpr
    constants = zip(old_program.constvars, first.consts, second.consts, strict=False)
    for name, old, new in constants:
        if not _equal(old, new):
            used = [eqn for eqn in old_program.eqns if any(v is name for v in eqn.invars)]
            return _line_of(used[0]) if used else "a constant"
    for eqn, other in zip(old_program.eqns, new_program.eqns, strict=False):
        if eqn.primitive is not other.primitive or len(eqn.invars) != len(other.invars):
            return _line_of(eqn)
        for old, new in zip(eqn.invars, other.invars, strict=True):
            if hasattr(old, "val") != hasattr(new, "val") or (
                hasattr(old, "val") and not _equal(old.val, new.val)
            ):
                return _line_of(eqn)
        for key, value in eqn.params.items():
            if hasattr(value, "jaxpr") and hasattr(value, "consts"):
                inner = _difference(value, other.params[key])
            elif hasattr(value, "eqns"):
                inner = _difference(_Closed(value), _Closed(other.params[key]))
            else:
                continue
            if inner is not None:
                return inner
    return (
        "the number of its operations" if len(old_program.eqns) != len(new_program.eqns) else None
    )


class _Closed(NamedTuple):
    jaxpr: Any
    consts: Sequence[Any] = ()


def _equal(old_program: Any, new_program: Any) -> bool:
    try:
        return bool(
            np.array_equal(np.asarray(old_program), np.asarray(new_program), equal_nan=True)
        )
    except TypeError:
        return bool(np.array_equal(np.asarray(old_program), np.asarray(new_program)))


def _line_of(eqn: Any) -> str:
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if is_user_file(frame.file_name) and "jax" not in frame.file_name:
            return f"at {frame.file_name}:{frame.line_num}"
    return f"in {eqn.primitive.name}"
