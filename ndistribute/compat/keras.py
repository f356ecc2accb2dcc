"""Keras's names for this package's models, with the arguments and results that differ."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import models
from ndistribute.compat.names import ROOT, Names, classes, derived, public
from ndistribute.compat.tensors import Scalar, tensor_if_array
from ndistribute.tree import map_leaves

__all__ = ["KERAS"]


class _Model(models.Model):
    """A model with the methods of Keras."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a model, which is a subclass or a `Sequential`."""
        if cls is _Model and (args or kwargs.keys() & {"inputs", "outputs"}):
            raise TypeError(
                "tf.keras.Model(inputs, outputs): there are no models of symbolic tensors in "
                "ndistribute.compat.tf. Write a tf.keras.Sequential, or a subclass with call."
            )
        return super().__new__(cls, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output as tensors."""
        return map_leaves(tensor_if_array, super().__call__(*args, **kwargs))

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        *,
        run_eagerly: Any = None,
        steps_per_execution: Any = None,
        jit_compile: Any = None,
    ) -> None:
        """Set the optimizer, the loss and the metrics; see `nd.Model`."""
        with self.strategy.scope():
            made = _optimizer(optimizer)
        super().compile(made, loss, metrics, weighted_metrics)

    def predict(  # type: ignore[override]
        self, x: Any, batch_size: Any = None, verbose: Any = "auto", steps: Any = None
    ) -> Any:
        """Return the predictions; see `nd.Model`."""
        return super().predict(x, batch_size, steps)

    def save(self, filepath: Any, overwrite: Any = True, save_format: Any = None) -> None:
        """Write the architecture and the weights; see `nd.Model.export`."""
        self.export(filepath)

    def summary(self, *args: Any, **kwargs: Any) -> str:
        """Write a table of the layers, and return it."""
        text = super().summary()
        sys.stdout.write(f"{text}\n")
        return text

    weights = property(lambda self: self.variables)
    trainable_weights = property(lambda self: self.trainable_variables)


class _Sequential(_Model, models.Sequential):
    """A model of one layer after another, with the methods of Keras."""


for _name, _class, _native in (
    ("Model", _Model, models.Model),
    ("Sequential", _Sequential, models.Sequential),
):
    _class.__name__ = _class.__qualname__ = _name
    _class.__module__ = f"{ROOT}.keras"
    # Other programs load the native class; ours is passed to `load` below.
    vars(models.layers.Layer)["known"].pop(f"_{_name}", None)


def _load_model(filepath: Any, custom_objects: Any = None, compile: Any = True) -> Any:  # noqa: A002
    """Return the model that `save` wrote; compile it before you fit it."""
    return models.load(filepath, {"Sequential": _Sequential, **(custom_objects or {})})


def _optimizer(identifier: Any) -> Any:
    """Return an optimizer for a name; one that is given is returned unchanged."""
    if not isinstance(identifier, str):
        return models.optimizers.get(identifier)
    kind = type(models.optimizers.get(identifier)).__name__
    return _OPTIMIZERS[kind]()


def _rate(self: Any) -> Any:
    rate = vars(self)["learning_rate"]
    return Scalar(rate) if isinstance(rate, int | float) else rate


def _set_rate(self: Any, rate: Any) -> None:
    vars(self)["learning_rate"] = rate


_RATE = property(_rate, _set_rate, doc="The learning rate, a number or a schedule.")
_OPTIMIZERS = {
    name: derived("keras.optimizers", one, learning_rate=_RATE, lr=_RATE)
    if issubclass(one, nd.optimizers.Optimizer) and name not in ("LossScale", "Optimizer")
    else one
    for name, one in classes(models.optimizers).items()
}


def _metric(kind: Any) -> Any:
    """Return a metric whose result is a scalar with `numpy`."""
    if "value_of" not in dir(kind) or kind is models.metrics.Metric:
        return kind

    def result(self: Any) -> Any:
        return Scalar(kind.result(self))

    return derived("keras.metrics", kind, "dtype", result=result)


def _input(
    shape: Any = None, input_shape: Any = None, dtype: Any = None, batch_size: Any = None, **o: Any
) -> Any:
    """Return a first layer, which declares the shape of an example."""
    if dtype is not None and np.dtype(dtype).kind == "f":
        o["dtype"] = dtype  # A layer computes in floats; `Embedding` converts them to integers.
    return models.layers.Input(input_shape if shape is None else shape, **o)


def _activation(name: str) -> Any:
    return lambda **options: models.layers.Activation(name, **options)


_layers = Names(
    "keras.layers",
    {
        **public(models.layers),
        "AveragePooling2D": models.layers.AveragePool2D,
        "Convolution2D": models.layers.Conv2D,
        "GlobalAveragePooling2D": models.layers.GlobalAveragePool2D,
        "Input": _input,
        "InputLayer": _input,
        "MaxPooling2D": models.layers.MaxPool2D,
        "ReLU": _activation("relu"),
        "Softmax": _activation("softmax"),
        "SyncBatchNormalization": functools.partial(
            models.layers.BatchNormalization, synchronized=True
        ),
    },
)
_REDUCTION = {
    "AUTO": "sum_over_batch_size",
    "NONE": "none",
    "SUM": "sum",
    "SUM_OVER_BATCH_SIZE": "sum_over_batch_size",
}
KERAS = Names(
    "keras",
    {
        "Input": _input,
        "Model": _Model,
        "Sequential": _Sequential,
        **{
            name: Names(f"keras.{name}", public(getattr(models, name)))
            for name in ("activations", "initializers")
        },
        "callbacks": Names(
            "keras.callbacks",
            {
                name: one
                if name in ("Callback", "History", "LambdaCallback")
                else derived("keras.callbacks", one, "verbose")
                for name, one in public(models.callbacks).items()
            },
        ),
        "layers": _layers,
        "losses": Names(
            "keras.losses",
            {**public(models.losses), "Reduction": Names("keras.losses.Reduction", _REDUCTION)},
        ),
        "metrics": Names(
            "keras.metrics",
            {**public(models.metrics)}
            | {name: _metric(one) for name, one in classes(models.metrics).items()},
        ),
        "mixed_precision": Names(
            "keras.mixed_precision",
            {
                "LossScaleOptimizer": models.optimizers.LossScale,
                "set_global_policy": models.layers.set_dtype_policy,
            },
        ),
        "models": Names(
            "keras.models",
            {"Model": _Model, "Sequential": _Sequential, "load_model": _load_model},
        ),
        "optimizers": Names(
            "keras.optimizers",
            {
                **_OPTIMIZERS,
                "get": _optimizer,
                "legacy": Names("keras.optimizers.legacy", _OPTIMIZERS),
                "schedules": Names("keras.optimizers.schedules", public(nd.optimizers.schedules)),
            },
        ),
        "regularizers": Names(
            "keras.regularizers",
            {
                **public(models.regularizers),
                "l1": models.regularizers.L1,
                "l2": models.regularizers.L2,
            },
        ),
        "utils": Names(
            "keras.utils",
            {
                "set_random_seed": nd.set_seed,
                "to_categorical": lambda x, num_classes=None: np.eye(
                    int(np.max(x)) + 1 if num_classes is None else num_classes, dtype=np.float32
                )[np.asarray(x, np.int64)],
            },
        ),
    },
)
