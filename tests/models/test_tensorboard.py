"""What TensorBoard is shown: a reader of event files of our own finds what was written."""

import contextlib
import inspect
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.event_files import EventFile, crc32c, histogram, masked_crc32c, png
from ndistribute.models import Sequential, callbacks, layers

X = np.ones((8, 2))
Y = np.zeros((8, 1))


def fields(message: bytes) -> dict[int, list[Any]]:
    """Return the fields of a message of Protocol Buffers."""
    found: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            value: Any = varint()
        else:
            size, code = {1: (8, "<d"), 5: (4, "<f"), 2: (0, "")}[key & 7]
            size = size or varint()
            raw = message[at : at + size]
            value, at = (struct.unpack(code, raw)[0] if code else raw), at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def events(folder: Path) -> list[tuple[int, dict[str, dict[int, list[Any]]]]]:
    """Return the step, and the fields of the values by tag, of each event of the one file."""
    (path,) = folder.iterdir()
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        content = data[at + 12 : at + 12 + length]
        (first,) = struct.unpack_from("<I", data, at + 8)
        (second,) = struct.unpack_from("<I", data, at + 12 + length)
        assert (first, second) == (masked_crc32c(data[at : at + 8]), masked_crc32c(content))
        at += 16 + length
        event = fields(content)
        if 3 in event:
            assert event[3] == [b"brain.Event:2"]
            continue
        if 4 in event:  # A graph.
            continue
        values = [fields(value) for value in fields(event[5][0])[1]]
        found.append((event[2][0], {value[1][0].decode(): value for value in values}))
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for step, values in events(folder):
        for tag, value in values.items():
            if 2 in value:
                found.setdefault(tag, []).append((step, value[2][0]))
    return found


def model_of() -> Sequential:
    model = Sequential([layers.Dense(1, dtype="float64")])
    model.compile(nd.optimizers.SGD(0.125), "mse")
    return model


@pytest.mark.parametrize(
    ("data", "expected"),
    # RFC 3720, appendix B.4.
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_the_checksum_is_that_of_the_standard(data, expected):
    assert crc32c(data) == expected


def test_the_metrics_are_in_folders_and_under_names_like_those_of_keras(tmp_path):
    board = callbacks.TensorBoard(tmp_path, update_freq=2, embeddings_freq=0)
    assert board.log_dir == str(tmp_path)
    model = model_of()
    history = model.fit(X, Y, 2, 2, 0, callbacks=[board], validation_data=(X, Y)).history
    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    assert set(train) == {"epoch_loss", "epoch_learning_rate", "batch_loss"}
    assert [step for step, _ in train["batch_loss"]] == [2, 4, 6, 8]
    assert train["epoch_learning_rate"] == [(0, 0.125), (1, 0.125)]
    for found, name in ((train, "loss"), (validation, "val_loss")):
        expected = [(epoch, float(np.float32(one))) for epoch, one in enumerate(history[name])]
        assert found["epoch_loss"] == expected


def test_a_rate_that_follows_a_schedule_is_shown(tmp_path):
    board = callbacks.TensorBoard(tmp_path, update_freq="batch")
    model = model_of()
    model.optimizer.learning_rate = lambda step: 1 / (1 + step)
    model.fit(X, Y, 8, 1, 0, callbacks=[board])
    assert scalars(tmp_path / "train")["epoch_learning_rate"] == [(0, 0.5)]


def test_variables_are_shown_as_histograms_and_images(tmp_path):
    board = callbacks.TensorBoard(tmp_path, histogram_freq=2, write_images=True)
    model = model_of()
    model.fit(X, Y, 8, 3, 0, callbacks=[board])
    name, found = model.layers[0].name, {}
    for step, values in events(tmp_path / "train"):
        found |= {(tag, step): value for tag, value in values.items()}
    steps = {step for tag, step in found if tag == f"{name}/kernel/histogram"}
    assert steps == {0, 2}
    kernel = model.get_weights()[0]
    numbers = fields(found[f"{name}/kernel/histogram", 2][5][0])
    assert [numbers[field][0] for field in range(1, 6)] == pytest.approx(
        [kernel.min(), kernel.max(), kernel.size, kernel.sum(), (kernel**2).sum()]
    )
    limits, counts = (np.frombuffer(numbers[field][0]) for field in (6, 7))
    assert counts.sum() == kernel.size
    assert limits[-1] == kernel.max()
    image = fields(found[f"{name}/kernel/image/0", 2][4][0])
    assert [image[field] for field in (1, 2, 3)] == [[2], [1], [1]]
    assert image[4][0].startswith(b"\x89PNG")
    assert not any("bias/image" in tag for tag, _ in found)


def test_an_image_is_a_png_file_of_the_pixels():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    data, at, chunks = png(pixels), 8, {}
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (zlib.crc32(kind + body),)
        chunks[kind], at = body, at + 12 + length
    assert chunks[b"IHDR"] == struct.pack(">II5B", 4, 2, 8, 2, 0, 0, 0)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(2, 13)
    assert not rows[:, 0].any()
    assert np.array_equal(rows[:, 1:].reshape(2, 4, 3), pixels)


def test_values_that_are_not_finite_are_left_out_of_a_histogram(tmp_path):
    with EventFile(tmp_path) as file:
        assert not histogram("none", [np.nan])
        file.add(histogram("some", [np.nan, np.inf, 3.0]), 1)
        file.scalars({"huge": 1e300, "lost": np.nan}, -1)
    (_, some), (step, values) = events(tmp_path)
    assert fields(some["some"][5][0])[3] == [1.0]
    assert values["huge"][2] == [np.inf]
    assert np.isnan(values["lost"][2][0])
    assert step == 2**64 - 1  # As -1 is written.


def test_values_that_hardly_differ_have_a_histogram(tmp_path):
    with EventFile(tmp_path) as file:
        for step, close in enumerate(([1.0, np.nextafter(1.0, 2.0)], [1e20] * 2, [-1e300, 1e308])):
            if summary := histogram("close", close):  # There is none of too large numbers.
                file.add(summary, step)
    counts = [np.frombuffer(fields(one["close"][5][0])[7][0]) for _, one in events(tmp_path)]
    assert [one.sum() for one in counts] == [2.0, 2.0]


def nodes_of(folder):
    """Return the nodes of a graph by name, as fields, from the second record of a file."""
    data = next(folder.iterdir()).read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    after = struct.unpack_from("<Q", data, size + 16)[0]
    event = fields(data[size + 28 : size + 28 + after])
    return {node[1][0].decode(): node for node in map(fields, fields(event[4][0])[1])}


def test_the_graph_of_a_model_is_shown(tmp_path):
    x = layers.Input((2,), name="x")
    shared = layers.Dense(2, name="shared")
    first = layers.Dense(2, name="first")(shared(x))
    functional = nd.Model(x, layers.Dense(1, name="last")(shared(first) + x + first))
    functional.compile("sgd", "mse")
    functional.fit(X, Y, 8, 1, 0, callbacks=[callbacks.TensorBoard(tmp_path / "functional")])
    found = nodes_of(tmp_path / "functional" / "train")
    sources = {name: [s.decode() for s in node.get(3, [])] for name, node in found.items()}
    assert sources == {
        "x": [],
        "shared": ["x", "first"],
        "first": ["shared"],
        "add": ["shared", "x"],
        "add_1": ["add", "first"],
        "last": ["add_1"],
    }
    assert found["shared"][2] == [b"Dense"]
    model = model_of()
    model.add(layers.Dense(1, name="more"))
    assert [sources for _, _, sources, _ in model.nodes()] == [[], [model.layers[0].name]]
    board = callbacks.TensorBoard(tmp_path / "none", write_graph=False)
    model.fit(X, Y, 8, 1, 0, callbacks=[board])
    assert b"more" not in next((tmp_path / "none" / "train").iterdir()).read_bytes()


def test_a_loop_writes_scalars_text_and_images(tmp_path):
    with nd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        with contextlib.closing(nd.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy:
            strategy.run(lambda: nd.summary.scalar("loss", 0.5, step=3))  # The first replica alone.
        nd.summary.text("note", "begun", step=0)
        nd.summary.image("digits", np.zeros((1, 4, 4, 1)), step=0)
    assert not nd.summary.scalar("loss", 0.5, step=4)  # There is no writer.
    found = [(step, *values) for step, values in events(tmp_path)]
    assert found == [(3, "loss"), (0, "note"), (0, "digits/image/0")]


def test_the_signatures_of_summaries_show_the_step():
    shown = [str(inspect.signature(function)) for function in (nd.summary.scalar, nd.summary.image)]
    assert shown[0] == "(name: 'str', data: 'Any', step: 'Any' = None) -> 'bool'"
    assert "step: 'Any' = None, *, max_outputs: 'int' = 3)" in shown[1]


def test_a_graph_is_shown(tmp_path):
    with nd.graph.Graph().as_default() as graph:
        x = nd.graph.constant(1.0, name="x")
        with graph.control_dependencies([x]), nd.device("/cpu:0"):
            nd.graph.identity(np.split(nd.graph.constant(np.ones(2)), 2)[1], name="y")
    with nd.graph.summary.FileWriter(tmp_path, graph):
        pass
    nodes = nodes_of(tmp_path)
    assert nodes["x"] == {1: [b"x"], 2: [b"constant"], 4: [b""]}
    assert nodes["y"][3] == [b"split:1", b"^x"]
    assert nodes["y"][4] == [b"/device:CPU:0"]


TRACED = """
import sys
import numpy as np
from ndistribute import timeline
from ndistribute.models import Sequential, callbacks, layers

class Busy(callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        with timeline.span("compute"), timeline.span("wait"):
            pass

model = Sequential([layers.Dense(1)])
model.compile("sgd", "mse")
used = [callbacks.TensorBoard(sys.argv[1]), Busy()]
model.fit(np.ones((8, 2)), np.ones((8, 1)), 2, 2, 0, callbacks=used)
"""


def test_the_step_breakdown_of_the_timeline_is_shown(tmp_path):
    environ = {**os.environ, "NDISTRIBUTE_TRACE": str(tmp_path / "traces")}
    subprocess.run([sys.executable, "-c", TRACED, tmp_path / "logs"], env=environ, check=True)
    found = scalars(tmp_path / "logs" / "train")
    assert {"step_ms/compute", "step_ms/wait"} <= set(found)
    assert all(0 < value < 1e4 for _, value in found["step_ms/compute"])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: callbacks.TensorBoard(update_freq="step"), "update_freq must be 'epoch' or"),
        (lambda: callbacks.TensorBoard(histogram_freq=-1), "histogram_freq must be 0 or more"),
        (lambda: callbacks.TensorBoard(embeddings_freq=1), "this callback writes no embeddings"),
        (lambda: png(np.zeros((2, 2))), "an image must be uint8 of shape"),
    ],
)
def test_mistakes_are_explained(make, says):
    with pytest.raises(ValueError, match=says):
        make()
