"""What a checkpoint has, without the objects that wrote it: names, shapes, dtypes and values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute.models.checkpoint import latest_checkpoint, read_newest

__all__ = ["CheckpointReader", "list_variables", "load_checkpoint", "load_variable"]

Place = str | os.PathLike[str]


class CheckpointReader:
    """The tensors of a checkpoint, by name; `load_checkpoint` returns it."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def has_tensor(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor of this name."""
        return name in self._tensors

    def get_tensor(self, name: str) -> Any:
        """Return a tensor; raise a KeyError if there is none of this name."""
        if name not in self._tensors:
            raise KeyError(f"the checkpoint has no {name!r}: it has {', '.join(self._tensors)}.")
        return self._tensors[name]

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Return the shapes by name."""
        return {name: list(tensor.shape) for name, tensor in self._tensors.items()}

    def get_variable_to_dtype_map(self) -> dict[str, np.dtype[Any]]:
        """Return the dtypes by name."""
        return {name: tensor.dtype for name, tensor in self._tensors.items()}


def load_checkpoint(ckpt_dir_or_file: Place) -> CheckpointReader:
    """Return a reader of a checkpoint, or of the newest in a directory.

    Raises:
        FileNotFoundError: there is none.
        CheckpointCorruptError: it is damaged.

    >>> import tempfile
    >>> import ndistribute as nd
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = nd.Checkpoint(v=nd.Variable([1.0, 2.0])).save(f"{directory}/run")
    ...     list_variables(directory), load_variable(path, "v")
    ([('v', [2])], array([1., 2.]))
    """
    path = Path(ckpt_dir_or_file)
    return CheckpointReader(dict(sorted(read_newest(latest_checkpoint(path) or path)[1].items())))


def list_variables(ckpt_dir_or_file: Place) -> list[tuple[str, list[int]]]:
    """Return the names and shapes of a checkpoint's tensors; see `load_checkpoint`."""
    return list(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def load_variable(ckpt_dir_or_file: Place, name: str) -> Any:
    """Return a tensor of a checkpoint; see `load_checkpoint`."""
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name.removesuffix(":0"))
