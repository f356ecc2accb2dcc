"""PyTorch's loaders as input, and its modules and optimizers in checkpoints, resumed exactly."""

import copy
import json

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import mirrored

torch = pytest.importorskip("torch")
from torch.utils import data as td  # noqa: E402 - After the check that it is there.

from ndistribute.interop.torch import DistributedOptimizer, replicate  # noqa: E402


class Rows(td.Dataset):
    """Numbered rows with random values and names."""

    def __len__(self):
        return 22

    def __getitem__(self, number):
        row = torch.tensor([float(number)])
        return {"x": row, "noise": torch.rand(2, dtype=torch.bfloat16), "name": f"row {number}"}


class Stream(td.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8.0))


class Halves(td.Sampler):
    """An order of its own, from a generator or from nobody knows where."""

    def __init__(self, generator=None):
        if generator is not None:
            self.generator = generator

    def __len__(self):
        return 22

    def __iter__(self):
        order = list(range(11))
        if hasattr(self, "generator"):
            order = torch.randperm(22, generator=self.generator).tolist()
        return iter(order)


def seeded():
    return torch.Generator().manual_seed(5)


def batched(generator):
    return td.BatchSampler(td.RandomSampler(Rows(), generator=generator), 4, drop_last=True)


LOADERS = {
    "in order": lambda: td.DataLoader(Rows(), batch_size=4),
    "shuffled": lambda: td.DataLoader(Rows(), batch_size=4, shuffle=True, generator=seeded()),
    "by workers": lambda: td.DataLoader(
        Rows(), batch_size=4, shuffle=True, generator=seeded(), num_workers=2
    ),
    "weighted": lambda: td.DataLoader(
        Rows(), 4, sampler=td.WeightedRandomSampler(range(1, 23), 22, generator=seeded())
    ),
    "batch sampler": lambda: td.DataLoader(Rows(), batch_sampler=batched(seeded())),
    "own sampler": lambda: td.DataLoader(Rows(), batch_size=4, sampler=Halves(seeded())),
    "one part": lambda: td.DataLoader(
        Rows(), 4, sampler=td.distributed.DistributedSampler(Rows(), num_replicas=1, rank=0)
    ),
}
REFUSED = {
    "global generator": (lambda: td.DataLoader(Rows(), 4, shuffle=True), r"torch\.Generator\(\)"),
    "unknown order": (
        lambda: td.DataLoader(Rows(), 4, sampler=Halves()),
        "its Halves has no generator",
    ),
    "workers that persist": (
        lambda: td.DataLoader(
            Rows(), 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
        ),
        "pass persistent_workers=False",
    ),
    "stream": (lambda: td.DataLoader(Stream(), batch_size=4), "iterable dataset"),
}


def values(strategy, batch):
    """Return the parts of the replicas as lists, after checking what they are."""
    parts = {name: strategy.local_results(part) for name, part in batch.items()}
    assert all(torch.is_tensor(part) for part in parts["x"] + parts["noise"])
    assert {part.dtype for part in parts["noise"]} == {torch.bfloat16}
    assert all(isinstance(part, np.ndarray) for part in parts["name"])
    return {name: [part.tolist() for part in parts[name]] for name in parts}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_continues_exactly(kind):
    """The order, what workers of the loader draw, and what the program draws are the same."""
    with mirrored(2) as strategy:

        def rest(dataset, iterator):
            left = [values(strategy, batch) for batch in iterator]
            return left, torch.rand(1), [values(strategy, batch) for batch in dataset]

        dataset = strategy.distribute_dataset(LOADERS[kind]())
        list(dataset)
        iterator = iter(dataset)
        taken = [values(strategy, next(iterator)) for _ in range(2)]
        state, drawn = json.loads(json.dumps(iterator.state_dict())), torch.get_rng_state()
        right = rest(dataset, iterator)
        assert right[0][0] not in taken

        dataset = strategy.distribute_dataset(LOADERS[kind]())
        iterator = iter(dataset)
        iterator.load_state_dict(state)
        torch.set_rng_state(drawn)
        assert rest(dataset, iterator) == right


@pytest.mark.parametrize("kind", REFUSED)
def test_an_order_that_cannot_be_restored_is_refused_when_a_state_is_asked_for(kind):
    make, match = REFUSED[kind]
    with mirrored(2) as strategy:
        iterator = iter(strategy.distribute_dataset(make()))
        next(iterator)
        with pytest.raises(ValueError, match=match):
            iterator.state_dict()


def test_a_state_of_another_loader_is_refused():
    with mirrored(1) as strategy:
        state = iter(strategy.distribute_dataset(LOADERS["in order"]())).state_dict()
        with pytest.raises(ValueError, match="other generators"):
            iter(strategy.distribute_dataset(LOADERS["shuffled"]())).load_state_dict(state)


def test_a_sampler_that_divides_the_data_must_divide_it_among_its_readers():
    def loader(parts):
        sampler = td.distributed.DistributedSampler(Rows(), num_replicas=parts, rank=0)
        return td.DataLoader(Rows(), 4, sampler=sampler)

    with mirrored(2) as strategy:
        with pytest.raises(
            ValueError, match="part 0 of 2 of the data, but this worker reads part 0 of 1"
        ):
            strategy.distribute_dataset(loader(2))
        with pytest.raises(
            ValueError, match="part 0 of 3 of the data, but this worker reads part 0 of 1"
        ):
            strategy.distribute_datasets_from_function(lambda context: loader(3))
        each = strategy.distribute_datasets_from_function(lambda context: loader(1))
        assert values(strategy, next(iter(each)))["x"][0] != []


def test_fit_gets_arrays_and_continues_exactly(tmp_path):
    rows = td.TensorDataset(torch.randn(24, 3, generator=seeded()), torch.ones(24, 1))

    def fit(directory, stop):
        loader = td.DataLoader(rows, batch_size=4, shuffle=True, generator=seeded())
        backup = nd.callbacks.BackupAndRestore(directory, save_freq=2)
        seen = []

        class Stop(nd.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(batch)
                if len(seen) == stop:
                    raise KeyboardInterrupt

        with mirrored(2) as strategy:
            nd.set_seed(3)
            model = nd.Sequential([nd.layers.Dense(4), nd.layers.Dense(1)])
            model.compile(optimizer=nd.optimizers.Adam(0.1), loss="mse")
            model.fit(loader, epochs=2, callbacks=[backup, Stop()], verbose=0)
        assert strategy is model.strategy
        return [variable.numpy() for variable in model.trainable_variables]

    right = fit(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", 9)
    for mine, whole in zip(fit(tmp_path / "broken", None), right, strict=True):
        np.testing.assert_array_equal(mine, whole)


def network(seed, dtype=torch.float32, width=4):
    """Return a module with buffers and dropout, and an optimizer of it."""
    torch.manual_seed(seed)
    parts = torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.5)
    module = torch.nn.Sequential(*parts, torch.nn.Linear(width, 1)).to(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, amsgrad=True)
    return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def train(module, optimizer, schedule, steps=5):
    for step in range(steps):
        inputs = torch.arange(24.0).reshape(8, 3).to(module[0].weight.dtype) * 0.1 + step
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()
        schedule.step()


def tensors(module, optimizer, schedule):
    states = optimizer.state_dict()["state"].values()
    moments = [value for state in states for value in state.values()]
    return [each.clone() for each in [*module.state_dict().values(), *moments]]


def check_bits(left, right):
    assert len(left) == len(right)
    assert all(map(torch.equal, left, right))
    assert [each.dtype for each in left] == [each.dtype for each in right]


def named(module, optimizer, schedule):
    parts = {"module": module, "optimizer": optimizer, "schedule": schedule}
    return nd.Checkpoint(**parts, random=torch.default_generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_continues_from_a_checkpoint_bit_by_bit(tmp_path, dtype):
    before, after = network(0, dtype), network(1, dtype)
    train(*before)
    path = nd.CheckpointManager(named(*before), tmp_path, max_to_keep=1).save()
    train(*before)
    named(*after).restore(path)
    train(*after)
    check_bits(tensors(*after), tensors(*before))


@pytest.mark.parametrize("change", ["shapes", "layers"])
def test_what_does_not_fit_changes_nothing(tmp_path, change):
    before = network(0)
    train(*before)
    path = named(*before).save(tmp_path / "run")
    other = network(1, width=5) if change == "shapes" else network(1)
    if change == "layers":
        other[0].append(torch.nn.Linear(1, 1))
    train(*other, steps=1)
    kept = tensors(*other)
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key") as caught:
        named(*other).restore(path)
    assert "Nothing has changed" in caught.value.__notes__[0]
    check_bits(tensors(*other), kept)


def test_all_replicas_get_the_state_of_the_first(tmp_path):
    pairs = nd.PerReplica([network(0)[:2], network(1)[:2]])
    train(*pairs.values[0], torch.optim.lr_scheduler.StepLR(pairs.values[0][1], 3))
    path = nd.Checkpoint(replicas=pairs).save(tmp_path / "run")
    others = nd.PerReplica([network(2)[:2], network(3)[:2]])
    nd.Checkpoint(replicas=others).restore(path)
    for pair in others.values:
        check_bits(tensors(*pair, None), tensors(*pairs.values[0], None))
    moments = [optimizer.state_dict()["state"][0]["exp_avg"] for _, optimizer in others.values]
    assert moments[0].data_ptr() != moments[1].data_ptr()
    with pytest.raises(TypeError, match="PerReplica, which a checkpoint cannot save"):
        nd.Checkpoint(replicas=nd.PerReplica([1, 2]))


def test_what_replicate_returned_is_saved_and_set_on_all(tmp_path):
    def make():
        module, optimizer, _ = network(0)
        DistributedOptimizer(optimizer)
        return module, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])

    def states():
        return [[each.state_dict() for each in part.values] for part in replicas[:2]]

    with mirrored(2) as strategy, strategy.scope():
        replicas = replicate(make)
        checkpoint = nd.Checkpoint(replicas=replicas)
        strategy.run(train, args=replicas, kwargs={"steps": 3})
        path, saved = checkpoint.save(tmp_path / "run"), copy.deepcopy(states())
        strategy.run(train, args=replicas, kwargs={"steps": 3})
        rates = [optimizer.param_groups[0]["lr"] for optimizer in replicas[1].values]
        checkpoint.restore(path)
        for (first, second), (wanted, _) in zip(states(), saved, strict=True):
            assert str(first) == str(second) == str(wanted)
        strategy.run(train, args=replicas, kwargs={"steps": 3})
        assert [optimizer.param_groups[0]["lr"] for optimizer in replicas[1].values] == rates
