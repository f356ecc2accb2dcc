"""`Metric`, the base class of metrics, and the values of metrics in a step of a model.

Each replica writes to its own component of a metric's variables. A read outside of replicas adds
the components up. So replicas exchange nothing until a metric is read, and an uneven last batch
counts correctly.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute import tree
from ndistribute.autodiff import untrack
from ndistribute.collective.reduce_op import reduce_arrays
from ndistribute.context import Frame, current_trace, entered
from ndistribute.devices import array_namespace, as_array, to_host
from ndistribute.exports import export as _export
from ndistribute.mistakes import Explaining
from ndistribute.models import initializers, loss_forms
from ndistribute.models.losses import weight_like
from ndistribute.names import snake_case
from ndistribute.values import Shown
from ndistribute.variables import Variable


class MetricValue(float):
    """The value of a metric on a replica in a step; the logs have that of all replicas.

    Attributes:
        metric: the metric.
    """

    metric: Metric


class PendingValue:
    """A placeholder for a metric's value in a step of a model, where it can only be returned.

    It is used in a compiled step, and if the value is not a number.

    Args:
        metric: the metric.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def __repr__(self) -> str:
        return f"<the value of metric {self.metric.name!r} after the step>"


def _in_steps(result: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a `result` that returns a placeholder in steps of models."""

    @functools.wraps(result)
    def value_of(self: Metric) -> Any:
        in_step = loss_forms.form.of_gradient is not None
        if in_step and current_trace() is not None:
            return self._pending
        value = result(self)
        value = value.read_value() if isinstance(value, Variable) else value
        if not in_step:
            return value
        if isinstance(value, Mapping) or np.ndim(value):
            return self._pending
        number = MetricValue(value)
        number.metric = self
        return number

    return value_of


class Metric(Explaining, Shown):
    """The base class of metrics; a subclass defines `update_state` and `result`.

    It creates variables with `add_weight`. In `update_state`, each replica writes to its own
    component of a variable. Outside of replicas, a variable is the sum of these components.

    Args:
        name: the name in logs; None: the class name in snake case.
        dtype: the dtype of its variables by default.

    >>> class Positive(Metric):
    ...     def __init__(self, name="positive", **options):
    ...         super().__init__(name, **options)
    ...         self.count = self.add_weight("count")
    ...
    ...     def update_state(self, y_true, y_pred, sample_weight=None):
    ...         self.count.assign_add(np.sum(y_pred > 0, dtype=self.dtype))
    ...
    ...     def result(self):
    ...         return self.count
    >>> metric = Positive()
    >>> metric.update_state(np.zeros(3), np.array([1.0, -1.0, 2.0]))
    >>> float(metric.result())
    2.0
    """

    _uncalled: ClassVar = {"value_of": "define result"}

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        self.name = name or snake_case(type(self).__name__)
        self.dtype = np.dtype(np.float32 if dtype is None else dtype)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "result" in vars(cls):
            cls.result = _in_steps(cls.result)  # type: ignore[assignment, method-assign]
        if "reset_states" in vars(cls) and "reset_state" not in vars(cls):  # Its older name.
            cls.reset_state = cls.reset_states  # type: ignore[method-assign]

    def add_weight(
        self,
        name: str = "weight",
        shape: int | Sequence[int] = (),
        initializer: Any = "zeros",
        *,
        dtype: Any = None,
        aggregation: Any = "sum",
        synchronization: Any = "on_read",
    ) -> Variable:
        """Return a new variable with a value on each replica; keep it as an attribute.

        Args:
            name: the last part of its name.
            shape: its shape.
            initializer: a name, or a function of a shape and a dtype.
            dtype: its dtype; None means the metric's.
            aggregation: how replicas' values are combined outside of replicas, see `Variable`.
            synchronization: as for `Variable`.
        """
        if not isinstance(name, str):
            raise TypeError(f"add_weight of metric {self.name!r}: pass shape={name!r} by keyword.")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        wanted = np.dtype(self.dtype if dtype is None else dtype)
        start = initializers.get(initializer)(shape, wanted)
        kind = synchronization, aggregation
        return Variable(start, False, f"metrics/{self.name}/{name}", wanted, *kind)

    def add_variable(
        self,
        shape: int | Sequence[int] = (),
        initializer: Any = "zeros",
        dtype: Any = None,
        aggregation: Any = "sum",
        name: str = "variable",
    ) -> Variable:
        """Return a new variable, like `add_weight`; the shape comes first, as in Keras 3."""
        return self.add_weight(name, shape, initializer, dtype=dtype, aggregation=aggregation)

    def named_variables(self) -> dict[str, Variable]:
        """Return the variables of this metric, and of metrics in its attributes, by path."""
        named: dict[str, Variable] = {}
        for path, part in tree.leaves("", self._attributes()):
            if isinstance(part, Variable):
                named[path] = part
            elif isinstance(part, Metric):
                inner = part.named_variables()
                named |= {f"{path}/{name}": each for name, each in inner.items()}
        return named

    @property
    def variables(self) -> list[Variable]:
        """The variables of this metric, and of metrics in its attributes."""
        return list({id(each): each for each in self.named_variables().values()}.values())

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add the examples of a batch."""
        raise NotImplementedError(f"{type(self).__name__} defines no update_state.")

    def result(self) -> Any:
        """Return the value over all replicas; inside `run`, the value of this replica alone."""
        raise NotImplementedError(f"{type(self).__name__} defines no result.")

    @functools.cached_property
    def _pending(self) -> PendingValue:
        return PendingValue(self)

    def local_result(self) -> Any:
        """Return the value over the replicas of this process, without waiting for others."""
        if all(v.distribute_strategy.input_topology.workers is None for v in self.variables):
            return self.result()
        with entered(Frame(None, None)):
            return self._of_this_process().result()

    def _of_this_process(self) -> Metric:
        """Return a copy whose variables are the sums of the replicas of this process."""

        def local(part: Any) -> Any:
            if isinstance(part, Metric):
                return part._of_this_process()
            if not isinstance(part, Variable):
                return part
            op, values = part.aggregation.reduce_op, [to_host(value) for value in part.values]
            return Variable(values[0] if op is None else reduce_arrays(op, values), False)

        copied = copy.copy(self)
        vars(copied).update(tree.map_leaves(local, self._attributes()))
        return copied

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_arguments"}

    def reset_state(self) -> None:
        """Reset the metric, so that it has counted no examples."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def reset_states(self) -> None:
        """Call `reset_state`; this was its name in TensorFlow before 2.5."""
        self.reset_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch, and return the value."""
        self.update_state(*args, **kwargs)
        return self.result()


class Sums(Metric):
    """The base class of metrics that are computed from sums, in one variable.

    Args:
        name: see `Metric`.
        size: the number of the sums, or the shape of an array of them.
    """

    def __init__(self, name: str | None, size: int | tuple[int, ...]) -> None:
        super().__init__(name, np.float64)
        self.state = self.add_weight("state", size)

    def sums(self) -> Any:
        """Return the sums of all replicas, on the host; in a replica, return its own sums."""
        return to_host(as_array(self.state))


class Mean(Sums):
    """The weighted mean of values; 0 before the first.

    >>> metric = Mean()
    >>> metric.update_state([1.0, 2.0, 6.0])
    >>> metric.result()
    3.0
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name, 2)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each with its weight."""
        self.state.assign_add(joined(*weighted_sum(values, sample_weight)))

    def result(self) -> float:
        """Return the sum over the count."""
        total, count = self.sums().tolist()
        return total / count if count else 0.0


class Sum(Mean):
    """The weighted sum of values.

    >>> metric = Sum()
    >>> metric.update_state([1.0, 2.0])
    >>> metric.result()
    3.0
    """

    def result(self) -> float:
        """Return the sum."""
        return float(self.sums()[0])


def joined(*numbers: Any) -> Any:
    """Return numbers as an array of float64, on the host or in a compiled step."""
    if current_trace() is None:
        return np.array([float(number) for number in numbers])
    return np.stack(numbers).astype(np.float64)


def weighted_sum(values: Any, sample_weight: Any = None) -> tuple[Any, Any]:
    """Return the weighted sum of values, and the sum of their weights."""
    values = as_array(untrack(values))
    if sample_weight is None:
        return values.sum(dtype=np.float64), values.size
    weight = weight_like(values, as_array(sample_weight))
    weight = array_namespace(weight).broadcast_to(weight, values.shape)
    return (values * weight).sum(dtype=np.float64), weight.sum(dtype=np.float64)


_export(vars(), but="MetricValue PendingValue Sums joined weighted_sum")
