"""Checkpoints: the state of a program, written whole or not at all, and read by any strategy.

A checkpoint has one tensor for each variable, whatever its copies and shards, named by its path in
the objects that were given. So what one strategy wrote, another reads, with any number of replicas,
workers or servers. All workers take part: the chief writes and reads the files.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from ndistribute import tensor_files
from ndistribute.collective.objects import all_gather_object
from ndistribute.context import current_seed, get_replica_context, get_strategy, restore_seed
from ndistribute.dtypes import dtype_named
from ndistribute.errors import CheckpointCorruptError, DistributeError
from ndistribute.models.layers.layer import Layer
from ndistribute.models.metrics import Metric
from ndistribute.optimizers import Optimizer
from ndistribute.tensor_files import Saved
from ndistribute.variables import Variable

__all__ = ["Checkpoint", "CheckpointManager", "latest_checkpoint"]

Save = TypeVar("Save", bound=Callable[..., Any])


def by_every_worker(save: Save) -> Save:
    """Return a method that names itself where a worker waits in it in vain for others."""

    @functools.wraps(save)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        workers = self.strategy.input_topology.workers
        if workers is None or workers.users_call:
            return save(self, *args, **kwargs)
        workers.users_call = name = f"{type(self).__name__}.{save.__name__}()"
        try:
            return save(self, *args, **kwargs)
        except DistributeError as error:
            if error.sequence is not None:  # Else a process was lost.
                advice = f"Every worker must call {name}; the chief alone reads and writes files."
                error.args = (f"{error} {advice}",)
            raise
        finally:
            workers.users_call = ""

    return cast("Save", call)


class Checkpoint:
    """The state of variables, layers, models, optimizers, metrics and iterators, by name.

    A model includes its optimizer and metrics. The seed and the random generators of replicas on
    CPUs are part of every checkpoint. An attribute that is set adds an object, too.

    Args:
        objects: by keyword, variables, layers, optimizers, metrics, objects with `state_dict` and
            `load_state_dict`, and lists and dicts of them.

    Raises:
        TypeError: an object is none of these.

    >>> import tempfile
    >>> v = Variable([1.0, 2.0])
    >>> checkpoint = Checkpoint(weights=v)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = checkpoint.save(f"{directory}/run")
    ...     _ = v.assign([0.0, 0.0])
    ...     checkpoint.restore(path)
    >>> v.numpy()
    array([1., 2.])
    """

    def __init__(self, **objects: Any) -> None:
        vars(self)["_objects"] = {}
        for name, one in objects.items():
            setattr(self, name, one)

    def __setattr__(self, name: str, value: Any) -> None:
        for path, one in _flat(name, value):
            if not isinstance(one, Variable | Optimizer) and not _has_state(one):
                raise TypeError(
                    f"Checkpoint: {path} is a {type(one).__name__}, whose state is unknown: pass "
                    "variables, layers, optimizers, metrics, or objects with state_dict and "
                    "load_state_dict."
                )
        self._objects[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_objects"][name]
        except KeyError:
            raise AttributeError(f"the checkpoint has no object {name!r}.") from None

    def __delattr__(self, name: str) -> None:
        if self._objects.pop(name, None) is None:
            raise AttributeError(f"the checkpoint has no object {name!r}.")

    @by_every_worker
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the state, and return the folder with it once it is safely on the disk.

        Every worker must call this outside of replicas; the chief writes. Workers of parameter
        servers with loops of their own each write a checkpoint, in turn. Earlier checkpoints of the
        same path are kept.

        Args:
            path: the folder's path, to which a number is appended.

        Raises:
            OSError: the state could not be written.
            ValueError: a variable has a value per replica and no aggregation, an optimizer trains a
                variable that is not part of the checkpoint, or JSON cannot represent a state.
        """
        path = Path(path)
        return Path(by_chief(self.strategy, self.writer(path.parent, path.name, _ALL)))

    @by_every_worker
    def restore(self, path: str | os.PathLike[str]) -> None:
        """Set the state to what was saved; models and optimizers not built yet are built.

        Every worker must call this outside of replicas; the chief reads.

        Args:
            path: the result of `save`, or the path that was passed to it, for its last checkpoint.

        Raises:
            FileNotFoundError: there is none.
            CheckpointCorruptError: it is damaged; the message names the file.
            ValueError: it lacks a variable, or a shape differs; nothing has changed then.
        """
        self.load(*by_chief(self.strategy, lambda: read_newest(Path(path))))

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state as tensors and plain values, the same on every worker."""
        parts = list(self._parts())
        names = _names(parts)
        tensors: dict[str, Any] = {}
        states: dict[str, Any] = {}
        trained: dict[str, list[str]] = {}
        with self.strategy.scope():
            for path, one in parts:
                if isinstance(one, Variable):
                    tensors[path] = one.numpy()
                elif isinstance(one, Optimizer):
                    trained[path] = [_name_of(variable, names, one) for variable in one.slots]
                    tensors[f"{path}/iterations"] = np.array(one.iterations)
                    for key, slot in _slots(path, one, names).items():
                        tensors[key] = slot.numpy()
                if _has_state(one):
                    states[path] = _without_arrays(one.state_dict(), f"{path}/state", tensors)
            generators = _generators(self.strategy)
        seed: Any = current_seed()
        random = {
            "entropy": str(seed.entropy),
            "children": seed.n_children_spawned,
            "generators": generators,
        }
        inputs = {
            name: [one.input_spec.shape[1:], one.input_spec.dtype.name]
            for name, one in self._objects.items()
            if hasattr(one, "build_for") and isinstance(one.input_spec, np.ndarray)
        }
        return tensors, {"states": states, "trained": trained, "random": random, "inputs": inputs}

    def load(self, source: str, tensors: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Set the state to one that was read from a folder, `source`."""
        for name, (shape, dtype) in data.get("inputs", {}).items():
            model: Any = self._objects.get(name)
            if hasattr(model, "build_for") and not all(one.built for one in model.walk()):
                with model.strategy.scope():
                    model.build_for(np.zeros((1, *shape), dtype_named(dtype)))
        self._check_built(source, tensors)
        parts = list(self._parts())
        names = _names(parts)
        by_name = {path: variable for path, variable in parts if isinstance(variable, Variable)}
        built: list[tuple[str, Optimizer]] = []
        for path, one in parts:
            trained = data.get("trained", {}).get(path, []) if isinstance(one, Optimizer) else []
            missing = [name for name in trained if name not in by_name]
            if missing:
                raise ValueError(
                    f"{source}: optimizer {path!r} trained {', '.join(missing)}, not part of this "
                    "checkpoint: pass the model or the variables too. Nothing has changed."
                )
            if trained:
                one.build([by_name[name] for name in trained])
                built.append((path, one))
        for path, one in built:
            by_name |= _slots(path, one, names)
        _check_fits(by_name, source, tensors)
        with self.strategy.scope():
            for name, variable in by_name.items():
                variable.assign(tensors[name])
            for path, one in built:
                one.iterations = int(tensors[f"{path}/iterations"])
            for path, one in parts:
                if path in data.get("states", {}):
                    one.load_state_dict(_with_arrays(data["states"][path], tensors))
            if "random" in data:  # A graph's checkpoint has variables alone.
                random = data["random"]
                restore_seed(int(random["entropy"]), random["children"])
                _set_generators(self.strategy, random["generators"])

    @property
    def strategy(self) -> Any:
        """The strategy of the variables, or the current one if there are none."""
        variables = (one for _, one in self._parts() if isinstance(one, Variable))
        first = next(variables, None)
        return get_strategy() if first is None else first.distribute_strategy

    def _check_built(self, source: str, tensors: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if variables of a layer are missing that the checkpoint has."""
        for name, one in self._objects.items():
            own = (f"{name}/optimizer/", f"{name}/metrics/")
            saved = any(key.startswith(f"{name}/") and not key.startswith(own) for key in tensors)
            if saved and isinstance(one, Layer) and not one.variables:
                raise ValueError(
                    f"{source} has variables of {name!r}, which has none yet: call it on an input "
                    "before, so that it is built. Nothing has changed."
                )

    def writer(
        self, directory: Path, name: str, keep: int, more: dict[str, Any] | None = None
    ) -> Callable[[], str]:
        """Return a function that writes the state of this moment, and returns its folder.

        Args:
            directory: the directory of the series.
            name: the name of the series.
            keep: the number of checkpoints of the series to keep.
            more: plain values to save too.
        """
        tensors, data = self.state()

        def write() -> str:
            with tensor_files.exclusive(directory, name):
                return str(tensor_files.write(directory, name, tensors, data | (more or {}), keep))

        return write

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for name, one in self._objects.items():
            yield from _flat(name, one)


class CheckpointManager:
    """The last checkpoints of a program in a directory.

    Args:
        checkpoint: what to save.
        directory: the directory; created if it is missing.
        max_to_keep: the number of checkpoints to keep.
        asynchronous: whether `save` returns once the state is copied, and a thread writes it.

    Attributes:
        step: the step that was saved or restored last; None before.

    >>> import tempfile
    >>> v = Variable(1.0)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     manager = CheckpointManager(Checkpoint(v=v), directory, max_to_keep=2)
    ...     for step in range(3):
    ...         path = manager.save(step)
    ...     [one.name for one in manager.checkpoints], manager.latest_checkpoint == path
    (['checkpoint.000002', 'checkpoint.000003'], True)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int = 5,
        *,
        asynchronous: bool = False,
    ) -> None:
        if max_to_keep < 1:
            raise ValueError(f"max_to_keep must be 1 or more, got {max_to_keep}.")
        self.checkpoint = checkpoint
        self.directory = Path(directory)
        self.step: int | None = None
        self._keep = max_to_keep
        self._asynchronous = asynchronous
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def extended(self, **objects: Any) -> CheckpointManager:
        """Return a manager of the same directory that saves other objects too, each once."""
        known = self.checkpoint._objects
        ids = set(map(id, known.values()))
        more = {name: one for name, one in objects.items() if id(one) not in ids}
        keep, background = self._keep, self._asynchronous
        return CheckpointManager(
            Checkpoint(**known, **more), self.directory, keep, asynchronous=background
        )

    @property
    def strategy(self) -> Any:
        """The strategy of the checkpoint."""
        return self.checkpoint.strategy

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints, the newest last."""
        return tensor_files.paths(self.directory, _SERIES)

    @property
    def latest_checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint, or None."""
        return self.checkpoints[-1] if self.checkpoints else None

    @by_every_worker
    def save(self, step: int | None = None) -> Path | None:
        """Write the state of a step, and return the folder; None if a thread writes it.

        Every worker must call this, at the same step. A state that is saved asynchronously is on
        the disk after `wait`, and after the next `save`.

        Args:
            step: the number of steps made; None: one more than at the last call.

        Raises:
            OSError: this state, or the one that a thread wrote, could not be written.
        """
        self.wait()
        self.step = (self.step or 0) + 1 if step is None else int(step)
        write = self.checkpoint.writer(self.directory, _SERIES, self._keep, {"step": self.step})
        if not self._asynchronous:
            return Path(by_chief(self.strategy, write))

        def keep_failure() -> None:
            try:
                write()
            except BaseException as error:
                self._failure = error

        strategy = self.strategy
        if strategy.is_chief or strategy.input_topology.workers is None:
            self._writing = threading.Thread(target=keep_failure, name="checkpoint")
            self._writing.start()
        return None

    def delete(self) -> None:
        """Delete all checkpoints; every worker must call this."""
        self.wait()

        def remove() -> None:
            for path in self.checkpoints:
                tensor_files.delete(path)

        by_chief(self.strategy, remove)

    def wait(self) -> None:
        """Wait until the last state is written; every worker must call this.

        Raises:
            OSError: it could not be written.
        """
        if not self._asynchronous:
            return

        def finish() -> None:
            if self._writing is not None:
                self._writing.join()
                self._writing = None
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

        by_chief(self.strategy, finish)

    def restore_or_initialize(self) -> Path | None:
        """Restore the newest checkpoint that is not damaged, and return its folder.

        Returns:
            None if there is no checkpoint: the variables keep their initial values.

        Raises:
            CheckpointCorruptError: there are checkpoints, and all are damaged.
            ValueError: the checkpoint does not fit; nothing has changed then.
        """
        self.wait()

        def read() -> Any:
            saved = tensor_files.newest(self.directory, _SERIES)
            for path, one in self.checkpoint._parts():
                if saved is not None and hasattr(one, "check_state"):
                    one.check_state(saved.path, saved.data["states"].get(path, {}))
            return None if saved is None else _contents(saved)

        found = by_chief(self.strategy, read)
        if found is None:
            return None
        self.checkpoint.load(*found)
        self.step = found[2]["step"]
        return Path(found[0])


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the checkpoint in a directory that was written last, or None.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Checkpoint(v=Variable(1.0)).save(f"{directory}/run")
    ...     latest_checkpoint(directory) == path
    True
    """
    found = tensor_files.written(directory)
    return found[-1] if found else None


# Errors of the chief that other workers raise as such.
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointCorruptError, FileNotFoundError, OSError, PermissionError, ValueError)
}
_SERIES = "checkpoint"
_ALL = 10**9
_TENSOR = "$tensor"  # In a state, the reference to an array.


def _flat(path: str, one: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables, optimizers and objects with a state of an object, by path."""
    if isinstance(one, Layer):
        for name, variable in one.named_variables().items():
            yield f"{path}/{name}", variable
        for name in ("metrics", "optimizer"):
            held = getattr(one, name, None)
            if held:
                yield from _flat(f"{path}/{name}", held)
    elif isinstance(one, Metric):
        yield path, one.state
    elif isinstance(one, Mapping):
        for name, each in one.items():
            yield from _flat(f"{path}/{name}", each)
    elif isinstance(one, list | tuple):
        for number, each in enumerate(one):
            yield from _flat(f"{path}/{number}", each)
    else:
        yield path, one


def _has_state(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _without_arrays(state: Any, path: str, tensors: dict[str, Any]) -> Any:
    """Return a state with references instead of its arrays, which are added to the tensors."""
    if isinstance(state, np.ndarray):
        tensors[path] = state
        return {_TENSOR: path}
    if isinstance(state, dict):
        return {key: _without_arrays(one, f"{path}/{key}", tensors) for key, one in state.items()}
    if isinstance(state, list | tuple):
        return [_without_arrays(one, f"{path}/{k}", tensors) for k, one in enumerate(state)]
    return state


def _with_arrays(state: Any, tensors: Mapping[str, Any]) -> Any:
    """Return a state with its arrays again."""
    if isinstance(state, dict):
        if state.keys() == {_TENSOR}:
            return tensors[state[_TENSOR]]
        return {key: _with_arrays(one, tensors) for key, one in state.items()}
    return [_with_arrays(one, tensors) for one in state] if isinstance(state, list) else state


def _names(parts: list[tuple[str, Any]]) -> dict[int, str]:
    """Return the first path of each variable, by its id."""
    names: dict[int, str] = {}
    for path, one in parts:
        if isinstance(one, Variable):
            names.setdefault(id(one), path)
    return names


def _name_of(variable: Variable, names: Mapping[int, str], optimizer: Optimizer) -> str:
    name = names.get(id(variable))
    if name is None:
        raise ValueError(
            f"optimizer {optimizer.name!r} trains variable {variable.name!r}, which is not part of "
            "the checkpoint: pass the model or the variable too."
        )
    return name


def _slots(path: str, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Variable]:
    return {
        f"{path}/{_name_of(variable, names, optimizer)}/{slot_name}": slot
        for variable, slots in optimizer.slots.items()
        for slot_name, slot in slots.items()
    }


def _check_fits(variables: Mapping[str, Variable], source: str, tensors: Mapping[str, Any]) -> None:
    """Raise a `ValueError` unless a checkpoint has each variable, in its shape."""
    wrong = []
    for name, variable in variables.items():
        tensor = tensors.get(name)
        if tensor is None:
            wrong.append(f"{name} is missing")
        elif tensor.shape != variable.shape:
            wrong.append(f"{name} has shape {tensor.shape}, the variable {variable.shape}")
    if wrong:
        raise ValueError(
            f"{source} does not fit: {'; '.join(wrong)}. Nothing has changed. Make the same "
            "objects as when it was saved; call a model on an input before, so that it is built."
        )


def read_newest(path: Path) -> tuple[str, dict[str, Any], Any]:
    """Return the folder, tensors and data of the checkpoint in a folder, or the last of a path."""
    found = tensor_files.paths(path.parent, path.name)
    if not found and not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint {path}.")
    try:
        return _contents(tensor_files.read(found[-1] if found else path))
    except CheckpointCorruptError:
        if found and not found[-1].exists():  # It was replaced meanwhile.
            return read_newest(path)
        raise


def _contents(saved: Saved) -> tuple[str, dict[str, Any], Any]:
    return str(saved.path), saved.tensors, saved.data


def by_chief(strategy: Any, act: Callable[[], Any]) -> Any:
    """Return what a function returns on the chief, plain values and arrays, on every worker.

    An error of the chief is raised by all.
    """
    group = strategy.input_topology.workers
    if group is None:
        return act()
    found, failure = None, None
    if strategy.is_chief:
        try:
            found = act()
        except Exception as error:
            failure = error
    kinds = [kind.__name__ for kind in type(failure).__mro__]
    known = next((name for name in kinds if name in _ERRORS), "")
    told = None if failure is None else (known, str(failure))
    outcomes = all_gather_object(group, (strategy.is_chief, found, told))
    if failure is not None:
        raise failure
    found, told = next((one[1], one[2]) for one in outcomes if one[0])
    if told is not None:
        raise _ERRORS.get(told[0], DistributeError)(f"on the chief: {told[1]}")
    return found


def on_any_worker(strategy: Any, flag: bool) -> bool:
    """Return True if a flag is set on any worker; all must call this after the same step."""
    group = strategy.input_topology.workers
    return flag if group is None else any(all_gather_object(group, bool(flag)))


def _generators(strategy: Any) -> list[str]:
    """Return the states of the generators of all replicas as JSON; empty for GPUs."""

    def state() -> str:
        generator = _generator()
        return "" if generator is None else json.dumps(generator.bit_generator.state)

    own = list(strategy.local_results(strategy.run(state)))
    group = strategy.input_topology.workers
    return own if group is None else list(itertools.chain(*all_gather_object(group, own)))


def _set_generators(strategy: Any, states: Sequence[str]) -> None:
    """Set the generators of the replicas for which there are states."""

    def set_state() -> None:
        replica, generator = get_replica_context(), _generator()
        number = 0 if replica is None else replica.replica_id_in_sync_group
        if generator is not None and number < len(states) and states[number]:
            generator.bit_generator.state = json.loads(states[number])

    strategy.run(set_state)


def _generator() -> np.random.Generator | None:
    """Return the generator of this replica, if it is one of NumPy."""
    replica = get_replica_context()
    generator = None if replica is None else replica.rng
    return generator if isinstance(generator, np.random.Generator) else None
