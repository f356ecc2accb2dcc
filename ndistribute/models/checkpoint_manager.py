"""`CheckpointManager`: the last checkpoints of a program in a directory, written when due."""

from __future__ import annotations

import copy
import logging
import operator
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ndistribute import tensor_files
from ndistribute.models.checkpoint import Checkpoint, by_chief, by_every_worker, check_keep
from ndistribute.variables import Variable

__all__ = ["CheckpointManager"]

_SERIES = "checkpoint"
_log = logging.getLogger("ndistribute")


class CheckpointManager:
    """The last checkpoints of a program in a directory.

    Args:
        checkpoint: what to save.
        directory: the directory; created if it is missing.
        max_to_keep: the number of checkpoints to keep; None: all.
        step_counter: a variable that counts the steps, for `save` without a step.
        checkpoint_interval: the least number of steps between two checkpoints; `save` writes none
            before. None: any number.
        init_fn: called by `restore_or_initialize` if there is no checkpoint.
        asynchronous: whether `save` returns once the state is copied, and a thread writes it.

    Raises:
        ValueError: `max_to_keep` is below 1, or there is an interval but no `step_counter`.

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
        max_to_keep: int | None = 5,
        *,
        step_counter: Variable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        asynchronous: bool = False,
    ) -> None:
        check_keep(max_to_keep)
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError("CheckpointManager: checkpoint_interval needs a step_counter, too.")
        self._counter, self._interval, self._init = step_counter, checkpoint_interval, init_fn
        self.checkpoint = checkpoint
        self.directory = Path(directory)
        self.step: int | None = None
        self._keep, self._kind = max_to_keep, "manager"
        self._asynchronous = asynchronous
        self._writing: list[tuple[threading.Thread, threading.Event]] = []
        self._failure: BaseException | None = None

    def extended(self, **objects: Any) -> CheckpointManager:
        """Return a manager of the same directory that saves other objects too, each once."""
        known = self.checkpoint._objects
        ids = set(map(id, known.values()))
        more = {name: value for name, value in objects.items() if id(value) not in ids}
        extended = copy.copy(self)
        extended.checkpoint, extended._kind = Checkpoint(**known, **more), "training"
        return extended

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
    def save(self, step: int | None = None, *, check_interval: bool = True) -> Path | None:
        """Write the state of a step, and return the folder; None if a thread writes it.

        It is also None if `checkpoint_interval` steps have not been made since the last one.

        Every worker must call this, at the same step. A state that is saved asynchronously is on
        the disk after `wait`, and after the next `save`.

        Args:
            step: the number of steps made; None: that of `step_counter`, or one more than at the
                last call.
            check_interval: False writes whatever the interval.

        Raises:
            OSError: this state, or the one that a thread wrote, could not be written.
        """
        self.wait()
        if step is None:
            step = (self.step or 0) + 1 if self._counter is None else int(self._counter)
        step = operator.index(step)
        passed = None if self.step is None or self._interval is None else step - self.step
        if check_interval and passed is not None and passed < (self._interval or 0):
            return None
        more = {"step": step}
        write = self.checkpoint.writer(self.directory, _SERIES, self._keep, more, self._kind)
        if not self._asynchronous:
            path = Path(by_chief(self.strategy, write) or self.directory)
            self.step = step
            return path

        def keep_failure() -> None:
            try:
                write()
            except BaseException as error:
                _log.error("the checkpoint of step %s could not be written: %s", step, error)
                self._failure = error
            finally:
                written.set()

        strategy = self.strategy
        alone = strategy.input_topology.workers is None and strategy.session is None
        if strategy.is_chief or alone:
            written = threading.Event()
            thread = threading.Thread(target=keep_failure, name="checkpoint")
            thread.start()
            self._writing = [(thread, written)]
        self.step = step
        return None

    def delete(self) -> None:
        """Delete all checkpoints that managers wrote; every worker must call this."""
        self.wait()

        def remove() -> None:
            for path in tensor_files.written_by(self._kind, self.directory, _SERIES):
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
            for thread, written in self._writing:
                # After an interrupt, `join` may return too early. A fork has no such thread.
                while thread.is_alive():
                    written.wait(1.0)
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

        by_chief(self.strategy, finish)

    def restore_or_initialize(self) -> Path | None:
        """Restore the newest checkpoint that is not damaged, and return its folder.

        Returns:
            None if there is no checkpoint: the variables keep their initial values, or get those
            of `init_fn`.

        Raises:
            CheckpointCorruptError: there are checkpoints, and all are damaged.
            ValueError: the checkpoint does not fit; nothing has changed then.
        """
        self.wait()

        def read() -> Any:
            saved = tensor_files.newest(self.directory, _SERIES)
            for path, part in self.checkpoint._parts():
                if saved is not None and hasattr(part, "check_state"):
                    part.check_state(saved.path, saved.data["states"].get(path, {}))
            return None if saved is None else (str(saved.path), saved.tensors, saved.data)

        read_by_chief = by_chief(self.strategy, read)
        if read_by_chief is None:
            if self._init is not None:
                self._init()
            return None
        self.checkpoint.load(*read_by_chief)
        self.step = read_by_chief[2].get("step")
        return Path(read_by_chief[0])
