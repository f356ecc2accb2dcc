"""Train with a backup, and go on after a kill, with the strategy of your choice.

    python examples/resume.py --replicas 2 --kill_at 100    # or press Ctrl-C, or kill it
    python examples/resume.py --replicas 3                  # goes on where the first one stopped

It shows that `BackupAndRestore` continues a training at the exact step, also with another strategy
or number of replicas: the curve of the loss is the one of a training that was never interrupted.
Every example is seen once in each epoch. At the end, the curve is printed, and plotted if
matplotlib is installed, and the backup is deleted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fit_digits import BATCH, make_model
from train_digits import load_data, make_parser, make_strategy, report

import ndistribute as nd
from ndistribute import callbacks


class Curve(callbacks.Callback):
    """The loss of each epoch, with the run and the replicas of it; a part of the backup."""

    def __init__(self) -> None:
        self.points: list[tuple[int, int, float]] = []
        self._run = 1
        self._has_begun = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is saved with the model."""
        return {"points": self.points, "run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.points = [(int(run), int(count), loss) for run, count, loss in state["points"]]
        self._run = int(state["run"]) + 1

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Say where the training starts, once the backup is restored."""
        position, strategy = self.model.position, self.model.strategy
        if strategy.is_chief and not self._has_begun:
            self._has_begun = True
            begins = "goes on" if position.steps_made else "starts"
            report(
                f"{strategy.num_replicas_in_sync} replica(s): the training {begins} after step "
                f"{position.step} of epoch {position.epoch + 1}"
            )

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Add a point."""
        self.points.append((self._run, self.model.strategy.num_replicas_in_sync, logs["loss"]))


class Kill(callbacks.Callback):
    """Kills this process after some number of steps, without a chance to save anything."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        """Kill the process if it is time."""
        if self.model.position.steps_made == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy: nd.Strategy, options: Any) -> None:
    """Train, or go on with a training, and show the curve."""
    (images, labels), test = load_data(options.seed)
    with strategy.scope():
        model = make_model(options.seed)
    curve = Curve()
    backup = callbacks.BackupAndRestore(options.backup, save_freq=options.save_freq)
    used = [backup, curve, Kill(options.kill_at)]
    model.fit(images, labels, BATCH, options.epochs, callbacks=used)
    accuracy = model.evaluate(*test, verbose=0)[1]
    if strategy.is_chief:
        for epoch, (run, replicas, loss) in enumerate(curve.points, 1):
            report(f"epoch {epoch}: loss {loss:.6f} with {replicas} replica(s) in run {run}")
        report(f"test accuracy {accuracy:.4f}")
        if options.picture:
            write_plot(curve.points, Path(options.picture))


def write_plot(points: list[tuple[int, int, float]], path: Path) -> None:
    """Write the curve of the loss, in one colour for each run of the program."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        report("no plot: pip install matplotlib")
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(points) + 1), [loss for _, _, loss in points], color="lightgrey")
    for run, count in dict.fromkeys(point[:2] for point in points):
        chosen = [(k, point[2]) for k, point in enumerate(points, 1) if point[0] == run]
        axes.plot(*zip(*chosen, strict=True), "o", label=f"run {run}: {count} replica(s)")
    title = "Loss of one training: each run goes on where the last was killed"
    axes.set(xlabel="epoch", ylabel="loss", yscale="log", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    figure.savefig(path, dpi=120)
    report(f"wrote {path}")


def main() -> None:
    """Parse the command line, and train."""
    parser = make_parser(__doc__, epochs=10)
    parser.add_argument("--backup", default="backup", help="the folder of the backup")
    parser.add_argument("--save_freq", type=int, default=5, help="steps between backups")
    parser.add_argument("--kill_at", type=int, default=0, help="the step to kill itself after")
    parser.add_argument("--picture", default="resume.png", help="a file, or '' for none")
    options = parser.parse_args()
    if options.strategy == "parameter_server" and nd.TFConfigClusterResolver().cluster_spec().jobs:
        raise SystemExit(
            "the workers of parameter servers make their steps at different times, so there is no "
            "step to go on from; servers save their variables themselves, by snapshots."
        )
    with make_strategy(options.strategy, options.replicas) as strategy:
        train(strategy, options)


if __name__ == "__main__":
    main()
