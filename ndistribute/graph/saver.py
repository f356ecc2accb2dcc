"""`Saver`: checkpoints of the variables of a graph, in the files that `nd.Checkpoint` uses."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ndistribute import models, tensor_files
from ndistribute.errors import InvalidArgumentError, NotFoundError
from ndistribute.graph.graph import Tensor
from ndistribute.graph.operations import group
from ndistribute.graph.shapes import Known
from ndistribute.graph.variables import GraphVariable, global_variables
from ndistribute.mistakes import accepting
from ndistribute.variables.policy import fitted

_NUMBERS = int | np.integer | np.ndarray


class Saver:
    """A saver of variables to checkpoints, which are written atomically and verified when read.

    A checkpoint contains the variables by name, without the ``:0``. ``nd.Checkpoint(**variables)``
    with the same names reads it, and a saver reads checkpoints of `nd.Checkpoint`.

    Args:
        var_list: the variables, or a mapping of the names in the files to variables; None: the
            global variables of the graph so far.
        max_to_keep: the number of checkpoints to keep; 0 or None: all.
        keep_checkpoint_every_n_hours: additionally keep one checkpoint for each period of this many
            hours.
    """

    @accepting("name", "restore_sequentially", "save_relative_paths", "sharded", "write_version")
    def __init__(
        self,
        var_list: Sequence[GraphVariable] | Mapping[str, GraphVariable] | None = None,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10_000.0,
    ) -> None:
        chosen = global_variables() if var_list is None else var_list
        if not isinstance(chosen, Mapping):
            chosen = {variable.op.name: variable for variable in chosen}
        if not chosen:
            raise ValueError("there are no variables to save: make the Saver after the model.")
        self._variables = dict(chosen)
        spare_seconds = keep_checkpoint_every_n_hours * 3600
        self._retention = tensor_files.Retention("saver", max_to_keep, spare_seconds)
        self._lock = threading.Lock()
        graph = next(iter(self._variables.values())).graph
        with graph.as_default(), graph.name_scope("save"), graph.control_dependencies(None):
            self._values: dict[str, Tensor] = {}
            restored = []
            for name, variable in self._variables.items():
                known = Known(variable.dtype, variable.shape)
                self._values[name] = graph.add("placeholder", name="value", known=known).outputs[0]
                restored.append(variable.assign(self._values[name]).op)
            self._restore = group(*restored, name="restore")

    @accepting("meta_graph_suffix", "strip_default_attrs", "write_meta_graph")
    def save(self, sess: Any, save_path: str | os.PathLike[str], global_step: Any = None) -> str:
        """Write a checkpoint, and return its path for `restore`.

        Args:
            sess: the session in which the variables have their values.
            save_path: the beginning of the path.
            global_step: a number that is appended to the path after ``-``, or a variable or tensor
                with this number. None: no number, so each checkpoint replaces the one before.

        Raises:
            FailedPreconditionError: a variable has no value.
            OSError: the files could not be written.
        """
        with self._lock:  # What a thread read first must not be written last.
            is_number = global_step is None or isinstance(global_step, _NUMBERS)
            fetches: Any = self._variables, [] if is_number else global_step
            tensors, step = sess.run(fetches)
            step = global_step if is_number else step
            path = os.fspath(save_path) + ("" if step is None else f"-{int(step)}")
            folder = Path(path)
            data = {"step": None if step is None else int(step)}
            tensor_files.clear(folder.parent, rf"{re.escape(Path(save_path).name)}-\d+")
            with tensor_files.exclusive(folder.parent, folder.name):
                written = tensor_files.write(folder.parent, folder.name, tensors, data, 1, "saver")
            self._retention.add(path, written)
        return path

    def restore(self, sess: Any, save_path: str | os.PathLike[str]) -> None:
        """Set the variables to the values of a checkpoint.

        Args:
            sess: the session in which to set them.
            save_path: a result of `save` or `latest_checkpoint`; it may also be of a model.

        Raises:
            CheckpointCorruptError: the checkpoint is damaged; the message names the file.
            NotFoundError: there is no such checkpoint, or it lacks a variable.
            InvalidArgumentError: a shape differs, or a variable's dtype cannot hold a value. No
                variable has changed.
        """
        path = Path(save_path)
        folder, name = path.parent, path.name
        saved = tensor_files.read(path) if path.is_dir() else tensor_files.newest(folder, name)
        if saved is None:
            raise NotFoundError(f"there is no checkpoint {os.fspath(save_path)!r}.")
        self._load(sess, os.fspath(save_path), saved)

    def restore_latest(self, sess: Any, directory: str | os.PathLike[str]) -> str | None:
        """Restore the newest checkpoint of a folder that is not damaged.

        `max_to_keep` then also counts the checkpoints of the folder that have the same name with
        another step.

        Returns:
            The path of the checkpoint; None if the folder has none.

        Raises:
            CheckpointCorruptError: there are checkpoints, and all are damaged.
        """
        saved = tensor_files.newest(directory)
        if saved is None:
            return None
        path = _path_of(saved.path)
        self._load(sess, path, saved)
        there = _checkpoints(directory)
        self.recover_last_checkpoints([each for each in there if _series(each) == _series(path)])
        return path

    @property
    def last_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that this saver wrote and kept, the newest last."""
        return self._retention.names

    def recover_last_checkpoints(self, checkpoint_paths: Sequence[str]) -> None:
        """Let `max_to_keep` also count the checkpoints of an earlier process that still exist."""
        folders = {path: _folders(path) for path in checkpoint_paths}
        self._retention.count({path: each[-1] for path, each in folders.items() if each})

    def _load(self, sess: Any, path: str, saved: tensor_files.Saved) -> None:
        """Set the variables to the values of a checkpoint that was read from a path."""
        missing = [name for name in self._values if name not in saved.tensors]
        if missing:
            raise NotFoundError(
                f"checkpoint {path!r} lacks {', '.join(missing)}: it has "
                f"{', '.join(sorted(saved.tensors))}."
            )
        values = {}
        for name, variable in self._variables.items():
            value = saved.tensors[name]
            values[self._values[name]] = fitting = fitted(value, variable.dtype or value.dtype)
            if fitting is None:
                raise InvalidArgumentError(
                    f"{name!r} has dtype {value.dtype} in checkpoint {path!r}, whose values the "
                    f"variable's dtype, {variable.dtype}, cannot hold. Nothing has changed."
                )
        sess.run(self._restore, values)


class CheckpointState(NamedTuple):
    """The checkpoints of a folder."""

    model_checkpoint_path: str
    """The path of the newest."""
    all_model_checkpoint_paths: list[str]
    """The paths of all, the newest last."""


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest checkpoint in a folder; None if it has none."""
    folder = models.latest_checkpoint(checkpoint_dir)
    return None if folder is None else _path_of(folder)


def get_checkpoint_state(checkpoint_dir: str | os.PathLike[str]) -> CheckpointState | None:
    """Return the checkpoints of a folder; None if it has none."""
    paths = _checkpoints(checkpoint_dir)
    return CheckpointState(paths[-1], paths) if paths else None


def init_from_checkpoint(
    ckpt_dir_or_file: str | os.PathLike[str], assignment_map: Mapping[str, Any]
) -> None:
    """Make the initializers of variables assign the values of a checkpoint.

    Args:
        ckpt_dir_or_file: a checkpoint, or a directory, whose newest checkpoint is used.
        assignment_map: a dict from names in the checkpoint to variables or their names. A key may
            also be a scope, which ends with ``/``, with another scope as its value: each variable
            of that scope gets the tensor with the same rest of the name.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint lacks a tensor, or its shape or dtype does not fit.
    """
    reader = models.load_checkpoint(ckpt_dir_or_file)
    known = {variable.op.name: variable for variable in global_variables()}
    for key, target in assignment_map.items():
        pairs = {key: target}
        if isinstance(target, str) and target.endswith("/"):
            prefix, below = key.removesuffix("/"), target.removeprefix("/")
            pairs = {
                f"{prefix}/{name.removeprefix(below)}".removeprefix("/"): name
                for name in known
                if name.startswith(below)
            }
        for name, place in pairs.items():
            variable = known.get(place) if isinstance(place, str) else place
            if variable is None or not reader.has_tensor(name):
                has_place = variable is not None
                lacks = f"checkpoint has no {name!r}" if has_place else f"graph has no {place!r}"
                raise ValueError(
                    f"init_from_checkpoint cannot copy {name!r} to {place!r}: the {lacks}."
                )
            variable.initialize_with(reader.get_tensor(name))


def _checkpoints(directory: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the checkpoints in a folder, without numbers of generations."""
    paths = map(_path_of, reversed(tensor_files.written(directory)))
    return list(dict.fromkeys(paths))[::-1]


def _path_of(folder: Path) -> str:
    return str(folder.with_suffix(""))


def _folders(path: str) -> list[Path]:
    """Return the folders of a path that savers wrote."""
    return tensor_files.written_by("saver", Path(path).parent, Path(path).name)


def _series(path: str) -> str:
    return re.sub(r"-\d+$", "", path)
