"""Which gradients of PyTorch are reduced, and how they are weighted: right, or refused."""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import context, mirrored, rank, served
from tests.processes import Ranks

torch = pytest.importorskip("torch")

from ndistribute.interop import torch as guest  # noqa: E402
from tests.interop.networks import (  # noqa: E402
    alone,
    check_equal,
    data,
    loss_of,
    network,
    pair,
    plain_step,
    trained,
    values_of,
)


def check_alike(step, make=None, sizes=(2, 3)):
    """Check that two and three replicas reach what one does."""
    right = alone(make, step)
    for size in sizes:
        check_equal(trained(mirrored(size), make, step), right)


def with_set_gradients(model, optimizer):
    """Make a step with gradients that no backward pass adds to the parameters."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def test_gradients_that_the_program_sets_are_reduced():
    check_alike(with_set_gradients)


def test_the_sum_of_gradients_that_the_program_sets_is_refused():
    with mirrored(2) as strategy, strategy.scope():
        replicas = guest.replicate(pair(op="sum"))
        with pytest.raises(RuntimeError, match=r"change gradients of backward\(\) only in place"):
            strategy.run(with_set_gradients, args=replicas)


def test_gradients_that_are_replaced_after_a_pass_stay_right():
    def step(model, optimizer):
        optimizer.zero_grad()
        loss_of(model).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)
        optimizer.step()

    check_alike(step)


def test_gradients_within_a_loss_are_not_summed():
    def step(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model, slice(None)) / context().num_replicas_in_sync
        inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        count = context().num_replicas_in_sync
        (loss + count * sum(each.square().sum() for each in inner)).backward()
        optimizer.step()

    check_alike(step, pair(op="sum"))


def test_optimizers_of_the_same_parameters_sum_once():
    def make():
        model = network()
        kinds = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
        return model, *[guest.DistributedOptimizer(kind, op="sum") for kind in kinds]

    def step(model, *optimizers):
        for optimizer in optimizers:
            optimizer.zero_grad()
            (loss_of(model) / context().num_replicas_in_sync).backward()
            optimizer.step()

    check_alike(step, make)


def test_replicas_that_train_the_same_parameters_are_refused():
    model = network()
    with mirrored(2) as strategy, strategy.scope():
        with pytest.raises(ValueError, match="replicas train the same parameters"):
            guest.replicate(pair(make_model=lambda: model))
        with pytest.raises(ValueError, match="replicas train the same parameters"):
            guest.broadcast(nd.PerReplica([model] * 2), nd.PerReplica([pair()()[1]] * 2))


# Parts of different sizes.


class Scaled(torch.nn.Module):
    """A network with a parameter without axes."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = network(), torch.nn.Parameter(torch.tensor(2.0).double())

    def forward(self, inputs):
        return self.inner(inputs) * self.scale


def mean_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    outputs = model(torch.tensor(inputs))
    torch.nn.functional.mse_loss(outputs, torch.tensor(targets)).backward()
    optimizer.step()


def after_batches(strategy, *sizes, step=mean_step, **options):
    """Return the parameters after a step with a batch of each size, and of each replica."""
    arrays = [part.numpy() for part in data()]
    with strategy, strategy.scope():
        torch.manual_seed(0)
        replicas = guest.replicate(pair(make_model=Scaled, **options))
        for size in sizes:
            dataset = nd.Dataset.from_tensor_slices(tuple(part[:size] for part in arrays))
            for batch in strategy.distribute_dataset(dataset.batch(size)):
                strategy.run(step, args=(*replicas, *batch))
        return [values_of(model) for model in replicas[0].values]


SIZES = 12, 11, 7, 1


def test_the_mean_counts_the_rows_of_a_short_batch():
    (right,) = after_batches(mirrored(1), *SIZES)
    for count in (2, 3):
        check_equal(after_batches(mirrored(count), *SIZES), right)


def on_a_worker(rank, size):
    options = nd.CommunicationOptions(timeout_seconds=40.0)
    (values,) = after_batches(nd.MultiWorkerMirroredStrategy(communication_options=options), *SIZES)
    return values


def test_the_mean_counts_the_rows_of_workers():
    with Ranks(2) as ranks:
        check_equal(ranks.results(on_a_worker), after_batches(mirrored(1), *SIZES)[0])


def accumulate(model, optimizer, inputs, targets):
    """Make a pass of two, and a step after the second."""
    outputs = model(torch.tensor(inputs))
    torch.nn.functional.mse_loss(outputs, torch.tensor(targets)).backward()
    if not optimizer.reduction.passes:
        optimizer.step()
        optimizer.zero_grad()


def test_passes_with_the_same_number_of_rows_are_weighted():
    def reached(count):
        sizes, how = (7, 7, 12, 12), {"step": accumulate, "backward_passes_per_step": 2}
        return after_batches(mirrored(count), *sizes, **how)

    check_equal(reached(2), reached(1)[0])


def test_passes_with_other_numbers_of_rows_are_refused():
    with pytest.raises(
        ValueError, match="parts of a batch differ in length, as do its arrays or passes"
    ):
        after_batches(mirrored(2), 12, 7, step=accumulate, backward_passes_per_step=2)


def test_parts_with_arrays_of_several_lengths_are_refused_if_they_differ():
    def step(*args):
        plain_step(*args[:2])

    def lengths(*counts):
        return [nd.PerReplica([np.zeros(count) for count in pair]) for pair in counts]

    with mirrored(2) as strategy, strategy.scope():
        replicas = guest.replicate(pair())
        strategy.run(step, args=(*replicas, *lengths((3, 3), (5, 5))))
        with pytest.raises(ValueError, match="as do its arrays or passes"):
            strategy.run(step, args=(*replicas, *lengths((3, 2), (5, 5))))


# Parameter servers.


def test_parameters_that_servers_do_not_have_are_refused_until_they_are_sent():
    with served(1) as strategy, strategy.scope():
        replicas = guest.replicate(pair())
        strategy.run(plain_step, args=replicas)
        with torch.no_grad():
            replicas[0].values[0][0].bias.fill_(3.0)
        with pytest.raises(RuntimeError, match=r"outside of the optimizer's step: call broadcast"):
            strategy.run(plain_step, args=replicas)
        guest.broadcast(*replicas)
        strategy.run(plain_step, args=replicas)
        assert abs(replicas[0].values[0][0].bias - 3.0).max() < 1.0


def test_a_group_that_servers_do_not_have_is_refused():
    def step(model, optimizer):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        plain_step(model, optimizer)

    with served(1) as strategy, strategy.scope():
        replicas = guest.replicate(pair())
        with pytest.raises(RuntimeError, match="changed or added outside"):
            strategy.run(step, args=replicas)


def test_batch_normalisation_of_a_single_value_is_refused():
    def step(layer):
        layer(torch.ones(1 - rank(), 2))

    with mirrored(2) as strategy, strategy.scope():
        layers = guest.replicate(lambda: guest.synchronize_batch_norm(torch.nn.BatchNorm1d(2)))
        with pytest.raises(ValueError, match="needs more than one value"):
            strategy.run(step, args=(layers,))
