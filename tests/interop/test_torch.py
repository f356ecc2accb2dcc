"""PyTorch's modules under every strategy of one process: replicas train as one does."""

import pytest

import ndistribute as nd
from tests.kinds import central, mirrored, served

torch = pytest.importorskip("torch")

from ndistribute.interop import torch as guest  # noqa: E402
from tests.interop.networks import (  # noqa: E402
    OPTIMIZERS,
    STEPS,
    alone,
    check_equal,
    loss_of,
    network,
    pair,
    trained,
    values_of,
)

KINDS = {
    "one device": lambda: nd.OneDeviceStrategy("cpu:0"),
    "two": lambda: mirrored(2),
    "three": lambda: mirrored(3),
    "central": lambda: central(2),
    "served": lambda: served(1),
    "two served": lambda: served(2),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_train_as_one_does(kind, optimizer):
    make = pair(optimizer)
    check_equal(trained(KINDS[kind](), make), alone(make))


def test_without_a_strategy_nothing_changes():
    torch.manual_seed(0)
    model = network()
    plain = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = guest.DistributedOptimizer(plain)
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.SGD)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, slice(None)).backward()
        optimizer.step()
    check_equal([values_of(model)], alone(), 0)
