"""`Layer`, a function of arrays with its own variables.

A layer creates its variables at its first call, from the shape of its input. It owns the variables
and layers that its attributes hold, also in lists, tuples and dicts. A path such as
``blocks/0/kernel`` names each of them. A layer remembers the arguments that created it, so that a
model can be saved without code.
"""

from __future__ import annotations

import difflib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute import tree
from ndistribute.context import get_replica_context
from ndistribute.mistakes import Explaining
from ndistribute.models import initializers, regularizers
from ndistribute.models.layers.arguments import (
    cast_floats,
    check_axes,
    dtypes_of,
    empty_like,
    example_of,
    lengths_of,
    made_in_call,
    numbered,
    on_device,
    once,
    taken_by,
)
from ndistribute.models.losses import global_count
from ndistribute.models.masks import attach_mask, mask_of, with_mask_of
from ndistribute.models.metrics import Mean, Metric
from ndistribute.models.symbolic import RecordedCall, is_plain, is_symbolic, record
from ndistribute.variables import Variable

IMAGES: tuple[str, ...] = ("images", "height", "width", "channels")
SEQUENCES: tuple[str, ...] = ("batch", "steps", "channels")
"""The axes of the input of layers; see `Layer.axes`."""
_STATES = "load_assets load_own_variables save_assets save_own_variables".split()
_LISTS = "non_trainable_variables trainable_variables variables".split()


def _building(build: Callable[[Any, Any], None]) -> Any:
    """Return a `build` that users may also call: it does what a first call does."""

    @functools.wraps(build)
    def built(self: Layer, input_shape: Any) -> None:
        if self._builds:
            build(self, input_shape)
            return
        example = example_of(input_shape, self.compute_dtype)
        if self.built and lengths_of(self.input_spec) != lengths_of(example):
            shapes = lengths_of(self.input_spec)
            raise ValueError(f"{self.name!r} was built for examples of the shapes {shapes}.")
        self._build_with(example)

    return built


class Replaceable:
    """A property that an attribute of the same name may replace."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __get__(self, instance: Any, kind: Any = None) -> Any:
        return self if instance is None else self._read(instance)


class Layer(Explaining):
    """The base class of layers.

    A subclass defines `call`, which computes the output, and `build`, which creates the variables
    with `add_weight`. Layers in its attributes, also in lists and dicts, belong to it.

    Args:
        name: the name in messages and summaries; None: the class name, with a number.
        trainable: whether tapes watch the layer's variables. You can also set it later; this sets
            it for the layers inside, too.
        dtype: the dtype of the variables and of the computation; or ``"mixed_float16"`` or
            ``"mixed_bfloat16"``, which compute in 16 bits and keep variables in float32. None means
            the policy of `set_dtype_policy`, or float32.
        input_shape: the shape of an example; a `Sequential` whose first layer has one creates its
            variables at once.
        input_dim: the length of an example of one axis, instead of `input_shape`.
        activity_regularizer: a penalty on the output, divided by the number of examples.

    >>> class Scale(Layer):
    ...     def build(self, input_shape):
    ...         self.factor = self.add_weight("factor", (), "ones")
    ...
    ...     def call(self, inputs):
    ...         return inputs * self.factor
    >>> layer = Scale(name="scale")
    >>> layer(np.ones(2, np.float32)), [v.name for v in layer.variables]
    (array([1., 1.], dtype=float32), ['scale/factor'])
    """

    known: ClassVar[dict[str, type[Layer]]] = {}
    """The classes of layers that this process has defined, by name."""
    policy: ClassVar[Any] = "float32"
    """The dtype of layers that are created without one; see `set_dtype_policy`."""
    weights_of_kind: ClassVar[dict[str, Any]] = {}
    """The initializers of weights by name, unless the options `NAME_initializer` say others."""
    axes: ClassVar[tuple[str, ...]] = ()
    """The names of the axes of the input, if their number is fixed."""
    fixes_last_axis = False
    """Whether the last axis of inputs keeps the length for which the layer was built."""
    supports_masking = False
    """Whether the mask of the input is that of the output, too; see `compute_mask`."""
    _trainable: bool = True
    _builds = False  # Whether the first call is creating the variables.
    _uncalled: ClassVar[dict[str, str]] = {
        **dict.fromkeys(_STATES, "keep what is to be saved in variables"),
        **dict.fromkeys(_LISTS, "set trainable of the layers or variables"),
        "losses": "define penalties",
    }

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Layer.known[cls.__name__] = cls
        if "build" in vars(cls):
            cls.build = _building(cls.build)  # type: ignore[method-assign]

    def __init__(
        self,
        *,
        name: str | None = None,
        trainable: bool = True,
        dtype: Any = None,
        input_shape: Sequence[int | None] | None = None,
        input_dim: int | None = None,
        activity_regularizer: str | Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self.name = numbered(type(self).__name__) if name is None else name
        if _calls.nested:
            _calls.made.append(self)
        self.trainable = trainable
        self.activity_regularizer = regularizers.get(activity_regularizer)
        if input_dim is not None:
            input_shape = (input_dim,)
        self._example_shape = None if input_shape is None else (*input_shape,)
        self.dtype, self.compute_dtype = dtypes_of(Layer.policy if dtype is None else dtype)
        self.built = False
        self._means: dict[str, Mean] = {}  # Of `add_metric`.
        self.input_spec: Any = None
        """A batch without examples, of the shape and dtype of the first input, once built."""
        self._recorded: list[RecordedCall] = []
        self._penalized: list[tuple[Callable[[Any], Any], Any]] = []  # Each with its variables.
        self._starts, self._regularizers = self._facts_of_weights(options)

    def _facts_of_weights(self, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the initializers and the regularizers of weights, by name."""
        starts, penalties = {}, {}
        for weight, start in self.weights_of_kind.items():
            key = weight.removesuffix("_kernel")
            starts[weight] = initializers.get(options.pop(f"{key}_initializer", start))
            penalties[weight] = regularizers.get(options.pop(f"{key}_regularizer", None))
            if options.pop(f"{key}_constraint", None) is not None:
                what = f"{self.name}: layers have no {key}_constraint: assign the variable"
                raise ValueError(f"{what} in a callback's on_train_batch_end, or regularize it.")
        for name in options:
            kind, weights = type(self).__name__, [key.removesuffix("_kernel") for key in starts]
            known = [f"{key}_{what}" for key in weights for what in ("initializer", "regularizer")]
            if near := difflib.get_close_matches(name, known, 1):
                raise TypeError(f"{kind} takes no argument {name!r}: use {near[0]}.")
            raise TypeError(f"{kind} got an unexpected keyword argument {name!r}")
        return starts, penalties

    # Methods that a subclass defines.

    @_building
    def build(self, input_shape: Any) -> None:
        """Create the variables; called once before the first `call`, or earlier by the user.

        A call for a model creates the variables of all its layers.

        Args:
            input_shape: the shape of the first argument of `call`, with the length of the batch,
                which may be None; a nest of shapes for a nest of arrays.

        Raises:
            ValueError: the layer was built for another shape.
        """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output; a keyword `training` receives whether the model is being trained."""
        raise NotImplementedError(f"{type(self).__name__} defines no call.")

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the output, booleans of its first axes; None means no mask.

        Args:
            inputs: the first argument of `call`.
            mask: its mask, or None.
        """
        if mask is not None and not self.supports_masking:
            kind = f"{self.name} gets a mask, which {type(self).__name__} does not pass on"
            what = f"{kind}, so later layers, losses and metrics count all time steps. To change"
            warnings.warn(f"{what} it, set supports_masking or define compute_mask.", stacklevel=3)
        return mask if self.supports_masking else None

    # Methods for users and subclasses.

    @property
    def trainable(self) -> bool:
        """Whether tapes watch the variables; setting it also sets it for the layers inside."""
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        for layer in self.walk():
            layer._trainable = value

    # An attribute of a layer may have one of these names.
    input: Any = Replaceable(lambda layer: layer._first_call("input"))
    output: Any = Replaceable(lambda layer: layer._first_call("output"))
    input_shape: Any = Replaceable(lambda layer: shapes_of(layer.input))
    output_shape: Any = Replaceable(lambda layer: shapes_of(layer.output))
    metrics: Any = Replaceable(lambda layer: layer._held_metrics())
    weights: Any = Replaceable(lambda layer: layer.variables)
    trainable_weights: Any = Replaceable(lambda layer: layer.trainable_variables)
    non_trainable_weights: Any = Replaceable(lambda layer: layer.non_trainable_variables)

    def __call__(self, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        """Return the output of `call`, with the mask of `compute_mask`; symbolic if an argument is.

        Args:
            args: passed to `call`. The first is the input: its floats are cast to `compute_dtype`,
                and its host arrays are copied to the GPU of the calling replica.
            training: whether the model is being trained; None: the value in the layer that calls
                this one; without such a layer, the default of `call`, or False.
            kwargs: passed to `call`; if `call` has a keyword `mask`, it gets the mask of the input.
        """
        first, otherwise, takes_mask = taken_by(type(self).call)
        if not args and first in kwargs:
            args = (kwargs.pop(first),)
        inputs = args[0] if args else None
        kind: Any = type(inputs)
        if kwargs or len(args) != 1 or not is_plain(kind):
            outputs = self._called_on_symbols(args, training, kwargs)
            if outputs is not NotImplemented:
                return outputs
        outer = _calls.nested, _calls.training
        if args and getattr(inputs, "dtype", None) != self.compute_dtype:
            cast = functools.partial(cast_floats, self.compute_dtype)
            args = (tree.map_leaves(cast, inputs), *args[1:])
        if args and not outer[0]:
            args = (on_device(args[0]), *args[1:])
        if not self.built or self.fixes_last_axis:
            self._prepare(args)
        if not outer[0]:
            _calls.begin(self)
        _calls.nested = True
        _calls.training = outer[1] if training is None else bool(training)
        try:
            if otherwise is not None:
                kwargs["training"] = otherwise if _calls.training is None else _calls.training
            mask = mask_of(inputs) if kwargs.get("mask") is None else kwargs["mask"]
            if mask is not None and takes_mask:
                kwargs["mask"] = mask
            outputs = self.call(*args, **kwargs)
            if self.activity_regularizer is not None:
                self._penalize(outputs)
            outputs = outputs if outer[0] else self._returned(outputs, inputs)
            masks = mask is not None or type(self).compute_mask is not Layer.compute_mask
            if masks and any(each is None for each in tree.flatten(mask_of(outputs))):
                attach_mask(outputs, self.compute_mask(inputs, mask))
            return outputs
        finally:
            _calls.nested, _calls.training = outer

    def _refuse_made(self) -> None:
        """Raise a `ValueError` if a call made layers to train that this layer does not hold."""
        held, made, _calls.made = [*self.walk()], _calls.made, []
        for layer in made:
            if layer not in held and layer.built and layer.trainable_variables:
                raise ValueError(made_in_call(layer))

    def _called_on_symbols(self, args: Any, training: bool | None, kwargs: Any) -> Any:
        """Return symbolic outputs for symbolic inputs, or tensors for tensors of a graph."""
        leaves = tree.flatten(args[0]) if args else ()
        first: Any = leaves[0] if leaves else None
        if hasattr(first, "__call_model__"):  # A tensor of a graph.
            trains = bool(_calls.training if training is None else training)
            outputs = first.__call_model__(self, args, {"training": trains} | kwargs)
            if outputs is not NotImplemented:
                return outputs
        if not any(map(is_symbolic, (*args, *kwargs.values()))):
            return NotImplemented
        options = {} if training is None else {"training": training}
        self._recorded.append(record(self, args, kwargs | options))
        return self._recorded[-1].outputs

    def add_weight(
        self,
        name: str = "weight",
        shape: Sequence[int] = (),
        initializer: str | Callable[..., Any] | None = None,
        *,
        trainable: bool = True,
        dtype: Any = None,
        synchronization: Any = "auto",
        aggregation: Any = "none",
        regularizer: str | Callable[[Any], Any] | None = None,
    ) -> Variable:
        """Return a new variable named after the layer; keep it as an attribute.

        Args:
            name: the last part of the variable's name.
            shape: the variable's shape.
            initializer: a name, or a function of a shape and a dtype; None: the initializer in the
                layer's options, or ``"glorot_uniform"``.
            trainable: whether tapes watch it.
            dtype: the variable's dtype; None means the layer's.
            synchronization: as for `Variable`.
            aggregation: as for `Variable`.
            regularizer: a penalty on the variable; None: the regularizer in the layer's options, if
                any.
        """
        wanted = np.dtype(self.dtype if dtype is None else dtype)
        make = initializers.get(initializer or self._starts.get(name, "glorot_uniform"))
        kind = trainable and self.trainable, wanted, synchronization, aggregation
        variable: Variable = self._new_variable(name, tuple(shape), make, *kind)
        penalty = regularizers.get(regularizer) or self._regularizers.get(name)
        if penalty is not None:
            self._penalized.append((penalty, variable))
        return variable

    def _new_variable(self, name: str, shape: Any, make: Any, trainable: bool, *kind: Any) -> Any:
        path, dtype = f"{self.name}/{name}", kind[0]
        return Variable(lambda: make(shape, dtype), trainable, path, *kind)

    def _returned(self, outputs: Any, like: Any) -> Any:
        """Return outputs as an array type with more methods, if the input was of such a type.

        The call must not have made layers to train that this layer does not hold.
        """
        if _calls.made:
            self._refuse_made()
        like = like[0] if isinstance(like, (tuple, list)) and like else like
        if not (isinstance(like, np.ndarray) and hasattr(like, "numpy")):
            return outputs

        def viewed(value: Any) -> Any:
            plain = type(value) is np.ndarray
            return with_mask_of(value.view(type(like)), value) if plain else value

        return tree.map_leaves(viewed, outputs)

    def named_variables(self) -> dict[str, Variable]:
        """Return the variables of this layer and of its layers by path, each once.

        The order is that in which the attributes were set.
        """
        variables: dict[int, tuple[str, Variable]] = {}
        for path, held in self._held():
            if isinstance(held, Variable):
                variables.setdefault(id(held), (path, held))
        return dict(variables.values())

    @property
    def variables(self) -> list[Variable]:
        """The variables of this layer and of its layers."""
        return list(self.named_variables().values())

    @property
    def trainable_variables(self) -> list[Variable]:
        """The variables to train: those that tapes watch, of layers that are not frozen."""
        frozen = {id(v) for layer in self.walk() if not layer.trainable for v in layer.variables}
        return [v for v in self.variables if v.trainable and id(v) not in frozen]

    @property
    def non_trainable_variables(self) -> list[Variable]:
        """The other variables."""
        trained = {id(v) for v in self.trainable_variables}
        return [v for v in self.variables if id(v) not in trained]

    def count_params(self) -> int:
        """Return the number of elements of all variables."""
        return sum(variable.size for variable in self.variables)

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Return a copy of each variable, in the order of `variables`."""
        return [variable.numpy() for variable in self.variables]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assign an array to each variable, in the order of `variables`.

        Raises:
            ValueError: the number of arrays or a shape is wrong. No variable has changed.
        """
        variables, arrays = self.variables, [np.asarray(weight) for weight in weights]
        shapes, expected = [a.shape for a in arrays], [v.shape for v in variables]
        if shapes != expected:
            hint = "" if self.built else " It is not built yet: call it on an input first."
            raise ValueError(
                f"set_weights of {self.name!r}: the variables have the shapes {expected}, but the "
                f"arrays have {shapes}. Nothing has changed.{hint}"
            )
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array.astype(variable.dtype))

    @property
    def losses(self) -> list[Any]:
        """The penalties of the regularizers of this layer and of its layers, tracked.

        They include the losses that `add_loss` added in this thread's last call.
        """
        penalties = [each for layer in self.walk() for each in layer.penalties()]
        return penalties + self._added_losses()

    def _added_losses(self) -> list[Any]:
        """Return the losses that this layer and its layers added in the last call."""
        layers = list(self.walk()) if _calls.added else []
        return [value for layer, value in _calls.added if layer in layers]

    def add_loss(self, loss: Any) -> None:
        """Add a number to the loss of the model, in `call`; it is averaged over the replicas."""
        values = loss if isinstance(loss, list | tuple) else [loss]
        if any(map(callable, values)):
            raise TypeError(f"add_loss of {self.name!r} got a function: pass a number, in `call`.")
        _calls.added += [(self, value) for value in values]

    def add_metric(self, value: Any, name: str, aggregation: str | None = "mean") -> None:
        """Add numbers to a mean in the logs of the model, in `call`."""
        if aggregation not in ("mean", None):
            raise ValueError(f"add_metric: aggregation must be 'mean', got {aggregation!r}.")
        if name not in self._means:
            once(lambda: self._means.setdefault(name, Mean(name)))
        self._means[name].update_state(value)

    def _held_metrics(self) -> list[Metric]:
        """Return the metrics that this layer and its layers hold, also in lists and dicts."""
        kinds = (Metric, list, tuple, dict)
        parts = [item for layer in self.walk() for item in vars(layer).items()]
        parts.sort(key=lambda item: item[0] == "_means")  # Those of `add_metric` come last.
        nests = [value for _, value in parts if isinstance(value, kinds)]
        return [value for _, value in tree.leaves("", nests) if isinstance(value, Metric)]

    def _prepare(self, args: Sequence[Any]) -> None:
        """Create the variables, or check that the input has the features that they fit."""
        if self.axes:
            check_axes(f"{self.name}: the input", args[0].shape, self.axes)
        if not self.built:
            self._build_once(args)
        last = getattr(self.input_spec, "shape", ())[1:][-1:]
        if last and self.fixes_last_axis and args[0].shape[-1:] != last:
            raise ValueError(
                f"{self.name}: the input has shape {tuple(args[0].shape)}, but the layer was built "
                f"for {last[0]} features on the last axis."
            )

    def _penalize(self, outputs: Any) -> None:
        """Add the penalty of the outputs, for each example of all replicas, to the loss."""
        replica = get_replica_context()
        replicas = 1 if replica is None else replica.num_replicas_in_sync
        for y in tree.flatten(outputs):
            share = replicas / global_count(y.shape[0])
            self.add_loss(self.activity_regularizer(y) * share)  # type: ignore[misc]

    def penalties(self) -> list[Any]:
        """Return the penalties of this layer alone; a subclass may override this."""
        return [penalty(variable) for penalty, variable in self._penalized]

    def walk(self) -> Iterator[Layer]:
        """Yield this layer, and all layers that it holds, each once."""
        seen = {id(self)}
        yield self
        for _, held in self._held():
            if isinstance(held, Layer) and id(held) not in seen:
                seen.add(id(held))
                yield held

    @classmethod
    def assembled(cls, config: Mapping[str, Any]) -> Any:
        """Return a new layer for a configuration, in which a model has the layers themselves."""
        return cls.from_config(config)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def _first_call(self, part: str) -> Any:
        """Return the symbolic input or output of the first call with symbolic arrays."""
        if not self._recorded:
            raise AttributeError(
                f"{self!r} has no {part}: it was not called on a symbolic array, such as the "
                "result of Input(). In a Sequential, begin with an Input."
            )
        call = self._recorded[0]
        if part == "output":
            return call.outputs
        return call.args[0] if len(call.args) == 1 else call.inputs or call.outputs

    def _held(self, prefix: str = "", inside: frozenset[int] = frozenset()) -> Iterator[Any]:
        """Yield the path and value of each layer and variable that this layer holds."""
        inside |= {id(self)}
        for path, held in self._own():
            if isinstance(held, Variable):
                yield prefix + path, held
            elif id(held) not in inside:
                yield prefix + path, held
                yield from held._held(f"{prefix}{path}/", inside)

    def _own(self) -> Iterator[tuple[str, Any]]:
        """Yield the path and value of each layer and variable in the attributes of this layer."""
        for path, value in tree.leaves("", vars(self) | {"_arguments": (), "_penalized": ()}):
            if isinstance(value, (Layer, Variable)):
                yield path, value

    def _build_with(self, batch: Any) -> None:
        """Create the variables for an input; a model overrides this."""
        self._prepare([batch])

    def _build_once(self, args: Sequence[Any]) -> None:
        """Create the variables; inside `run`, once for all replicas, which wait for it."""

        def build() -> bool:
            if self.built:
                return bool(self.variables)
            attributes = vars(self).items()
            self._refuse_uncalled(name for name, value in attributes if value is not None)
            self._builds = True
            try:
                self.build(tree.map_leaves(np.shape, args[0]) if args else None)
            finally:
                del self._builds
            self.input_spec = tree.map_leaves(empty_like, args[0]) if args else None
            self.built = True
            return bool(self.variables)

        if once(build) and not self.built:  # Another replica has called another layer.
            raise ValueError(made_in_call(self))


def shapes_of(nest: Any) -> Any:
    """Return the shape of each array in a nest."""
    return tree.map_leaves(lambda array: array.shape, nest)


def build_for(layer: Layer, batch: Any, strategy: Any) -> Any:
    """Create the variables of a layer for inputs of the shapes and dtypes of a batch.

    Returns:
        The layer's output for an example of zeros, on each replica.
    """
    example = tree.map_leaves(lambda array: np.zeros((1, *array.shape[1:]), array.dtype), batch)

    with strategy.scope():
        return strategy.run(lambda inputs: layer(inputs, training=False), args=(example,))


def set_dtype_policy(policy: Any) -> None:
    """Set the default dtype of layers that are created from now on.

    Args:
        policy: a floating dtype, ``"mixed_float16"`` or ``"mixed_bfloat16"``.

    Raises:
        ValueError: `policy` is none of these.

    >>> set_dtype_policy("mixed_float16")
    >>> layer = Layer()
    >>> layer.dtype.name, layer.compute_dtype.name
    ('float32', 'float16')
    >>> set_dtype_policy("float32")
    """
    dtypes_of(policy)
    Layer.policy = policy


class _Calls(threading.local):
    """The state of a thread: whether the current call is in training, and the added losses."""

    nested = False  # Whether a layer is being called.
    training: bool | None = None  # None: not specified.

    def __init__(self) -> None:
        self.added: list[tuple[Layer, Any]] = []
        self.made: list[Layer] = []  # Created since the outermost call began.

    def begin(self, layer: Layer) -> None:
        """Forget what earlier calls of a layer added or made."""
        self.made = []
        if self.added:
            layers = list(layer.walk())
            self.added = [each for each in self.added if each[0] not in layers]


_calls = _Calls()
