"""What a strategy saves, others restore; a damaged checkpoint is never taken for a whole one."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, layers, losses
from ndistribute.models.checkpoint import Checkpoint, CheckpointManager
from tests.contract_rows import STRATEGIES
from tests.kinds import strategy
from tests.processes import HANG_SECONDS

__all__ = ["strategy"]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6))
Y = RNG.integers(0, 3, 50)


def classifier(optimizer: Any = None, *, build: bool = True) -> Sequential:
    """Return a compiled model in float64, with dropout, which needs random numbers."""
    model = Sequential(
        [
            layers.Dense(8, activation="tanh", dtype="float64"),
            layers.Dropout(0.2),
            layers.Dense(3, dtype="float64"),
        ]
    )
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or nd.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    if build:
        model(X[:1])
    return model


def trained(model: Sequential, epochs: int = 1) -> Any:
    """Return the history of a training."""
    return model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0).history


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_training_continues_as_if_it_had_not_stopped(kind, tmp_path):
    nd.set_seed(1)
    with STRATEGIES[kind]() as strategy:
        model = classifier()
        trained(model)
        path = Checkpoint(model=model).save(tmp_path / "run")
        expected = trained(model)
        weights = model.get_weights()
    nd.set_seed(2)
    with STRATEGIES[kind]() as strategy:
        model = classifier()
        Checkpoint(model=model).restore(path)
        assert strategy.num_replicas_in_sync >= 1
        assert trained(model) == expected
        assert all(map(np.array_equal, model.get_weights(), weights))


def test_any_strategy_reads_what_another_wrote(strategy, tmp_path):
    source = classifier()
    trained(source)
    path = Checkpoint(net=source).save(tmp_path / "run")
    with strategy.scope():
        model = classifier()
        Checkpoint(net=model).restore(path)
        assert all(map(np.array_equal, model.get_weights(), source.get_weights()))
        slots = [slot.numpy() for slot in model.optimizer.variables]
        assert all(map(np.array_equal, slots, [v.numpy() for v in source.optimizer.variables]))
        assert model.optimizer.iterations == source.optimizer.iterations == 4
        back = Checkpoint(net=model).save(tmp_path / "back")
    other = classifier()
    Checkpoint(net=other).restore(back)
    assert all(map(np.array_equal, other.get_weights(), source.get_weights()))


def test_a_restored_optimizer_is_built(tmp_path):
    v = nd.Variable([1.0, 2.0], name="v")
    optimizer = nd.optimizers.Adam()
    optimizer.apply_gradients([([1.0, 1.0], v)])
    path = Checkpoint(v=v, optimizer=optimizer).save(tmp_path / "run")
    w, other = nd.Variable([0.0, 0.0]), nd.optimizers.Adam()
    Checkpoint(v=w, optimizer=other).restore(path)
    assert other.iterations == 1
    assert [s.numpy().tolist() for s in other.variables] == [
        s.numpy().tolist() for s in optimizer.variables
    ]


def test_a_model_without_variables_is_built_from_the_checkpoint(tmp_path):
    source = classifier()
    path = Checkpoint(model=source).save(tmp_path / "run")
    unbuilt = classifier(build=False)
    Checkpoint(model=unbuilt).restore(path)
    assert all(map(np.array_equal, unbuilt.get_weights(), source.get_weights()))
    with pytest.raises(ValueError, match="layers/2/bias is in the checkpoint alone"):
        Sequential([layers.Dense(8)]).load_weights(path)


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

    value, steps, path = run(replicas(2), 3)
    assert (value, steps) == (1 - 0.5 * 3, 1)
    value, steps, _ = run(replicas(1), 1, path)  # 3 of two replicas before, 1 of one replica now.
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


def damaged(path: Path, name: str, *, missing: bool = False) -> Path:
    """Flip a byte of a file, or remove the last one."""
    data = bytearray((path / name).read_bytes())
    if missing:
        del data[-1]
    else:
        data[len(data) // 2] ^= 1
    (path / name).write_bytes(bytes(data))
    return path


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", ["tensors.safetensors", "data.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(name, missing, tmp_path):
    v = nd.Variable([1.0, 2.0])
    manager = CheckpointManager(Checkpoint(v=v), tmp_path)
    manager.save(1)
    v.assign([5.0, 6.0])
    last = damaged(manager.save(2), name, missing=missing)
    with pytest.raises(nd.CheckpointCorruptError, match=str(last / name)):
        Checkpoint(v=v).restore(last)
    assert v.numpy().tolist() == [5.0, 6.0]
    assert manager.restore_or_initialize().name == "checkpoint.000001"
    assert v.numpy().tolist() == [1.0, 2.0]
    assert manager.step == 1


def test_an_asynchronous_save_has_the_state_of_its_call(tmp_path):
    v = nd.Variable(np.zeros(1000))
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=1, asynchronous=True)
    for step in range(3):
        v.assign(np.full(1000, float(step)))
        manager.save(step)
        v.assign(np.full(1000, -1.0))
    manager.wait()
    assert len(manager.checkpoints) == 1
    manager.restore_or_initialize()
    assert (v.numpy() == 2).all()


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


def test_a_failure_of_an_asynchronous_save_is_logged_for_a_program_that_ends(tmp_path, caplog):
    (tmp_path / "file").touch()
    v = nd.Variable(1.0)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path / "file", asynchronous=True)
    manager.save(7)
    with pytest.raises(OSError, match="file"):
        manager.wait()
    assert "the checkpoint of step 7 could not be written" in caplog.text


def test_a_failure_of_an_asynchronous_save_is_raised_by_the_next(tmp_path):
    (tmp_path / "file").touch()
    manager = CheckpointManager(
        Checkpoint(v=nd.Variable(1.0)), tmp_path / "file", asynchronous=True
    )
    manager.save(1)
    with pytest.raises(OSError, match="file"):
        manager.save(2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda path: Checkpoint(x=3), "x is a int, whose state is unknown"),
        (lambda path: Checkpoint(w=nd.Variable(1.0)).restore(path), "w is missing"),
        (lambda path: Checkpoint(v=nd.Variable(1.0)).restore(path), r"v has shape \(2,\), the var"),
        (lambda path: Checkpoint(v=nd.Variable(1.0)).restore("nowhere"), "no checkpoint nowhere"),
        (lambda path: CheckpointManager(Checkpoint(), path, 0), "max_to_keep must be 1 or more"),
    ],
)
def test_mistakes_are_explained(call, says, tmp_path):
    path = Checkpoint(v=nd.Variable([1.0, 2.0])).save(tmp_path / "run")
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=says):
        call(path)


def replicas(count: int) -> nd.Strategy:
    """Return a strategy of some replicas."""
    return nd.MirroredStrategy([f"cpu:{k}" for k in range(count)])


def test_objects_that_are_set_as_attributes_are_saved_and_restored(tmp_path):
    checkpoint, v = Checkpoint(), nd.Variable([1.0, 2.0])
    checkpoint.v, checkpoint.gone = v, nd.Variable(0.0)
    del checkpoint.gone
    path = checkpoint.save(tmp_path / "run")
    v.assign([0.0, 0.0])
    Checkpoint(v=v).restore(path)
    assert v.numpy().tolist() == [1.0, 2.0]
    assert checkpoint.v is v
    with pytest.raises(TypeError, match="w is a int, whose state is unknown"):
        checkpoint.w = 3
    with pytest.raises(AttributeError, match="no object 'gone'"):
        _ = checkpoint.gone
    with pytest.raises(AttributeError, match="no object 'gone'"):
        del checkpoint.gone
