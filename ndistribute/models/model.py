"""`Model`, a layer that can be trained, and `Sequential`, a model of one layer after another."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ndistribute import tree
from ndistribute.dtypes import kind_of
from ndistribute.mistakes import accepting
from ndistribute.models.checkpoint import check_absent
from ndistribute.models.export import export, save, to_json
from ndistribute.models.functional import CallGraph, cloned, connected, with_axes
from ndistribute.models.layers.inputs import Input, InputLayer
from ndistribute.models.layers.layer import Layer, Replaceable
from ndistribute.models.symbolic import SymbolicArray, is_symbolic
from ndistribute.models.training import Trainer
from ndistribute.variables import Variable

_WIDTH, _LEAST = 80, 20  # Of a summary, and of its column of shapes.
_UNBROKEN = "\N{NO-BREAK SPACE}"


class Model(Trainer):
    """A model, made from its inputs and outputs, or by a subclass that computes in `call`.

    Create and compile it in the scope of a strategy, which then runs it.

    Args:
        inputs: a result of `Input`; for several inputs, a list, tuple or dict of them. A subclass
            with a `call` passes no inputs, and creates its layers in its constructor.
        outputs: a nest of results of layers and NumPy's functions, computed from the inputs.
        name: the name in messages and summaries; None: the class name, with a number.
        options: `trainable` and `dtype`, see `Layer`; the default dtype is that of the inputs.

    Raises:
        TypeError: inputs or outputs are not symbolic arrays.
        ValueError: the outputs need an input that is not in `inputs`.

    >>> import numpy as np
    >>> from ndistribute.models.layers import Dense, Input, add
    >>> x = Input((4,))
    >>> hidden = Dense(4, activation="relu")(x)
    >>> model = Model(inputs=x, outputs=Dense(2)(add([x, hidden])))
    >>> model.predict(np.zeros((3, 4))).shape, model.count_params()
    ((3, 2), 30)

    >>> class Classifier(Model):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.hidden = layers.Dense(8, activation="relu")
    ...         self.output = layers.Dense(2)
    ...
    ...     def call(self, x):
    ...         return self.output(self.hidden(x))
    >>> from ndistribute.models import layers
    >>> import numpy as np
    >>> model = Classifier()
    >>> model(np.zeros((3, 4), np.float32)).shape, model.count_params()
    ((3, 2), 58)
    """

    # An attribute of a model may have one of these names.
    layers: Any = Replaceable(lambda model: model._parts())
    inputs: Any = Replaceable(lambda model: model._connected().inputs)
    outputs: Any = Replaceable(lambda model: model._connected().outputs)
    input: Any = inputs
    output: Any = outputs
    input_names: Any = Replaceable(lambda model: model._graph and model._graph.input_names)
    output_names: Any = Replaceable(lambda model: model._graph and model._graph.output_names)
    _graph: CallGraph | None = None
    _aside: Any = None  # The graph with the symbolic losses and metrics that were added, if any.

    def __init__(
        self, inputs: Any = None, outputs: Any = None, *, name: str | None = None, **options: Any
    ) -> None:
        inputs = None if inputs is self else inputs  # Some subclasses pass themselves.
        graph = None if inputs is None and outputs is None else CallGraph(inputs, outputs)
        if graph is not None:
            floats = (value.dtype for value in tree.flatten(inputs) if kind_of(value.dtype) == "f")
            options = {"dtype": next(floats, None)} | options
        super().__init__(name=name, **options)
        if graph is not None:
            self.layers, self.variables_of_calls = graph.layers, graph.variables
            self._connect(graph)

    def call(self, inputs: Any) -> Any:
        """Return the outputs; a subclass overrides this."""
        if self._aside is None:
            return super().call(inputs) if self._graph is None else self._graph.run(inputs)
        outputs, losses, metrics = self._aside.run(inputs)
        super().add_loss(losses)
        for name, value in metrics.items():
            super().add_metric(value, name)
        return outputs

    def add_loss(self, loss: Any) -> None:
        """Add a number to the loss, in `call` or as a result computed from symbolic inputs."""
        if not is_symbolic(loss):
            return super().add_loss(loss)
        return self._add_aside(loss if isinstance(loss, list | tuple) else [loss], {})

    def add_metric(self, value: Any, name: str, aggregation: str | None = "mean") -> None:
        """Add numbers to a mean in the logs, in `call` or from symbolic inputs."""
        if not is_symbolic(value):
            return super().add_metric(value, name, aggregation)
        return self._add_aside([], {name: value})

    def _add_aside(self, losses: Sequence[Any], metrics: dict[str, Any]) -> None:
        """Let the graph compute more losses and metrics beside the outputs."""
        graph, aside = self._connected(), self._aside
        _, before, known = (None, [], {}) if aside is None else aside.outputs
        more = [*before, *losses], known | metrics
        self._aside = CallGraph(graph.inputs, (graph.outputs, *more))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return None: the layers of the model have attached the masks of the outputs."""

    def _defines_call(self) -> bool:
        return self._graph is not None or type(self).call is not Model.call

    def _connected(self) -> CallGraph:
        """Return the calls between the symbolic inputs and outputs."""
        if self._graph is None:
            raise AttributeError(
                f"{self!r} has no symbolic inputs and outputs: make it with Model(inputs, "
                "outputs), or begin a Sequential with Input(shape)."
            )
        return self._graph

    def _connect(self, graph: CallGraph) -> None:
        """Set what the model computes, and the shapes of its input."""
        self._graph = graph
        self._build_once([graph.sample()])

    def get_layer(self, name: str | None = None, index: int | None = None) -> Layer:
        """Return the layer of `layers` with a name or an index.

        Raises:
            ValueError: there is no such layer, or not exactly one argument is passed.
        """
        if (name is None) == (index is None):
            raise ValueError("get_layer needs a name or an index.")
        layers = self.layers
        if index is None:
            layers, index = [layer for layer in layers if layer.name == name], 0
        if not -len(layers) <= index < len(layers):
            names = [layer.name for layer in self.layers]
            raise ValueError(
                f"get_layer: {self.name!r} has no layer {name or index!r}; it has {names}."
            )
        return layers[index]  # type: ignore[no-any-return]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that create an equal model, and a functional model's calls."""
        config = super().get_config()
        calls = self._graph.calls if self._graph is not None and is_symbolic(config) else []
        parts = [(call.function, call.args, call.kwargs, call.outputs) for call in calls]
        return {"calls": parts, **config} if parts else config

    @classmethod
    @accepting("custom_objects")  # The configuration has the classes themselves.
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Return a new model from a result of `get_config`, with new layers and variables."""
        return cls._made(cloned(dict(config), {}))

    @classmethod
    def assembled(cls, config: Mapping[str, Any]) -> Any:
        """Return a new model from a configuration that contains the layers themselves."""
        inherited = cls.from_config.__func__ is Model.from_config.__func__  # type: ignore[attr-defined]
        return cls._made(config) if inherited else cls.from_config(config)

    @classmethod
    def _made(cls, config: Mapping[str, Any]) -> Any:
        return cls(**(connected(config) if "calls" in config else config))

    def to_json(self) -> str:
        """Return the architecture as JSON text, without weights; see `model_from_json`."""
        return to_json(self)

    def export(self, path: str | os.PathLike[str], max_to_keep: int | None = None) -> Path:
        """Write the architecture and the weights, and return the folder; see `models.load`.

        Every worker must call this; the chief writes. The files contain no code: pass the classes
        of your own layers to `load`.

        Args:
            path: the folder's path, to which a number is appended.
            max_to_keep: the number of exports of this path to keep; None: all.

        Raises:
            ValueError: the model is not built, or an argument of a layer cannot be written.
        """
        return export(self, path, max_to_keep)

    def save(
        self, path: str | os.PathLike[str], overwrite: bool = True, include_optimizer: bool = True
    ) -> None:
        """Write the model with its optimizer, loss and metrics; replace what is at the path.

        `models.load` returns the model in this state, so that `fit` can continue. As for `export`,
        every worker must call this.

        Args:
            path: the path of a folder; its name may have any ending.
            overwrite: whether to replace what is at the path already.
            include_optimizer: whether to write the optimizer, the loss and metrics too.

        Raises:
            FileExistsError: the path exists, and `overwrite` is False.
            ValueError: the model is not built, or an argument of a layer, of the optimizer, the
                loss or a metric cannot be written.
        """
        check_absent(self.strategy, path, overwrite)
        save(self, path, include_optimizer)

    def summary(self) -> str:
        """Return a table of the layers with the shapes and numbers of their variables.

        The table of a functional model has the shapes of outputs, and the sources of inputs.

        >>> from ndistribute.models.layers import Dense, Input
        >>> x = Input((4,), name="x")
        >>> print(Model(x, x + Dense(4, name="hidden")(x), name="net").summary())
        Model 'net'
        layer           output shape  parameters  connected to
        ------------------------------------------------------
        x (InputLayer)  (None, 4)              0  -
        hidden (Dense)  (None, 4)             20  x
        add (function)  (None, 4)              0  x, hidden
        ------------------------------------------------------
        Parameters: 20, to train: 20
        """
        rows = self._rows()
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        layout = "{{:<{}}}  {{:<{}}}  {{:>{}}}  {{}}".format(*widths)
        lines = [layout.format(*row, "").rstrip() for row in rows]
        rule = "-" * len(lines[0])
        trained = sum(variable.size for variable in self.trainable_variables)
        total = f"Parameters: {self.count_params():,}, to train: {trained:,}"
        if not all(map(_is_built, self._parts())):
            total += "\nThe other variables are created when the model is first called."
        return "\n".join([f"Model {self.name!r}", lines[0], rule, *lines[1:], rule, total])

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a summary, the headings first."""
        if self._graph is not None:
            return [("layer", "output shape", "parameters", "connected to"), *self._graph.rows()]
        rows = [("layer", "variables", "parameters"), *map(_row, self._parts())]
        variables = [held for _, held in self._own() if isinstance(held, Variable)]
        if variables:
            rows.append(_row(self, variables))
        room = max(_LEAST, _WIDTH - 4 - sum(max(len(row[k]) for row in rows) for k in (0, 2)))
        return [line for row in rows for line in _wrapped(*row, room)]

    def nodes(self) -> Iterator[tuple[str, str, Sequence[str], str]]:
        """Yield for each layer its name, its class, the names of its sources, and "", for a graph.

        Only functional models and `Sequential` know the sources of a layer before they are called.
        """
        if self._graph is not None:
            yield from self._graph.nodes()
            return
        before: list[str] = []
        for layer in self._parts():
            yield layer.name, type(layer).__name__, before, ""
            before = [layer.name] if isinstance(self, Sequential) else []

    def _parts(self) -> list[Layer]:
        """Return the layers that the model itself holds, also in lists and dicts, each once."""
        parts = {id(held): held for _, held in self._own() if isinstance(held, Layer)}
        return list(parts.values())


def _row(layer: Layer, variables: Sequence[Variable] | None = None) -> tuple[str, str, str]:
    """Return the row of a layer in a summary, in which equal shapes are counted."""
    name = f"{layer.name} ({type(layer).__name__})"
    if variables is None and not _is_built(layer):
        return name, "not built", "?"
    shown = layer.variables if variables is None else variables
    counts = Counter(str(variable.shape) for variable in shown)
    each = (f"{n} x {shape}" if n > 1 else shape for shape, n in counts.items())
    shapes = ", ".join(shape.replace(" ", _UNBROKEN) for shape in each)
    return name, shapes or "-", f"{sum(variable.size for variable in shown):,}"


def _wrapped(name: str, shapes: str, count: str, room: int) -> list[tuple[str, str, str]]:
    """Return a row of a summary as lines, which end between shapes."""
    first, *others = textwrap.wrap(shapes, room, break_long_words=False)
    lines = [(name, first, count), *(("", line, "") for line in others)]
    return [(left, middle.replace(_UNBROKEN, " "), right) for left, middle, right in lines]


def _is_built(layer: Layer) -> bool:
    return all(part.built for part in layer.walk())


class Sequential(Model):
    """A model that applies layers in turn.

    Args:
        layers: the layers; `add` appends more.
        name: the name in messages and summaries.

    >>> from ndistribute.models.layers import Dense
    >>> model = Sequential([Dense(8, activation="relu"), Dense(2)])
    >>> import numpy as np
    >>> model(np.zeros((3, 4), np.float32)).shape
    (3, 2)
    """

    def __init__(self, layers: Iterable[Layer] = (), name: str | None = None) -> None:
        super().__init__(name=name)
        self.layers: list[Layer] = []
        self._values: list[SymbolicArray] = []  # The input and the outputs of layers, if known.
        for layer in layers:
            self._append(layer)
        self._connect_values()

    def add(self, layer: Layer | SymbolicArray) -> None:
        """Append a layer; the first may be a result of `Input`.

        Raises:
            TypeError: `layer` is not a `Layer`.
            ValueError: `layer` is an `Input`, but not the first.
        """
        self._append(layer)
        self._connect_values()

    def pop(self) -> Layer:
        """Remove the last layer, and return it.

        Raises:
            IndexError: the model has no layers.
        """
        if not self.layers:
            raise IndexError(f"pop of {self.name!r}: it has no layers.")
        if self._values:
            self._values.pop()
            self._connect_values()
        return self.layers.pop()

    def _append(self, layer: Any) -> None:
        layer = layer.output if isinstance(layer, InputLayer) else layer
        if isinstance(layer, SymbolicArray):
            if self.layers or self._values:
                raise ValueError(
                    f"Sequential: {layer!r} must be the first element, and the only Input."
                )
            self._values.append(layer)
            self.compute_dtype = layer.dtype if kind_of(layer.dtype) == "f" else self.compute_dtype
            return
        if not isinstance(layer, Layer):
            raise TypeError(f"Sequential needs Layer objects, got {layer!r}.")
        if not self.layers and not self._values:
            self._values = _inputs_like(layer)
        if self._values:  # The shape of the input is known.
            with self.strategy.scope():
                self._values.append(layer(self._values[-1]))
        self.layers.append(layer)

    def _connect_values(self) -> None:
        if self._values:
            self._connect(CallGraph(self._values[0], self._values[-1]))

    def call(self, inputs: Any) -> Any:
        """Return the output of the last layer."""
        if self._values and hasattr(inputs, "shape"):
            inputs = with_axes(self._values[0], inputs)
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs

    def get_config(self) -> dict[str, Any]:
        """Return the layers, after the input if its shape is known, and the name."""
        starts = [value.call.function for value in self._values[:1]]
        return {"layers": [*starts, *self.layers], "name": self.name}

    def _parts(self) -> list[Layer]:
        return self.layers


def _inputs_like(layer: Layer) -> list[SymbolicArray]:
    """Return an input that fits a layer; None if the layer does not know its input."""
    graph = layer._graph if isinstance(layer, Model) else None
    if graph is not None and isinstance(graph.inputs, SymbolicArray):
        return [Input(graph.inputs.shape[1:], dtype=graph.inputs.dtype)]
    shape = layer._example_shape
    return [] if shape is None else [Input(shape, dtype=layer.compute_dtype)]


def clone_model(model: Model) -> Any:
    """Return a model with the same configuration and names, and new layers and variables.

    >>> from ndistribute.models.layers import Dense
    >>> model = Sequential([Input((4,)), Dense(2)])
    >>> clone_model(model).count_params(), clone_model(model).layers[0] is model.layers[0]
    (10, False)
    """
    return cloned(model, {})
