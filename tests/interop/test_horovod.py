"""Programs with Horovod's names, on processes that a launcher started."""

import copy

import numpy as np
import pytest

from tests.jobs.launched import run
from tests.processes import Ranks

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("ndistribute.interop.horovod")

ROWS = 8
WITHOUT_NAME = ("alltoall", "reducescatter", "add_process_set", "ProcessSet", "start_timeline")


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


def in_job(check):
    """Return what a function returns between `init` and `shutdown`."""
    hvd.init()
    try:
        return check()
    finally:
        hvd.shutdown()


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def trained(rows, distribute):
    """Return the parameters after some steps with a part of the rows."""
    inputs = torch.from_numpy(np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32))
    model = network(seed=0 if distribute is None else hvd.rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if distribute is not None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = distribute(optimizer, model)
    for _ in range(5):
        optimizer.zero_grad()
        (model(inputs[rows]) ** 2).mean().backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def train_here(rank, size, **options):
    def distribute(optimizer, model):
        named = model.named_parameters()
        return hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)

    return in_job(lambda: trained(slice(hvd.rank(), None, hvd.size()), distribute))


def train_with_fp16(rank, size):
    return train_here(rank, size, compression=hvd.Compression.fp16)


def places(rank, size):
    names = "rank size local_rank local_size cross_rank cross_size is_homogeneous".split()
    return in_job(lambda: [getattr(hvd, name)() for name in names])


def collectives(rank, size):
    def check():
        me, mine = hvd.rank(), torch.tensor([1.0, 2.0]) + hvd.rank()
        assert hvd.allreduce(mine).tolist() == [1.5, 2.5]
        assert hvd.allreduce(mine, average=False, prescale_factor=2.0).tolist() == [6.0, 10.0]
        assert hvd.allreduce(mine.int(), postscale_factor=2.0).tolist() == [2, 4]  # 1.5 is cut.
        assert hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Max)).tolist() == [2.0, 3.0]
        assert hvd.allreduce(mine.double(), compression=hvd.Compression.fp16).tolist() == [1.5, 2.5]
        assert hvd.grouped_allreduce([mine, mine], op=hvd.Min)[1].tolist() == [1.0, 2.0]
        assert hvd.allgather(mine[: 1 + me]).tolist() == [1.0, 2.0, 3.0]
        assert hvd.broadcast(mine, 1).tolist() == [2.0, 3.0]
        asked = mine.clone().requires_grad_()
        hvd.broadcast(asked, 1).sum().backward()
        assert asked.grad.tolist() == [2.0 * me] * 2
        kept = mine.clone()
        assert hvd.allreduce_(kept, op=hvd.Sum) is kept
        assert hvd.broadcast_(kept * me, 1).tolist() == [3.0, 5.0]
        sent = {"rank": me, 0: [mine, (None, "text")]}
        received = hvd.broadcast_object(sent, 1)
        assert received["rank"] == 1
        assert received[0][0].tolist() == [2.0, 3.0]
        assert received[0][1] == (None, "text")
        assert [each["rank"] for each in hvd.allgather_object(sent)] == [0, 1]
        kept = hvd.broadcast_object(network(seed=me).state_dict(), root_rank=0)
        assert all(map(torch.equal, kept.values(), network(seed=0).state_dict().values()))
        hvd.elastic.TorchState(epoch=1).sync()
        hvd.barrier()
        return hvd.join()

    return in_job(check)


def test_two_processes():
    right = trained(slice(None), None)
    with Ranks(2) as ranks:
        assert ranks.results(places) == [[0, 2, 0, 2, 0, 1, True], [1, 2, 1, 2, 0, 1, True]]
        assert ranks.results(collectives) == [1, 1]
        first, second = ranks.results(train_here)
        for mine, other, whole in zip(first, second, right, strict=True):
            np.testing.assert_array_equal(mine, other)
            np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-6)
        first, second = ranks.results(train_with_fp16)
        for mine, other, whole in zip(first, second, right, strict=True):
            np.testing.assert_array_equal(mine, other)
            np.testing.assert_allclose(mine, whole, atol=0.02)


def test_what_horovod_has_and_this_lacks_is_refused_by_name(alone):
    for name in WITHOUT_NAME:
        with pytest.raises(AttributeError, match=f"no {name}: "):
            getattr(hvd, name)
    with pytest.raises(AttributeError, match="no ElasticSampler: make a DistributedSampler"):
        hvd.elastic.ElasticSampler(None)
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)
    with pytest.raises(ValueError, match="process_set"):
        hvd.allgather(torch.ones(1), process_set=[0])
    with pytest.raises(ValueError, match="pass op"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    for broadcast in (hvd.broadcast, hvd.broadcast_object, hvd.broadcast_):
        with pytest.raises(ValueError, match=r"root_rank must be in \[0, 1\)"):
            broadcast(torch.ones(1, requires_grad=True), 1)
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(torch.ones(1))


def test_init_is_needed_and_takes_all_processes():
    with pytest.raises(ValueError, match=r"call hvd\.init"):
        hvd.rank()
    with pytest.raises(ValueError, match="all processes take part"):
        hvd.init(comm=[0])
    assert not hvd.is_initialized()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"named_parameters": [("a", None), ("a", None)]}, "occur twice: a"),
        ({"named_parameters": [("a", None)]}, "were not named"),
        ({"named_parameters": [None]}, "tuples"),
        ({"op": "sum", "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"sparse_as_dense": True}, "sparse_as_dense"),
        ({"process_set": 1}, "process_set"),
        ({"compression": "bits"}, "compression"),
    ],
)
def test_wrong_arguments_of_an_optimizer(alone, options, match):
    model = network(0)
    with pytest.raises(ValueError, match=match):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_a_state_has_what_a_training_needs(alone):
    model = network(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, epoch=3)

    @hvd.elastic.run
    def train(state, steps):
        for _ in range(steps):
            state.epoch += 1
            state.commit()
        return state.epoch

    kept = copy.deepcopy(state.state_dict())
    assert train(state, 4) == 7
    state.load_state_dict(kept)
    assert state.epoch == 3
    assert state.schedule is schedule


ELASTIC = """
import os, signal, sys
from pathlib import Path
import torch
import ndistribute as nd
import ndistribute.interop.horovod as hvd

hvd.init(elastic=nd.Elastic(min_workers=1, max_workers=2))
died = Path("died")
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
resets = []

@hvd.elastic.run
def train(state):
    last = state.step + 3 if hvd.size() == 2 and died.exists() else sys.maxsize
    while state.step < last:
        optimizer.zero_grad()
        model(torch.arange(8.0).reshape(2, 4) * (1 + hvd.rank())).square().mean().backward()
        if state.step == 3 and hvd.rank() == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.step += 1
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, step=0)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
digest = [round(value.sum().item(), 6) for value in model.parameters()]
print("END", state.step, digest, "resets", resets)
"""


def test_a_training_goes_on_when_a_worker_is_lost_and_comes_back(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    options = ["--elastic", "-n", "2", "--min-workers", "1"]
    done = run("run", *options, script, cwd=tmp_path)
    ends = sorted(line.split("END ")[1] for line in done.stdout.splitlines() if "END" in line)
    values, resets = zip(*(end.split(" resets ") for end in ends), strict=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(ends) == 2, done.stdout + done.stderr
    assert values[0] == values[1]
    assert resets == ("[1, 2]", "[]")
