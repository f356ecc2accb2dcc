"""The whole state of a training is saved, and moves from any strategy to any other, sharded or not.

Of several workers only the chief sees the disk; a damaged checkpoint is never taken as whole.
"""

import contextlib
import dataclasses
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import tensor_files
from ndistribute.models import Sequential, layers, losses, metrics
from ndistribute.models.checkpoint import Checkpoint
from ndistribute.models.checkpoint_manager import CheckpointManager
from tests.contract_rows import central, mirrored, served
from tests.jobs.digits import serve, step_of
from tests.kinds import DEADLINE, closing, context
from tests.processes import HANG_SECONDS, Ranks
from tests.strategies.on_servers import sharded


def test_gradients_accumulated_so_far_are_part_of_a_checkpoint(tmp_path):
    def run(strategy: nd.Strategy, steps: int, restored: Any = None) -> Any:
        with strategy:
            v = nd.Variable([1.0], name="v")
            optimizer = nd.optimizers.GradientAccumulation(nd.optimizers.SGD(0.5), steps=2)
            checkpoint = Checkpoint(v=v, optimizer=optimizer)
            if restored is not None:
                checkpoint.restore(restored)

            def step() -> None:
                own = 1.0 + nd.get_replica_context().replica_id_in_sync_group
                optimizer.apply_gradients([(np.array([own]), v)])

            for _ in range(steps):
                strategy.run(step)
            return v.numpy(), optimizer.iterations, checkpoint.save(tmp_path / "run")

    value, steps, path = run(mirrored(2), 3)
    assert (value, steps) == (1 - 0.5 * 3, 1)
    value, steps, _ = run(mirrored(1), 1, path)  # 3 of two replicas before, 1 of one replica now.
    assert (value, steps) == (1 - 0.5 * 3 - 0.5 * (3 + 1) / 2, 2)


def test_the_loss_scale_is_part_of_a_checkpoint(tmp_path):
    v = nd.Variable(np.ones(1, np.float32))
    optimizer = nd.optimizers.LossScale(nd.optimizers.SGD(), initial_scale=8.0)
    optimizer.apply_gradients([(np.array([np.nan], np.float32), v)])
    path = Checkpoint(optimizer=optimizer).save(tmp_path / "run")
    other = nd.optimizers.LossScale(nd.optimizers.SGD())
    Checkpoint(optimizer=other).restore(path)
    assert other.scale == 4.0
    assert v.numpy() == 1


@pytest.mark.parametrize("name", ["tensors.safetensors", "data.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(name, tmp_path):
    v = nd.Variable([1.0, 2.0])
    manager = CheckpointManager(Checkpoint(v=v), tmp_path)
    manager.save(1)
    v.assign([5.0, 6.0])
    file = manager.save(2) / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(nd.CheckpointCorruptError, match=str(file)):
        Checkpoint(v=v).restore(file.parent)
    assert v.numpy().tolist() == [5.0, 6.0]
    assert manager.restore_or_initialize().name == "checkpoint.000001"
    assert v.numpy().tolist() == [1.0, 2.0]
    assert manager.step == 1


def test_an_interrupted_wait_can_be_repeated_and_the_program_ends_after_the_save(tmp_path):
    """The second `wait` returned at once, and the interpreter ended in the middle of the save."""
    path, writing, on = tmp_path / "run", threading.Event(), threading.Event()
    v = nd.Variable(1.0)
    manager = CheckpointManager(Checkpoint(v=v), path, asynchronous=True)
    writer = manager.checkpoint.writer

    def slow(*args):
        write = writer(*args)

        def act():
            writing.set()
            assert on.wait(HANG_SECONDS)
            return write()

        return act

    def interrupt(*_):
        raise KeyboardInterrupt

    def wait_until_interrupted():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        manager.wait()

    vars(manager.checkpoint)["writer"] = slow
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        manager.save(1)
        assert writing.wait(HANG_SECONDS)
        with pytest.raises(KeyboardInterrupt):
            wait_until_interrupted()
    finally:
        signal.signal(signal.SIGALRM, before)
        later = threading.Timer(0.05, on.set)
        later.start()
    manager.wait()
    later.join()
    assert manager.latest_checkpoint == path / "checkpoint.000001"


def test_a_failure_of_an_asynchronous_save_is_logged_and_raised_by_the_next_call(tmp_path, caplog):
    (tmp_path / "file").touch()
    v = nd.Variable(1.0)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path / "file", asynchronous=True)
    manager.save(7)
    with pytest.raises(OSError, match="file"):
        manager.wait()
    assert "the checkpoint of step 7 could not be written" in caplog.text
    manager.save(8)
    with pytest.raises(OSError, match="file"):
        manager.save(9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda path: Checkpoint(x=3), "x is a int, which a checkpoint cannot save"),
        (
            lambda path: Checkpoint(v=nd.Variable(1.0)).restore("nowhere"),
            r"no checkpoint /.*nowhere\.$",
        ),
        (lambda path: CheckpointManager(Checkpoint(), path, 0), "max_to_keep must be 1 or more"),
    ],
)
def test_mistakes_are_explained(call, says, tmp_path):
    path = Checkpoint(v=nd.Variable([1.0, 2.0])).save(tmp_path / "run")
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=says):
        call(path)


def test_objects_that_are_set_as_attributes_are_saved_and_restored(tmp_path):
    checkpoint, v = Checkpoint(), nd.Variable([1.0, 2.0])
    checkpoint.v = v
    path = checkpoint.save(tmp_path / "run")
    v.assign([0.0, 0.0])
    Checkpoint(v=v).restore(path)
    assert v.numpy().tolist() == [1.0, 2.0]
    assert checkpoint.v is v
    with pytest.raises(TypeError, match="w is a int, which a checkpoint cannot save"):
        checkpoint.w = 3
    with pytest.raises(AttributeError, match="no object 'gone'"):
        _ = checkpoint.gone


def save_and_restore(rank: int, size: int, directory: str) -> tuple[float, bool, str]:
    """Save asynchronously, restore, and fail to save, where only the chief sees the disk."""
    own = directory if rank == 0 else f"{directory}/{rank}-sees-nothing"
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]):
        v = nd.Variable(3.0)
        manager = CheckpointManager(Checkpoint(v=v), own, asynchronous=True)
        manager.save(1)
        v.assign(5.0)
        found = manager.restore_or_initialize()
        if rank == 0:
            (Path(directory) / "file").write_text("")
        lost = CheckpointManager(Checkpoint(v=v), f"{own}/file", asynchronous=True)
        lost.save(2)
        try:
            lost.wait()
        except OSError as error:
            return float(v.numpy()), found is not None, type(error).__name__
    return float(v.numpy()), found is not None, ""


def test_an_asynchronous_save_of_two_workers_needs_the_chiefs_disk_alone(tmp_path):
    with Ranks(2) as ranks:
        first, second = ranks.results(save_and_restore, str(tmp_path / "saved"))
    assert first[:2] == second[:2] == (3.0, True)
    assert first[2]
    assert second[2]  # Both learn that it could not be written.
    assert not (tmp_path / "saved" / "1-sees-nothing").exists()


def save_on_the_chief_alone(rank: int, size: int, folder: str, others: str) -> None:
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        strategy.run(step := lambda: nd.get_replica_context().all_reduce("sum", 1.0))
        model = nd.Sequential([nd.layers.Dense(1)])
        model(np.ones((1, 2), np.float32))
        if strategy.is_chief:
            model.save_weights(f"{folder}/weights")
        elif others == "go on":
            strategy.run(step)


@pytest.mark.parametrize("others", ["go on", "end"])
def test_saving_on_the_chief_alone_names_the_call_and_what_to_do(tmp_path, others):
    with Ranks(2) as ranks:
        chief, other = ranks.run(save_on_the_chief_alone, str(tmp_path), others)
    assert chief.error == ("WorkerLostError" if others == "end" else "CollectiveMismatchError")
    advice = (
        "Every worker must call Sequential.save_weights(), although only the chief reads and writes"
    )
    assert advice in chief.text
    if others == "go on":
        assert other.error == "CollectiveMismatchError"
        assert "worker 0 called all_gather" in other.text
        assert " for Sequential.save_weights()" in other.text
    assert not list(tmp_path.iterdir())


def save_at_any_time(rank: int, size: int, directory: str) -> list[str]:
    """Save and restore without waiting for the other worker."""
    with nd.ParameterServerStrategy(devices=["cpu:0"], timeout_seconds=DEADLINE):
        variables = [nd.Variable(np.full(50, 7.0), name=f"v{k}") for k in range(5)]
        checkpoint = Checkpoint(v=variables)
        manager = CheckpointManager(checkpoint, directory, 1, asynchronous=rank == 2)
        for _ in range(20):
            manager.save()
            assert manager.restore_or_initialize() is not None
        return [checkpoint.save(f"{directory}/same").name for _ in range(10)]


def test_workers_that_do_not_wait_for_each_other_save_in_turn(tmp_path):
    with Ranks(3, jobs=["ps", "worker", "worker"]) as ranks:
        ranks.run(serve, ranks=[0])[0].result()
        outcomes = ranks.run(save_at_any_time, str(tmp_path), ranks=[1, 2])
        names = sorted(name for outcome in outcomes for name in outcome.result())
    assert names == [f"same.{number:06d}" for number in range(1, 21)]
    for folder in tmp_path.glob("*.0*"):
        assert (tensor_files.read(folder).tensors["v/0"] == 7).all()
    assert all(path.suffix[1:].isdigit() for path in tmp_path.iterdir())  # No lock is left.
    assert [path.name for path in tmp_path.glob("checkpoint.0*")] == ["checkpoint.000040"]


def test_a_value_per_replica_without_an_aggregation_is_refused_by_name(tmp_path):
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        v = nd.Variable(0.0, synchronization="on_read", name="counts")
        with pytest.raises(ValueError, match=r"'counts'.*aggregation"):
            Checkpoint(v=v).save(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def fit_otherwise_on_one(rank: int, size: int, what: str) -> str:
    """Call `fit` on two workers whose programs differ in one thing, and then alike."""
    x, y = np.ones((8, 3), np.float32), np.zeros(8, int)
    differs = rank == 1
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        with strategy.scope():
            activation = "relu" if differs and what == "layer 1" else "tanh"
            model = nd.Sequential([nd.layers.Dense(4, activation), nd.layers.Dense(2)])
            model.compile("sgd", "sparse_categorical_crossentropy")
        if differs and what == "rate":
            model.optimizer.learning_rate = 0.5
        options = {"epochs": 2 if differs and what == "epochs" else 1}
        options["class_weight"] = {0: 2.0} if differs and what == "class_weight" else None
        with pytest.raises(ValueError, match=rf"fit: the {what} is .* on worker 0 and") as caught:
            model.fit(x, y, verbose=0, **options)
        return str(caught.value)


@pytest.mark.parametrize("what", ["layer 1", "rate", "epochs", "class_weight"])
def test_workers_that_would_train_in_different_ways_are_told(what):
    with Ranks(2) as ranks:
        first, second = ranks.results(fit_otherwise_on_one, what)
    assert first == second
    assert "on worker 1" in first


BATCH, STEPS = 5, 3
RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 7, (23, 4)), RNG.integers(0, 3, 23)


KINDS: dict[str, Callable[[], Any]] = {
    "none": nd.get_strategy,
    "mirrored-3": lambda: mirrored(3),
    "central-2": lambda: central(2),
    "served-2": lambda: served(2),
    "sharded-3": lambda: sharded(servers=2, shards=3, replicas=1),
    "sharded-5": lambda: sharded(servers=3, shards=5, replicas=2),
}


@dataclasses.dataclass
class Training:
    """A model, its input and a metric, and the step that a user writes."""

    strategy: Any
    model: Sequential
    batches: Any
    seen: metrics.Mean

    @property
    def checkpoint(self) -> nd.Checkpoint:
        return nd.Checkpoint(model=self.model, batches=self.batches, seen=self.seen)

    def run(self, steps: int) -> None:
        step = step_of(self.model)

        def step_and_score(batch: Any) -> None:
            step(batch)
            self.seen.update_state(self.model.loss.call(batch[1], self.model(batch[0])))

        for _ in range(steps):
            self.strategy.run(step_and_score, args=(next(self.batches),))

    def draws(self) -> list[float]:
        """Return the next random number of each replica."""

        def draw() -> Any:
            return context().rng.random()

        own = self.strategy.run(draw)
        return [float(one) for one in self.strategy.local_results(own)]

    def state(self) -> list[Any]:
        """Return all values: weights, step count and slots, metrics, the labels of a next batch."""
        optimizer = self.model.optimizer
        slots = [one.numpy() for one in optimizer.variables]
        parts = self.strategy.local_results(next(self.batches)[1])
        return [*self.model.get_weights(), *slots, self.seen.result(), np.concatenate(parts)]


@contextlib.contextmanager
def training(kind: str, seed: int) -> Iterator[Training]:
    """Return a training at its first step."""
    nd.set_seed(seed)
    with closing(KINDS[kind]()) as strategy, strategy.scope():
        model = Sequential(
            [
                layers.Embedding(7, 6, dtype="float64"),
                layers.Flatten(dtype="float64"),
                layers.BatchNormalization(synchronized=True, dtype="float64"),
                layers.Dense(3, dtype="float64"),
            ]
        )
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(nd.optimizers.Adam(0.05), loss, metrics=["accuracy"])
        model.build_for(X[:1])
        model.optimizer.build(model.trainable_variables)
        dataset = nd.Dataset.from_tensor_slices((X, Y)).shuffle(23, seed=3).batch(BATCH)
        batches = iter(strategy.distribute_dataset(dataset.repeat()))
        yield Training(strategy, model, batches, metrics.Mean())


@functools.cache
def expected(steps: int) -> list[Any]:
    """Return the state after some steps without an interruption or a strategy."""
    with training("none", seed=1) as alone:
        alone.run(steps)
        return alone.state()


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Save under a kind of strategy; return the paths by steps, and each replica's next draw."""
    folder: Path = tmp_path_factory.mktemp("saved")
    with training(request.param, seed=1) as source:
        paths = {0: source.checkpoint.save(folder / "new")}
        source.run(STEPS)
        source.draws()
        paths[STEPS] = source.checkpoint.save(folder / "begun")
        return paths, source.draws()


@pytest.mark.parametrize("kind", KINDS)
def test_what_any_strategy_saves_all_others_continue(saved, kind):
    paths, drawn = saved
    # Before the scope below, in which no strategy would be that of the scope.
    states = {steps: expected(steps + STEPS) for steps in paths}
    with training(kind, seed=2) as target:
        for steps, path in paths.items():
            target.run(1)  # What is restored replaces all of it.
            target.checkpoint.restore(path)
            assert target.model.optimizer.iterations == steps
            if steps:
                common = min(len(drawn), target.strategy.num_replicas_in_sync)
                assert target.draws()[:common] == drawn[:common]
            target.run(STEPS)
            for found, wanted in zip(target.state(), states[steps], strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
