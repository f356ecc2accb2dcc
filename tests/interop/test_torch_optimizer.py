"""What PyTorch's programs do with an optimizer works the same with reduced gradients, or raises."""

import copy
import pickle

import pytest

from ndistribute.errors import CollectiveMismatchError
from tests.kinds import context, mirrored, rank, served

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from ndistribute.interop import torch as guest  # noqa: E402
from tests.interop.networks import (  # noqa: E402
    alone,
    check_equal,
    data,
    loss_of,
    network,
    pair,
    plain_step,
    rows,
    trained,
    values_of,
)


def check_alike(step, make=None, sizes=(2, 3), steps=4):
    """Check that two and three replicas reach what one does."""
    right = alone(make, step, steps)
    for size in sizes:
        check_equal(trained(mirrored(size), make, step, steps), right)


def clipped(model, optimizer):
    optimizer.zero_grad()
    loss_of(model).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
    optimizer.step()


def two_passes(model, optimizer):
    optimizer.zero_grad()
    loss_of(model).backward()
    (2 * loss_of(model)).backward()
    optimizer.step()


def retained(model, optimizer):
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def scheduled(model, optimizer):
    if not hasattr(optimizer, "schedule"):
        optimizer.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    plain_step(model, optimizer)
    optimizer.schedule.step()


def with_closure(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    assert optimizer.step(closure=closure).item() > 0


def scaled(model, optimizer):
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


@pytest.mark.parametrize("step", [clipped, two_passes, retained, scheduled, scaled])
def test_programs_of_one_process_give_the_same_result(step):
    check_alike(step)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_replicas_decide_by_the_loss_of_all_when_to_stop(line_search):
    def make():
        model = network()
        options = {"max_iter": 20, "tolerance_change": 1e-2, "line_search_fn": line_search}
        kind = torch.optim.LBFGS(model.parameters(), **options)
        return model, guest.DistributedOptimizer(kind)

    check_alike(with_closure, make)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activations_that_are_computed_again_give_the_same_result(use_reentrant):
    def step(model, optimizer):
        inputs, targets = data()
        optimizer.zero_grad()
        inputs = inputs[rows()].requires_grad_()
        outputs = inputs
        for layer in model:
            outputs = checkpoint(layer, outputs, use_reentrant=use_reentrant)
        torch.nn.functional.mse_loss(outputs, targets[rows()]).backward()
        optimizer.step()

    check_alike(step)


def test_a_sum_of_losses_over_the_global_batch_weights_uneven_parts():
    def step(model, optimizer):
        inputs, targets = data()
        cuts = {1: [0, 12], 2: [0, 9, 12], 3: [0, 1, 12, 12]}[context().num_replicas_in_sync]
        part = slice(*cuts[rank() : rank() + 2])
        optimizer.zero_grad()
        count = context().all_reduce("sum", len(inputs[part]))
        losses = torch.nn.functional.mse_loss(model(inputs[part]), targets[part], reduction="sum")
        (losses / count).backward()
        optimizer.step()

    check_alike(step, pair(op="sum"))


def test_gradients_of_a_sum_add_up_over_passes():
    def step(model, optimizer):
        optimizer.zero_grad()
        for _ in range(2):
            (loss_of(model) / context().num_replicas_in_sync).backward()
        optimizer.step()

    check_alike(step, pair(op="sum"))


# Accumulation.


def test_gradients_are_reduced_once_for_several_passes():
    calls = []

    def step(model, optimizer):
        optimizer.zero_grad()
        for _ in range(3):
            loss_of(model).backward()
            calls.append(context().communicator.calls_made)
        optimizer.step()

    check_alike(step, pair(backward_passes_per_step=3), sizes=(2,), steps=1)
    assert sorted(calls[3:]) == [0, 0, 0, 0, 1, 1]


def test_a_step_in_the_midst_of_passes_reduces_what_there_is():
    def step(model, optimizer):
        optimizer.zero_grad()
        loss_of(model).backward()
        with optimizer.skip_synchronize():
            optimizer.step()

    check_alike(step, pair(backward_passes_per_step=2))


def test_zero_grad_forgets_passes():
    def step(model, optimizer):
        loss_of(model).backward()
        plain_step(model, optimizer)

    check_alike(step, pair(backward_passes_per_step=2))


def test_synchronize_reduces_before_clipping():
    def step(model, optimizer):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    check_alike(step, pair(backward_passes_per_step=2))


# Parameters.


class Branches(torch.nn.Module):
    """A layer that some use, one that all use, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.some, self.all, self.nobody = (torch.nn.Linear(3, 1).double() for _ in range(3))

    def forward(self, inputs, branch):
        return self.all(inputs) + (self.some(inputs) if branch else 0)


def test_a_parameter_without_a_gradient_on_some_replicas_counts_as_zeros_there():
    def step(model, optimizer):
        inputs, targets = data()
        optimizer.zero_grad()
        part = rows()
        one_replica = context().num_replicas_in_sync == 1
        if one_replica:  # The first half of the rows takes the branch.
            outputs = torch.cat([model(inputs[:6], True), model(inputs[6:], False)])
        else:
            outputs = model(inputs[part], rank() == 0)
        torch.nn.functional.mse_loss(outputs, targets[part]).backward()
        assert model.nobody.weight.grad is None
        assert model.some.weight.grad is not None
        optimizer.step()

    check_alike(step, pair(make_model=Branches), sizes=(2,))


def test_a_parameter_that_is_trained_later_is_reduced():
    def make():
        model = network()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD([model[0].weight], 0.1)
        optimizer = guest.DistributedOptimizer(optimizer, op="sum")
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
        return model, optimizer

    def step(model, optimizer):
        optimizer.zero_grad()
        (loss_of(model) / context().num_replicas_in_sync).backward()
        optimizer.step()
        model[0].weight.requires_grad_(True)

    check_alike(step, make)


def test_parameters_of_bfloat16_train_alike_on_all_replicas():
    def step(model, optimizer):
        inputs, targets = data()
        optimizer.zero_grad()
        outputs = model(inputs[rows()].bfloat16())
        torch.nn.functional.mse_loss(outputs.double(), targets[rows()]).backward()
        assert model[0].weight.grad.dtype is torch.bfloat16
        optimizer.step()

    def make():
        model = network().bfloat16()
        return model, guest.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    with mirrored(2) as strategy, strategy.scope():
        replicas = guest.replicate(make)
        for _ in range(4):
            strategy.run(step, args=replicas)
        first, second = (model.parameters() for model in replicas[0].values)
        assert all(map(torch.equal, first, second))


def test_two_optimizers_of_adversaries_reduce_in_the_same_order():
    def make():
        drawing, judging = (torch.nn.Linear(3, 3).double() for _ in range(2))
        both = [
            guest.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
            for model in (judging, drawing)
        ]
        return torch.nn.ModuleList([drawing, judging]), *both

    def step(models, of_judge, of_drawer):
        drawing, judging = models
        noise = data()[0][rows()]
        of_judge.zero_grad()
        (judging(drawing(noise).detach()) - judging(noise)).square().mean().backward()
        of_judge.step()
        of_drawer.zero_grad()
        judging(drawing(noise)).square().mean().backward()  # Gradients of both.
        of_drawer.step()

    check_alike(step, make)


def test_the_state_of_an_optimizer_is_that_of_its_class():
    model, optimizer = pair("adam")()
    loss_of(model, slice(None)).backward()
    optimizer.step()
    plain = torch.optim.Adam(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


# What all replicas begin with.


def test_all_replicas_get_the_state_of_the_first_one():
    def make():
        model = torch.nn.BatchNorm1d(3).double()
        model.running_mean.copy_(torch.rand(3))
        optimizer = torch.optim.Adam(model.parameters())
        model(data()[0]).sum().backward()
        optimizer.step()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"model": model, "rest": (guest.DistributedOptimizer(optimizer), schedule)}

    with mirrored(3) as strategy, strategy.scope():
        torch.manual_seed(0)
        made = guest.replicate(make)
        after = torch.rand(1)
    torch.manual_seed(0)
    wanted = make()
    assert after == torch.rand(1)  # As if it had been called once.
    for k in range(3):
        state = made["model"].values[k].state_dict()
        for name, value in wanted["model"].state_dict().items():
            assert torch.equal(state[name], value)
        optimizer = made["rest"][0].values[k].state_dict()
        assert torch.equal(
            optimizer["state"][0]["exp_avg"],
            wanted["rest"][0].state_dict()["state"][0]["exp_avg"],
        )


def test_buffers_that_are_not_saved_are_shared_too():
    numbers = iter([1.0, 2.0])

    def make():
        model = torch.nn.Linear(1, 1)
        model.register_buffer("scale", torch.full((1,), next(numbers)), persistent=False)
        return model

    with mirrored(2) as strategy, strategy.scope():
        assert [model.scale.item() for model in guest.replicate(make).values] == [1.0, 1.0]


def test_a_replica_broadcasts_its_state():
    with mirrored(2) as strategy, strategy.scope():
        models, optimizers = guest.replicate(pair("adam"))
        strategy.run(plain_step, args=(models, optimizers))
        with torch.no_grad():
            models.values[1][0].weight.fill_(7.0)
        guest.broadcast(models, optimizers, root=1)
        assert values_of(models.values[0])[0][0, 0] == 7.0
        for root in (-1, 2):
            with pytest.raises(ValueError, match=r"root must be in \[0, 2\), got"):
                guest.broadcast(models, root=root)
        with pytest.raises(ValueError, match="2 replicas, and each needs its own module"):
            guest.broadcast(network())


def test_a_module_of_another_shape_is_named_with_its_replica():
    widths = iter([2, 3])
    with mirrored(2) as strategy, strategy.scope():
        with pytest.raises(RuntimeError, match="size mismatch for weight") as caught:
            guest.replicate(lambda: torch.nn.Linear(next(widths), 1))
        assert "replica 1 of 2" in "".join(caught.value.__notes__)


# What is refused.


def test_parameters_that_differ_are_named():
    def step(model, optimizer):
        if rank():
            model[0].weight.requires_grad_(False)
        plain_step(model, optimizer)

    def make():
        model = network()
        return model, guest.DistributedOptimizer(torch.optim.SGD(model.named_parameters(), 0.1))

    with mirrored(2) as strategy, strategy.scope():
        replicas = guest.replicate(make)
        with pytest.raises(CollectiveMismatchError) as caught:
            strategy.run(step, args=replicas)
        notes = "".join(caught.value.__notes__)
        assert "0.1 0.bias [8], 0.2 2.weight [1, 8]" in notes


def test_an_error_in_the_backward_pass_of_a_replica_ends_the_step_of_all():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            if rank() == 1:
                raise ZeroDivisionError("in a backward pass")
            return gradient

    def step(model, optimizer):
        optimizer.zero_grad()
        Fails.apply(loss_of(model)).backward()

    with mirrored(2) as strategy, strategy.scope():
        replicas = guest.replicate(pair())
        with pytest.raises(ZeroDivisionError, match="in a backward pass") as caught:
            strategy.run(step, args=replicas)
        assert "replica 1 of 2" in "".join(caught.value.__notes__)
        strategy.run(plain_step, args=replicas)  # It works again.


def run_on_two(step, make=None):
    with mirrored(2) as strategy, strategy.scope():
        strategy.run(step, args=guest.replicate(make or pair()))


def test_a_graph_of_gradients_is_refused():
    def step(model, optimizer):
        loss_of(model).backward(create_graph=True)

    refused = pytest.raises(NotImplementedError, match=r"parameter 0.0.*torch.autograd.grad")
    with pytest.warns(UserWarning, match="create_graph"), refused:
        run_on_two(step)


def test_a_sparse_gradient_is_refused_by_name():
    def make():
        model = torch.nn.Embedding(3, 2, sparse=True)
        return model, guest.DistributedOptimizer(torch.optim.SGD(model.named_parameters(), 0.1))

    def step(model, optimizer):
        model(torch.tensor([1])).sum().backward()

    with pytest.raises(NotImplementedError, match=r"parameter 0.0 weight has a sparse gradient"):
        run_on_two(step, make)


def test_training_outside_of_replicas_is_refused_where_there_are_several():
    with mirrored(2) as strategy, strategy.scope():
        models, _ = guest.replicate(pair())
        with pytest.raises(RuntimeError, match=r"outside of replicas.*backward\(\) in the func"):
            loss_of(models.values[0], slice(None)).backward()


def test_training_outside_of_the_scope_of_several_is_refused():
    model, _ = pair()()
    strategy = mirrored(2)
    with pytest.raises(RuntimeError, match="outside the scope of MirroredStrategy"):
        loss_of(model, slice(None)).backward()
    strategy.close()
    loss_of(model, slice(None)).backward()


def test_servers_need_to_know_the_module():
    with served(1) as strategy, strategy.scope():
        model, _ = pair()()
        with pytest.raises(RuntimeError, match="with replicate, or pass both to broadcast"):
            loss_of(model, slice(None)).backward()


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"op": "max"}, ValueError, "MAX"),
        ({"backward_passes_per_step": 0}, ValueError, "got MEAN, 0"),
    ],
)
def test_other_arguments_are_refused(arguments, kind, match):
    with pytest.raises(kind, match=match):
        pair(**arguments)()


def test_what_is_no_optimizer_or_is_distributed_is_refused():
    for wrong in (network(), pair()()[1]):
        with pytest.raises(TypeError, match="of PyTorch that is not distributed yet"):
            guest.DistributedOptimizer(wrong)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(copied):
    with pytest.raises(TypeError, match=r"copy state_dict\(\)"):
        copied(pair()()[1])


def test_replicate_inside_of_a_replica_is_refused():
    with mirrored(2) as strategy, pytest.raises(RuntimeError, match="inside a replica"):
        strategy.run(lambda: guest.replicate(network))
