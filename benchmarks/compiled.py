"""Training steps of three models with Adam, plain and compiled, float32.

A step is a model, its loss, a tape and an optimizer: plainly on one replica and on two, compiled by
`nd.function`, and compiled by `TPUStrategy` for one and for two emulated devices. TensorFlow has
the same step in a `tf.function`, Keras on JAX in `train_on_batch`. All start from the same weights
and must agree on the loss of the first steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks import models, peer
from benchmarks.harness import JAX, OURS, TF, Benchmark, Contender, Group, main
from benchmarks.report import markdown, shown
from benchmarks.worker import Prepared

MODELS = ("MLP 784-512-512-10", "CNN 8x8x1", "transformer, 2 layers")
BATCHES = (32, 256, 2048)
RATE, CHECKED_STEPS = 1e-3, 3
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}


def step_of(
    lib: Any, model: Any, batch: int, prepare: Callable[[Any], Any] = list
) -> Callable[[Any, Any], Any]:
    """Return a replica's step of ndistribute or TensorFlow, which returns its share of the loss."""
    losses = lib.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    optimizer = lib.optimizers.Adam(RATE, epsilon=1e-7)

    def train(x: Any, y: Any) -> Any:
        with lib.GradientTape() as tape:
            loss = losses(y, model(x, training=True)) / batch
        variables = model.trainable_variables
        gradients = prepare(tape.gradient(loss, variables))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return train


def _prepared(step: Callable[[], float], compilations: Callable[[], int]) -> Prepared:
    """Return the step, after the first ones, with the seconds of the first one to tell."""
    begun = time.perf_counter()
    losses = [step()]
    first = time.perf_counter() - begun
    losses += [step() for _ in range(CHECKED_STEPS - 1)]

    def tell() -> dict[str, Any]:
        return {"first_seconds": first, "compilations": compilations()}

    return Prepared(step, float(np.mean(losses)), tell)


@contextmanager
def ours(model: str, batch: int, way: str) -> Iterator[Prepared]:
    """Set up a step of ndistribute."""
    import ndistribute as nd

    kind, _, count = way.partition(" ")
    devices = [f"{'tpu' if kind == 'TPUStrategy' else 'cpu'}:{i}" for i in range(int(count or 1))]
    strategy: Any = getattr(nd, kind)(devices) if count else nd.get_strategy()
    x, y = models.data_of(model, batch)
    with strategy.scope():
        net = models.model_of(nd, model)
        models.fill(net, x)
        train: Any = step_of(nd, net, batch)
    if kind == "function":
        train = nd.function(train)
        prepared = _prepared(lambda: float(train(x, y)), lambda: len(train.compilations))
    else:
        args = tuple(nd.PerReplica(np.split(array, len(devices))) for array in (x, y))

        def step() -> float:
            return float(strategy.reduce("sum", strategy.run(train, args=args)))

        prepared = _prepared(step, lambda: len(getattr(strategy, "compilations", ())))
    yield prepared
    if count:
        strategy.close()


@contextmanager
def tensorflow(model: str, batch: int) -> Iterator[Prepared]:
    """Set up the same step in a `tf.function`."""
    tf = peer.tensorflow()
    x, y = models.data_of(model, batch)
    net = models.model_of(tf.keras, model)
    models.fill(net, x)

    def dense(gradients: Any) -> Any:
        # Keras's Adam on TensorFlow squares repeated rows of a sparse gradient one by one.
        return map(tf.convert_to_tensor, gradients)

    graph = tf.function(step_of(_NamesOfTensorFlow(tf), net, batch, dense))
    args = tf.constant(x), tf.constant(y)
    yield _prepared(lambda: float(graph(*args)), graph.experimental_get_tracing_count)


class _NamesOfTensorFlow:
    """The names of a step, of which TensorFlow has some in Keras."""

    def __init__(self, tf: Any) -> None:
        self.GradientTape = tf.GradientTape
        self.losses, self.optimizers = tf.keras.losses, tf.keras.optimizers


@contextmanager
def keras(model: str, batch: int) -> Iterator[Prepared]:
    """Set up `train_on_batch` of Keras on JAX."""
    lib = peer.keras_on_jax()
    x, y = models.data_of(model, batch)
    net = models.model_of(lib, model)
    loss = lib.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(lib.optimizers.Adam(RATE, epsilon=1e-7), loss)
    models.fill(net, x)

    def step() -> float:
        net.reset_metrics()
        return float(net.train_on_batch(x, y))

    yield _prepared(step, lambda: 1)


# Name, side, maker and way.
_WAYS = [
    ("plain", OURS, "ours", {"way": "plain"}),
    ("MirroredStrategy, 2", OURS, "ours", {"way": "MirroredStrategy 2"}),
    ("nd.function", OURS, "ours", {"way": "function"}),
    ("TPUStrategy, 1", OURS, "ours", {"way": "TPUStrategy 1"}),
    ("TPUStrategy, 2", OURS, "ours", {"way": "TPUStrategy 2"}),
    ("tf.function", TF, "tensorflow", {}),
    ("Keras", JAX, "keras", {}),
]
_PLAIN = ("plain", "MirroredStrategy, 2")


def _groups(quick: bool) -> list[Group]:
    groups = []
    for model in MODELS[: 2 if quick else None]:
        for batch in BATCHES[: 1 if quick else None]:
            contenders = [
                Contender(
                    name,
                    side,
                    f"compiled:{maker}",
                    {"model": model, "batch": batch, **way},
                    threads=0 if side == OURS else 2,  # Ours chooses, as it does for users.
                    environ=DEVICES,
                    facts={"batch": batch},
                    alone=True,
                )
                for name, side, maker, way in _WAYS
            ]
            groups.append(Group(f"{model}, batch {batch}", contenders))
    return groups


def conclude(entries: list[dict[str, Any]]) -> str:
    """Return a row for each model and batch: milliseconds, compilation, and two ratios."""
    rows = []
    for group in dict.fromkeys(entry["group"] for entry in entries):
        named = {entry["name"]: entry for entry in entries if entry["group"] == group}
        times = {name: entry["figure"]["median"] / 1e3 for name, entry in named.items()}
        compiled = [n for n, e in named.items() if e["side"] == OURS and n not in _PLAIN]
        best = min((times[name] for name in compiled), default=float("nan"))
        seconds = [named[name]["told"][0]["first_seconds"] for name in compiled]
        rows.append(
            [
                group,
                *(shown(times[name]) if name in times else "" for name, *_ in _WAYS),
                f"{times.get('MirroredStrategy, 2', float('nan')) / best:.2f}",
                f"{min(times.values()) / best:.2f}",
                f"{min(seconds, default=0):.1f} to {max(seconds, default=0):.1f}",
            ]
        )
    head = ["ms", *(name for name, *_ in _WAYS), "two plain / compiled", "best / compiled"]
    return markdown([*head, "seconds of compilation"], rows)


BENCHMARK = Benchmark(
    "compiled",
    "A training step, plain and compiled, float32, Adam",
    "us",
    _groups,
    rate=False,
    conclude=conclude,
)

if __name__ == "__main__":
    main(BENCHMARK)
