"""Summaries that a program's own loop writes for TensorBoard: `ndistribute.summary`.

The names are those of `tf.summary`. Inside `run`, only the first replica writes. Outside replicas,
each worker writes to its own file: create a writer on the chief only, or give each worker its own
folder.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     with create_file_writer(folder) as writer, writer.as_default():
...         for step in range(3):
...             written = scalar("loss", 1 / (1 + step), step=step)
>>> written
True
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ndistribute import event_files, timeline
from ndistribute.context import get_replica_context
from ndistribute.event_files import EventFile
from ndistribute.exports import export as _export
from ndistribute.mistakes import accepting


class _Defaults(threading.local):
    """The writer, the step and the condition of a thread."""

    writer: Any = None
    step: Any = None
    records: Any = True


_defaults = _Defaults()


class SummaryFile(EventFile):
    """Writes summaries to a new file in a folder; `create_file_writer` returns it.

    Args:
        logdir: the folder; created if it is missing.
    """

    @accepting("filename_suffix", "flush_millis", "max_queue", "name")
    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        super().__init__(logdir)

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[SummaryFile]:
        """Return a context manager; summaries in its block go to this file."""
        before = vars(_defaults).copy()
        self.set_as_default(step)
        try:
            yield self
        finally:
            vars(_defaults).clear()
            vars(_defaults).update(before)

    def set_as_default(self, step: Any = None) -> None:
        """Send the summaries of this thread to this file from now on."""
        _defaults.writer = self
        if step is not None:
            _defaults.step = step

    def init(self) -> None:
        """Do nothing: the file exists."""

    flush = init


create_file_writer = SummaryFile


def should_record_summaries() -> bool:
    """Return whether summaries are written now; among replicas, only the first one writes."""
    replica = get_replica_context()
    if replica is not None and replica.replica_id_in_sync_group:
        return False
    condition = _defaults.records
    return _defaults.writer is not None and bool(condition() if callable(condition) else condition)


@contextlib.contextmanager
def record_if(condition: Any) -> Iterator[None]:
    """Return a context manager; its block writes summaries only if a condition holds."""
    before, _defaults.records = _defaults.records, condition
    try:
        yield
    finally:
        _defaults.records = before


def flush(writer: Any = None) -> None:
    """Do nothing: every summary is in the file as soon as it is written."""


def _writing(make: Callable[..., bytes]) -> Callable[..., bool]:
    """Return a function that writes a summary at a step, and returns whether it was written."""

    @accepting("description")
    def write(name: str, data: Any, step: Any = None, **options: Any) -> bool:
        if not should_record_summaries():
            return False
        step = _defaults.step if step is None else step
        if step is None:
            raise ValueError("a summary needs a step: pass step=, here or to as_default().")
        _defaults.writer.add(make(name, data, **options), int(step))
        return True

    written = functools.wraps(make, ["__name__", "__doc__"])(write)
    shown = inspect.signature(make)
    name, data, *options = shown.parameters.values()
    step = inspect.Parameter("step", data.kind, default=None, annotation="Any")
    written.__signature__ = shown.replace(  # type: ignore[attr-defined]
        parameters=[name, data, step, *options], return_annotation="bool"
    )
    return written


@_writing
def scalar(name: str, data: Any) -> bytes:
    """Write a number at a step; None: the step of `as_default`."""
    value = float(data)
    timeline.counter(name, value)
    return event_files.scalar(name, value)


@_writing
def histogram(name: str, data: Any, *, buckets: int = 30) -> bytes:
    """Write the distribution of an array's values at a step, like `scalar`."""
    if buckets != 30:
        raise ValueError(f"histogram: buckets must be 30, got {buckets}.")
    return event_files.histogram(name, data)


@_writing
def text(name: str, data: Any) -> bytes:
    """Write text at a step, like `scalar`."""
    return event_files.text(name, str(np.asarray(data)[()]))


@_writing
def image(name: str, data: Any, *, max_outputs: int = 3) -> bytes:
    """Write images, bytes or floats from 0 to 1, at a step, like `scalar`."""
    pixels = np.asarray(data)[:max_outputs]
    if pixels.dtype.kind == "f":
        pixels = (np.clip(pixels, 0, 1) * 255 + 0.5).astype(np.uint8)
    tags = [f"{name}/image/{k}" for k in range(len(pixels))]
    return b"".join(map(event_files.image, tags, pixels))


_export(vars(), also="create_file_writer")
