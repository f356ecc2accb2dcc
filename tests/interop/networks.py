"""What the tests of PyTorch share: a network, one batch of data, and how replicas train on it.

Only files that have looked whether PyTorch is there import it.
"""

import numpy as np
import torch

import ndistribute as nd
from ndistribute.interop import torch as guest
from tests.kinds import context

ROWS, STEPS = 12, 4
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


def pair(kind="momentum", make_model=network, **options):
    """Return a function for `replicate` that makes a model and its optimizer."""

    def make():
        model = make_model()
        return model, guest.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), **options)

    return make


def rows(rank=None, size=None):
    """Return which rows of the batch a replica has: equal parts."""
    if rank is None:
        rank, size = context().replica_id_in_sync_group, context().num_replicas_in_sync
    return slice(ROWS * rank // size, ROWS * (rank + 1) // size)


def loss_of(model, part=None):
    """Return the mean loss of this replica's rows."""
    inputs, targets = data()
    part = rows() if part is None else part
    return torch.nn.functional.mse_loss(model(inputs[part]), targets[part])


def plain_step(model, optimizer):
    """Make a step as PyTorch's programs do."""
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def values_of(model):
    return [each.detach().numpy().copy() for each in model.parameters()]


def trained(strategy, make=None, step=plain_step, steps=STEPS):
    """Return the parameters of the model of each local replica after some steps."""
    with strategy, strategy.scope():
        torch.manual_seed(0)
        replicas = guest.replicate(make or pair())
        for _ in range(steps):
            strategy.run(step, args=replicas)
        return [values_of(model) for model in strategy.local_results(replicas[0])]


def alone(make=None, step=plain_step, steps=STEPS):
    """Return the parameters that one replica reaches."""
    (right,) = trained(nd.OneDeviceStrategy("cpu:0"), make, step, steps)
    return right


def check_equal(all_values, right, tolerance=1e-12):
    """Check that all replicas have the same bits, near the right values."""
    for values in all_values:
        for mine, first, wanted in zip(values, all_values[0], right, strict=True):
            assert np.array_equal(mine, first)
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=tolerance)
