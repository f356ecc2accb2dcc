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
    """Save variables to files and restore them: each checkpoint whole or not at all, verified.

    A checkpoint contains the variables by name, without the ``:0``. ``nd.Checkpoint(**variables)``
    with the same names reads it, and a saver reads checkpoints of `nd.Checkpoint`.

    Args:
        var_list: the variables, or a mapping of the names in the files to variables; None: the
            global variables of the graph so far.
        max_to_keep: the number of checkpoints to keep; 0 or None: all.
        keep_checkpoint_every_n_hours: each time that these have passed, one more is kept.
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
            sess: the session that has the values.
            save_path: the beginning of the path.
            global_step: a number that is appended to the path after ``-``, or a variable or tensor
                that has it; None: none, so a checkpoint replaces the one before.

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
        """Set the variables to what a checkpoint has.

        Args:
            sess: the session in which to set them.
            save_path: the result of `save` or of `latest_checkpoint`, also of those of models.

        Raises:
            CheckpointCorruptError: it is damaged; the message names the file.
            NotFoundError: there is no such checkpoint, or it lacks a variable.
            InvalidArgumentError: a shape differs, or its dtype here cannot hold a value; nothing
                has changed then.
        """
        path = Path(save_path)
        folder, name = path.parent, path.name
        saved = tensor_files.read(path) if path.is_dir() else tensor_files.newest(folder, name)
        if saved is None:
            raise NotFoundError(f"there is no checkpoint {os.fspath(save_path)!r}.")
        self._load(sess, os.fspath(save_path), saved)

    def restore_latest(self, sess: Any, directory: str | os.PathLike[str]) -> str | None:
        """Restore the newest checkpoint of a folder that is not damaged.

        The checkpoints of the folder with the same name but for the step then count among those to
        keep.

        Returns:
            Its path; None if the folder has none.

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
        """Count the checkpoints of an earlier process among those to keep, if they are there."""
        folders = {path: _folders(path) for path in checkpoint_paths}
        self._retention.count({path: each[-1] for path, each in folders.items() if each})

    def _load(self, sess: Any, path: str, saved: tensor_files.Saved) -> None:
        """Set the variables to what a checkpoint has that was read from a path."""
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
                    f"{name!r} is {value.dtype} in checkpoint {path!r}, which its dtype here, "
                    f"{variable.dtype}, would cut. Nothing has changed."
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
    """Let the initializers of variables take the values of a checkpoint.

    Args:
        ckpt_dir_or_file: a checkpoint, or the directory of several, of which the newest counts.
        assignment_map: by name in the checkpoint, a variable or its name; by scope, which ends with
            ``/``, another scope, of whose variables each gets the tensor of the rest of its name.

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
                raise ValueError(
                    f"init_from_checkpoint: {name!r} is to go to {place!r}, but the "
                    f"{'checkpoint' if variable is not None else 'graph'} has no such name."
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
