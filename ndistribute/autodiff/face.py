"""The methods of an array, written in terms of NumPy's functions.

A tracked array offers what a NumPy array offers, so that model code need not know which it has.
Everything here calls ``np.something(self, ...)``, which comes back through the protocols of
`Tracked`; no derivative and no graph is known in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

__all__ = ["ArrayFace"]


class ArrayFace:
    """Offer the attributes, methods and less frequent operators of ``numpy.ndarray``.

    Args:
        value: the raw array.
        graph: the graph in which it was recorded.
        index: its place there.
    """

    __slots__ = ("graph", "index", "value")

    def __init__(self, value: Any, graph: Any, index: int) -> None:
        self.value = value
        self.graph = graph
        self.index = index

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the axes."""
        return self.value.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> Any:
        """Return the dtype of the elements."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return self.value.ndim  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.value.size  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Return the memory that the elements take."""
        return self.value.nbytes  # type: ignore[no-any-return]

    @property
    def itemsize(self) -> int:
        """Return the memory that one element takes."""
        return self.value.itemsize  # type: ignore[no-any-return]

    @property
    def device(self) -> Any:
        """Return where the raw array lives."""
        return self.value.device

    @property
    def T(self) -> Any:
        """Return the array with its axes reversed."""
        return np.transpose(self)  # type: ignore[call-overload]

    @property
    def mT(self) -> Any:
        """Return the array with its last two axes exchanged."""
        return np.swapaxes(self, -1, -2)  # type: ignore[call-overload]

    @property
    def real(self) -> Any:
        """Return the real part."""
        return np.real(self)

    @property
    def imag(self) -> Any:
        """Return the imaginary part."""
        return np.imag(self)

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        """Return the array with another shape, given as one tuple or as several integers."""
        wanted = shape[0] if len(shape) == 1 else shape
        return np.reshape(self, wanted, order)  # type: ignore[call-overload]

    def transpose(self, *axes: Any) -> Any:
        """Return the array with its axes reordered, given as one tuple or as several integers."""
        order = axes[0] if len(axes) == 1 else axes or None
        return np.transpose(self, order)  # type: ignore[call-overload]

    def flatten(self, order: str = "C") -> Any:
        """Return the elements along one axis."""
        return np.ravel(self, order)  # type: ignore[call-overload]

    def numpy(self) -> Any:
        """Return a copy of the raw array, without a gradient."""
        return self.value.copy()

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        if not self.value.ndim:
            raise TypeError("iteration over a 0-d tracked array.")
        return (self[i] for i in range(len(self.value)))  # type: ignore[index]

    def __contains__(self, item: Any) -> bool:
        return item in self.value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value[()] if self.value.ndim == 0 else self.value, spec)

    def __abs__(self) -> Any:
        return np.absolute(self)  # type: ignore[call-overload]

    def __pos__(self) -> Any:
        return np.positive(self)  # type: ignore[call-overload]

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            "x[i] = v on a tracked array: the tape could not take it back. Make a new array, with "
            "np.where(mask, v, x), np.concatenate or np.stack."
        )


def _operator(ufunc: Any, name: str, *, reflected: bool = False) -> Callable[..., Any]:
    def operator(self: ArrayFace, other: Any) -> Any:
        return ufunc(other, self) if reflected else ufunc(self, other)

    operator.__name__ = name
    return operator


_COMPARISONS: dict[str, Any] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
}
_DIVISIONS: dict[str, Any] = {"floordiv": np.floor_divide, "mod": np.remainder, "divmod": np.divmod}

for _name, _ufunc in _COMPARISONS.items():
    setattr(ArrayFace, _name, _operator(_ufunc, _name))
for _name, _ufunc in _DIVISIONS.items():
    setattr(ArrayFace, f"__{_name}__", _operator(_ufunc, _name))
    setattr(ArrayFace, f"__r{_name}__", _operator(_ufunc, _name, reflected=True))
del _name, _ufunc
