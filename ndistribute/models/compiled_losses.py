"""`Objective`: the losses and metrics of a compiled model, for each of its outputs.

A model returns its outputs: an array, or a list, tuple or dict of arrays. Each output has a name.
Users pass losses, their weights, metrics, labels and sample weights in the same way: by output
name, by position, or once for all outputs. This file knows neither replicas nor datasets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff import untrack
from ndistribute.models import losses as _losses
from ndistribute.models import metrics as _metrics
from ndistribute.models.loss_forms import form
from ndistribute.models.masks import attach_mask, mask_of
from ndistribute.models.metrics.metric import joined


@dataclasses.dataclass(eq=False)
class Output:
    """The loss and the metrics of an output, each with whether it uses sample weights."""

    loss: _losses.Loss | None
    weight: float
    mean: _metrics.Mean | None  # Of its loss, if there are several outputs.
    metrics: list[tuple[_metrics.Metric, bool]]


class TotalLoss(_metrics.Mean):
    """The mean of a model's loss; a call that updates it has counted the loss of the step."""

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each with its weight."""
        form.untold = None
        super().update_state(values, sample_weight)

    def count(self, share: Any, rows: float, here: int) -> None:
        """Add a replica's share of the mean over `rows` examples, of which `here` are its own."""
        form.untold = None
        self.state.assign_add(joined(untrack(share) * np.float64(rows), here))


class Objective:
    """The losses and metrics of a model.

    Args:
        names: the names of the outputs; an empty name if the model has a single output.
        loss: a `Loss` for all outputs, or losses by output.
        loss_weights: the factor of each loss in the sum; None means 1.
        metrics: metrics by output, or a list of metrics that each output gets.
        weighted_metrics: like `metrics`, but these use the sample weights.

    Attributes:
        loss: the mean of the loss.
        named: all metrics by their names in logs.
    """

    def __init__(
        self,
        names: Sequence[str],
        loss: Any,
        loss_weights: Any,
        metrics: Any,
        weighted_metrics: Any,
    ) -> None:
        self.names, several = list(names), len(names) > 1
        self.loss = TotalLoss("loss")
        self.named: dict[str, _metrics.Metric] = {"loss": self.loss}
        self.outputs: list[Output] = []
        parts = by_output(loss, names, "loss")
        weights = by_output(loss_weights, names, "loss_weights")
        for name, part, weight in zip(names, parts, weights, strict=True):
            mean = _metrics.Mean(f"{name}_loss") if several and part is not None else None
            self.outputs.append(Output(part, 1.0 if weight is None else float(weight), mean, []))
            self.named |= {} if mean is None else {mean.name: mean}
        plain = _lists(metrics, names, "metrics")
        for_weights = _lists(weighted_metrics, names, "weighted_metrics")
        for name, output, *lists in zip(names, self.outputs, plain, for_weights, strict=True):
            for weighted, asked in ((w, each) for w in (False, True) for each in lists[w]):
                metric = _metrics.get(asked, output.loss)
                output.metrics.append((metric, weighted))
                prefix = f"{name}_" if several else ""
                self._name(prefix, metric, weighted)

    def _name(self, prefix: str, metric: _metrics.Metric, weighted: bool) -> None:
        name = prefix + metric.name
        if any(metric is known for known in self.named.values()):
            raise ValueError(
                f"compile: metric {metric.name!r} would count several outputs together: pass one "
                "object for each output, such as metrics={'a': [...], 'b': [...]}, or its name."
            )
        if weighted and name in self.named:
            name = f"{prefix}weighted_{metric.name}"
        while name in self.named:
            name += "_1"
        self.named[name] = metric

    def compared(self, y: Any, predicted: Any, weight: Any, model: str) -> list[Any]:
        """Return the outputs with their labels, predictions and weights in a batch.

        Raises:
            ValueError: there are not as many labels as outputs; the text begins with `model`.
        """
        names = self.names
        columns = [
            by_output(predicted, names, f"{model} returned", for_all=False),
            by_output(y, names, f"{model} got labels", for_all=False),
            by_output(weight, names, f"{model} got sample_weight"),
        ]
        rows = []
        for output, out, labels, weights in zip(self.outputs, *columns, strict=True):
            if labels is None and (output.loss or output.metrics):
                raise ValueError(
                    f"{model} got no labels: pass y, or a dataset of batches (x, y); or compile "
                    "it without a loss and metrics for this output."
                )
            if isinstance(labels, list | tuple | Mapping):
                raise ValueError(f"{model} got labels as a {type(labels).__name__} for an output.")
            # Losses of 16-bit predictions are computed in float32.
            narrow = getattr(out, "dtype", None) is not None and out.dtype.itemsize == 2
            wide = out.astype(np.float32) if narrow else out
            attach_mask(wide, mask_of(out))
            rows.append((output, labels, wide, weights))
        return rows

    def share(self, compared: Iterable[Any], rows: float) -> Any:
        """Return this replica's share of the loss, or None, and count those of several outputs.

        Args:
            compared: the result of `compared`.
            rows: the number of examples on all replicas.
        """
        total: Any = None
        for output, labels, predicted, weight in compared:
            if output.loss is None:
                continue
            each = output.loss.weighted(labels, predicted, weight)
            part = np.sum(each) / max(1.0, rows * math.prod(each.shape[1:]))
            if output.mean is not None:
                output.mean.update_state(untrack(each))
            part = part if output.weight == 1.0 else part * output.weight
            total = part if total is None else total + part
        return total

    def count(self, compared: Iterable[Any]) -> None:
        """Add a batch to the metrics."""
        for output, labels, predicted, weight in compared:
            for metric, weighted in output.metrics:
                weights = (weight,) if weighted and weight is not None else ()
                metric.update_state(labels, untrack(predicted), *weights)


def names_of(outputs: Any) -> list[str]:
    """Return the names of the outputs that a model returned.

    >>> names_of({"a": 1, "b": 2}), names_of((1, 2)), names_of(1)
    (['a', 'b'], ['output_1', 'output_2'], [''])
    """
    if isinstance(outputs, Mapping):
        return list(outputs)
    if isinstance(outputs, list | tuple):
        return [f"output_{number}" for number, _ in enumerate(outputs, 1)]
    return [""]


def by_output(nest: Any, names: Sequence[str], what: str, for_all: bool = True) -> list[Any]:
    """Return a value for each output, from a dict by name, a list by position, or one for all.

    Args:
        nest: the dict, the list, or the value for all.
        names: the outputs.
        what: the beginning of messages.
        for_all: whether several outputs may share one value; None is always allowed.

    >>> by_output({"b": 1}, ["a", "b"], "loss"), by_output("mse", ["a", "b"], "loss")
    ([None, 1], ['mse', 'mse'])

    Raises:
        ValueError: a name or the number of values does not fit; the text begins with `what`.
    """
    if isinstance(nest, Mapping):
        if names == [""] and len(nest) == 1:
            return list(nest.values())
        if unknown := [name for name in nest if name not in names]:
            raise ValueError(
                f"{what}: the model has {_shown(names)}, but no output {unknown[0]!r}."
            )
        return [nest.get(name) for name in names]
    several = isinstance(nest, list | tuple)
    if not several and (for_all or len(names) == 1 or nest is None):
        return [nest] * len(names)
    if not several or len(nest) != len(names):
        number = f" of {len(nest)}" if several else ""
        raise ValueError(
            f"{what}: a {type(nest).__name__}{number} for {_shown(names)}: pass one for each "
            "output, or a dict by the outputs' names."
        )
    return list(nest)


def _shown(names: Sequence[str]) -> str:
    if names == [""]:
        return "one output"
    return f"{len(names)} outputs, {', '.join(map(repr, names))}"


def _lists(nest: Any, names: Sequence[str], what: str) -> list[Sequence[Any]]:
    """Return a list of metrics for each output."""
    if nest is not None and not isinstance(nest, list | tuple | Mapping):
        raise TypeError(f"compile: {what} must be a list or a dict by output, got {nest!r}.")
    apart = isinstance(nest, Mapping) or any(
        isinstance(m, list | tuple) or m is None for m in nest or ()
    )
    asked = by_output(nest, names, what) if apart else [nest or []] * len(names)
    lists = [[] if each is None else each for each in asked]
    return [each if isinstance(each, list | tuple) else [each] for each in lists]
