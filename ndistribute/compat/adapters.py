"""Classes with TensorFlow's methods and keywords, and the adapters that make them.

The tables of names refer to this file: names to classes, and adapters to rows of `ADAPTERS`.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import graph, models
from ndistribute.compat import programs, signatures, tensor_functions
from ndistribute.compat.keras_functions import keras_operation
from ndistribute.compat.keras_layers import WithTensors, layer
from ndistribute.compat.keras_objects import get_optimizer, with_decay
from ndistribute.compat.signatures import (
    adapted,
    plainly,
    raising,
    subclass,
    tensor_if_array,
    unary,
)
from ndistribute.compat.strategies import by_communication, strategy
from ndistribute.compat.tensor_functions import eager_constant
from ndistribute.compat.tensors import WatchingTape, as_tensor, assignable, plain, variable_type
from ndistribute.data.iterator import ElementIterator
from ndistribute.graph.graph import Symbolic
from ndistribute.mistakes import accepting
from ndistribute.models import layers
from ndistribute.tree import flatten, map_leaves


def tensors(nest: Any) -> Any:
    """Return copies of arrays and lists of numbers, in tuples and dicts."""
    if isinstance(nest, tuple):
        items = tuple(map(tensors, nest))
        return type(nest)(*items) if hasattr(nest, "_fields") else items
    if isinstance(nest, dict):
        return {key: tensors(value) for key, value in nest.items()}
    return plain(eager_constant(nest))


def _of_elements(function: Any) -> Any:
    """Return a function whose elements are tensors, and which makes no operations of graphs."""

    @functools.wraps(function, ["__name__", "__qualname__"])
    def call(*element: Any) -> Any:
        with programs.init_scope():
            return function(*map_leaves(as_tensor, element))

    return call


def _numpy(leaf: Any) -> Any:
    is_text = getattr(getattr(leaf, "dtype", None), "kind", "") == "U"
    return as_tensor(leaf).numpy() if is_text else leaf


class NumpyIterator(ElementIterator):
    """An iterator over elements as NumPy arrays, with a method `next`."""

    def next(self) -> Any:
        """Return the next element."""
        return next(self)


class TensorDataset(nd.Dataset):
    """A dataset with TensorFlow's names of arguments, in which lists count as tensors."""

    batch = adapted(nd.Dataset.batch, "num_parallel_calls", "deterministic", batch_size="n")
    map = adapted(nd.Dataset.map, "deterministic", map_func="fn")
    prefetch = adapted(nd.Dataset.prefetch, buffer_size="n")
    cardinality = unary(lambda self: np.int64(nd.Dataset.cardinality(self)), 0)

    _convert = staticmethod(functools.partial(map_leaves, tensor_if_array))
    _function = staticmethod(lambda fn, what: _of_elements(nd.Dataset._function(fn, what)))

    def reduce(self, initial_state: Any, reduce_func: Any, name: Any = None) -> Any:
        return map_leaves(tensor_if_array, super().reduce(tensors(initial_state), reduce_func))

    def as_numpy_iterator(self) -> Any:
        """Return an iterator over arrays; text becomes bytes, as in `numpy()` of tensors."""
        return NumpyIterator(self._node, functools.partial(map_leaves, _numpy))

    def make_one_shot_iterator(self) -> Any:
        """Return an iterator whose `get_next` returns tensors of a graph."""
        return graph.DatasetIterator(self)

    make_initializable_iterator = make_one_shot_iterator

    @classmethod
    def from_tensor_slices(cls, nest: Any, name: Any = None) -> nd.Dataset:
        return super().from_tensor_slices(tensors(nest))

    @classmethod
    def from_tensors(cls, nest: Any, name: Any = None) -> nd.Dataset:
        return super().from_tensors(tensors(nest))


TextLineDataset = functools.partial(nd.data.text_lines, kind=TensorDataset)
make_csv_dataset = functools.partial(nd.data.make_csv_dataset, kind=TensorDataset)
CsvDataset = functools.partial(nd.data.csv_rows, kind=TensorDataset)


class Restored(SimpleNamespace):
    """The result of `Checkpoint.restore`; it knows what else the file has, or None for no file."""

    def assert_consumed(self) -> Restored:
        """Raise an `AssertionError` unless the whole checkpoint was restored."""
        if self.others:
            raise AssertionError(f"not restored: {', '.join(sorted(self.others))}.")
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> Restored:
        """Raise an `AssertionError` if nothing was restored; `restore` compares all objects."""
        if self.others is None:
            raise AssertionError("restore(None) has restored nothing.")
        return self

    def expect_partial(self) -> Restored:
        """Return this object; it has no other effect, because `restore` does not warn."""
        return self


class Checkpoint(nd.Checkpoint):
    """A checkpoint whose `restore` returns a status, as TensorFlow's does, and accepts None."""

    def __init__(self, root: Any = None, **objects: Any) -> None:
        super().__init__(**({} if root is None else {"root": root}), **objects)

    def __setattr__(self, name: str, value: Any) -> None:
        """Add an object, and restore it if the file that was restored earlier contains it."""
        super().__setattr__(name, value)
        others = vars(self).get("_others") or ()
        if any(f"{other}/".startswith(f"{name}/") for other in others):
            nd.Checkpoint(**{name: value}).restore(vars(self)["_restored"])

    def save(self, file_prefix: Any, options: Any = None) -> Any:
        is_folder = str(file_prefix).endswith(os.sep)
        return super().save(f"{file_prefix}ckpt" if is_folder else file_prefix)

    def write(self, file_prefix: Any, options: Any = None) -> Any:
        """Write the state to a path, and return the path."""
        super().write(file_prefix)
        return str(file_prefix)

    @raising
    def restore(self, path: Any, options: Any = None) -> Any:
        if path is not None:
            super().restore(path)
            vars(self)["_restored"] = path
        return Restored(others=None if path is None else vars(self)["_others"])

    read = restore


class Model(WithTensors, models.Model):
    """A model with Keras's methods."""

    @accepting("auto_scale_loss", "experimental_run_tf_function")
    def _compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        kwargs["jit_compile"] = kwargs.get("jit_compile") not in (None, "auto", False)
        with self.strategy.scope():
            super().compile(get_optimizer(optimizer), *args, **kwargs)

    compile = adapted(_compile)

    save = adapted(models.Model.save, "save_format", "zipped", filepath="path")
    save_weights = adapted(models.Model.save_weights, "save_format", "options", filepath="path")
    fit, evaluate, predict = (
        accepting("max_queue_size", "use_multiprocessing", "workers")(method)
        for method in (models.Model.fit, models.Model.evaluate, models.Model.predict)
    )

    def _serve(self, *inputs: Any, **named: Any) -> dict[str, Any]:
        """Return the outputs by name, for one input or for inputs by name."""
        (data,) = inputs or (named.values() if len(named) == 1 else [named])
        outputs = flatten(self(data, training=False))
        last = [layer.name for layer in self.layers[-1:] if isinstance(self, Sequential)]
        names = [name for name in self.output_names or last if name] or last
        names = names or [f"output_{n + 1}" for n in range(len(outputs))]
        return dict(zip(names, outputs, strict=True))

    signatures = property(lambda self: {"serving_default": self._serve})

    def load_weights(self, filepath: Any) -> Restored:  # type: ignore[override]
        """Restore all weights, and return the status that `Checkpoint.restore` returns."""
        super().load_weights(filepath)
        return Restored(others=())

    submodules = property(lambda self: tuple(self.walk())[1:])

    @accepting("expand_nested", "layer_range", "show_trainable")
    def summary(self, line_length: Any = None, positions: Any = None, print_fn: Any = None) -> str:
        (print_fn or (lambda text: sys.stdout.write(f"{text}\n")))(super().summary())
        return super().summary()


class Sequential(Model, models.Sequential):
    """A model of one layer after another, with Keras's methods."""


dataset_iterator = graph.DatasetIterator, iter
# Other programs load the native classes; `load_model` loads ours.
layers.Layer.known.update(Layer=layers.Layer, Model=models.Model, Sequential=models.Sequential)


def _holder(optimizer: Any) -> Any:
    """Return the optimizer that has the learning rate: this one, or the one that it wraps."""
    return _holder(optimizer.inner) if "inner" in vars(optimizer) else optimizer


def _only_grpc(init: Any) -> Any:
    """Return the constructor of a server, which supports one protocol and no session options."""

    def call(self: Any, *args: Any, protocol: Any = None, config: Any = None, **named: Any) -> None:
        if protocol not in (None, "grpc") or config not in (None, graph.ConfigProto()):
            raise ValueError("Server: protocol must be 'grpc', and config belongs to Session.")
        init(self, *args, **named)

    return call


def _get_rate(optimizer: Any) -> Any:
    rate = vars(_holder(optimizer))["learning_rate"]
    if callable(rate) or isinstance(rate, Symbolic):
        return rate
    return assignable(rate, functools.partial(_set_rate, optimizer))


def _set_rate(optimizer: Any, rate: Any) -> None:
    rate = rate if callable(rate) or isinstance(rate, Symbolic) else float(rate)
    vars(_holder(optimizer)).update(learning_rate=rate)


rate = property(_get_rate, _set_rate)
_steps: Any = vars(nd.optimizers.Optimizer)["iterations"]
steps = property(lambda self: as_tensor(np.int64(_steps.fget(self))), _steps.fset)


def constraining(kind: Any) -> Any:
    """Return an optimizer's update method, followed by the constraints of the variables."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        pairs = list(grads_and_vars)
        if "experimental_aggregate_gradients" in options:  # The keyword of older versions.
            adds = options.pop("experimental_aggregate_gradients")
            options["skip_gradients_aggregation"] = not adds
        result = kind.apply_gradients(self, pairs, *args, **options)
        bound = [v for _, v in pairs if getattr(v, "constraint", None) is not None]

        def constrain(_: Any = None) -> None:
            for variable in bound:
                variable.assign(variable.constraint(variable.value()))

        replica = nd.get_replica_context() if bound else None
        constrain() if replica is None else replica.merge_call(constrain)
        return result

    return apply_gradients


def minimizing_at_once(kind: Any) -> Any:
    """Return an optimizer's `minimize`, which accepts a loss, or a function that computes it."""

    def minimize(self: Any, loss: Any, *args: Any, **options: Any) -> Any:
        if not callable(loss):
            return kind.minimize(self, loss, *args, **options)
        with WatchingTape() as tape:
            target = loss()
        return kind.minimize(self, target, *args, **{**options, "tape": tape})

    return minimize


def minimizing(kind: Any) -> Any:
    """Return an optimizer of graphs that can also update variables at once."""

    def compute_gradients(self: Any, loss: Any, var_list: Any = None, *args: Any) -> Any:
        if not callable(loss):
            return kind.compute_gradients(self, loss, var_list, *args)
        with WatchingTape() as tape:
            target = loss()
        variables = tape.watched_variables() if var_list is None else var_list
        return list(zip(tape.gradient(target, variables), variables, strict=True))

    def apply_gradients(
        self: Any, grads_and_vars: Any, global_step: Any = None, name: Any = None
    ) -> Any:
        pairs = list(grads_and_vars)
        if not all(isinstance(variable, nd.Variable) for _, variable in pairs):
            return kind.apply_gradients(self, pairs, global_step, name)
        rate = self._learning_rate
        inner = vars(self).setdefault("_inner", nd.optimizers.Optimizer(self._rule, rate))
        inner.apply_gradients(pairs)
        return None if global_step is None else global_step.assign_add(1)

    return subclass(kind, compute_gradients=compute_gradients, apply_gradients=apply_gradients)


def _of_lists(loss: Any) -> Any:
    """Return a function of labels and predictions that also accepts lists; others unchanged."""

    def call(y_true: Any, y_pred: Any, *args: Any, **options: Any) -> Any:
        return loss(*models.losses.aligned(y_true, y_pred), *args, **options)

    return call if "y_pred" in inspect.signature(loss).parameters else loss


ADAPTERS: dict[str, Any] = {
    "asserting": tensor_functions.asserting,
    "binary": lambda operation: unary(signatures.binary(operation), 0),
    "by_communication": by_communication,
    "callback": lambda kind: subclass(kind, "verbose", "profile_batch"),
    "counted": signatures.counted,
    "dtype": np.dtype,
    "eagerly": minimizing,
    "file": raising,
    "floating": lambda operation: unary(signatures.floating(operation)),
    "index": signatures.index,
    "initializer": lambda kind: subclass(kind, "dtype"),
    "joining": signatures.joining,
    "keras": keras_operation,
    "layer": layer,
    "last_axis": lambda operation: unary(
        lambda x, axis=-1: signatures.floating(operation)(x, -1 if axis is None else axis),
        dim="axis",
    ),
    "loss": lambda kind: (
        subclass(kind, "dtype", __call__=plainly(kind.__call__))
        if isinstance(kind, type)
        else plainly(_of_lists(kind))
    ),
    "metric": lambda kind: subclass(
        kind, "dtype", result=adapted(kind.result), update_state=plainly(kind.update_state)
    ),
    "operation": lambda function: unary(function, 0),
    "optimizer": lambda kind: subclass(
        kind,
        __init__=with_decay(kind),
        learning_rate=rate,
        lr=rate,
        iterations=steps,
        apply_gradients=constraining(kind),
        minimize=minimizing_at_once(kind),
    ),
    "reduction": signatures.reduction,
    "resolver": lambda kind: subclass(kind, "rpc_layer", rpc_layer="grpc"),
    "server": lambda kind: subclass(kind, __init__=_only_grpc(kind.__init__)),
    "strategy": strategy,
    "unary": unary,
    "writer": lambda kind: subclass(kind, add_run_metadata=signatures.nothing),
}
BY_PROGRAM: dict[str, Any] = {
    "graph": programs.in_graphs_only,
    "losses": lambda function, program: adapted(programs.of_tensors(function, program)),
    "either": programs.either,
    "program": programs.of_program,
    "variable": variable_type,
}
Input = adapted(layers.Input, input_shape="shape", batch_input_shape="batch_shape")
_HARMLESS = {"deterministic", "experimental_deterministic", "experimental_slack"}
"""Options of datasets that concern speed alone: the elements always come in order."""


def _set_option(options: Any, name: str, value: Any) -> None:
    """Set an option; options that change no result are accepted."""
    if name not in vars(options) and name not in _HARMLESS:
        raise TypeError(f"Options: {name} has no effect here, so leave it out.")
    object.__setattr__(options, name, value)
    options.__post_init__()


_PARTS = dict.fromkeys(  # These affect only speed, and accept any option.
    ["autotune", "experimental_optimization", "threading"], property(lambda _: SimpleNamespace())
)
_itself = property(lambda self: self)
Options = subclass(
    nd.InputOptions, __setattr__=_set_option, experimental_distribute=_itself, **_PARTS
)
SyncBatchNormalization = functools.partial(layer(layers.BatchNormalization), synchronized=True)
makedirs = functools.partial(os.makedirs, exist_ok=True)


def _unless_there(write: Any) -> Any:
    """Return a function of two paths that never overwrites an existing file."""

    def call(src: Any, dst: Any, overwrite: bool = False) -> None:
        if not overwrite and os.path.exists(dst):
            raise FileExistsError(f"{dst} exists already: pass overwrite=True.")
        write(src, dst)

    return call


copy, rename = _unless_there(shutil.copyfile), _unless_there(os.replace)
# Only the chief writes, so other workers may remove what does not exist.
rmtree = functools.partial(shutil.rmtree, ignore_errors=True)


def _save(model: Any, filepath: Any, *args: Any, options: Any = None, **keywords: Any) -> None:
    if not isinstance(model, Model):
        raise TypeError(
            f"save: expected a model of tf.keras, got {type(model).__name__}: save the variables "
            "of a tf.Module with tf.train.Checkpoint(module=module).write(path)."
        )
    model.save(filepath, *args, **keywords)


save_model = adapted(_save, obj="model", export_dir="filepath")
backend, epsilon = (lambda: "tensorflow"), lambda: 1e-7
floatx, image_data_format = (lambda: "float32"), lambda: "channels_last"


def do_not_convert(func: Any = None) -> Any:
    """Return the function unchanged: no function is converted."""
    return do_not_convert if func is None else func


cardinality = TensorDataset.cardinality
Counter = TensorDataset.counter
rejection_resample = functools.partial(operator.methodcaller, "rejection_resample")
