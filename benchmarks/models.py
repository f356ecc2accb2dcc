"""Steps of models that `fit` trains: an MLP, convolutional networks, an LSTM and a transformer.

Keras, on TensorFlow and on JAX, has the same models from the same code, PyTorch's loop is written
out. All start
from the same weights, and their losses after a few steps are compared before the measurement. The
first epoch of each `fit` is not counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from benchmarks import peer
from benchmarks.harness import JAX, OURS, TF, TORCH, Benchmark, Contender, Group, main
from benchmarks.machine import facts
from benchmarks.report import markdown, shown
from benchmarks.worker import Prepared, strategy_of

BATCH, CLASSES, WORDS, LENGTH, WIDTH, HEADS = 64, 10, 1000, 32, 64, 4
RATE, CHECKED_STEPS = 1e-3, 2
_CNNS = {"CNN 8x8x1": (8, 1, 16), "CNN 32x32x3": (32, 3, 32)}  # Size, channels, first filters.
_RESIDUAL, _LSTM, UNITS = "functional CNN 32x32x3", "LSTM of 32 steps", 128
_IMAGES = {**_CNNS, _RESIDUAL: (32, 3, 16)}
MODELS = ("MLP 784-512-512-10", *_IMAGES, _LSTM, "transformer, 2 layers")


def model_of(lib: Any, name: str) -> Any:
    """Return a model of ndistribute or of Keras."""
    layers = lib.layers
    if name.startswith("MLP"):
        hidden = [layers.Dense(512, activation="relu") for _ in range(2)]
        return lib.Sequential([*hidden, layers.Dense(CLASSES)])
    if name in _CNNS:
        filters = _CNNS[name][2]
        parts: list[Any] = []
        for count in (filters, 2 * filters):
            parts.append(layers.Conv2D(count, 3, padding="same", activation="relu"))
            parts.append(layers.MaxPool2D(2))
        head = [layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(CLASSES)]
        return lib.Sequential([*parts, *head])

    if name == _RESIDUAL:
        size, channels, filters = _IMAGES[name]
        x = layers.Input((size, size, channels))
        y = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        inner = layers.Conv2D(filters, 3, padding="same", activation="relu")(y)
        pooled = layers.MaxPool2D(4)(layers.add([y, inner]))
        return lib.Model(x, layers.Dense(CLASSES)(layers.Flatten()(pooled)))
    if name == _LSTM:
        return lib.Sequential(
            [layers.Embedding(WORDS, WIDTH), layers.LSTM(UNITS), layers.Dense(CLASSES)]
        )

    class Block(layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
            self.first_norm = layers.LayerNormalization()
            self.hidden = layers.Dense(4 * WIDTH, activation="relu")
            self.output_ = layers.Dense(WIDTH)
            self.second_norm = layers.LayerNormalization()

        def call(self, inputs: Any) -> Any:
            x = self.first_norm(inputs + self.attention(inputs, inputs))
            return self.second_norm(x + self.output_(self.hidden(x)))

    embedding = layers.Embedding(WORDS, WIDTH)
    return lib.Sequential([embedding, Block(), Block(), layers.Flatten(), layers.Dense(CLASSES)])


def _parts_of(torch: Any, name: str) -> list[Any]:
    """Return the layers of the same model of PyTorch."""
    nn = torch.nn
    if name.startswith("MLP"):
        parts = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        parts.append(nn.Linear(512, CLASSES))
    elif name in _CNNS:
        size, channels, filters = _CNNS[name]
        parts = []
        for count, inputs in ((filters, channels), (2 * filters, filters)):
            conv = nn.Conv2d(inputs, count, 3, padding=1)
            parts += [conv, nn.ReLU(), nn.MaxPool2d(2)]
        flat = (size // 4) ** 2 * 2 * filters
        parts += [nn.Flatten(), nn.Linear(flat, 64), nn.ReLU(), nn.Linear(64, CLASSES)]
    elif name == _RESIDUAL:
        size, channels, filters = _IMAGES[name]
        parts = [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
        parts += [_around(torch, nn.Conv2d(filters, filters, 3, padding=1)), nn.MaxPool2d(4)]
        parts += [nn.Flatten(), nn.Linear((size // 4) ** 2 * filters, CLASSES)]
    elif name == _LSTM:
        parts = [nn.Embedding(WORDS, WIDTH), _last(torch, nn.LSTM(WIDTH, UNITS, batch_first=True))]
        parts.append(nn.Linear(UNITS, CLASSES))
    else:
        options = {"dropout": 0.0, "layer_norm_eps": 1e-3, "batch_first": True}
        blocks = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(2)]
        parts = [nn.Embedding(WORDS, WIDTH), *blocks, nn.Flatten()]
        parts.append(nn.Linear(LENGTH * WIDTH, CLASSES))
    return parts


def torch_model_of(torch: Any, name: str, weights: _Weights) -> Any:
    """Return the same model of PyTorch, images with the channels first."""
    nn, parts = torch.nn, _parts_of(torch, name)
    channels = 0
    with torch.no_grad():
        for part in parts:
            if isinstance(part, nn.Conv2d):
                _fill_conv(torch, part, weights)
                channels = part.out_channels
            elif isinstance(part, nn.Linear):
                _fill_dense(torch, part, weights, channels)
                channels = 0
            elif hasattr(part, "conv"):
                _fill_conv(torch, part.conv, weights)
            elif hasattr(part, "lstm"):
                _fill_lstm(torch, part.lstm, weights)
            elif isinstance(part, nn.Embedding):
                part.weight.copy_(torch.from_numpy(weights("embeddings", WORDS, WIDTH)))
            elif isinstance(part, nn.TransformerEncoderLayer):
                _fill_block(torch, part, weights)
    return nn.Sequential(*parts)


def _around(torch: Any, conv: Any) -> Any:
    """Return a module that adds its input to the rectified result of a convolution."""

    class Around(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Any) -> Any:
            return x + torch.relu(self.conv(x))

    return Around()


def _last(torch: Any, lstm: Any) -> Any:
    """Return a module that returns the last output of an LSTM."""

    class Last(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lstm = lstm

        def forward(self, x: Any) -> Any:
            return self.lstm(x)[0][:, -1]

    return Last()


class _Weights:
    """Draws the first weights, the same for everyone who asks in the same order."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, kind: str, *shape: int) -> Any:
        if kind.endswith("kernel") or kind == "embeddings":
            return self._rng.normal(0, 0.05, shape).astype(np.float32)
        return np.full(shape, float(kind == "gamma"), np.float32)


def _fill_dense(torch: Any, part: Any, weights: _Weights, channels: int = 0) -> None:
    kernel = weights("kernel", part.in_features, part.out_features)
    if channels:  # What is flattened before has its channels first here, last elsewhere.
        size = round((part.in_features / channels) ** 0.5)
        images = kernel.reshape(size, size, channels, -1)
        kernel = images.transpose(2, 0, 1, 3).reshape(kernel.shape)
    part.weight.copy_(torch.from_numpy(kernel.T.copy()))
    part.bias.zero_()


def _fill_conv(torch: Any, part: Any, weights: _Weights) -> None:
    kernel = weights("kernel", 3, 3, part.in_channels, part.out_channels)
    part.weight.copy_(torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy()))
    part.bias.zero_()


def _fill_lstm(torch: Any, part: Any, weights: _Weights) -> None:
    """Fill the weights, whose gates have the same order in Keras."""
    for weight, inputs in ((part.weight_ih_l0, part.input_size), (part.weight_hh_l0, UNITS)):
        weight.copy_(torch.from_numpy(weights("kernel", inputs, 4 * UNITS).T.copy()))
    part.bias_ih_l0.zero_()
    part.bias_hh_l0.zero_()


def _fill_block(torch: Any, part: Any, weights: _Weights) -> None:
    attention = part.self_attn
    inputs = np.concatenate([weights("kernel", WIDTH, WIDTH) for _ in range(3)], axis=1)
    attention.in_proj_weight.copy_(torch.from_numpy(inputs.T.copy()))
    attention.in_proj_bias.zero_()
    for dense in (attention.out_proj, part.linear1, part.linear2):
        _fill_dense(torch, dense, weights)


def data_of(name: str, rows: int) -> tuple[Any, Any]:
    """Return the inputs and the labels of an epoch."""
    rng = np.random.default_rng(1)
    labels = rng.integers(CLASSES, size=rows).astype(np.int64)
    if name.startswith(("transformer", "LSTM")):
        return rng.integers(WORDS, size=(rows, LENGTH)), labels
    size, channels, _ = _IMAGES.get(name, (0, 0, 0))
    shape = (size, size, channels) if size else (784,)
    return rng.random((rows, *shape), np.float32), labels


class _Memory:
    """The memory that steps need, beside what the process holds with model and data, in MB."""

    def __init__(self) -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # The peak so far no longer counts.
        self._before = facts(os.getpid())["resident"]

    def told(self) -> dict[str, float]:
        """Return how much of it there was at most since this object was made."""
        peak = facts(os.getpid())["peak"]
        return {"grown_mb": peak - self._before, "peak_mb": peak}


def fill(model: Any, x: Any) -> None:
    """Give a model of ndistribute or of Keras its first weights."""
    weights = _Weights()
    model(x[:1])  # Creates the variables, which have no optimizer or metric among them.
    kinds = [(one.name.rpartition("/")[2], one.shape) for one in model.trainable_variables]
    model.set_weights([weights(kind, *shape) for kind, shape in kinds])


def _fitted(lib: Any, scope: Any, name: str, steps: int) -> Prepared:
    """Return the work of `fit`, whose first epoch is not counted."""
    x, y = data_of(name, BATCH * steps)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    with scope:
        model = model_of(lib, name)
        loss = lib.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(lib.optimizers.Adam(RATE, epsilon=1e-7), loss)
        fill(model, x)
    memory, count = _Memory(), CHECKED_STEPS * BATCH
    checked = model.fit(x[:count], y[:count], **options).history["loss"][0]

    def seconds(epochs: int) -> float:
        ends: list[float] = []
        clock = lib.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
        )
        model.fit(x, y, epochs=epochs + 1, callbacks=[clock], **options)
        return ends[-1] - ends[0]

    return Prepared(seconds=seconds, check=float(checked), tell=memory.told)


@contextmanager
def ours(model: str, strategy: str, steps: int) -> Iterator[Prepared]:
    """Set up `fit` of ndistribute."""
    import ndistribute as nd

    made: dict[str, Callable[[], Any]] = {
        "one": nd.get_strategy,
        "mirrored": lambda: nd.MirroredStrategy(["cpu:0", "cpu:1"]),
        "workers": lambda: strategy_of("MultiWorkerMirroredStrategy"),
    }
    chosen = made[strategy]()
    yield _fitted(nd, chosen.scope(), model, steps)
    if strategy == "mirrored":
        chosen.close()


@contextmanager
def keras(model: str, strategy: str, steps: int) -> Iterator[Prepared]:
    """Set up the same `fit` of Keras."""
    made = {"one": nullcontext, "mirrored": lambda: peer.mirrored(2).scope()}
    yield _fitted(peer.tensorflow().keras, made[strategy](), model, steps)


@contextmanager
def keras_on_jax(model: str, strategy: str, steps: int) -> Iterator[Prepared]:
    """Set up the same `fit` of Keras on JAX, which is always compiled."""
    yield _fitted(peer.keras_on_jax(), nullcontext(), model, steps)


@contextmanager
def torch(model: str, strategy: str, steps: int) -> Iterator[Prepared]:
    """Set up the same steps in a loop of PyTorch."""
    lib, rank = peer.torch_group()
    net = torch_model_of(lib, model, _Weights())
    workers = 1
    if strategy == "workers":
        workers = lib.distributed.get_world_size()
        net = lib.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = lib.optim.Adam(net.parameters(), RATE, eps=1e-7)
    x, y = data_of(model, BATCH * steps)
    x = np.moveaxis(x, 3, 1) if x.ndim == 4 else x
    x, y = (one.reshape(steps, workers, -1, *one.shape[1:])[:, rank] for one in (x, y))
    batches = [
        tuple(map(lib.from_numpy, map(np.ascontiguousarray, pair)))
        for pair in zip(x, y, strict=True)
    ]

    def epoch(some: Sequence[Any]) -> float:
        total = lib.zeros(())
        for inputs, labels in some:
            optimizer.zero_grad()
            # The mean over this worker's part; DDP takes the mean of the workers' gradients.
            loss = lib.nn.functional.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return float(total) / len(some)

    def seconds(epochs: int) -> float:
        epoch(batches)
        start = time.perf_counter()
        for _ in range(epochs):
            epoch(batches)
        return time.perf_counter() - start

    memory = _Memory()
    check = lib.tensor(epoch(batches[:CHECKED_STEPS])) / workers
    if workers > 1:
        lib.distributed.all_reduce(check)
    yield Prepared(seconds=seconds, check=float(check), tell=memory.told)


# Name, side, maker, strategy, processes and threads of each.
_WAYS: dict[str, list[tuple[str, str, str, str, int, int]]] = {
    "one process, 1 thread": [
        ("fit", OURS, "ours", "one", 1, 1),
        ("Keras fit", TF, "keras", "one", 1, 1),
        ("Keras fit on JAX", JAX, "keras_on_jax", "one", 1, 1),
        ("loop", TORCH, "torch", "one", 1, 1),
    ],
    "one process, 2 threads": [
        ("fit", OURS, "ours", "one", 1, 2),
        ("Keras fit", TF, "keras", "one", 1, 2),
        ("loop", TORCH, "torch", "one", 1, 2),
    ],
    "two replicas": [
        ("MirroredStrategy", OURS, "ours", "mirrored", 1, 1),
        ("MultiWorkerMirrored", OURS, "ours", "workers", 2, 1),
        ("Keras, MirroredStrategy", TF, "keras", "mirrored", 1, 2),
        ("DDP, gloo", TORCH, "torch", "workers", 2, 1),
    ],
}


def _groups(quick: bool) -> list[Group]:
    groups = []
    for model in MODELS:
        steps = CHECKED_STEPS if quick else (32 if model in _IMAGES else 64)
        for title, ways in _WAYS.items():
            if quick and (title == "one process, 2 threads" or "32x32x3" in model):
                continue
            found = []
            for name, side, maker, strategy, processes, threads in ways:
                params = {"model": model, "strategy": strategy, "steps": steps}
                told = {"batch": BATCH, "workers": processes, "threads": threads}
                jobs, made = ("worker",) * processes, f"models:{maker}"
                common: dict[str, Any] = {"jobs": jobs, "threads": threads, "facts": told}
                common |= {"units": steps, "alone": True}
                found.append(Contender(name, side, made, params, **common))
            groups.append(Group(f"{model}: {title}", found))
    return groups


def conclude(entries: list[dict[str, Any]]) -> str:
    """Return a table with a row for each model and way: milliseconds, ratio and memory."""
    rows = []
    for one in (entry for entry in entries if entry["side"] == OURS):
        near = {e["side"]: e for e in entries if e["group"] == one["group"] and e["side"] != OURS}
        sides = [one, near.get(TF), near.get(JAX), near.get(TORCH)]
        times = [side["figure"]["median"] for side in near.values()]
        model, _, way = one["group"].rpartition(": ")
        rows.append(
            [
                f"{model}, {way if one['name'] == 'fit' else one['name']}",
                *(shown(side["figure"]["median"] / 1e3) if side else "" for side in sides),
                f"{min(times) / one['figure']['median']:.2f}" if times else "",
                *(f"{_grown(side):.0f}" if side else "" for side in sides),
            ]
        )
    names = "ours", "Keras", "Keras on JAX", "PyTorch"
    head = ["", *(f"{name} ms" for name in names), "times the best peer"]
    return markdown([*head, *(f"{name} MB" for name in names)], rows)


def _grown(entry: dict[str, Any]) -> float:
    """Return how much the memory of all processes of a contender grew at most, in MB."""
    return float(sum(one["grown_mb"] for one in entry["told"]))


BENCHMARK = Benchmark(
    "models",
    f"A step of models trained by fit, batch {BATCH}, float32, Adam",
    "us",
    _groups,
    rate=False,
    conclude=conclude,
)

if __name__ == "__main__":
    main(BENCHMARK)
