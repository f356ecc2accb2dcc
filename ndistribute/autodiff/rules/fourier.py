"""Derivatives of `numpy.fft`.

The matrix of a Fourier transform is symmetric: its derivative is the transform itself. Transforms
over several axes are those over one, one after the other, as in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.unbroadcast import unbroadcast, zeros
from ndistribute.device import Array

__all__ = ["COMPOSED", "RULES"]

Value = Any  # a tracked or plain array
Vjp = Callable[[Array], Array]

# What scales a transform there, scales the transform back that its derivative is made of.
_BACK: dict[Any, Any] = {
    None: "forward",
    "backward": "forward",
    "ortho": "ortho",
    "forward": "backward",
}


def _complex(function: Callable[..., Array]) -> Callable[..., Vjp]:
    """Return the rule of `fft` or `ifft`."""

    def maker(out: Array, a: Array, n: Any = None, axis: int = -1, norm: Any = None) -> Vjp:
        shape, dtype = a.shape, a.dtype
        return lambda g: unbroadcast(
            _resized(function(g, axis=axis, norm=norm), shape), shape, dtype
        )

    return maker


def _rfft(out: Array, a: Array, n: Any = None, axis: int = -1, norm: Any = None) -> Vjp:
    shape, dtype, length = a.shape, a.dtype, a.shape[axis] if n is None else n
    return lambda g: _resized(np.fft.fft(g, length, axis, norm).real, shape).astype(dtype)


def _irfft(out: Array, a: Array, n: Any = None, axis: int = -1, norm: Any = None) -> Vjp:
    shape, dtype, length = a.shape, a.dtype, out.shape[axis]

    def vjp(g: Array) -> Array:
        change = np.conj(np.fft.rfft(g, axis=axis, norm=_BACK[norm]))
        # All but the first, and the middle one of an even length, stand for two frequencies.
        np.moveaxis(change, axis, 0)[1 : (length + 1) // 2] *= 2
        return unbroadcast(_resized(change, shape), shape, dtype)

    return vjp


def _resized(g: Array, shape: tuple[int, ...]) -> Array:
    """Return an array cut or filled with zeros at the end of each axis."""
    if g.shape == shape:
        return g
    whole = zeros(g, shape)
    common = tuple(slice(min(pair)) for pair in zip(g.shape, shape, strict=True))
    whole[common] = g[common]
    return whole


def _over_axes(
    last: Callable[..., Value], others: Callable[..., Value], default: Any
) -> Callable[..., Value]:
    """Return a transform over several axes; that of real values is over the last axis."""

    def transform(a: Value, s: Any = None, axes: Any = default, norm: Any = None) -> Value:
        if axes is None:
            axes = range(-(np.ndim(a) if s is None else len(s)), 0)
        lengths = [None] * len(axes) if s is None else [None if n == -1 else n for n in s]
        *first, final = zip(lengths, axes, strict=True)
        if last is np.fft.irfft:
            for n, axis in first:
                a = others(a, n, axis, norm)
            return last(a, *final, norm)
        a = last(a, *final, norm)
        for n, axis in reversed(first):
            a = others(a, n, axis, norm)
        return a

    return transform


def _hfft(a: Value, n: Any = None, axis: int = -1, norm: Any = None) -> Value:
    return np.fft.irfft(np.conj(a), n, axis, _BACK[norm])


def _ihfft(a: Value, n: Any = None, axis: int = -1, norm: Any = None) -> Value:
    return np.conj(np.fft.rfft(a, n, axis, _BACK[norm]))


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.fft.fft: (_complex(np.fft.fft),),
    np.fft.ifft: (_complex(np.fft.ifft),),
    np.fft.rfft: (_rfft,),
    np.fft.irfft: (_irfft,),
    np.fft.fftshift: (lambda out, x, axes=None: lambda g: np.fft.ifftshift(g, axes),),
    np.fft.ifftshift: (lambda out, x, axes=None: lambda g: np.fft.fftshift(g, axes),),
}

COMPOSED: dict[Any, Callable[..., Value]] = {
    np.fft.hfft: _hfft,
    np.fft.ihfft: _ihfft,
} | {
    getattr(np.fft, f"{name}{suffix}"): _over_axes(
        getattr(np.fft, name), np.fft.ifft if name[0] == "i" else np.fft.fft, axes
    )
    for name in ("fft", "ifft", "rfft", "irfft")
    for suffix, axes in (("2", (-2, -1)), ("n", None))
}
