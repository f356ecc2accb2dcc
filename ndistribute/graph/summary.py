"""Summaries: operations whose values TensorBoard displays, and the writer of its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.event_files import EventFile
from ndistribute.graph.graph import Graph, Tensor, as_tensor, get_default_graph
from ndistribute.mistakes import accepting

__all__ = ["SUMMARIES", "FileWriter", "histogram", "image", "merge", "merge_all", "scalar"]

SUMMARIES = "summaries"


def scalar(name: str, tensor: Any, collections: Sequence[str] | None = None) -> Tensor:
    """Return the summary of a number, for `FileWriter.add_summary`."""
    return _summary("scalar", name, tensor, collections)


def histogram(name: str, values: Any, collections: Sequence[str] | None = None) -> Tensor:
    """Return the summary of the distribution of an array's values."""
    return _summary("histogram", name, values, collections)


def image(
    name: str, tensor: Any, max_outputs: int = 3, collections: Sequence[str] | None = None
) -> Tensor:
    """Return the summary of images.

    Args:
        name: their tag in TensorBoard.
        tensor: of shape ``(batch, height, width, channels)`` with 1, 3 or 4 channels: bytes, or
            floats, which are scaled so that each image uses the range of a byte.
        max_outputs: the largest number of images of a batch.
        collections: the collections to add it to; None: the summaries.
    """
    return _summary("image", name, tensor, collections, max_outputs)


def merge(inputs: Sequence[Tensor], name: str = "merge_summary") -> Tensor:
    """Return a summary with the contents of other summaries."""
    return get_default_graph().add("merge_summaries", inputs, name=name).outputs[0]


def merge_all(key: str = SUMMARIES) -> Tensor | None:
    """Return a summary with the contents of all summaries of the graph; None if it has none."""
    summaries = get_default_graph().get_collection(key)
    return merge(summaries) if summaries else None


class FileWriter(EventFile):
    """Writes summaries to a file that TensorBoard reads; a context manager that closes it.

    Args:
        logdir: the folder; created if it is missing.
        graph: a graph to write, see `add_graph`.

    >>> import tempfile
    >>> from ndistribute.graph.session import Session
    >>> with tempfile.TemporaryDirectory() as folder, FileWriter(folder) as writer:
    ...     writer.add_summary(Session().run(scalar("loss", 0.5)), 1)
    """

    @accepting("flush_secs", "max_queue", "session")
    def __init__(self, logdir: str | os.PathLike[str], graph: Graph | None = None) -> None:
        super().__init__(logdir)
        if graph is not None:
            self.add_graph(graph)

    def add_graph(self, graph: Graph, global_step: int | None = None) -> None:
        """Write the operations of a graph, with their inputs and devices."""
        nodes = []
        for op in graph.get_operations():
            inputs = [tensor.name.removesuffix(":0") for tensor in op.inputs]
            controls = [f"^{before.name}" for before in op.control_inputs]
            nodes.append((op.name, op.type, [*inputs, *controls], op.device))
        self.graph(nodes)

    def add_summary(self, summary: Any, global_step: int | None = None) -> None:
        """Write the value of a summary that a session returned."""
        value = summary if isinstance(summary, bytes) else np.asarray(summary).item()
        self.add(value, int(global_step or 0))

    def flush(self) -> None:
        """Do nothing: every summary is in the file as soon as it is added."""


def _summary(kind: str, name: str, value: Any, keys: Sequence[str] | None, most: int = 0) -> Tensor:
    tensor = as_tensor(value)
    graph = tensor.graph
    op = graph.add("summary", [tensor], name=name, attributes={"kind": kind, "most": most})
    op.definition.attributes["tag"] = op.name
    made = op.outputs[0]
    for key in [SUMMARIES] if keys is None else keys:
        graph.add_to_collection(key, made)
    return made
