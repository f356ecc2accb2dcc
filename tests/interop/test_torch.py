"""`DistributedOptimizer`, `replicate` and `broadcast` for PyTorch's modules under every strategy.

Steps on several replicas must equal the same steps on one, with the whole batch.
"""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import central, mirrored
from tests.processes import Ranks

torch = pytest.importorskip("torch")
guest = pytest.importorskip("ndistribute.interop.torch")

ROWS, STEPS = 12, 4
KINDS = {
    "one device": lambda: nd.OneDeviceStrategy("cpu:0"),
    "two": lambda: mirrored(2),
    "three": lambda: mirrored(3),
    "central": lambda: central(2),
}
OPTIMIZERS = {
    "momentum": lambda values: torch.optim.SGD(values, 0.1, momentum=0.9),
    "adam": lambda values: torch.optim.Adam(values, 0.01),
}


def data():
    """Return the inputs and targets of one batch."""
    rng = np.random.default_rng(0)
    return tuple(torch.from_numpy(rng.normal(size=(ROWS, columns))) for columns in (3, 1))


def network():
    """Return a network of float64."""
    layers = torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers).double()


def pair(make_optimizer=OPTIMIZERS["momentum"], **options):
    """Return what `replicate` calls."""

    def make():
        model = network()
        return model, guest.DistributedOptimizer(make_optimizer(model.parameters()), **options)

    return make


def rows():
    """Return which rows of the batch this replica has."""
    context = nd.get_replica_context()
    rank, size = context.replica_id_in_sync_group, context.num_replicas_in_sync
    return slice(ROWS * rank // size, ROWS * (rank + 1) // size)


def loss_of(model):
    """Return the mean loss of this replica's rows."""
    inputs, targets = data()
    part = rows()
    return torch.nn.functional.mse_loss(model(inputs[part]), targets[part])


def plain_step(model, optimizer):
    """Make a step as PyTorch's programs do."""
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def values_of(model):
    return [each.detach().numpy().copy() for each in model.parameters()]


def trained(strategy, make=None, step=plain_step, steps=STEPS):
    """Return the parameters of each local replica after some steps."""
    with strategy, strategy.scope():
        torch.manual_seed(0)
        replicas = guest.replicate(make or pair())
        for _ in range(steps):
            strategy.run(step, args=replicas)
        return [values_of(model) for model in strategy.local_results(replicas[0])]


def check_equal(all_values, right, tolerance=1e-12):
    """Check that all replicas have the same bits, near the right values."""
    for values in all_values:
        for mine, first, wanted in zip(values, all_values[0], right, strict=True):
            assert np.array_equal(mine, first)
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=tolerance)


def alone(make=None, step=plain_step, steps=STEPS):
    """Return the parameters that one replica reaches."""
    (right,) = trained(nd.OneDeviceStrategy("cpu:0"), make, step, steps)
    return right


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_train_as_one_does(kind, optimizer):
    make = pair(OPTIMIZERS[optimizer])
    check_equal(trained(KINDS[kind](), make), alone(make))


def in_steps(rank, size, optimizer):
    """Train in `strategy.run` on all workers."""
    make = pair(OPTIMIZERS[optimizer])
    (values,) = trained(nd.MultiWorkerMirroredStrategy(), make)
    return values


def as_a_script(rank, size, optimizer):
    """Train outside of `strategy.run`, as a script of Horovod or DDP does."""
    with nd.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        torch.manual_seed(rank)
        if rank == 0:
            torch.manual_seed(0)
        model, distributed = pair(OPTIMIZERS[optimizer])()
        guest.broadcast(model, distributed)
        for _ in range(STEPS):
            distributed.zero_grad()
            inputs, targets = data()
            part = slice(ROWS * rank // size, ROWS * (rank + 1) // size)
            torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            distributed.step()
        return values_of(model)


@pytest.mark.parametrize("size", [2, 3])
def test_workers_train_as_one_process_does(size):
    with Ranks(size) as ranks:
        for optimizer, make in OPTIMIZERS.items():
            right = alone(pair(make))
            check_equal(ranks.results(in_steps, optimizer), right)
            check_equal(ranks.results(as_a_script, optimizer), right)
