"""`Compiler`: functions that XLA compiles once for each shape of their arguments, and runs.

The first call with arguments of new shapes traces the function until all variables that it reads
and creates are known. Then it is traced twice as a program. A value that differs between the two
traces, such as a random number or the time, is refused, because it would be the same in all later
calls. The program takes the states of the variables and returns new states, in the same memory
where possible. It is one program for all devices, and each replica has its part of the states.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute import tree
from ndistribute.autodiff import untrack
from ndistribute.autodiff.diagnostics import is_user_file
from ndistribute.context import ReplicaContext, current_frame, current_trace, tracing
from ndistribute.devices import Array, is_device_array, jax_module
from ndistribute.errors import TracingError
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.jit.box import Box
from ndistribute.jit.identity import Identities, constant_key
from ndistribute.jit.same_steps import SameSteps
from ndistribute.jit.sparse_rows import NO_ROW
from ndistribute.jit.trace import EMPTY, Check, StepTrace, checksum
from ndistribute.jit.traced_backend import AXIS
from ndistribute.values import PerReplica

# The maximum number of traces of one program, until it has found all variables twice.
_MOST_TRACES = 6
_MANY = (8, 64)  # The numbers of compilations of a function at which a warning is logged.
# With this, XLA does not copy a variable that a program reads before it writes to the same memory.
_OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}
_PASSED = (
    "is an argument, and a compiled step cannot change the caller's array: change a copy of it"
)
_log = logging.getLogger("ndistribute")


class Compilation(NamedTuple):
    """The shapes of a compilation's arguments, and the seconds until its first result."""

    arguments: str
    seconds: float


class Devices:
    """The JAX devices on which programs run, one for each replica of all processes.

    Args:
        devices: JAX's devices; None means the first device of this process.
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        jax = jax_module()
        self.all = [jax.local_devices()[0]] if devices is None else list(devices)
        self.size = len(self.all)
        self.local_size = sum(d.process_index == jax.process_index() for d in self.all)
        self.is_local = self.local_size == self.size
        self.shares_memory = self.all[0].platform == "cpu"
        self.mesh = jax.sharding.Mesh(np.array(self.all), (AXIS,))
        self.same_steps = None if self.is_local else SameSteps(self.all)

    def spec(self, axis: int | None) -> Any:
        """Return where an array is: on all devices, or divided along an axis (-1: the first)."""
        parts = () if axis is None else (None,) * max(axis, 0) + (AXIS,)
        return jax_module().sharding.PartitionSpec(*parts)

    def place(self, parts: Sequence[Array], axis: int | None) -> Any:
        """Return a JAX array of the values of this process's replicas."""
        jax = jax_module()
        joined = parts[0]
        if axis is not None:
            joined = np.stack(parts) if axis < 0 else np.concatenate(parts, axis)
        sharding = jax.sharding.NamedSharding(self.mesh, self.spec(axis))
        return jax.make_array_from_process_local_data(sharding, joined)


class _Arguments(NamedTuple):
    """The arguments of a call: the inputs of the program, and the constants in it."""

    nest: Any
    leaves: list[Any]
    # The leaves that are arrays, and whether they differ between replicas.
    arrays: list[tuple[int, bool]]
    key: Any


class Compiler:
    """Compiles functions, and keeps the programs; see the module.

    Args:
        devices: the devices on which programs run.
        replicas: a function that returns the replicas of this process; their generators give the
            random numbers.
        enter: a function that returns the context in which functions are traced.
        together: a function that calls a compiling function at a time when all processes compile.
        most: the number of functions, and of shapes of arguments, whose programs are kept.

    Attributes:
        compilations: the compilations, in order.
    """

    def __init__(
        self,
        devices: Devices,
        replicas: Callable[[], Sequence[ReplicaContext]],
        enter: Callable[[], contextlib.AbstractContextManager[Any]],
        together: Callable[[Callable[[], Any]], Any] = operator.call,
        most: int = 64,
    ) -> None:
        self.compilations: list[Compilation] = []
        self.devices, self.enter = devices, enter
        self._replicas, self._together, self._most = replicas, together, most
        self._identities = Identities()
        # For each key of a function, its programs by the shapes of the arguments. Programs for the
        # same shapes differ in the values that the function looks up before each call.
        self._functions: OrderedDict[Any, OrderedDict[Any, list[_Program]]] = OrderedDict()
        self._counts: Counter[Any] = Counter()
        self.lock = threading.RLock()  # Held while a program is compiled, and while it runs.

    def __call__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Return the results of the replicas of this process."""
        arguments = self._arguments((tuple(args), dict(kwargs)))
        shapes = arguments.key, current_frame().replica is None
        with self.lock, _numpys_dtypes():
            key = self._identities.of(function, arguments.nest)
            programs = self._functions.get(key, OrderedDict())
            for known in programs.get(shapes, ()):
                if all(compute() == value for compute, value in known.trace.constants):
                    return known.run(arguments)
            began = time.perf_counter()
            program: _Program = self._together(lambda: self._compile(function, arguments))
            results = program.run(arguments)
            programs.setdefault(shapes, []).append(program)
            # The trace may have changed objects around the function, and so the key.
            for each in (key, self._identities.of(function, arguments.nest)):
                self._functions.setdefault(each, programs)
            for kept in (self._functions, programs):
                while len(kept) > self._most:
                    kept.popitem(last=False)
            self._report(function, arguments, time.perf_counter() - began)
            return results

    def seeds(self) -> list[Array]:
        """Return the seeds of the random numbers of a call, one for each replica here."""
        draws = [replica.generator().integers(2**32, size=2) for replica in self._replicas()]
        return [draw.astype(np.uint32) for draw in draws]

    def _report(self, function: Any, arguments: _Arguments, seconds: float) -> None:
        shown = ", ".join(_shown(leaf) for leaf in arguments.leaves)
        self.compilations.append(Compilation(shown, seconds))
        code = getattr(function, "__code__", _name(function))
        self._counts[code] += 1
        text, level = "compiled %s for (%s) in %.2f s, compilation %d", logging.INFO
        if self._counts[code] in _MANY:
            level = logging.WARNING
            text += (
                ": each new shape of an array, and each new Python value or object in its "
                "arguments or around it, needs another compilation. Pass values that change as "
                "arrays, in arguments"
            )
        _log.log(level, text, _name(function), shown, seconds, self._counts[code])

    def _arguments(self, nest: Any) -> _Arguments:
        leaves = tree.flatten(nest)
        arrays, keys = [], []
        for k, passed in enumerate(leaves):
            leaf = leaves[k] = self._joined(passed) if isinstance(passed, PerReplica) else passed
            differs = isinstance(leaf, PerReplica)
            first = leaf.values[0] if differs else leaf
            if isinstance(first, np.ndarray | np.generic) and first.dtype.kind in "biufcV":
                arrays.append((k, differs))
                keys.append((first.shape, first.dtype, differs))
            else:
                keys.append(constant_key(leaf))
        return _Arguments(nest, leaves, arrays, (tree.outline(nest), tuple(keys)))

    def _joined(self, value: PerReplica) -> Any:
        """Return the components as arrays of one shape, or the value that all of them equal."""
        parts = value.values
        first = tree.select(value, 0, self.devices.local_size)
        if len(parts) == 1:
            return first
        if not isinstance(first, np.ndarray | np.generic | int | float | bool):
            if all(part is first or part == first for part in parts):
                return first
            raise TypeError(
                f"a compiled step of several replicas got {first!r} for one replica and other "
                "values for others: pass arrays of numbers."
            )
        arrays = [np.asarray(part) for part in parts]
        for rank, array in enumerate(arrays):
            if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
                raise ValueError(
                    f"replica {rank} got {_shown(array)}, replica 0 {_shown(arrays[0])}: in a "
                    "compiled step the parts of all replicas must have the same shape. Pass a "
                    "dataset, Dataset.from_tensor_slices((x, y)).batch(n, drop_remainder=True), "
                    "where n is a multiple of the number of replicas, or pad the last batch."
                )
        return PerReplica(arrays)

    def _compile(self, function: Callable[..., Any], arguments: _Arguments) -> _Program:
        name = _name(function)
        if current_trace() is not None:
            raise TracingError(f"{name}: a compiled step is called inside another one.")
        if self.devices.same_steps is not None:
            self.devices.same_steps.new_program()
        earlier, last = None, _Program(self, function, arguments, StepTrace())
        for _ in range(_MOST_TRACES - 1):
            earlier, last = last, _Program(self, function, arguments, last.trace)
            if earlier.is_complete and last.is_complete:
                _refuse_differences(name, earlier, last)
                last.finish()
                return last
        raise TracingError(
            f"{name} creates or reads different variables in each call, but a compiled step can "
            "create variables only in its first call. Create them outside of it."
        )


class _Output:
    """A placeholder for an array in a result: how to get it from the outputs of a program."""

    def __init__(self, make: Callable[[Sequence[Any]], Any]) -> None:
        self.make = make


class _Program:
    """A program that is traced for arguments of some shapes, and compiled at its first run.

    Args:
        compiler: the compiler, which has the devices.
        function: the function to trace.
        arguments: the arguments of the first call.
        known: an earlier trace, which has found the variables, the inputs, and whether random
            numbers are drawn.
    """

    trace: StepTrace
    result: Any  # The nest, with an `_Output` for each array.

    def __init__(
        self,
        compiler: Compiler,
        function: Callable[..., Any],
        arguments: _Arguments,
        known: StepTrace,
    ) -> None:
        self._compiler, self._function, self._known = compiler, function, known
        self._nest, self._arrays = arguments.nest, arguments.arrays
        at = [k for k, _ in self._arrays]
        self._constants = [None if k in at else v for k, v in enumerate(arguments.leaves)]
        self._written = [group for group in known.states if group in known.written]
        self._read = [group for group in known.states if group not in known.written]
        self._outside: list[Any] = []
        spec = compiler.devices.spec
        states = [[spec(group.axis) for group in part] for part in (self._written, self._read)]
        arrays = [spec(-1 if differs else None) for _, differs in self._arrays]
        spread = jax_module().shard_map(
            self._traced,
            mesh=compiler.devices.mesh,
            in_specs=(*states, arrays, spec(None), spec(-1)),
            out_specs=(states[0], spec(-1), spec(None)),
            check_vma=False,
        )
        jax, on_cpu = jax_module(), compiler.devices.shares_memory
        options = _OPTIONS if on_cpu and jax.__version_info__ >= (0, 10) else None
        self._program = jax.jit(spread, donate_argnums=(0,), compiler_options=options)
        keys = [np.zeros(2, np.uint32)] * compiler.devices.local_size
        self.jaxpr: Any = self._program.trace(*self._inputs(arguments, lambda: keys)).jaxpr

    def _traced(self, written: Any, read: Any, arrays: Any, numbers: Any, key: Any) -> Any:
        """Trace the function, for one replica: from the inputs to new states and outputs."""
        groups, values = [*self._written, *self._read], [*written, *read]
        pairs = zip(groups, values, strict=True)
        known = {group: value[0] if group.axis == -1 else value for group, value in pairs}
        self.trace = trace = StepTrace(known, numbers, None if key is None else key[0])
        outputs: list[Any] = []
        with tracing(trace), self._compiler.enter():
            args, kwargs = self._boxed(arrays)
            result = untrack(self._function(*args, **kwargs))
            if (same_steps := self._compiler.devices.same_steps) is not None:
                same_steps.compare(trace)
            self.result = tree.map_leaves(lambda leaf: _kept(leaf, outputs), result)
            told = [[value.value for value in values] for _, values in trace.after]
        held, numbers = _of_all_replicas(trace.checks)
        new = []
        for group, old in zip(self._written, written, strict=True):
            value = trace.states[group]._value if group in trace.states else known[group]
            value = value[None] if group.axis == -1 else value
            new.append(jax_module().numpy.where(held.all(), value, old) if trace.checks else value)
        return new, [output[None] for output in outputs], (held, numbers, told)

    def _boxed(self, arrays: Sequence[Any]) -> Any:
        leaves = list(self._constants)
        for (k, differs), array in zip(self._arrays, arrays, strict=True):
            leaves[k] = box = Box(array[0] if differs else array, refusal=_PASSED)
            if self._compiler.devices.is_local:  # Otherwise other processes would wait in the step.
                self.trace.arguments[id(box.value)] = box.value, k
        return tree.unflatten(self._nest, leaves)

    @property
    def is_complete(self) -> bool:
        """Whether the earlier trace had found everything that this trace found."""
        return not self.trace.created and bool(self.trace.needs() == self._known.needs())

    def finish(self) -> None:
        """Drop objects that only tracing needs, such as arrays that the function created."""
        self.jaxpr = None
        outside = [(weakref.ref(array), *told) for array, *told in self.trace.outside.values()]
        self.trace.outside.clear()
        self._known.outside.clear()
        self._outside = [(find, *told) for find, *told in outside if find() is not None]

    def _inputs(self, arguments: _Arguments, seeds: Callable[[], list[Array]]) -> tuple[Any, ...]:
        place = self._compiler.devices.place
        arrays = [
            place(arguments.leaves[k].values, -1) if differs else arguments.leaves[k]
            for k, differs in self._arrays
        ]
        states = [
            [_current(group, place) for group in part] for part in (self._written, self._read)
        ]
        numbers = [compute() for compute in self._known.before]
        return (*states, arrays, numbers, place(seeds(), -1) if self._known.draws else None)

    def run(self, arguments: _Arguments) -> list[Any]:
        """Return the results of the replicas of this process."""
        for find, *told in self._outside:
            _check_unchanged(find(), *told)
        for place, *allowed in self.trace.ranges:
            _check_argument(arguments.leaves[place], *allowed)
        inputs, results = self._inputs(arguments, self._compiler.seeds), list[Any]()
        for group in self._written:
            group.in_use = self._compiler.lock
        error = None
        # An interrupt takes effect after this call, when the program has run and the step is made.
        try:
            results.extend(itertools.starmap(self._program, [inputs]))
        finally:
            for new, outputs, checks in results:
                error = self._keep(new, outputs, checks)
        if error is not None:
            raise error
        return [
            self._filled([np.array(output.addressable_data(rank))[0] for output in outputs])
            for rank in range(self._compiler.devices.local_size)
        ]

    def _keep(self, new: Any, outputs: Any, checks: Any) -> Exception | None:
        """Keep the program's outputs, even if an interrupt comes; return the error of a check."""
        held, numbers, told = checks
        for group, value in zip(self._written, new, strict=True):
            group.store(value)
        error = interrupt = None
        if self._compiler.devices.shares_memory:  # The host may change the arguments from now on.
            arrays = jax_module().tree.leaves((new, outputs))
            try:
                deque(map(operator.methodcaller("block_until_ready"), arrays), 0)
            except BaseException as raised:  # This comes after the wait, which is one call.
                interrupt = raised
        if not (flags := np.asarray(held)).all():
            first = int(np.argmin(flags))
            error = self.trace.checks[first].error(*map(np.asarray, numbers[first]))
        else:
            for (effect, _), values in zip(self.trace.after, told, strict=True):
                effect(*map(np.asarray, values))
        if interrupt is not None:
            raise interrupt
        return error

    def _filled(self, outputs: Sequence[Any]) -> Any:
        return tree.map_leaves(
            lambda leaf: leaf.make(outputs) if isinstance(leaf, _Output) else leaf, self.result
        )


def _kept(leaf: Any, outputs: list[Any]) -> Any:
    """Return the placeholder for an array in a result; the array becomes an output."""
    if isinstance(leaf, IndexedSlices):
        values, indices = _kept(leaf.values, outputs), _kept(leaf.indices, outputs)
        return _Output(lambda made: _rows(values.make(made), indices.make(made), leaf.dense_shape))
    if not isinstance(leaf, Box):
        return leaf
    outputs.append(leaf.value)
    return _Output(operator.itemgetter(len(outputs) - 1))


def _rows(values: Any, indices: Any, shape: tuple[int, ...]) -> IndexedSlices:
    is_row = indices != NO_ROW
    return IndexedSlices(values[is_row], indices[is_row], shape)


def _of_all_replicas(checks: Sequence[Check]) -> tuple[Any, list[Any]]:
    """Return which checks held on all replicas, and the smallest and largest of their numbers."""
    if not checks:
        return np.ones(1, bool), []
    lax, numpy = jax_module().lax, jax_module().numpy
    held = numpy.stack([check.held for check in checks])
    reductions = lax.pmin, lax.pmax
    return lax.pmin(held.astype(np.int32), AXIS).astype(bool), [
        [reduce(number, AXIS) for reduce, number in zip(reductions, check.numbers, strict=False)]
        for check in checks
    ]


def _current(group: Any, place: Callable[..., Any]) -> Any:
    """Return the value of a state on the devices."""
    if not group.has_array():
        parts = [cell.array for cell in group.cells]
        if is_device_array(parts[0]):
            raise TracingError(
                "a compiled function uses a variable on a GPU of CuPy: JAX computes on its own "
                "devices. Use nd.TPUStrategy, whose devices are all that JAX has."
            )
        group.array = place(parts, group.axis)
    return group.array


def _check_unchanged(array: Any, known: int, line: str) -> None:
    """Raise an error if an array that is a constant of a program still exists and has changed."""
    if array is not None and checksum(array) != known:
        raise TracingError(
            f"the {array.dtype} array of shape {array.shape} that a compiled step uses at {line} "
            "has changed, but the step was compiled with its old values as constants: pass it as "
            "an argument, or make it a variable."
        )


def _check_argument(leaf: Any, start: int, stop: int, error: Callable[..., Exception]) -> None:
    """Raise an error unless all replicas' numbers of an argument are in ``[start, stop)``."""
    parts = leaf.values if isinstance(leaf, PerReplica) else [leaf]
    limits = [limit for part in parts if part.size for limit in (part.min(), part.max())]
    if limits and not start <= min(limits) <= max(limits) < stop:
        raise error(min(limits), max(limits))


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


def _shown(leaf: Any) -> str:
    leaf = leaf.values[0] if isinstance(leaf, PerReplica) else leaf
    if isinstance(leaf, np.ndarray | np.generic):
        return f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"
    return repr(leaf)[:40]


@contextlib.contextmanager
def _numpys_dtypes() -> Any:
    """Compute in NumPy's dtypes, however JAX is configured."""
    jax = jax_module()
    owner = jax if hasattr(jax, "enable_x64") else jax.experimental  # There before JAX 0.8.
    with owner.enable_x64(True), jax.default_matmul_precision("float32"):
        yield


def _refuse_differences(name: str, earlier: _Program, later: _Program) -> None:
    """Raise an error if two traces of a function differ in operations, constants or results."""
    pairs = itertools.zip_longest(*map(_parts, (earlier, later)), fillvalue=(None, []))
    for (eqn, old), (other, new) in pairs:
        if len(old) == len(new) and all(map(_equal, old, new)):
            continue
        where = _line_of(eqn or other) if eqn or other else f"what it returns, {old}, then {new}"
        raise TracingError(
            f"{name} computed other values when it was traced twice: {where}. A compiled step "
            "would use one of them forever. Draw random numbers from get_replica_context().rng. "
            "Pass what changes from call to call, such as the time or a counter, as an argument, "
            "or keep it in a variable."
        )


def _parts(program: _Program) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the operations of a program with their parts, and its constant results."""
    yield from _operations(program.jaxpr.jaxpr, program.jaxpr.consts)
    leaves = tree.flatten(program.result)
    yield from ((None, [leaf]) for leaf in leaves if not isinstance(leaf, _Output))


def _operations(
    jaxpr: Any, constants: Sequence[Any], known: Mapping[Any, Any] = EMPTY
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each operation of a program, with its name and the constants among its operands."""
    known = {**known, **dict(zip(jaxpr.constvars, constants, strict=False))}
    for eqn in jaxpr.eqns:
        operands = [v.val if hasattr(v, "val") else known.get(v) for v in eqn.invars]
        for inner in tree.flatten(list(eqn.params.values())):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                body: Any = getattr(inner, "jaxpr", inner)
                passed = zip(body.invars, operands, strict=False)
                here = {v: value for v, value in passed if value is not None}
                yield from _operations(body, getattr(inner, "consts", ()), here)
        yield eqn, [eqn.primitive.name, *operands]


def _equal(old: Any, new: Any) -> bool:
    if old is new:
        return True
    old, new = np.asarray(old), np.asarray(new)
    return bool(np.array_equal(old, new)) or old.tobytes() == new.tobytes()


def _line_of(eqn: Any) -> str:
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if is_user_file(frame.file_name) and "jax" not in frame.file_name:
            return f"at {frame.file_name}:{frame.line_num}"
    return f"in {eqn.primitive.name}"
