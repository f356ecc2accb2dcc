"""`PreemptionCheckpointHandler`: a training that saves itself before its machines are taken away.

The system sends one worker a SIGTERM. The signal only sets a flag; after each step the workers
agree whether it is set on any of them, which costs a small collective, and save at the same step.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from ndistribute.models.callbacks.callback import Callback, Logs
from ndistribute.models.callbacks.saving import continued
from ndistribute.models.checkpoint import CheckpointManager, on_any_worker

_log = logging.getLogger("ndistribute")


class PreemptionCheckpointHandler(Callback):
    """Saves a training when any worker gets a SIGTERM, at the same step on all, and exits.

    As a callback of `fit`, it continues from the manager's newest checkpoint, and saves the model,
    the position in the data and the state of the callbacks with what the manager saves. For a loop
    of one's own it is a context manager, which restores the newest checkpoint::

        with PreemptionCheckpointHandler(manager) as handler:
            for _ in range(handler.steps_made, 1000):
                handler.run(train_step, iterator)

    Every worker must use it, in its main thread; under a chief that schedules the steps, the chief.

    Args:
        manager: where to save.
        exit_code: the code that all workers exit with, so that a launcher starts them again.

    Attributes:
        steps_made: the number of calls of `run`, since the first start of the program.
    """

    restores = True  # After the other callbacks have begun.

    def __init__(self, manager: CheckpointManager, exit_code: int = 143) -> None:
        self.manager = manager
        self.exit_code = exit_code
        self.steps_made = 0
        self._signalled = False
        self._previous: Any = None
        self._listens = False
        self._fitting: CheckpointManager | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function returns, which makes a step; then exit if a worker must.

        Raises:
            RuntimeError: called outside of the handler's ``with`` block.
            SystemExit: a worker has got a SIGTERM, and the state is saved.
        """
        if not self._listens:
            raise RuntimeError(
                "PreemptionCheckpointHandler.run was called before the handler is entered: write "
                "`with handler:` around the loop."
            )
        result = function(*args, **kwargs)
        self.steps_made += 1
        self._exit_if_signalled(self.manager, self.steps_made)
        return result

    def __enter__(self) -> PreemptionCheckpointHandler:
        """Restore the newest checkpoint, and listen to the signal."""
        self._listen()
        try:
            if self.manager.restore_or_initialize() is not None:
                self.steps_made = self.manager.step or 0
        except BaseException:
            self._stop_listening()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the earlier handler of the signal."""
        self._stop_listening()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Continue from the newest checkpoint, and listen to the signal."""
        self._listen()
        self._fitting = continued(self.manager, self.model)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Exit if a worker must."""
        if not self.model.position.ahead:
            self._exit_from_fit()

    def saves_after(self, steps_made: int) -> bool:
        """Return True if this process must exit: a chief then waits for its workers."""
        return self._signalled

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Exit if a worker must: all callbacks have seen the end of the last epoch."""
        self._exit_from_fit()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Exit if a worker must, and restore the earlier handler of the signal."""
        try:
            if self.model.position.finished:
                self._exit_from_fit()
        finally:
            self._stop_listening()

    def _exit_from_fit(self) -> None:
        if self._fitting is not None and self._listens:
            self._exit_if_signalled(self._fitting, self.model.position.steps_made)

    def _exit_if_signalled(self, manager: CheckpointManager, step: int) -> None:
        if not on_any_worker(manager.checkpoint.strategy, self._signalled):
            return
        manager.save(step)
        manager.wait()
        _log.warning("a worker got SIGTERM: saved after step %d in %s", step, manager.directory)
        self._signalled = False  # It is served.
        self._stop_listening()
        raise SystemExit(self.exit_code)

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "PreemptionCheckpointHandler must be used in the main thread, the only one in "
                f"which Python handles signals; this is {threading.current_thread().name!r}."
            )
        if not self._listens:
            self._signalled, self._listens = False, True
            self._previous = signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self._signalled = True

    def _stop_listening(self) -> None:
        """Restore the earlier handler, which gets a signal that was not served."""
        if not self._listens:
            return
        self._listens = False
        # None: a handler that was not installed from Python, which cannot be restored.
        signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        if self._signalled:
            self._signalled = False
            signal.raise_signal(signal.SIGTERM)
