"""Checkpoints: the state of a program, written whole or not at all, and read by any strategy.

A checkpoint has one tensor for each variable, whatever its copies and shards, named by its path in
the objects that were given. So what one strategy wrote, another reads, with any number of replicas,
workers or servers. All workers take part: the chief writes and reads the files.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from ndistribute import tensor_files, tree
from ndistribute.collective.objects import all_gather_object
from ndistribute.context import current_seed, get_strategy, restore_seed
from ndistribute.data.sources import has_state
from ndistribute.errors import CheckpointCorruptError, DistributeError
from ndistribute.models import contents
from ndistribute.models.layers.layer import Layer, build_for
from ndistribute.optimizers import Optimizer
from ndistribute.transport.failures import error_of, failure_of
from ndistribute.variables import Variable

__all__ = ["Checkpoint", "Weights", "latest_checkpoint", "read_newest"]

# The attributes of a model that are saved with its variables.
_OF_MODELS = ("metrics", "optimizer")


Save = TypeVar("Save", bound=Callable[..., Any])


def by_every_worker(save: Save) -> Save:
    """Return a method that names itself where a worker waits in it in vain for others."""

    @functools.wraps(save)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        act = functools.partial(save, self, *args, **kwargs)
        workers = self.strategy.input_topology.workers
        if workers is None or workers.users_call:
            return act()
        workers.users_call = name = f"{type(self).__name__}.{save.__name__}()"
        try:
            return self.strategy.attempt(act)
        except DistributeError as error:
            if error.sequence is not None:  # Otherwise a process was lost.
                advice = (
                    f"Every worker must call {name}, although only the chief reads and writes "
                    "files."
                )
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
        objects: by keyword, variables, layers, optimizers, metrics, other checkpoints, objects with
            `state_dict` and `load_state_dict`, such as iterators of datasets and PyTorch's modules
            and optimizers, PyTorch's generators, and lists and dicts of all but checkpoints. Of a
            `DistributedValues` of such objects the first one's state is saved; all get it.

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

    _saves: ClassVar[tuple[str, ...]] = _OF_MODELS

    def __init__(self, **objects: Any) -> None:
        vars(self).update(_objects={}, _made_in=get_strategy())
        for name, value in objects.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        nest = value._nest if isinstance(value, Checkpoint) else value
        for path, part in contents.flat(name, nest, self._saves):
            if not isinstance(part, Variable | Optimizer) and not has_state(part):
                raise TypeError(
                    f"Checkpoint: {path} is a {type(part).__name__}, which a checkpoint cannot "
                    "save: pass variables, layers, optimizers, metrics, or objects with state_dict "
                    "and load_state_dict."
                )
        self._objects[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_objects"][name]
        except KeyError:
            raise AttributeError(f"the checkpoint has no object {name!r}.") from None

    @by_every_worker
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the state, and return the folder with it once it is safely on the disk.

        Every worker must call this outside of replicas; the chief writes. Workers of parameter
        servers with loops of their own each write a checkpoint, in turn. Earlier checkpoints of the
        same path are kept.

        Args:
            path: the folder's path, to which a number is appended. One that ends in ``.h5`` or
                ``.keras`` is that of a folder in which the last checkpoint alone is kept.

        Raises:
            OSError: the state could not be written.
            ValueError: a variable has a value per replica and no aggregation, an optimizer trains a
                variable that is not part of the checkpoint, or JSON cannot represent a state.
        """
        path = Path(path)
        series = (path, NAME, 1) if path.suffix in _OF_FILES else (path.parent, path.name)
        return Path(by_chief(self.strategy, self.writer(*series)) or path)

    @by_every_worker
    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the state as `save` does, in place of what `write` wrote to that path before."""
        path = Path(path)
        writer = self.writer(path.parent, path.name, keep=1, kind="write")
        return Path(by_chief(self.strategy, writer) or path)

    def read(self, path: str | os.PathLike[str]) -> None:
        """Set the state to what `write` or `save` wrote; see `restore`."""
        self.restore(path)

    @by_every_worker
    def restore(self, path: str | os.PathLike[str]) -> None:
        """Set the state to what was saved, all of it or nothing.

        Models and layers without variables are built for the input that they had when they were
        saved, and optimizers for the variables that they trained. Every worker must call this
        outside of replicas; the chief reads. What the file has under other keywords, and the
        optimizer and metrics of a model that lacks them, are ignored.

        Args:
            path: the result of `save`, or the path that was passed to it, for its last checkpoint.

        Raises:
            FileNotFoundError: there is none.
            CheckpointCorruptError: it is damaged; the message names the file.
            ValueError: it and the objects do not fit each other.

        If this raises, also in `load_state_dict` of an object, no value has changed on any worker.
        Models and optimizers that were built for it stay built.
        """
        self.load(*by_chief(self.strategy, lambda: read_newest(Path(path)), reads=True))

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a copy of the state as tensors and plain values, the same on every worker."""
        parts = list(self._parts())
        states: dict[str, Any] = {}
        trained = {path: [*slots] for path, slots in contents.slots_of(parts).items()}
        with self.strategy.scope():
            for path, part in parts:
                if path in trained and part.iterations and not trained[path]:
                    raise ValueError(
                        f"optimizer {path!r} made its steps in other processes, so this process "
                        "does not know its slots: call its build(variables) before you save."
                    )
            tensors = {path: part.numpy() for path, part in contents.variables_of(parts).items()}
            encoder = contents.States(tensors)

            def encode() -> None:
                for path, part in parts:
                    if has_state(part):
                        states[path] = encoder.encode(part.state_dict(), f"{path}/state")

            by_all(self.strategy, encode)
            generators = contents.generators_of(self.strategy)
        seed: Any = current_seed()
        random = {"entropy": str(seed.entropy), "children": seed.n_children_spawned}
        random["generators"] = generators
        inputs = {path: encoder.encode(part.input_spec, path) for path, part in self._layers()}
        return tensors, {"states": states, "trained": trained, "random": random, "inputs": inputs}

    def load(self, source: str, tensors: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Set the state to one that was read from a folder, `source`: all of it, or raise."""
        self._build(source, tensors, data)
        values: list[tuple[Variable, Any]] = []
        strategy = self.strategy
        with strategy.scope(), contextlib.ExitStack() as undo:

            def prepare() -> list[str]:
                values.extend(self._checked(source, tensors, data))
                for path, part in self._parts():
                    if has_state(part):
                        for each in getattr(part, "objects", (part,)):
                            undo.callback(each.load_state_dict, copy.deepcopy(each.state_dict()))
                        state = contents.States(tensors).decode(data["states"][path])
                        with _naming(path, source):
                            part.load_state_dict(state)
                return sorted(path for path, _ in self._parts())

            first, *others = by_all(strategy, prepare)
            for rank, paths in enumerate(others, 1):
                if paths != first:
                    raise ValueError(
                        f"{source}: worker {rank} and the chief restore different objects: only "
                        f"one of them has {min({*paths} ^ {*first})}. Nothing has changed. Make "
                        "the same Checkpoint on every worker."
                    )
            if self._saves and "random" in data:
                random = data["random"]
                restore_seed(int(random["entropy"]), random["children"])
                contents.set_generators(strategy, random["generators"])
            undo.pop_all()
            for variable, value in values:
                variable.assign(value)

    @property
    def strategy(self) -> Any:
        """The strategy of the variables, or of a model; else the current one.

        If that is the default, it is the one in whose scope the checkpoint was made.
        """
        for _, part in self._parts():
            if isinstance(part, Variable):
                owner = part.distribute_strategy
                return get_strategy() if owner.is_default else owner
        models: list[Any] = [part for _, part in self._layers() if hasattr(part, "build_for")]
        if models:
            return models[0].strategy
        return self._made_in if (current := get_strategy()).is_default else current

    def _build(self, source: str, tensors: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Build the layers that lack variables, for the inputs that they were saved with."""
        inputs = data.get("inputs", {})
        for path, layer in self._layers():
            if "inputs" in data and path not in inputs and not layer.variables:
                raise ValueError(
                    f"{source} does not fit: {path} is missing. Nothing has changed. Make the same "
                    "objects as when it was saved."
                )
            known = {f"{path}/{name}" for name in layer.named_variables()}
            other = [f"{path}/{part}" for part in _OF_MODELS]
            lacks = contents.below([path], other, tensors) - known
            if lacks and inputs.get(path) is not None:
                try:
                    build_for(layer, contents.States(tensors).decode(inputs[path]), self.strategy)
                except DistributeError:  # The workers failed, not the model.
                    raise
                except Exception as error:
                    raise ValueError(
                        f"{source}: {path!r} cannot be built for the input that it was saved with "
                        f"({error}): call it on an input before you restore. Nothing has changed."
                    ) from error

    def _checked(
        self, source: str, tensors: Mapping[str, Any], data: Mapping[str, Any]
    ) -> list[tuple[Variable, Any]]:
        """Return all variables and their values; build the optimizers.

        Raises:
            ValueError: the objects and the file do not fit each other.
        """
        parts = list(self._parts())
        variables = contents.variables_of(parts)
        states, trained = data.get("states", {}), data.get("trained", {})
        wrong = []
        for path, part in parts:
            kept = states if has_state(part) else trained
            if not isinstance(part, Variable) and path not in kept:
                wrong.append(f"the state of {path} is missing")
            if not isinstance(part, Optimizer):
                continue
            missing = [name for name in trained.get(path, []) if name not in variables]
            if missing:
                raise ValueError(
                    f"{source}: optimizer {path!r} trained {', '.join(missing)}, which this "
                    "Checkpoint does not contain: pass the model or the variables too. Nothing has "
                    "changed."
                )
            part.build([variables[name] for name in trained.get(path, [])])
            if np.any(tensors.get(f"{path}/iterations", 0) < 0):
                wrong.append(f"{path}/iterations is below 0")
        variables = contents.variables_of(parts)
        values = contents.fitting(variables, tensors, wrong)
        arrays = contents.below([f"{path}/state" for path in states], [], tensors)
        known = {path for path, part in parts if has_state(part)}
        others = {*tensors, *states} - arrays - variables.keys() - known
        vars(self)["_others"] = others
        if "states" in data:  # Else a graph wrote it, which saves variables alone.
            wrong += [f"only the checkpoint has {name}" for name in sorted(self._below(others))]
        if wrong:
            raise ValueError(
                f"{source} does not fit: {'; '.join(wrong)}. Nothing has changed. Make the same "
                "objects as when it was saved. Call a model on an input before you restore, which "
                "builds it."
            )
        return values

    def _below(self, names: Iterable[str]) -> set[str]:
        """Return those names of tensors and states in a file that these objects must take."""
        left = [f"{path}/metrics" for path, _ in self._layers()]
        for path, value in self._layers():
            if not self._saves or getattr(value, "optimizer", None) is None:
                left.append(f"{path}/optimizer")
        asked = [name for name, value in self._nest.items() if not isinstance(value, Variable)]
        return contents.below(asked, left, names)

    def writer(
        self,
        directory: Path,
        name: str,
        keep: int | None = None,
        more: Mapping[str, Any] | None = None,
        kind: str = "checkpoint",
    ) -> Callable[[], str]:
        """Return a function that writes the state of this moment, and returns its folder.

        Args:
            directory: the directory of the series.
            name: the name of the series.
            keep: the number of checkpoints of the series and kind to keep; None: all.
            more: plain values to save too.
            kind: the kind of the writer.
        """
        check_keep(keep)
        tensors, data = self.state()
        data |= more or {}

        def write() -> str:
            with tensor_files.exclusive(directory, name):
                return str(tensor_files.write(directory, name, tensors, data, keep, kind))

        return write

    @property
    def _nest(self) -> dict[str, Any]:
        """The objects by name, with those of other checkpoints in place of these."""
        items = self._objects.items()
        return {name: part._nest if isinstance(part, Checkpoint) else part for name, part in items}

    def _layers(self) -> Iterator[tuple[str, Layer]]:
        for path, leaf in tree.leaves("", self._nest):
            if isinstance(leaf, Layer):
                yield path, leaf

    def _parts(self) -> Iterator[tuple[str, Any]]:
        return contents.flat("", self._nest, self._saves)


@contextlib.contextmanager
def _naming(path: str, source: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while {path} was restored from {source}. Nothing has changed.")
        raise


NAME = "model"  # The name of a checkpoint in a folder with exactly the path passed.
_OF_FILES = (".h5", ".keras")  # How the paths of files of Keras end.


class Weights(Checkpoint):
    """The variables of layers and models, without optimizers and metrics."""

    _saves = ()


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the checkpoint in a directory that was written last, or None.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Checkpoint(v=Variable(1.0)).save(f"{directory}/run")
    ...     latest_checkpoint(directory) == path
    True
    """
    folders = tensor_files.written(directory)
    return folders[-1] if folders else None


# If one worker raises an error of one of these types, the others raise the same type.
_OF_READING = CheckpointCorruptError, FileNotFoundError, PermissionError
_KINDS: tuple[type[Exception], ...] = *_OF_READING, FileExistsError, OSError, ValueError
_ERRORS = {kind.__name__: kind for kind in _KINDS} | {"": DistributeError}


def check_keep(count: int | None) -> None:
    """Raise a ValueError unless a number of checkpoints to keep is 1 or more, or None."""
    if count is not None and operator.index(count) < 1:
        raise ValueError(f"max_to_keep must be 1 or more, got {count}.")


def check_absent(strategy: Any, path: str | os.PathLike[str], overwrite: bool) -> None:
    """Raise a `FileExistsError` if there is something at a path that must not be overwritten."""

    def check() -> None:
        if Path(path).exists() or tensor_files.paths(Path(path).parent, Path(path).name):
            raise FileExistsError(f"{path} exists: delete it, or pass overwrite=True.")

    if not overwrite:
        by_chief(strategy, check)


def read_newest(path: Path) -> tuple[str, dict[str, Any], Any]:
    """Return the folder, tensors and data of the checkpoint in a folder, or the last of a path."""
    inside = tensor_files.paths(path, NAME) if path.is_dir() else []
    folders = inside or tensor_files.paths(path.parent, path.name)
    if not folders and not path.is_dir():
        file = (
            f" {path.name} is a file; ndistribute does not read the files of Keras."
            if path.exists()
            else ""
        )
        raise FileNotFoundError(f"there is no checkpoint {path.absolute()}.{file}")
    folder = folders[-1] if folders else path
    try:
        saved = tensor_files.read(folder)
        return str(saved.path), saved.tensors, saved.data
    except CheckpointCorruptError:
        if not os.path.lexists(folder):  # It was deleted during the read.
            return read_newest(path)
        raise


def by_chief(strategy: Any, act: Callable[[], Any], *, reads: bool = False) -> Any:
    """Return what a function returns on the chief, plain values and arrays, on every worker.

    An error of the chief is raised by all. A worker that has not joined its job yet gets None; it
    acts if the function only reads.
    """
    session = strategy.session
    alone = strategy.input_topology.workers is None if session is None else session.is_newcomer
    alone &= reads or session is None

    def call() -> Any:
        return by_all(strategy, lambda: act() if alone or strategy.is_chief else None)[0]

    return strategy.attempt(call)  # If the chief is lost, another one acts.


def by_all(strategy: Any, act: Callable[[], Any]) -> list[Any]:
    """Return a function's result on every worker; its error on one of them is raised by all."""
    group = strategy.input_topology.workers
    if group is None:
        return [act()]
    result, failure, described = None, None, None
    try:
        result = act()
    except Exception as error:
        failure = error
        described = failure_of(error, _ERRORS)
    outcomes = all_gather_object(group, (result, described))
    if failure is not None:
        raise failure
    for rank, (_, other) in enumerate(outcomes):
        if other is not None:
            who = f"worker {rank}" if rank else "the chief"
            raise error_of(other, _ERRORS, f"on {who}: ")
    return [result for result, _ in outcomes]


def on_any_worker(strategy: Any, flag: bool) -> bool:
    """Return True if a flag is set on any worker; all must call this after the same step."""
    group = strategy.input_topology.workers
    return flag if group is None else any(all_gather_object(group, bool(flag)))
