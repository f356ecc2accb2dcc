"""`GraphVariable`, public as `graph.Variable`: a value that a task keeps and its clients share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.exports import export as _export
from ndistribute.graph.graph import Graph, Operation, Symbolic, Tensor, as_tensor, get_default_graph
from ndistribute.graph.ops import op_named
from ndistribute.graph.partition import within
from ndistribute.graph.shapes import Known, Shape, narrowed
from ndistribute.mistakes import accepting
from ndistribute.variables.policy import fitted

GLOBAL_VARIABLES = "variables"
LOCAL_VARIABLES = "local_variables"
METRIC_VARIABLES = "metric_variables"
TRAINABLE_VARIABLES = "trainable_variables"
GLOBAL_STEP = "global_step"


class GraphVariable(Symbolic):
    """A variable of a graph, which its device's task keeps and operations read and change.

    Public as `graph.Variable`. It has no value until its initializer has run. Clients share a
    variable if it has the same name and the same task in their graphs. A step that reads it gets a
    snapshot, which later updates do not change.

    Args:
        initial_value: an array, a number, a tensor, or a function that returns one.
        trainable: whether optimizers change it by default.
        name: its name in the current scope.
        dtype: its dtype; None: that of the initial value, float32 for Python floats and int32 for
            Python integers.
        collections: the names of the collections to add it to; None: the global variables.

    >>> with Graph().as_default():
    ...     w = GraphVariable(np.zeros(2), name="w")
    ...     step = w.assign_add([1.0, 2.0])
    >>> w.name, w.shape, w.dtype
    ('w:0', (2,), dtype('float64'))
    """

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        name: str = "Variable",
        dtype: Any = None,
        collections: list[str] | None = None,
    ) -> None:
        graph = get_default_graph()
        self.trainable = trainable
        scope = f"{graph.unique_name(name)}/"
        # The variable lives outside of control flow and of control dependencies.
        with graph.control_dependencies(None), graph.name_scope(scope):
            before = graph.version
            # A function that places the variable may ask for its bytes, so this comes first.
            with graph.device(None):
                made = initial_value() if callable(initial_value) else initial_value
                made = narrowed(made) if dtype is None else made
                self.initial_value: Tensor = as_tensor(made, dtype, "initial_value")
                if dtype is not None and self.initial_value.dtype != np.dtype(dtype):
                    self.initial_value = self.initial_value.astype(dtype)
            self.dtype, self.shape = self.initial_value.dtype, self.initial_value.shape
            attributes = {"variable": scope[:-1], **self._static()}
            self.op: Operation = graph.add("variable", name=scope, outputs=0, attributes=attributes)
            for op in graph.get_operations()[before:]:
                op.set_device(op.device or self.op.device)
            self.initializer: Operation = self._kernel("assign", self.initial_value).op
            self._snapshot = self._kernel("read")
        names = [GLOBAL_VARIABLES] if collections is None else list(collections)
        for key in names + ([TRAINABLE_VARIABLES] if trainable else []):
            graph.add_to_collection(key, self)

    @property
    def name(self) -> str:
        """The unique name in its graph, followed by ``:0``."""
        return f"{self.op.name}:0"

    @property
    def graph_element(self) -> Tensor:
        """The tensor that stands for it in operations."""
        again = self._read_in() is not self.graph or self.graph.has_control_dependencies()
        return self.read_value() if again else self._snapshot

    def value(self) -> Tensor:
        """Return its value as a tensor."""
        return self.graph_element

    def read_value(self) -> Tensor:
        """Return its value as a new tensor, read after the current control dependencies."""
        with self.graph.name_scope(f"{self.op.name}/"):
            return self._kernel("read")

    def initialized_value(self) -> Tensor:
        """Return its value as a tensor, or its initial value if it has no value yet."""
        return self._kernel("initialized_value", self.initial_value)

    def is_initialized(self) -> Tensor:
        """Return a boolean tensor that tells whether it has a value."""
        return self._kernel("is_initialized")

    @accepting("name", "read_value", "use_locking")
    def assign(self, value: Any) -> Tensor:
        """Return a tensor with its new value; computing the tensor assigns the value."""
        return self._change("assign", value)

    @accepting("name", "read_value", "use_locking")
    def assign_add(self, delta: Any) -> Tensor:
        """Return a tensor with its new value; computing the tensor adds to the variable."""
        return self._change("assign_add", delta)

    @accepting("name", "read_value", "use_locking")
    def assign_sub(self, delta: Any) -> Tensor:
        """Return a tensor with its new value; computing the tensor subtracts from the variable."""
        return self._change("assign_sub", delta)

    def initialize_with(self, value: Any) -> None:
        """Make its initializer assign a value; raise a ValueError if that does not fit."""
        if self.shape is not None:
            self.shape.merged(Shape(value.shape))
        fitting = fitted(value, self.dtype or value.dtype)
        if fitting is None:
            raise ValueError(
                f"variable {self.name!r} of {self.dtype} cannot hold values of {value.dtype}."
            )
        with self.graph.as_default(), self.graph.control_dependencies(None):
            with self.graph.colocate_with(self.op):
                self.initial_value = as_tensor(fitting)
            self.initializer = self._kernel("assign", self.initial_value).op

    def load(self, value: Any, session: Any = None) -> None:
        """Assign a value in a session now."""
        self.initializer.run({self.initial_value: value}, session)

    def eval(self, session: Any = None) -> Any:
        """Return its value in a session or the default session."""
        return self.graph_element.eval(session=session)

    def __getitem__(self, index: Any) -> Any:
        """Return a part of it; only the part leaves its task."""
        with self.graph.colocate_with(self.op):
            return super().__getitem__(index)

    def __repr__(self) -> str:
        return f"<graph.Variable {self.name!r}, shape={self.shape}, dtype={self.dtype}>"

    def _change(self, kind: str, value: Any) -> Tensor:
        with self.graph.colocate_with(self.op):
            operand = as_tensor(value, None if hasattr(value, "op") else self.dtype)
        return self._kernel(kind, operand)

    def _kernel(self, kind: str, *inputs: Tensor) -> Tensor:
        attributes = {"variable": self.op.name}
        if kind == "assign":
            attributes |= self._static()
        # In a branch of `cond`, only that branch makes the change, and later reads are there, too.
        graph = self._read_in() if op_named(kind).reads else get_default_graph()
        if not graph.encloses(self.graph):
            graph = self.graph
        known = Known(self.dtype, self.shape)
        if kind == "is_initialized":
            known = Known(np.dtype(bool), Shape(()))
        op = graph.add(kind, inputs, attributes=attributes, device=self.device, known=known)
        return op.outputs[0]

    def _read_in(self) -> Graph:
        """Return the innermost branch that has changed the variable, or the variable's graph."""
        around: Graph | None = get_default_graph()
        while around is not None and around is not self.graph:
            if around.has_control_dependencies() and self.op.name in changed(around):
                return around
            around.reads.add(self.op.name)
            around = around.outer
        return self.graph

    def _static(self) -> dict[str, Any]:
        """Return its dtype and shape as plain values; None where they are known only in a run."""
        shape = self.shape
        return {
            "dtype": None if self.dtype is None else self.dtype.name,
            "shape": None if shape is None or None in shape else [*map(int, shape)],
        }


def changed(*graphs: Graph) -> set[Any]:
    """Return the names of the variables that graphs change, also in branches and loops."""
    outer = [op.definition for graph in graphs for op in graph.get_operations()]
    using = [op for top in outer for op in (top, *within(top)) if "variable" in op.attributes]
    return {op.attributes["variable"] for op in using if not op_named(op.kind).reads}


def global_variables(scope: str | None = None) -> list[GraphVariable]:
    """Return the variables of the default graph, without local variables."""
    return get_default_graph().get_collection(GLOBAL_VARIABLES, scope)


def local_variables(scope: str | None = None) -> list[GraphVariable]:
    """Return the local variables of the default graph: each client has its own values."""
    return get_default_graph().get_collection(LOCAL_VARIABLES, scope)


def trainable_variables(scope: str | None = None) -> list[GraphVariable]:
    """Return the variables of the default graph that optimizers change."""
    return get_default_graph().get_collection(TRAINABLE_VARIABLES, scope)


def variables_initializer(variables: list[GraphVariable], name: str = "init") -> Operation:
    """Return the operation that gives variables their initial values."""
    graph = get_default_graph()
    with graph.control_dependencies([variable.initializer for variable in variables]):
        return graph.add("group", name=name, outputs=0)


def global_variables_initializer() -> Operation:
    """Return the operation that gives the global variables their initial values."""
    return variables_initializer(global_variables())


def report_uninitialized_variables(
    var_list: Sequence[GraphVariable] | None = None, name: str = "report_uninitialized_variables"
) -> Tensor:
    """Return a tensor of the names of the variables that have no value.

    Args:
        var_list: the variables to look at; None: the global and the local ones.
        name: the name scope of the operations.

    >>> from ndistribute.graph.session import Session
    >>> with Graph().as_default(), Session() as session:
    ...     w = GraphVariable(0.0, name="w")
    ...     session.run(report_uninitialized_variables()).tolist()
    ['w']
    """
    chosen = [*global_variables(), *local_variables()] if var_list is None else var_list
    with get_default_graph().name_scope(name):
        names = as_tensor(np.array([variable.op.name for variable in chosen], np.str_))
        if not chosen:
            return names
        have: Any = np.concatenate([np.reshape(each.is_initialized(), [1]) for each in chosen])
        return names[np.logical_not(have)]  # type: ignore[no-any-return]


def find_global_step(graph: Graph | None = None) -> GraphVariable | None:
    """Return the variable that counts the steps of a graph or the default graph; None if none.

    It is the variable in the collection of global steps, or the variable with this name.
    """
    graph = graph or get_default_graph()
    named = [each for each in graph.get_collection(GLOBAL_VARIABLES) if each.op.name == GLOBAL_STEP]
    return next(iter([*graph.get_collection(GLOBAL_STEP), *named]), None)


def get_or_create_global_step(graph: Graph | None = None) -> GraphVariable:
    """Return the int64 variable that counts the training steps; the first call creates it."""
    graph = graph or get_default_graph()
    if (step := find_global_step(graph)) is not None:
        return step
    with graph.as_default(), graph.name_scope(None), graph.control_dependencies(None):
        step = GraphVariable(np.int64(0), trainable=False, name="global_step")
    graph.add_to_collection(GLOBAL_STEP, step)
    return step


_export(vars(), but="changed find_global_step")
