"""Containers with one component per replica.

They refuse arithmetic, because the caller must decide how to combine replicas; a single component
converts to a number or an array. They depend on no strategy and no device.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from ndistribute.mistakes import count_of


class Shown:
    """The base class of objects whose ``repr`` shows their public attributes with plain values.

    >>> import ndistribute as nd
    >>> nd.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0, name="sgd")
    SGD(learning_rate=0.1, name='sgd', weight_decay=0.0, ema_momentum=0.0,
        ema_overwrite_frequency=0, momentum=0.9, nesterov=False, clipnorm=1.0)
    >>> nd.losses.Huber(delta=2.0), nd.metrics.BinaryAccuracy(threshold=0.5)
    (Huber(reduction='sum_over_batch_size', name='huber', delta=2.0),
     BinaryAccuracy(name='binary_accuracy', threshold=0.5))
    """

    _parameters: dict[str, Any]  # Also shown, if there are any.

    def __repr__(self) -> str:
        told = vars(self) | vars(self).get("_parameters", {})
        kinds = str | int | float | Shown
        public = {name: value for name, value in told.items() if name[0] != "_"}
        shown = [f"{n}={v!r}" for n, v in public.items() if callable(v) or isinstance(v, kinds)]
        return f"{type(self).__name__}({', '.join(shown)})"


class DistributedValues:
    """The base class of values that have one component per replica.

    Args:
        values: the components in replica order, at least one.

    Raises:
        ValueError: `values` is empty.

    >>> isinstance(PerReplica([1, 2]), DistributedValues)
    True
    """

    __slots__ = ("__weakref__", "_values")

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = tuple(values)
        if not self._values:
            raise ValueError(
                f"{type(self).__name__} needs at least one component, one for each replica."
            )

    @property
    def values(self) -> tuple[Any, ...]:
        """The components in replica order."""
        return self._values

    def __repr__(self) -> str:
        rows = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{rows}\n}}"

    def _only(self, wanted: str) -> Any:
        if len(self._values) != 1:
            self._refuse(wanted)
        return self._values[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._only("np.asarray"), dtype=dtype, copy=copy)

    def numpy(self) -> Any:
        """Return the only component as a NumPy array."""
        return np.asarray(self)

    def __float__(self) -> float:
        return float(self._only("float"))

    def __int__(self) -> int:
        return int(self._only("int"))

    def __index__(self) -> int:
        return operator.index(self._only("index"))

    def __format__(self, spec: str) -> str:
        return format(self._only(f"the format {spec!r}"), spec) if spec else str(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> NoReturn:
        self._refuse(f"np.{ufunc.__name__}")

    def _refuse(self, what: str, *_: Any) -> NoReturn:
        raise TypeError(
            f"{what} on a {type(self).__name__} of {count_of(len(self._values), 'component')}: it "
            "has one value per replica. Get them with strategy.local_results(value), or combine "
            "them with strategy.reduce(op, value)."
        )


for _name in (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv "
    "ifloordiv mod rmod imod divmod rdivmod pow rpow ipow matmul rmatmul imatmul and rand iand "
    "or ror ior xor rxor ixor lshift rlshift ilshift rshift rrshift irshift neg pos abs invert "
    "lt le gt ge getitem setitem iter len bool contains"
).split():
    _method = functools.partialmethod(DistributedValues._refuse, f"__{_name}__")
    setattr(DistributedValues, f"__{_name}__", _method)
del _name, _method


class PerReplica(DistributedValues):
    """A value that may differ between replicas, such as the losses that ``run`` returns.

    >>> losses = PerReplica([0.5, 0.25])
    >>> losses.values
    (0.5, 0.25)
    >>> f"{PerReplica([0.5]):.3f}"
    '0.500'
    """

    # Of a result of `run` where workers come and go: how many changes of them came before it.
    __slots__ = ("_changes",)


class Mirrored(DistributedValues):
    """A value that is the same on every replica, with one copy per replica.

    >>> Mirrored([1.0, 1.0]).values
    (1.0, 1.0)
    """

    __slots__ = ()
