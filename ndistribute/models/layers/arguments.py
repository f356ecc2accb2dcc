"""Checks and conversions of layers' arguments: numbers, dtypes, and random dropout factors."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ndistribute import tree
from ndistribute.context import get_replica_context, get_strategy
from ndistribute.devices import copy_to
from ndistribute.dtypes import dtype_named, kind_of
from ndistribute.models.masks import with_mask_of
from ndistribute.names import snake_case

Pair = int | Sequence[int]
T = TypeVar("T")


def dropout_factors(like: Any, shape: Sequence[int], rate: float) -> Any:
    """Return an array of 0, with the probability `rate`, and ``1 / (1 - rate)``; None for rate 0.

    Args:
        like: an array, plain or tracked, of the dtype and device of the result.
        shape: the shape of the result.
        rate: the share of zeros.
    """
    if not rate:
        return None
    factors = (random_generator().random(shape, dtype=np.float32) >= rate).astype(like.dtype)
    factors *= like.dtype.type(1 / (1 - rate))
    return factors


def random_generator(seed: Any = None, generators: Any = None) -> Any:
    """Return the generator of this replica; outside of replicas, that of the first.

    Args:
        seed: the seed of generators that only the owner of `generators` draws from.
        generators: a dict, which gets such a generator for each replica.
    """
    replica: Any = get_replica_context() or get_strategy().replica_contexts[0]
    if seed is None:
        return replica.rng
    number = replica.replica_id_in_sync_group
    known = generators.get(number) or np.random.default_rng([seed, number])
    return generators.setdefault(number, known)


def as_floats(x: Any, variable: Any) -> Any:
    """Return an array in a variable's dtype, unless it has fewer bits: no computation is wider.

    For None instead of a variable, return the array.
    """
    if variable is None:
        return x
    narrow = x.dtype.kind not in "iub" and x.dtype.itemsize <= variable.dtype.itemsize
    return x if narrow else x.astype(variable.dtype)


def rate_of(rate: float, what: str) -> float:
    """Return a share of elements to drop, which must be in ``[0, 1)``."""
    if not 0 <= rate < 1:
        raise ValueError(f"{what} must be in [0, 1), got {rate}.")
    return float(rate)


def positive(value: int, what: str) -> int:
    """Return an integer, which must be 1 or more."""
    try:
        number = 0 if isinstance(value, bool) else int(value)
    except (OverflowError, TypeError, ValueError):  # Such as for "relu", None and infinity.
        number = 0
    if number < 1 or number != value:
        raise ValueError(f"{what} must be an integer, 1 or more, got {value!r}.")
    return number


def lengths(value: Pair, what: str, rank: int) -> tuple[int, ...]:
    """Return one or two positive integers, for what a user passed."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * rank
    if len(values) != rank:
        count = "a sequence of one" if rank == 1 else "two of them"
        raise ValueError(f"{what} must be an integer or {count}, got {value!r}.")
    return tuple(positive(each, what) for each in values)


def one_of(value: Any, what: str, known: Iterable[Any]) -> Any:
    """Return a value, which must be a known one."""
    names = [*known]
    if value not in names:
        raise ValueError(f"{what} must be one of {names}, got {value!r}.")
    return value


def check_axes(what: str, shape: Sequence[int], axes: Sequence[str]) -> None:
    """Raise a `ValueError` unless a shape has as many axes as there are names of them."""
    if len(shape) != len(axes):
        raise ValueError(
            f"{what} has shape {tuple(shape)}, but needs the axes ({', '.join(axes)}). Write "
            f"x[..., np.newaxis] for one of the {axes[-1]}."
        )


def dtypes_of(policy: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the dtypes of the variables and of the computation."""
    name = policy if isinstance(policy, str) else np.dtype(policy).name
    mixed = name.removeprefix("mixed_")
    if mixed not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(
            f"a layer's dtype must be float16, bfloat16, float32, float64, mixed_float16 or "
            f"mixed_bfloat16, got {policy!r}."
        )
    computing = dtype_named(mixed)
    return (computing if mixed == name else np.dtype(np.float32)), computing


def cast_floats(dtype: np.dtype[Any], value: Any) -> Any:
    """Return an array of floats in a dtype; other values are returned unchanged."""
    present = getattr(value, "dtype", None)
    stays = present is None or present == dtype or kind_of(present) != "f"
    return value if stays else with_mask_of(value.astype(dtype), value)


_numbers: weakref.WeakKeyDictionary[Any, dict[str, Iterator[int]]] = weakref.WeakKeyDictionary()


def numbered(kind: str) -> str:
    """Return a class name in snake case, with a number from the second of a strategy on.

    So the names are the same in all processes that run the same program.
    """
    label = snake_case(kind)
    numbers = _numbers.setdefault(get_strategy(), defaultdict(itertools.count))
    number = next(numbers[label])
    return f"{label}_{number}" if number else label


def on_device(inputs: Any) -> Any:
    """Return inputs with the arrays of the host on the GPU of this replica, if it has one."""
    replica = get_replica_context()
    if replica is None or replica.device.kind != "gpu":
        return inputs
    device = replica.device
    place = lambda leaf: copy_to(leaf, device) if isinstance(leaf, np.ndarray) else leaf  # noqa: E731
    return tree.map_leaves(place, inputs)


def example_of(shape: Any, dtype: np.dtype[Any]) -> Any:
    """Return zeros of a shape that a user gave, or a nest of zeros for a nest of shapes."""
    if isinstance(shape, Mapping):
        return {name: example_of(each, dtype) for name, each in shape.items()}
    lengths = list(shape)
    if any(isinstance(each, Mapping | Sequence) for each in lengths):
        return type(shape)(example_of(each, dtype) for each in lengths)
    if not lengths or None in lengths[1:]:
        raise ValueError(f"build needs each length but the first, got {tuple(lengths)}.")
    return np.zeros((1, *lengths[1:]), dtype)


def lengths_of(batch: Any) -> list[tuple[int, ...]]:
    """Return the lengths of the arrays of a nest on all axes but the first."""
    return [array.shape[1:] for array in tree.flatten(batch)]


def once(make: Callable[[], T]) -> T:
    """Call a function that makes variables; inside `run`, once for all replicas, which wait.

    All replicas of this process return its result.
    """
    replica = get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return make()
    with replica.communicator.uncounted():  # A worker that joins later builds later.
        return replica.merge_call(lambda _: make())  # type: ignore[no-any-return]


def made_in_call(layer: Any) -> str:
    """Return the error for a layer whose variables no model keeps."""
    return (
        f"{layer.name}: this {type(layer).__name__} layer was created inside call, so each call "
        "creates new variables, which fit does not train. Create the layer in __init__, as an "
        "attribute such as self.dense, and use the attribute in call."
    )


def empty_like(value: Any) -> np.ndarray[Any, Any]:
    """Return an array without examples, of the shape and dtype of a batch."""
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    return np.zeros((0, *np.shape(value)[1:]), dtype)


@functools.cache
def taken_by(call: Callable[..., Any]) -> tuple[str, bool | None, bool]:
    """Return the name of the first argument of a `call`, and last whether it takes a mask.

    Between these, return the default of `training`; None if it does not take it.
    """
    parameters = inspect.signature(call).parameters
    training = False if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else None
    if "training" in parameters:
        training = parameters["training"].default is True
    return [*parameters, "", ""][1], training, "mask" in parameters
