"""Random numbers under TensorFlow's names, from the generator of the replica or from a seed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import graph
from ndistribute.compat.signatures import axis_of, unary
from ndistribute.compat.tensors import as_tensor
from ndistribute.context import current_seed
from ndistribute.models import initializers


def generator(seed: Any = None) -> Any:
    """Return the generator of the replica, or a new one outside of replicas.

    Args:
        seed: calls with a number draw other numbers each time, but the same in each run of a
            program and after each `set_seed`. Calls with a pair of numbers always draw the same
            numbers.
    """
    if isinstance(seed, np.random.Generator):
        return seed
    if hasattr(seed, "generator"):  # A `keras.random.SeedGenerator`.
        return seed.generator()
    if seed is not None and np.ndim(seed):
        return np.random.default_rng(np.asarray(seed))
    replica = nd.get_replica_context()
    rng = None if replica is None else replica.rng
    if seed is None and rng is not None:
        return rng
    # It is the generator of a GPU or of a trace.
    if rng is not None and not isinstance(rng, np.random.Generator):
        return np.random.default_rng(seed)
    sequence: Any = current_seed() if rng is None else rng.bit_generator.seed_seq
    (child,) = sequence.spawn(1)
    if seed is None:
        return np.random.default_rng(child)
    return np.random.default_rng([int(seed), child.spawn_key[-1]])


def _normal(shape: Any, mean: Any = 0, stddev: Any = 1, dtype: Any = None, seed: Any = None) -> Any:
    return generator(seed).normal(mean, stddev, axis_of(shape)).astype(dtype or np.float32)


def _uniform(
    shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = None, seed: Any = None
) -> Any:
    dtype = np.dtype(dtype or np.float32)
    if dtype.kind in "iu":
        if maxval is None:
            raise ValueError(f"uniform numbers of {dtype} need maxval, the exclusive upper bound.")
        return generator(seed).integers(minval, maxval, axis_of(shape), dtype)
    high = 1 if maxval is None else maxval
    return generator(seed).uniform(minval, high, axis_of(shape)).astype(dtype)


def _truncated_normal(
    shape: Any, mean: Any = 0, stddev: Any = 1, dtype: Any = None, seed: Any = None
) -> Any:
    values = initializers.truncated(generator(seed), axis_of(shape))
    return (values * stddev + mean).astype(dtype or np.float32)


def _shuffle(value: Any, seed: Any = None) -> Any:
    return np.take(value, generator(seed).permutation(len(value)), 0)


def _categorical(logits: Any, num_samples: int, dtype: Any = np.int64, seed: Any = None) -> Any:
    noise = generator(seed).gumbel(size=(len(logits), num_samples, np.shape(logits)[1]))
    return np.argmax(np.asarray(nd.stop_gradient(logits))[:, None] + noise, -1).astype(dtype)


def _gamma(shape: Any, alpha: Any, beta: Any = 1, dtype: Any = np.float32, seed: Any = None) -> Any:
    size = (*axis_of(shape), *np.shape(np.multiply(alpha, beta)))
    return generator(seed).gamma(alpha, 1 / np.asarray(beta), size).astype(dtype)


def _stateless(draw: Any) -> Any:
    """Return a function that always draws the same numbers for a seed of two numbers."""

    def call(shape: Any, seed: Any, *args: Any, alg: Any = None, **named: Any) -> Any:
        if np.shape(seed) != (2,):
            raise ValueError(f"seed must be two numbers, got {seed!r}.")
        return draw(shape, *args, **named | {"seed": seed})

    return unary(call, 0)


def _split(seed: Any, num: int = 2, alg: Any = None) -> Any:
    return generator(np.asarray(seed)).integers(0, 2**31 - 1, (num, 2), np.int32)


split = unary(_split, 0)


def _initializing(draw: Any) -> Any:
    """Return a function that also accepts a dtype after the shape, as layers call initializers."""

    def call(shape: Any, *args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], np.dtype):
            return draw(shape, dtype=args[0])
        return draw(shape, *args, **options)

    return unary(call, 0)


normal = graph.random_normal, _initializing(_normal)
uniform = graph.random_uniform, _initializing(_uniform)
truncated_normal = graph.truncated_normal, _initializing(_truncated_normal)
shuffle, categorical = unary(_shuffle), unary(_categorical)
gamma = unary(_gamma, 0)
stateless_normal, stateless_uniform = _stateless(_normal), _stateless(_uniform)
stateless_truncated_normal = _stateless(_truncated_normal)


def _drawing(draw: Any) -> Any:
    """Return a method that draws from the state of a `Generator`."""

    def method(self: Generator, *args: Any, name: Any = None, **options: Any) -> Any:
        return self._draw(lambda rng: draw(*args, seed=rng, **options))

    return method


def _any_integers(shape: Any, dtype: Any = np.uint64, seed: Any = None) -> Any:
    bounds = np.iinfo(dtype)
    return seed.integers(bounds.min, bounds.max, axis_of(shape), dtype, endpoint=True)


class Generator:
    """`tf.random.Generator`: random numbers from a state, which is a counter and a key.

    Several threads may use it. Its numbers come from NumPy's Philox.
    """

    def __init__(self, copy_from: Any = None, state: Any = None, alg: Any = None) -> None:
        self._lock = threading.Lock()
        self.reset(copy_from.state if state is None else state)

    normal, uniform = _drawing(_normal), _drawing(_uniform)
    truncated_normal, uniform_full_int = _drawing(_truncated_normal), _drawing(_any_integers)

    @classmethod
    def from_state(cls, state: Any, alg: Any = None) -> Generator:
        """Return a generator that continues from a state."""
        return cls(state=state)

    @classmethod
    def from_seed(cls, seed: Any, alg: Any = None) -> Generator:
        """Return a generator that draws the same numbers each time."""
        made = cls(state=np.zeros(6, np.int64))
        made.reset_from_seed(seed)
        return made

    @classmethod
    def from_non_deterministic_state(cls, alg: Any = None) -> Generator:
        """Return a generator that draws other numbers each time."""
        return cls.from_seed(None)

    @property
    def state(self) -> Any:
        """The counter and the key, as six integers."""
        return as_tensor(self._state.copy())

    def reset(self, state: Any) -> None:
        """Continue from a state."""
        if np.shape(state) != (6,):
            raise ValueError(
                f"the state of a Generator is 6 integers, got shape {np.shape(state)}."
            )
        self._state = np.array(state, np.int64)

    def reset_from_seed(self, seed: Any) -> None:
        """Start over, like a generator from `from_seed`."""
        key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        self.reset([0] * 4 + [*key.view(np.int64)])

    def skip(self, delta: Any) -> None:
        """Skip some blocks of four 64-bit numbers."""
        self._draw(lambda rng: rng.bit_generator.advance(int(delta)))

    def split(self, count: int = 1) -> list[Generator]:
        """Return independent generators; this one continues with other numbers."""
        return list(map(Generator.from_seed, self.uniform_full_int([count, 4], np.uint32).numpy()))

    def make_seeds(self, count: int = 1) -> Any:
        """Return a column of two numbers for each call of a stateless function."""
        return self.uniform_full_int([2, count], np.uint32).astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"state": self._state.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.reset(state["state"])

    def _draw(self, draw: Any) -> Any:
        """Return what a function draws with a NumPy generator, and advance the state."""
        with self._lock:
            counter, key = np.split(self._state.view(np.uint64), [4])
            bits = np.random.Philox(counter=counter, key=key)
            result = draw(np.random.Generator(bits))
            # The rest of the last block is dropped, so that the counter alone is the position.
            self._state[:4] = bits.state["state"]["counter"].view(np.int64)
        return as_tensor(result)


def get_global_generator() -> Generator:
    """Return a generator that the seed of the program determines; each call returns another one."""
    return Generator.from_seed(generator().integers(0, 2**32, 4))


def _candidates(
    true_classes: Any,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: Any = None,
) -> Any:
    """Return random classes, small numbers more often, and how often each is expected.

    The class k has the probability ``log((k + 2) / (k + 1)) / log(range_max + 1)``.
    """
    classes = np.asarray(true_classes)
    if classes.shape[1:] != (num_true,) or (unique and num_sampled > range_max):
        what = f"classes of shape {classes.shape}, num_sampled={num_sampled}"
        raise ValueError(f"num_true={num_true} and range_max={range_max} do not fit {what}.")
    rng, most = generator(seed), np.log(range_max + 1)
    drawn, tries = list[int](), 0
    while len(drawn) < num_sampled:
        each, tries = int(np.exp(rng.random() * most)) - 1, tries + 1
        drawn += [] if unique and each in drawn else [min(each, range_max - 1)]

    def expected(numbers: Any) -> Any:
        share = np.log((numbers + 2) / (numbers + 1)) / most
        count = -np.expm1(tries * np.log1p(-share)) if unique else share * num_sampled
        return as_tensor(np.asarray(count, np.float32))

    sampled = np.array(drawn, np.int64)
    return as_tensor(sampled), expected(classes), expected(sampled)


log_uniform_candidate_sampler = unary(_candidates, 0)


def make_sampling_table(size: int, sampling_factor: float = 1e-5) -> Any:
    """Return the probability to keep each word; words are sorted by frequency."""
    ranks = np.maximum(np.arange(size), 1)
    frequencies = 1 / (ranks * (np.log(ranks) + 0.577) + 0.5 - 1 / (12 * ranks))
    return np.minimum(1, np.sqrt(sampling_factor / frequencies))


def skipgrams(
    sequence: Any,
    vocabulary_size: int,
    window_size: int = 4,
    negative_samples: float = 1.0,
    shuffle: bool = True,
    sampling_table: Any = None,
    seed: Any = None,
) -> tuple[list[list[int]], list[int]]:
    """Return pairs of a word and a near word, further pairs with a random word, and labels.

    Labels are 1 for near words, and 0 for random words. The word 0 is left out. `sampling_table`
    has the probability to keep each word, and so leaves out frequent words.
    """
    rng, words = generator(seed), [int(word) for word in sequence]
    pairs = [
        [word, other]
        for place, word in enumerate(words)
        if word and (sampling_table is None or sampling_table[word] >= rng.random())
        for near, other in enumerate(words)
        if other and 0 < abs(near - place) <= window_size
    ]
    labels = [1] * len(pairs)
    for k in rng.integers(0, len(pairs) or 1, int(len(pairs) * negative_samples)):
        pairs.append([pairs[k][0], int(rng.integers(1, vocabulary_size))])
    labels += [0] * (len(pairs) - len(labels))
    order = rng.permutation(len(pairs)) if shuffle else range(len(pairs))
    return [pairs[k] for k in order], [labels[k] for k in order]
