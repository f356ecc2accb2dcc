"""Attention: each query gets a mean of values, weighted by how well their keys match it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ndistribute.autodiff import softmax, untrack
from ndistribute.exports import export as _export
from ndistribute.models import operations
from ndistribute.models.layers.arguments import check_axes, dropout_factors, positive, rate_of
from ndistribute.models.layers.core import Dense
from ndistribute.models.layers.layer import Layer
from ndistribute.models.masks import mask_of

_OF_LAYERS = {"name", "trainable", "dtype", "input_shape"}


class MultiHeadAttention(Layer):
    """A layer in which each query attends to keys, and gets the mean of their values.

    The layer projects queries, keys and values to several heads, and projects the results of all
    heads to the output. Source: Vaswani et al., "Attention Is All You Need", 2017.

    Args:
        num_heads: the number of heads.
        key_dim: the length of a head's queries and keys.
        value_dim: the length of a head's values; None means `key_dim`.
        dropout: the share of probabilities to drop in training.
        use_bias: whether the projections have biases.
        output_shape: the length of the output's last axis; None means that of the query.
        options: as for `Dense`, for the projections; each has one matrix for all heads.

    >>> layer = MultiHeadAttention(num_heads=2, key_dim=4)
    >>> query, value = np.zeros((3, 5, 8), np.float32), np.zeros((3, 7, 6), np.float32)
    >>> layer(query, value).shape
    (3, 5, 8)
    """

    supports_masking = True

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | None = None,
        **options: Any,
    ) -> None:
        of_layer = {name: options.pop(name) for name in options.keys() & _OF_LAYERS}
        super().__init__(**of_layer)
        self.num_heads = positive(num_heads, "MultiHeadAttention: num_heads")
        self.key_dim = positive(key_dim, "MultiHeadAttention: key_dim")
        width = self.key_dim if value_dim is None else value_dim
        self.value_dim = positive(width, "MultiHeadAttention: value_dim")
        self.dropout = rate_of(dropout, "MultiHeadAttention: dropout")
        self._output_shape = output_shape
        dtype = of_layer.get("dtype") or Layer.policy
        self._dense = options | {"use_bias": use_bias, "trainable": self.trainable, "dtype": dtype}
        self.query = self._projection("query", self.num_heads * self.key_dim)
        self.key = self._projection("key", self.num_heads * self.key_dim)
        self.value = self._projection("value", self.num_heads * self.value_dim)
        self.output: Any = None

    def build(self, input_shape: Any) -> None:
        """Create the projection of the output."""
        width = input_shape[-1] if self._output_shape is None else self._output_shape
        self.output = self._projection("output", width)

    def call(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
        return_attention_scores: bool = False,
        training: bool = False,
    ) -> Any:
        """Return the output, of shape ``(batch, queries, width)``.

        Args:
            query: an array of shape ``(batch, queries, ...)``.
            value: an array of shape ``(batch, keys, ...)``.
            key: an array of shape ``(batch, keys, ...)``; None means `value`.
            attention_mask: booleans of shape ``(queries, keys)``, ``(batch, queries, keys)`` or
                ``(batch, heads, queries, keys)``, True where a query attends to a key. Axes of
                length 1 are repeated. The output of a query without keys is zeros. Keys that the
                mask of `value` or `key` leaves out have no effect.
            use_causal_mask: whether queries ignore later keys.
            return_attention_scores: whether to return a tuple of the output and the probabilities,
                of shape ``(batch, heads, queries, keys)``.
            training: whether to drop probabilities.
        """
        key = value if key is None else key
        for what, array in (("query", query), ("value", value), ("key", key)):
            check_axes(f"{self.name}: {what}", array.shape, ("batch", "length", "features"))
        heads = self._heads(self.query, query), self._heads(self.key, key)
        values = self._heads(self.value, value)
        shape = query.shape[0], self.num_heads, query.shape[1], key.shape[1]
        mask = self._mask(attention_mask, shape)
        for of_keys in {id(array): mask_of(array) for array in (value, key)}.values():
            mask = _both(mask, None if of_keys is None else of_keys[:, None, None])
        kept = dropout_factors(values, shape, self.dropout) if training else None
        options = {"mask": mask, "is_causal": use_causal_mask, "kept": kept}
        means = operations.attention(*heads, values, **options)
        y = self.output(means.reshape(*query.shape[:2], self.num_heads * self.value_dim))
        if not return_attention_scores:
            return y
        scores = np.einsum("bqhd,bkhd->bhqk", *heads) / math.sqrt(self.key_dim)
        weights = _probabilities(scores, mask, use_causal_mask)
        return y, weights if kept is None else weights * kept

    def _heads(self, projection: Layer, x: Any) -> Any:
        """Return a projection of shape ``(batch, length, heads, width)``."""
        y = projection(x)
        return y.reshape(*y.shape[:2], self.num_heads, y.shape[2] // self.num_heads)

    def _mask(self, mask: Any, shape: tuple[int, ...]) -> Any:
        """Return a mask that broadcasts to a shape; raise a ValueError if it does not."""
        if mask is None:
            return None
        mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
        before = mask.shape
        if mask.ndim == 3:
            mask = mask[:, None]
        fits = mask.ndim in (2, 4) and all(
            n in (1, wanted) for n, wanted in zip(mask.shape[::-1], shape[::-1], strict=False)
        )
        if not fits:
            raise ValueError(
                f"{self.name}: attention_mask has shape {before}, but must be of shape (queries, "
                f"keys) = {shape[2:]}, (batch, queries, keys) or {shape}."
            )
        return mask.astype(bool)

    def _projection(self, name: str, width: int) -> Dense:
        return Dense(width, name=f"{self.name}/{name}", **self._dense)


def _both(mask: Any, other: Any) -> Any:
    """Return where two masks are True; None is True everywhere."""
    return other if mask is None else mask if other is None else mask & other


def _probabilities(scores: Any, mask: Any, is_causal: bool) -> Any:
    """Return the softmax over keys of scores, without those that a mask leaves out."""
    allowed = _both(mask, operations.causal_mask(untrack(scores)) if is_causal else None)
    if allowed is None:
        return softmax(scores, axis=-1)
    scores = np.where(allowed, scores, np.finfo(scores.dtype).min)
    return np.where(allowed, softmax(scores, axis=-1), 0)  # A query that no key may reach gets 0.


_export(vars())
