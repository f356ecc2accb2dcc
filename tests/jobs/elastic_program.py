"""A worker of an elastic job: it trains, reports each step, and counts each sample that it commits.

ELASTIC_OPTIONS describes the job, as `WorkerOptions`; reports go to the socket of ELASTIC_DOOR, one
JSON object a line. A worker may be told to kill itself at a named point of a change of members.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute.collective.meeting import Meetings
from ndistribute.collective.membership import RosterMeeting, RosterPlan
from ndistribute.data import agreement
from ndistribute.strategies.elastic import ElasticSession
from ndistribute.transport.rpc import Client

COLUMNS = 20


@dataclass
class WorkerOptions:
    """What a worker does."""

    rows: int = 240
    epochs: int = 4
    batch: int = 24
    seconds: float = 0.005  # That a step takes besides.
    updates: int = 2  # In a step: 2 count the samples by an assignment, 1 by the optimizer.
    counts: bool = True  # Whether each epoch's samples are counted, or those of all together.
    implementation: str = "auto"
    devices: int = 1
    min_workers: int = 1
    max_workers: int | None = None
    timeout: float = 30.0
    scaled: bool = False
    reduces: bool = True  # Whether the loop adds up the losses.
    loop: str = "loop"  # Or "fit".
    source: str = "data"  # Or "function": a pipeline for each worker.
    drop: tuple[int, int] | None = None  # The epoch and the step in which a sample is left out.
    die_at: str = ""  # A point of `POINTS`.
    after: int = 0  # How often it is passed before.


class Reports:
    """Tells the driver of a job what happens."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ["ELASTIC_DOOR"])
        self.tell("start", index=json.loads(os.environ["TF_CONFIG"])["task"]["index"])

    def tell(self, what: str, **facts: Any) -> None:
        """Send a report."""
        line = json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **facts})
        self._socket.sendall(f"{line}\n".encode())

    def close(self) -> None:
        """Close the line."""
        self._socket.close()


class _Fuse:
    """Kills this process when a point is passed, once steps were made."""

    def __init__(self, after: int) -> None:
        self.armed, self.left = False, after
        self.reports: Reports | None = None

    def burn(self) -> None:
        """Kill the process, unless the point is to be passed some times more."""
        if self.armed:
            if not self.left:
                if self.reports is not None:
                    self.reports.tell("dies")
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1


def _around(
    owner: Any, name: str, fuse: _Fuse, *, before: bool, when: Callable[..., bool] | None = None
) -> None:
    """Let a fuse burn before or after each call of a method, or of those with some arguments."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        burns = when is None or when(*args[1:])
        if before and burns:
            fuse.burn()
        result = method(*args, **named)
        if not before and burns:
            fuse.burn()
        return result

    setattr(owner, name, wrapped)


def _is_plan(instance: str, reply: Any) -> bool:
    return isinstance(reply, RosterPlan)


def _is_arrival(request: Any, *_: Any) -> bool:
    return type(request).__name__ == "Arrival"


# Where a worker dies: the owner of a method, its name, before or after its call.
POINTS: dict[str, tuple[Any, str, bool, Callable[..., bool] | None]] = {
    "before it arrives": (Meetings, "meet", True, None),
    "after it arrives": (Client, "start", False, _is_arrival),
    "leads": (RosterMeeting, "arrive", False, None),
    "before it plans": (RosterMeeting, "_plan", True, None),
    "has sent one plan": (Meetings, "_send", False, _is_plan),
    "has its plan": (Meetings, "_accept", False, None),
    "the group has formed": (ElasticSession, "_form", False, None),
    "before the state is sent": (ElasticSession, "_passed_on", True, None),
    "after the state is sent": (ElasticSession, "_passed_on", False, None),
    "before it synchronises": (ElasticSession, "_synchronise", True, None),
    "after it synchronises": (ElasticSession, "_synchronise", False, None),
    "is established": (Meetings, "establish", False, None),
    "before the commit": (ElasticSession, "_commit", True, None),
    "after the commit": (ElasticSession, "_commit", False, None),
    "an epoch begins": (agreement, "_notes_of_all", True, None),
    "all begin an epoch": (agreement, "_notes_of_all", False, None),
    "before an update": (nd.optimizers.SGD, "apply_gradients", True, None),
    "between updates": (nd.optimizers.SGD, "apply_gradients", False, None),
}


def _datasets(strategy: Any, options: WorkerOptions) -> Any:
    x, y = samples(options.rows)
    arrays = np.arange(options.rows), x, y

    def of_worker(context: nd.InputContext) -> Any:
        per_worker = context.get_per_replica_batch_size(options.batch)
        data = nd.Dataset.from_tensor_slices(arrays)
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(per_worker)

    if options.source == "function":
        return strategy.distribute_datasets_from_function(of_worker)
    data = nd.Dataset.from_tensor_slices(arrays).shuffle(options.rows, seed=1)
    return strategy.distribute_dataset(data.batch(options.batch))


def samples(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and the targets."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, COLUMNS))
    return x, x @ random.normal(size=COLUMNS)


def train(options: WorkerOptions, reports: Reports, fuse: _Fuse) -> dict[str, Any]:
    """Train; return the weights and the counts."""
    nd.set_seed(3)
    limits = nd.Elastic(
        options.min_workers, options.max_workers, "scaled" if options.scaled else "constant"
    )
    communication = nd.CommunicationOptions(
        implementation=options.implementation, timeout_seconds=options.timeout
    )
    devices = [f"cpu:{number}" for number in range(options.devices)]
    with nd.MultiWorkerMirroredStrategy(
        communication_options=communication, devices=devices, elastic=limits
    ) as strategy:
        reports.tell("joined", newcomer=strategy.session.is_newcomer)
        train = fit if options.loop == "fit" else loop
        return {
            **train(strategy, options, reports, fuse),
            "changes": strategy.session.changes,
            "joined": not strategy.session.is_newcomer,
        }


def loop(strategy: Any, options: WorkerOptions, reports: Reports, fuse: _Fuse) -> dict[str, Any]:
    """Train in a loop of one's own; return the weights and the counts."""
    counted = options.epochs if options.counts else 1
    with strategy.scope():
        weights = nd.Variable(np.zeros(COLUMNS), name="weights")
        counts = nd.Variable(np.zeros((counted, options.rows)), name="counts", aggregation="sum")
        seen = nd.metrics.Sum(name="seen")
        # With one update, the optimizer counts as well, by a gradient of -1 and a rate of 1.
        optimizer = nd.optimizers.SGD(1.0, momentum=0.9 * (options.updates == 2))
    data = _datasets(strategy, options)

    def step(batch: Any, epoch: int, number: int) -> Any:
        ids, inputs, targets = batch
        time.sleep(options.seconds)
        if options.drop == (epoch, number) and strategy.is_chief:
            ids, inputs, targets = ids[1:], inputs[1:], targets[1:]
        error = inputs @ weights.numpy() - targets
        gradient = 0.02 * inputs.T @ error / options.batch
        hits = np.zeros((counted, options.rows))
        np.add.at(hits[epoch % counted], ids, 1)
        seen.update_state(ids + 1)
        if options.updates == 1:
            optimizer.apply_gradients([(gradient, weights), (-hits, counts)])
        else:
            optimizer.apply_gradients([(gradient, weights)])
            counts.assign_add(hits)
        return np.sum(error**2)

    totals: list[float] = []
    for epoch in range(options.epochs):
        total = 0.0
        for batch in strategy.elastic(data):
            number = strategy.session.input.number
            loss = strategy.run(step, args=(batch, epoch, number))
            session = strategy.session
            reports.tell(
                "step",
                epoch=epoch,
                step=number,
                size=session.size,
                changes=session.changes,
                weight=float(weights.numpy()[0]),
            )
            fuse.armed = True
            if options.reduces:
                total += float(strategy.reduce("sum", loss))
        totals.append(float(seen.result()))
        seen.reset_state()
    return {
        "weights": weights.numpy().tolist(),
        "counts": counts.numpy().tolist(),
        "totals": totals,
    }


class Counts(nd.metrics.Metric):
    """The samples of each number that an epoch has; its value is 0 if each occurs once."""

    def __init__(self, rows: int) -> None:
        super().__init__("counts")
        self.counts = self.add_weight("counts", (rows,))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count the samples whose numbers are the first column."""
        hits = np.zeros(self.counts.shape, np.float32)
        np.add.at(hits, np.asarray(y_true)[:, 0].astype(int), 1)
        self.counts.assign_add(hits)

    def result(self) -> Any:
        """Return how many samples are missing, or too many."""
        return np.sum(np.abs(np.asarray(self.counts) - 1))


def fit(strategy: Any, options: WorkerOptions, reports: Reports, fuse: _Fuse) -> dict[str, Any]:
    """Train by `fit`; return the weights, and the counts of the epochs that this worker ended."""
    x, y = samples(options.rows)
    numbered = np.stack([np.arange(options.rows), y], axis=1)
    data = nd.Dataset.from_tensor_slices((x, numbered))
    data = data.shuffle(options.rows, seed=1, reshuffle_each_iteration=False)

    def loss(y_true: Any, y_pred: Any) -> Any:
        return (y_pred[:, 0] - y_true[:, 1]) ** 2

    class Teller(nd.callbacks.Callback):
        epoch, wrong = 0, 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.wrong += float(logs["counts"])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            session = strategy.session
            facts = {"size": session.size, "changes": session.changes, "weight": 0.0}
            reports.tell("step", epoch=self.epoch, step=batch + 1, **facts)
            fuse.armed = True
            time.sleep(options.seconds)

    with strategy.scope():
        model = nd.Sequential([nd.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        momentum = 0.9 * (options.updates == 2)
        model.compile(
            optimizer=nd.optimizers.SGD(0.01, momentum=momentum),
            loss=loss,
            metrics=[Counts(options.rows)],
        )
    teller = Teller()
    batches = data.batch(options.batch)
    model.fit(batches, epochs=options.epochs, callbacks=[teller], verbose=0)
    weights = model.get_weights()
    return {
        "weights": weights[0][:, 0].tolist() if weights else [0.0] * COLUMNS,
        "counts": [[1.0 + teller.wrong]] * options.epochs,
        "totals": [options.rows * (options.rows + 1) / 2] * options.epochs,
    }


def main() -> None:
    """Be a worker."""
    options = WorkerOptions(**json.loads(os.environ["ELASTIC_OPTIONS"]))
    options.drop = tuple(options.drop) if options.drop else None  # type: ignore[assignment]
    fuse = _Fuse(options.after)
    if options.die_at:
        owner, name, before, when = POINTS[options.die_at]
        _around(owner, name, fuse, before=before, when=when)
    reports = fuse.reports = Reports()
    try:
        reports.tell("result", **train(options, reports, fuse))
    except Exception as error:
        reports.tell("error", text=f"{type(error).__name__}: {error}")
        raise
    finally:
        reports.close()


if __name__ == "__main__":
    main()
