"""Train one model under each strategy, and compare loss and throughput side by side.

    python examples/swap_strategies.py
    python examples/swap_strategies.py --strategy none mirrored multi_worker --replicas 4

It shows that the strategy changes how fast a model trains, and not what it learns: synchronous
strategies draw the same curve of the loss, and only workers of a parameter server, which do not
wait for each other, draw one of their own. It prints a table and, with matplotlib, writes a plot.
Strategies of several processes run as a job of their own, with one replica in each process.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fit_digits import BATCH, make_model
from train_digits import load_data, make_parser, make_strategy, report, serves

import ndistribute as nd

ALONE = ("none", "one_device")
JOBS = {
    "multi_worker": lambda count: ["-n", f"{count}"],
    "parameter_server": lambda count: ["--workers", f"{count}", "--ps", "1", "--chief"],
}


@dataclasses.dataclass
class Result:
    """What a training reached: the replicas, each epoch's loss and duration, and the accuracy."""

    replicas: int
    losses: list[float]
    seconds: list[float]
    accuracy: float
    images: int

    @property
    def throughput(self) -> float:
        """The images trained in a second in the fastest epoch, which others disturbed least."""
        return self.images / min(self.seconds)


class Watch(nd.callbacks.Callback):
    """Measures the duration of each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Start the watch."""
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Stop the watch."""
        self.seconds.append(time.perf_counter() - self._began)


def train(strategy: nd.Strategy, replicas: int, epochs: int, seed: int) -> Result:
    """Train under a strategy; these lines are the same for all."""
    (images, labels), test = load_data(seed)
    with strategy.scope():
        model = make_model(seed)
    watch = Watch()
    history = model.fit(images, labels, BATCH, epochs, verbose=0, callbacks=[watch]).history
    accuracy = float(model.evaluate(*test, verbose=0)[1])
    return Result(replicas, history["loss"], watch.seconds, accuracy, len(images))


def train_as_job(name: str, replicas: int, epochs: int, seed: int) -> Result:
    """Start processes that run this script, and return what their chief wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        shared = ["--strategy", name, "--replicas", replicas, "--epochs", epochs, "--seed", seed]
        launcher = [sys.executable, "-m", "ndistribute", "run", *JOBS[name](replicas)]
        command = [*launcher, __file__, *map(str, shared), "--result", str(path)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return Result(**json.loads(path.read_text()))


def run_in_job(options: Any) -> None:
    """Do the work of a process of a job."""
    (name,) = options.strategy
    if name == "parameter_server" and serves():
        return
    with make_strategy(name, 1) as strategy:
        result = train(strategy, options.replicas, options.epochs, options.seed)
        if strategy.is_chief:
            Path(options.result).write_text(json.dumps(dataclasses.asdict(result)))


def show_table(results: Mapping[str, Result]) -> None:
    """Print the results."""
    report(f"{'strategy':<18}{'replicas':>8}{'loss':>10}{'accuracy':>10}{'images/s':>10}")
    for name, one in results.items():
        numbers = f"{one.losses[-1]:>10.4f}{one.accuracy:>10.4f}{one.throughput:>10,.0f}"
        report(f"{name:<18}{one.replicas:>8}{numbers}")


def write_plot(results: Mapping[str, Result], path: Path) -> None:
    """Write the curves of the loss and the throughputs, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        report("no plot: pip install matplotlib")
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    for number, (name, one) in enumerate(results.items()):
        # Curves that lie on each other stay visible: each is thinner than the one below.
        width = 1.5 + 1.5 * (len(results) - 1 - number)
        epochs = range(1, len(one.losses) + 1)
        curves.plot(epochs, one.losses, label=name, linewidth=width, solid_capstyle="round")
    curves.set(xlabel="epoch", ylabel="loss", yscale="log", title="Loss")
    curves.xaxis.get_major_locator().set_params(integer=True)
    for line in curves.legend().get_lines():
        line.set_linewidth(3)
    labels = [f"{name}, {one.replicas}" for name, one in results.items()]
    colors = [f"C{number}" for number in range(len(results))]
    drawn = bars.barh(labels, [one.throughput for one in results.values()], color=colors)
    bars.bar_label(drawn, fmt="{:,.0f}", padding=3)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set(xlabel="images per second", title="Throughput of the fastest epoch")
    figure.savefig(path, dpi=120)
    report(f"wrote {path}")


def main() -> None:
    """Train under each strategy, and show the results."""
    parser = make_parser(__doc__, epochs=6, replicas=2, several=True)
    parser.add_argument("--picture", default="strategies.png", help="a file, or '' for none")
    parser.add_argument("--result", help="in a process of a job: where the chief writes")
    options = parser.parse_args()
    if options.result:
        run_in_job(options)
        return
    results = {}
    for name in options.strategy:
        rest = options.epochs, options.seed
        if name in JOBS:
            results[name] = train_as_job(name, options.replicas, *rest)
            continue
        replicas = 1 if name in ALONE else options.replicas
        with make_strategy(name, replicas) as strategy:
            results[name] = train(strategy, replicas, *rest)
    show_table(results)
    if options.picture:
        write_plot(results, Path(options.picture))


if __name__ == "__main__":
    main()
