"""`Graph`, and its operations and symbolic tensors.

A tensor stands for an array that a session computes later. NumPy's functions, operators and
indexing make operations when they get a tensor, so you write a model as for arrays. Each operation
keeps the settings of the surrounding `device`, `name_scope`, `control_dependencies` and
`colocate_with`.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

import ndistribute.graph.kernels  # noqa: F401  # All readers of a graph ask for its facts.
from ndistribute import numpy_functions
from ndistribute.context import seed_sources
from ndistribute.errors import InvalidArgumentError
from ndistribute.graph.definition import BodyDef, OperationDef, OperationInput, call_template, pack
from ndistribute.graph.placement import DeviceFunction, merge_device
from ndistribute.graph.shapes import Known, Shape, known_of
from ndistribute.mistakes import count_of
from ndistribute.numpy_functions import ArrayMethods, number_of_parts, refuse_writing, written_to

_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(np.__file__).parent))


class Symbolic(ArrayMethods, NDArrayOperatorsMixin):
    """The arithmetic of tensors and variables: NumPy's functions, operators and methods."""

    __slots__ = ()
    __array_priority__ = 2000.0
    dtype: Any
    op: Operation
    shape: Any
    __call_model__: Any  # Calls a layer or a loss on tensors: see `model_calls`.

    @property
    def graph(self) -> Graph:
        """The graph that it belongs to."""
        return self.op.graph

    @property
    def device(self) -> str:
        """The full name of its operation's device; empty if it has none."""
        return self.op.device

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        if written_to(function, inputs, kwargs):
            refuse_writing(ufunc.__name__)
        return apply(function, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        for how, _ in written_to(function, args, kwargs):
            refuse_writing(f"{function.__name__} with {how}")
        count = number_of_parts(function, args)
        if count == 1:
            return [as_tensor(args[0])]
        return apply(function, args, kwargs, outputs=count or 1)

    def __apply_named__(self, name: str, args: Any, kwargs: Any) -> Any:
        return apply_named(name, args, kwargs)

    def __getitem__(self, index: Any) -> Any:
        return apply_named("getitem", (self, index), {})

    def stop_gradient(self, name: str = "stop_gradient") -> Tensor:
        """Return a tensor with the same value, which is a constant for gradients."""
        tensor = as_tensor(self)
        return self.graph.add("stop_gradient", [tensor], name=name, known=(tensor,)).outputs[0]

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        refuse_writing("x[i] = v")

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape or self.shape[0] is None:
            why = "only a run knows its length. Index it, or use np.split."
            raise TypeError(f"{self!r} cannot be iterated over: {why}")
        return (self[i] for i in range(self.shape[0]))

    def __bool__(self) -> bool:
        why = "use cond(), np.where() or np.logical_and() in a graph."
        raise TypeError(f"{self!r} has no truth value before it is run: {why}")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        why = "pass it to functions of NumPy or nd.models.nn, or fetch it with Session.run."
        raise TypeError(f"{self!r} has no values before it is run: {why}")

    @staticmethod
    def _call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return apply(function, args, kwargs)

    __float__ = __int__ = __index__ = __array__
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        """Return True for the same object, so that tensors can be keys; see `np.equal`."""
        return self is other

    def __ne__(self, other: object) -> Any:
        return self is not other

    def get_shape(self) -> Shape:
        """Return the shape, with None for unknown lengths.

        Raises:
            ValueError: the number of axes is known only in a run.
        """
        if self.shape is None:
            why = "set it with set_shape(), or compute with np.shape() of the tensor."
            raise ValueError(f"only a run knows the shape of {self!r}: {why}")
        return self.shape  # type: ignore[no-any-return]


class Tensor(Symbolic):
    """A symbolic array: one result of an operation.

    Attributes:
        op: the operation that computes it.
        name: the operation's name and the position among its results, such as ``"add:0"``.
        known: what is known of the tensor before a run, or the tensors that tell it; None: see its
            operation.

    >>> graph = Graph()
    >>> with graph.as_default():
    ...     x = as_tensor(np.ones(3))
    ...     y = 2 * x[1:]
    >>> y.name, y.graph is graph, y.shape
    ('multiply:0', True, (2,))
    """

    __slots__ = ("index", "known", "name", "op")

    def __init__(self, op: Operation, index: int, known: Known | tuple[Tensor, ...] | None) -> None:
        self.op, self.index, self.name = op, index, f"{op.name}:{index}"
        self.known = known

    @property
    def dtype(self) -> Any:
        """The dtype; None if it is known only in a run."""
        return known_of(self).dtype

    @property
    def shape(self) -> Shape | None:
        """The shape, with None for unknown lengths; None if it is known only in a run."""
        return known_of(self).shape

    def __repr__(self) -> str:
        shape = "" if self.shape is None else f", shape={self.shape}"
        dtype = "" if self.dtype is None else f", dtype={self.dtype}"
        return f"<Tensor {self.name!r}{shape}{dtype}>"

    def set_shape(self, shape: Sequence[int | None]) -> None:
        """Set unknown lengths of the shape; a ValueError is raised if known lengths differ."""
        self.known = Known(self.dtype, Shape(shape).merged(self.shape))

    def eval(self, feed_dict: Any = None, session: Any = None) -> Any:
        """Return the value, computed in a session or the default session."""
        return (session or default_session()).run(self, feed_dict)


class Operation:
    """A node of a graph: it computes tensors from tensors, on one device."""

    def __init__(
        self,
        graph: Graph,
        definition: OperationDef,
        inputs: list[Tensor],
        controls: list[Operation],
        known: Known | tuple[Tensor, ...] | None,
    ) -> None:
        self.graph, self.definition = graph, definition
        self.inputs, self.control_inputs = inputs, controls
        self.outputs = [Tensor(self, k, known) for k in range(definition.outputs)]

    @property
    def name(self) -> str:
        """The unique name in its graph."""
        return self.definition.name

    @property
    def type(self) -> str:
        """The name of its function or kernel, such as ``"numpy.matmul"``."""
        return self.definition.kind

    @property
    def device(self) -> str:
        """The full name of its device, such as ``"/job:ps/task:0"``; empty if it has none."""
        return self.definition.device

    def set_device(self, device: str) -> None:
        """Place it on a device."""
        if device != self.device:
            self.definition = msgspec.structs.replace(self.definition, device=device)

    def run(self, feed_dict: Any = None, session: Any = None) -> None:
        """Run the operation in a session or the default session."""
        (session or default_session()).run(self, feed_dict)

    def __repr__(self) -> str:
        where = f" on {self.device}" if self.device else ""
        return f"<Operation {self.name!r} ({self.type}){where}>"


class _Scopes(threading.local):
    """The settings of the scopes of a graph in which a thread is."""

    prefix = ""
    devices: tuple[str | DeviceFunction | None, ...] = ()
    controls: tuple[Operation, ...] = ()
    variables: Any = None
    """The `VariableScope`; None: the outermost one, which `get_variable_scope` makes."""


class Graph:
    """A graph of operations, which sessions run.

    >>> with Graph().as_default() as graph:
    ...     with graph.name_scope("layer"):
    ...         y = as_tensor(1.0) + 2.0
    >>> [op.name for op in graph.get_operations()]
    ['layer/constant', 'layer/add']
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._operations: dict[str, Operation] = {}
        self._names: dict[str, int] = {}
        self._collections: dict[str, list[Any]] = {}
        self.scopes = _Scopes()
        self.functions: dict[str, Any] = {}
        """The functions of `py_function` and the iterators of datasets, by operation."""
        self.reads: set[str] = set()  # The variables of outer graphs that it reads before it runs.
        self.finalized = False
        """Whether no operation can be added any more."""
        self.seed: int | None = None
        """The seed of the graph's random operations; None: a new one for each."""
        self._weights: np.random.SeedSequence | None = None
        self.outer: Graph | None = None
        self.arguments: dict[Operation, Tensor] = {}
        """The arguments of a body, and their tensors of the graph around it, `outer`."""
        self.captured: dict[Tensor, Tensor] = {}
        """By a tensor of graphs around, the argument that always has its value."""
        self.replicated = False
        """Whether each replica of a strategy runs it: see `optimizers`."""

    @property
    def weight_seed(self) -> np.random.SeedSequence | None:
        """The seed of the weights that initializers draw while this is the default graph."""
        if self.outer is not None:
            return self.outer.weight_seed
        if self.seed is not None and (self._weights is None or self._weights.entropy != self.seed):
            self._weights = np.random.SeedSequence(self.seed)
        return None if self.seed is None else self._weights

    @property
    def version(self) -> int:
        """The number of operations, which only grows."""
        return len(self._operations)

    def encloses(self, graph: Graph) -> bool:
        """Whether operations of this graph can use tensors of another graph."""
        return graph is self

    def finalize(self) -> None:
        """Make the graph read-only."""
        self.finalized = True

    @contextlib.contextmanager
    def as_default(self) -> Iterator[Graph]:
        """Return a context manager; new operations in its block go to this graph."""
        _open_graphs.set((*_open_graphs.get(), self))
        try:
            yield self
        finally:
            left = list(_open_graphs.get())
            left.remove(self)
            _open_graphs.set(tuple(left))

    # The scopes of the current thread.

    @contextlib.contextmanager
    def scoped(self, kind: str, value: Any) -> Iterator[None]:
        """Return a context manager; in its block `scopes` of this thread has another value."""
        before = getattr(self.scopes, kind)
        setattr(self.scopes, kind, value)
        try:
            yield
        finally:
            setattr(self.scopes, kind, before)

    @contextlib.contextmanager
    def name_scope(self, name: str | None) -> Iterator[str]:
        """Return a context manager that puts ``name/`` before the names of operations.

        A name that ends in ``/`` enters an earlier scope again; None or "" leaves all scopes.
        """
        inner = f"{self.unique_name(name)}/" if name else ""
        with self.scoped("prefix", inner):
            yield inner

    @contextlib.contextmanager
    def device(self, device: str | DeviceFunction | None) -> Iterator[None]:
        """Return a context manager that places the operations of its block, see `device`."""
        with self.scoped("devices", (*self.scopes.devices, device)):
            yield

    @contextlib.contextmanager
    def control_dependencies(self, inputs: Iterable[Any] | None) -> Iterator[None]:
        """Return a context manager; operations of its block run after others; None: after none."""
        outer = () if inputs is None else self.scopes.controls
        added = tuple(_operation(value) for value in inputs or ())
        for op in added:
            if not self.encloses(op.graph):
                raise ValueError(f"{op!r} belongs to another graph.")
        with self.scoped("controls", (*outer, *added)):
            yield

    def has_control_dependencies(self) -> bool:
        """Whether operations that are added now run after others."""
        return bool(self.scopes.controls)

    @contextlib.contextmanager
    def colocate_with(self, op: Any) -> Iterator[None]:
        """Return a context manager; it places operations of its block with another operation."""
        with self.scoped("devices", (_operation(op).device or None,)):
            yield

    # Operations.

    def unique_name(self, name: str) -> str:
        """Return a name in the current scope that no operation or scope has yet.

        A name that ends in ``/`` is one that was returned before.
        """
        if name.endswith("/"):
            return name[:-1]
        full = f"{self.scopes.prefix}{name}"
        with self._lock:
            count = self._names.get(full, 0)
            unique = full
            while unique in self._names:
                unique = f"{full}_{count}"
                count += 1
            self._names[full] = count or 1
            self._names.setdefault(unique, 1)
        return unique

    def add(
        self,
        type: str,  # noqa: A002
        inputs: Sequence[Any] = (),
        *,
        name: str = "",
        outputs: int = 1,
        call: Any = None,
        attributes: dict[str, Any] | None = None,
        value: Any = None,
        bodies: Sequence[BodyDef] = (),
        device: str | None = None,
        known: Known | tuple[Tensor, ...] | None = None,
    ) -> Operation:
        """Add an operation where the current scopes place it, and return it.

        Args:
            type: the name of its function or kernel.
            inputs: tensors, variables, arrays and numbers.
            name: its name in the current scope; empty: a name from its type.
            outputs: the number of its results.
            call: the template of the function's arguments.
            attributes: plain values for the kernel.
            value: the value of a constant.
            bodies: functions of tensors for the kernel.
            device: the device, which overrides the scopes; None: the device of the scopes.
            known: what is known of each result before a run, see `Tensor`.

        Raises:
            RuntimeError: the graph is finalized.
        """
        if self.finalized:
            raise RuntimeError("the graph is finalized: add all operations before it is run.")
        tensors = [as_tensor(value) for value in inputs]
        for tensor in tensors:
            if tensor.graph is not self:
                raise ValueError(f"{tensor!r} belongs to another graph.")
        controls = [op for op in self.scopes.controls if op.graph is self]
        definition = OperationDef(
            name=self.unique_name(name or type.rpartition(".")[2]),
            kind=type,
            inputs=tuple(tensor.name for tensor in tensors),
            controls=tuple(dict.fromkeys(op.name for op in controls)),
            outputs=outputs,
            call=call,
            attributes=attributes or {},
            value=None if value is None else pack(value),
            bodies=tuple(bodies),
            source=_source_line(),
        )
        op = Operation(self, definition, tensors, controls, known)
        if device is None:
            self._place(op)
        else:
            op.set_device(device)
        with self._lock:
            self._operations[op.name] = op
        return op

    def get_operations(self) -> list[Operation]:
        """Return all operations in the order in which they were added."""
        return list(self._operations.values())

    def get_operation_by_name(self, name: str) -> Operation:
        """Return an operation.

        Raises:
            KeyError: there is no operation of this name.
        """
        if name not in self._operations:
            raise KeyError(f"there is no operation {name!r} in the graph.")
        return self._operations[name]

    def get_tensor_by_name(self, name: str) -> Tensor:
        """Return a tensor, whose name is ``operation:index``."""
        op, _, index = name.rpartition(":")
        operation = self.get_operation_by_name(op)
        if operation.type == "variable" and index == "0":  # Its name stands for its value.
            return self.get_tensor_by_name(f"{op}/read:0")
        outputs = operation.outputs
        if not index.isdigit() or int(index) >= len(outputs):
            raise KeyError(
                f"operation {op!r} has no result {index!r}: it has "
                f"{count_of(len(outputs), 'result')}."
            )
        return outputs[int(index)]

    def as_graph_element(self, element: Any) -> Any:
        """Return the tensor or operation for a tensor, an operation, a variable, or a name."""
        if isinstance(element, str):
            find = self.get_tensor_by_name if ":" in element else self.get_operation_by_name
            return find(element)
        element = getattr(element, "graph_element", element)
        if not isinstance(element, Tensor | Operation):
            raise TypeError(f"{element!r} is not a tensor, operation or variable of a graph.")
        if element.graph is not self:
            raise ValueError(f"{element!r} belongs to another graph.")
        return element

    # Collections: lists under a name.

    def add_to_collection(self, name: str, value: Any) -> None:
        """Append a value to the list of a name."""
        self._collections.setdefault(name, []).append(value)

    def get_collection(self, name: str, scope: str | None = None) -> list[Any]:
        """Return a copy of the list of a name, or of its values whose names begin with `scope`."""
        values = self._collections.get(name, [])
        return [each for each in values if not scope or re.match(scope, getattr(each, "name", ""))]

    def get_collection_ref(self, name: str) -> list[Any]:
        """Return the list of a name itself."""
        return self._collections.setdefault(name, [])

    def _place(self, op: Operation) -> None:
        """Give an operation the device of the scopes; inner scopes have priority."""
        for scope in reversed(self.scopes.devices):
            if scope is None:
                return
            wanted = scope(op) if callable(scope) else scope
            op.set_device(merge_device(op.device, wanted or ""))


def apply(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: int = 1) -> Any:
    """Add the operation that calls a function, and return its result or the list of its results."""
    return apply_named(numpy_functions.name_of(function), args, kwargs, outputs)


def apply_named(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: int = 1) -> Any:
    """Add an operation of a function in the table, whose arguments contain tensors and arrays."""
    inputs: list[Any] = []

    def symbolic(value: Any) -> Any:
        if isinstance(value, Symbolic | np.ndarray):
            inputs.append(value)
            return OperationInput(len(inputs) - 1)
        if isinstance(value, list | tuple):
            return [*map(symbolic, value)] if type(value) is list else (*map(symbolic, value),)
        if isinstance(value, slice):
            return slice(*map(symbolic, (value.start, value.stop, value.step)))
        return value

    template = call_template([*map(symbolic, args)], {k: symbolic(v) for k, v in kwargs.items()})
    # The graph is that of the inputs, or one that is traced around it.
    default = get_default_graph()
    graphs = [value.graph for value in inputs if isinstance(value, Symbolic)]
    graph = next((graph for graph in graphs if not default.encloses(graph)), default)
    op = graph.add(name, inputs, outputs=outputs, call=template)
    return op.outputs[0] if outputs == 1 else op.outputs


def as_tensor(value: Any, dtype: Any = None, name: str = "constant") -> Tensor:
    """Return a value as a tensor; a tensor or variable is unchanged, others become constants."""
    element = getattr(value, "graph_element", value)
    if isinstance(element, Tensor):
        return element
    array = np.array(value, dtype)  # A copy: the program may change what it passed.
    op = get_default_graph().add("constant", name=name, value=array, known=Known.value(array))
    return op.outputs[0]


def _source_line() -> str:
    """Return the line of the user's program that is now running."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _operation(value: Any) -> Operation:
    op = value if isinstance(value, Operation) else getattr(value, "op", None)
    if not isinstance(op, Operation):
        raise TypeError(f"{value!r} is not an operation, tensor or variable of a graph.")
    return op


class _Stacks(threading.local):
    """The default sessions of a thread, the innermost last."""

    def __init__(self) -> None:
        self.sessions: list[Any] = []


_stacks = _Stacks()
# The default graphs, the innermost last. Replicas of a step have those of the thread that calls it.
_open_graphs: contextvars.ContextVar[tuple[Graph, ...]] = contextvars.ContextVar(
    "open_graphs", default=()
)
_global = [Graph()]


def get_default_graph() -> Graph:
    """Return the graph for new operations: that of the innermost `Graph.as_default`."""
    graphs = _open_graphs.get()
    return graphs[-1] if graphs else _global[-1]


seed_sources.append(lambda: get_default_graph().weight_seed)


def in_default_of_a_block() -> bool:
    """Return True inside of `Graph.as_default`."""
    return bool(_open_graphs.get())


def reset_default_graph() -> None:
    """Start with an empty default graph, unless a `Graph.as_default` is open."""
    if in_default_of_a_block():
        raise RuntimeError("reset_default_graph cannot be called inside Graph.as_default.")
    _global[-1] = Graph()


@contextlib.contextmanager
def as_default_session(session: Any) -> Iterator[Any]:
    """Return a context manager; `Tensor.eval` and `Operation.run` in its block use a session."""
    _stacks.sessions.append(session)
    try:
        yield session
    finally:
        _stacks.sessions.remove(session)


def default_session() -> Any:
    """Return the innermost session whose ``with`` block is open."""
    if not _stacks.sessions:
        why = "there is no default session: write `with Session():`, or pass session=."
        raise InvalidArgumentError(why)
    return _stacks.sessions[-1]
