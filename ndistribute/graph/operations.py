"""Functions that make operations, in addition to NumPy's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.exports import export as _export
from ndistribute.graph.definition import BodyDef
from ndistribute.graph.graph import Graph, Operation, Symbolic, Tensor, as_tensor, get_default_graph
from ndistribute.graph.shapes import Known, Shape, known_of, narrowed
from ndistribute.graph.variables import changed
from ndistribute.mistakes import count_of


def placeholder(dtype: Any, shape: Any = None, name: str = "placeholder") -> Tensor:
    """Return a tensor whose value each run must feed.

    Args:
        dtype: the dtype; values are cast to it.
        shape: the shape, with None for any length; None: any shape.
        name: its name in the current scope.
    """
    known = Known(np.dtype(dtype), None if shape is None else Shape(shape))
    return get_default_graph().add("placeholder", name=name, known=known).outputs[0]


def constant(value: Any, dtype: Any = None, shape: Any = None, name: str = "constant") -> Tensor:
    """Return a tensor with a fixed value: an array of numbers or strings.

    Args:
        value: an array, a number, a string, or a nested list of these.
        dtype: the dtype; None: float32 for Python floats, int32 for Python integers, otherwise the
            dtype of the value.
        shape: the shape to which to broadcast a scalar or reshape the elements; None: the value's
            shape.
        name: its name in the current scope.
    """
    array = np.asarray(narrowed(value) if dtype is None else value, dtype)
    if shape is not None:
        array = np.broadcast_to(array, shape) if array.ndim == 0 else array.reshape(shape)
    return as_tensor(array, name=name)


def identity(value: Any, name: str = "identity") -> Tensor:
    """Return a tensor with the same value, computed after the current control dependencies."""
    tensor = as_tensor(value)
    return tensor.graph.add("identity", [tensor], name=name, known=(tensor,)).outputs[0]


def stop_gradient(value: Any, name: str = "stop_gradient") -> Tensor:
    """Return a tensor with the same value, which is a constant for gradients."""
    return as_tensor(value).stop_gradient(name)


def group(*operations: Any, name: str = "group") -> Operation:
    """Return an operation that ends when other operations have ended.

    Each task sends one message when all of its operations have ended.
    """
    of_device: dict[str, list[Any]] = {}
    for operation in tree.flatten(list(operations)):
        if operation is not None:
            of_device.setdefault(getattr(operation, "device", ""), []).append(operation)
    graph, ends = get_default_graph(), []
    for device, some in of_device.items():
        if device and len(some) > 1:
            with graph.control_dependencies(some):
                ends.append(graph.add("group", name=f"{name}_part", outputs=0, device=device))
        else:
            ends += some
    with graph.control_dependencies(ends):
        return graph.add("group", name=name, outputs=0)


def py_function(
    function: Callable[..., Any], inputs: Sequence[Any], outputs: int = 1, name: str = "py_function"
) -> Any:
    """Return a tensor whose value a Python function computes from arrays, in this process.

    Only two kinds of sessions can run it: a session without a target, and a session whose target is
    a server of this process, on the task of that server. For gradients the result is a constant.

    Args:
        function: takes the values of the inputs as arrays; returns an array, or a sequence of them.
        inputs: tensors.
        outputs: the number of its results; with 0, `py_function` returns the operation.
        name: its name in the current scope.
    """
    op = get_default_graph().add("py_function", inputs, name=name, outputs=outputs)
    op.definition.attributes["function"] = op.name
    op.graph.functions[op.name] = function
    return op.outputs[0] if outputs == 1 else op.outputs or op


def random_normal(
    shape: Any,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: Any = np.float32,
    seed: int | None = None,
    name: str = "random_normal",
) -> Tensor:
    """Return normal random numbers, which differ in each run of a session."""
    return _random("normal", shape, mean, stddev, dtype, seed, name)


def truncated_normal(
    shape: Any,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: Any = np.float32,
    seed: int | None = None,
    name: str = "truncated_normal",
) -> Tensor:
    """Return normal random numbers within two standard deviations of the mean."""
    return _random("truncated_normal", shape, mean, stddev, dtype, seed, name)


def random_uniform(
    shape: Any,
    minval: float = 0.0,
    maxval: float = 1.0,
    dtype: Any = np.float32,
    seed: int | None = None,
    name: str = "random_uniform",
) -> Tensor:
    """Return uniform random numbers from `minval` to `maxval`, which is excluded."""
    return _random("uniform", shape, minval, maxval, dtype, seed, name)


def _random(
    distribution: str, shape: Any, low: Any, high: Any, dtype: Any, seed: int | None, name: str
) -> Tensor:
    if isinstance(low, Symbolic) or isinstance(high, Symbolic):
        whole = np.dtype(dtype).kind in "iu"
        kind = np.float64 if whole else dtype
        drawn: Any = _random(distribution, shape, 0.0, 1.0, kind, seed, name)
        scaled = low + (high - low if distribution == "uniform" else high) * drawn
        return (np.floor(scaled) if whole else scaled).astype(dtype)  # type: ignore[no-any-return]
    graph = get_default_graph()
    sources = None
    if seed is not None or graph.seed is not None:
        # The place of an operation tells it from others with the same seeds.
        sources = [graph.seed or 0, seed if seed is not None else graph.version]
    attributes = {
        "distribution": distribution,
        "low": low,
        "high": high,
        "dtype": np.dtype(dtype).name,
        "seed": int(np.random.SeedSequence(sources).generate_state(1)[0]),
    }
    if isinstance(shape, list | tuple) and any(isinstance(n, Symbolic) for n in shape):
        shape = np.stack(shape)
    lengths = as_tensor(shape if isinstance(shape, Symbolic) else np.array(shape, np.int64))
    return graph.add("random", [lengths], name=name, attributes=attributes).outputs[0]


def cond(
    condition: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any], name: str = "cond"
) -> Any:
    """Return the results of one of two functions; the other function does not run.

    The functions may use tensors of the graph around them. Both return the same number of tensors,
    and run on one device.

    >>> from ndistribute.graph.session import Session
    >>> x = placeholder(np.float64)
    >>> y = cond(np.less(x, 0), lambda: -x, lambda: x)
    >>> float(Session().run(y, {x: -3.0}))
    3.0
    """
    graph = get_default_graph()
    captured: list[Tensor] = []
    traced = [_Traced(graph, captured, function, []) for function in (true_fn, false_fn)]
    counts = [len(branch.results) for branch in traced]
    if counts[0] != counts[1]:
        raise ValueError(
            f"the functions of cond() return {counts[0]} and {count_of(counts[1], 'tensor')}: they "
            "must return the same number."
        )
    bodies = [branch.definition() for branch in traced]
    with graph.control_dependencies(traced[0].awaited + traced[1].awaited):
        op = graph.add("cond", [condition, *captured], name=name, outputs=counts[0], bodies=bodies)
    for made, *results in zip(op.outputs, *(branch.results for branch in traced), strict=True):
        made.known = tuple(results)
    return op.outputs[0] if traced[0].single else list(op.outputs)


def while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Sequence[Any],
    maximum_iterations: int | None = None,
    name: str = "while",
) -> Any:
    """Return the loop variables after running a body as long as a condition holds.

    In the body they have the shapes of the first values.

    Args:
        condition: a function of the loop variables that returns a boolean tensor.
        body: a function of the loop variables that returns their next values.
        loop_vars: the first values.
        maximum_iterations: the largest number of runs of the body; None: no limit.
        name: its name in the current scope.

    >>> from ndistribute.graph.session import Session
    >>> Session().run(while_loop(lambda i: np.less(i, 10), lambda i: i + 3, [np.array(0)]))
    [np.int64(12)]
    """
    graph = get_default_graph()
    first = [as_tensor(value) for value in loop_vars]
    captured: list[Tensor] = []
    traced = [_Traced(graph, captured, function, first) for function in (condition, body)]
    if len(traced[1].results) != len(first):
        raise ValueError(
            f"the body of while_loop() returns {count_of(len(traced[1].results), 'tensor')}, "
            f"expected one for each of the {count_of(len(first), 'loop variable')}."
        )
    if stale := changed(*traced) & (traced[0].reads | traced[1].reads):
        raise ValueError(
            f"while_loop() reads {min(stale)!r} before changing it, so an iteration would use an "
            "old value: make the value a loop variable; or read it before the loop, if each "
            "iteration needs its value from before the loop."
        )
    with graph.control_dependencies(traced[0].awaited + traced[1].awaited):
        op = graph.add(
            "while",
            [*first, *captured],
            name=name,
            outputs=len(first),
            attributes={"maximum_iterations": maximum_iterations},
            bodies=[function.definition() for function in traced],
        )
    pairs = list(zip(first, traced[1].results, strict=True))
    if all(known_of(before)[:2] == known_of(after)[:2] for before, after in pairs):
        for made, before in zip(op.outputs, first, strict=True):
            made.known = (before,)  # No round changes it.
    return list(op.outputs)


def _as_result(value: Any) -> Tensor:
    """Return a result of a function as a tensor: for an operation, true once it is done."""
    if not isinstance(value, Operation):
        return as_tensor(value)
    with get_default_graph().control_dependencies([value]):
        return identity(np.True_)


class _Traced(Graph):
    """The graph of a function of tensors; tensors of the graph around it become its inputs.

    Functions that are traced with the same list `captured` have the same inputs.
    """

    def __init__(
        self, outer: Graph, captured: list[Tensor], function: Callable[..., Any], args: list[Tensor]
    ) -> None:
        super().__init__()
        self.outer: Graph = outer
        self._captured = captured
        self.functions, self.seed = outer.functions, outer.seed
        self.awaited: list[Operation] = []
        """Operations of graphs around, after which some in this one run."""
        # Other names, because a step keeps records, functions and generators by name.
        scope = f"{outer.unique_name('body')}/"
        with self.as_default(), self.name_scope(scope):
            self._arguments = [self._argument(tensor) for tensor in args]
            results = function(*self._arguments)
            self.single = not isinstance(results, list | tuple)
            tensors = [_as_result(value) for value in ([results] if self.single else results)]
            self.results = [self.inside(tensor) for tensor in tensors]

    def definition(self) -> BodyDef:
        for tensor in self._captured:
            self.inside(tensor)
        inputs = [*self._arguments, *(self.captured[tensor] for tensor in self._captured)]
        return BodyDef(
            tuple(tensor.op.name for tensor in inputs),
            tuple(op.definition for op in self.get_operations()),
            tuple(tensor.name for tensor in self.results),
        )

    def inside(self, tensor: Tensor) -> Tensor:
        """Return the tensor in this graph that stands for one of the graph around it."""
        if tensor.graph is self:
            return tensor
        if tensor not in self.captured:
            outer = tensor
            if tensor.graph is not self.outer and isinstance(self.outer, _Traced):
                outer = self.outer.inside(tensor)
            if outer not in self._captured:
                self._captured.append(outer)
            self.captured[outer] = self.captured[tensor] = self._argument(tensor)
        return self.captured[tensor]

    def encloses(self, graph: Graph) -> bool:
        return graph is self or self.outer.encloses(graph)

    def _argument(self, like: Tensor) -> Tensor:
        with self.as_default():
            op = super().add("placeholder", name="argument", known=(like,))
        self.arguments[op] = like
        return op.outputs[0]

    def add(self, type: str, inputs: Sequence[Any] = (), **options: Any) -> Operation:  # noqa: A002
        self.awaited += [op for op in self.scopes.controls if op.graph is not self]
        return super().add(type, [self.inside(as_tensor(value)) for value in inputs], **options)


_export(vars())
