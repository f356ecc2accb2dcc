"""`Input`, the start of a functional model or a `Sequential`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.dtypes import dtype_named
from ndistribute.exports import export as _export
from ndistribute.models.layers.layer import Layer
from ndistribute.models.symbolic import RecordedCall, SymbolicArray


class InputLayer(Layer):
    """The layer whose output is a symbolic input of a model; see `Input`."""

    def __init__(
        self,
        shape: Sequence[int | None],
        batch_size: int | None = None,
        dtype: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input_shape=shape)
        call = RecordedCall(self)
        dtype = str if isinstance(dtype, str) and dtype == "string" else dtype
        named = dtype_named(dtype) if isinstance(dtype, str) else np.dtype(dtype or self.dtype)
        call.outputs = SymbolicArray(call, (batch_size, *shape), named)
        self._recorded.append(call)
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Return the input."""
        return inputs


def Input(  # noqa: N802
    shape: Sequence[int | None] = (),
    batch_size: int | None = None,
    dtype: Any = None,
    name: str | None = None,
    batch_shape: Sequence[int | None] | None = None,
) -> SymbolicArray:
    """Return a symbolic array, the input of a functional model or a `Sequential`.

    Args:
        shape: the shape of an example; None is a length that may differ from batch to batch.
        batch_size: the length of the batch in shapes; a model also accepts other lengths.
        dtype: the dtype to which the model casts its input, or ``"string"``; None means the dtype
            of variables.
        name: the name in messages and summaries, and the key in a dict of inputs.
        batch_shape: the shape of a batch, instead of `shape` and `batch_size`.

    >>> from ndistribute.models import Model, Sequential
    >>> from ndistribute.models.layers import Dense
    >>> Sequential([Input((4,)), Dense(2)]).count_params()
    10
    >>> x = Input((4,))
    >>> Model(inputs=x, outputs=x + Dense(4)(x)).output_shape
    (None, 4)
    """
    if batch_shape is not None:
        batch_size, *shape = batch_shape
    return InputLayer(shape, batch_size, dtype, name).output  # type: ignore[no-any-return]


_export(vars())
