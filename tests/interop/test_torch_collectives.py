"""Tensors in collectives, which are differentiable, and batch normalisation over replicas."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.errors import CollectiveMismatchError
from tests.kinds import context, mirrored, rank

torch = pytest.importorskip("torch")
guest = pytest.importorskip("ndistribute.interop.torch")

LENGTHS = 2, 0, 3


def parts_of(whole):
    """Return this replica's part of the rows of a tensor, as one that requires a gradient."""
    part = torch.split(whole, LENGTHS)[rank()]
    return part.clone().requires_grad_()


def on_three(step):
    """Return what a step returns on each of three replicas."""
    boxes = [None] * 3

    def kept():
        boxes[rank()] = step()

    with mirrored(3) as strategy:
        strategy.run(kept)
    return boxes


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_gradients_flow_through_an_all_reduce(op):
    values = torch.tensor([[1.0, 5.0, 2.0], [3.0, 5.0, 2.0], [0.0, 1.0, 2.0]])
    factors = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])

    def step():
        mine = values[rank()].clone().requires_grad_()
        (guest.all_reduce(op, mine) * factors[rank()]).sum().backward()
        return mine.grad

    everything = values.clone().requires_grad_()
    (getattr(everything, op)(0) * factors).sum().backward()
    for mine, wanted in zip(on_three(step), everything.grad, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_flow_through_an_all_gather_of_parts_of_different_lengths(axis):
    whole, factors = torch.arange(10.0).reshape(5, 2), torch.rand(3, 5, 2)

    def step():
        mine = parts_of(whole)
        joined = guest.all_gather(mine.movedim(0, axis), axis).movedim(axis, 0)
        (joined**2 * factors[rank()]).sum().backward()
        return joined.detach(), mine.grad

    wanted = torch.split(2 * whole * factors.sum(0), LENGTHS)
    for (joined, mine), right in zip(on_three(step), wanted, strict=True):
        assert torch.equal(joined, whole)
        torch.testing.assert_close(mine, right)


def test_the_second_derivative_of_a_sum_is_right():
    def step():
        mine = torch.full((1,), rank() + 1.0, requires_grad=True)
        (first,) = torch.autograd.grad(guest.all_reduce("sum", mine) ** 3, mine, create_graph=True)
        (second,) = torch.autograd.grad(first, mine)
        return first.item(), second.item()

    assert on_three(step) == [(3 * 3 * 6.0**2, 9 * 6 * 6.0)] * 3


def test_methods_of_the_context_take_tensors_beside_arrays_and_numbers():
    def step():
        mine = torch.ones(2, requires_grad=True)
        nest = context().all_reduce("sum", {"tensor": mine, "array": np.ones(2), "number": rank()})
        rows = context().all_gather((mine[None], np.ones((1, 2))), axis=0)
        nest["tensor"].sum().backward()
        return nest, rows, mine.grad

    for nest, (tensors, arrays), gradient in on_three(step):
        assert nest["tensor"].tolist() == gradient.tolist() == [3.0, 3.0]
        assert (nest["array"].tolist(), nest["number"]) == ([3.0, 3.0], 3)
        assert isinstance(arrays, np.ndarray)
        assert isinstance(tensors, torch.Tensor)
        assert tensors.shape == arrays.shape == (3, 2)


def test_tensors_of_bfloat16_are_added_in_float32():
    def step():
        mine = torch.tensor([256.0, 1.0][rank() > 0], dtype=torch.bfloat16, requires_grad=True)
        total = guest.all_reduce("sum", mine)
        total.backward()
        return total.item(), total.dtype, mine.grad.item()

    assert on_three(step) == [(258.0, torch.bfloat16, 3.0)] * 3


def test_shapes_that_differ_are_named():
    with mirrored(2) as strategy, pytest.raises(CollectiveMismatchError, match=r"float32\[2\]"):
        strategy.run(lambda: guest.all_reduce("sum", torch.ones(1 + rank())))


@pytest.mark.parametrize("op", ["prod", "max"])
def test_other_reductions_have_no_gradient(op):
    value = guest.all_reduce(op, torch.ones(2, requires_grad=True))
    with pytest.raises(NotImplementedError, match=f"has no gradient for {op.upper()}"):
        value.sum().backward()


def test_a_result_with_a_gradient_is_detached_before_it_is_reduced():
    with mirrored(2) as strategy:
        losses = nd.PerReplica([torch.ones(1, requires_grad=True)] * 2)
        with pytest.raises(TypeError, match=r"tensor.detach\(\)"):
            strategy.reduce("mean", losses)


# Batch normalisation.


def normalised(sizes, dtype=torch.float64, **options):
    """Return outputs, gradients and buffers of a layer over replicas with so many rows."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(sizes), 3, 4, generator=rng, dtype=torch.float64).to(dtype)
    factors = torch.randn(rows.shape, generator=rng, dtype=torch.float64).to(dtype)
    boxes = [None] * len(sizes)

    def make():
        layer = torch.nn.BatchNorm1d(3, dtype=dtype, **options)
        return guest.synchronize_batch_norm(layer)

    def step(layer):
        mine = torch.split(rows, sizes)[rank()].clone().requires_grad_()
        for _ in range(2):
            result = layer(mine)
        (result * torch.split(factors, sizes)[rank()]).sum().backward()
        weights = [context().all_reduce("sum", each.grad) for each in layer.parameters()]
        layer.eval()
        buffers = [each.clone() for each in layer.buffers()]
        boxes[rank()] = (result.detach(), mine.grad, weights, buffers, layer(mine).detach())

    with mirrored(len(sizes)) as strategy:
        strategy.run(step, args=(guest.replicate(make),))
    return boxes


@pytest.mark.parametrize("sizes", [(4, 4), (5, 0, 3)])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
def test_statistics_and_gradients_are_those_of_all_rows(sizes, options):
    ((result, gradient, weights, buffers, evaluated),) = normalised((8,), **options)
    boxes = normalised(sizes, **options)
    torch.testing.assert_close(torch.cat([box[0] for box in boxes]), result)
    torch.testing.assert_close(torch.cat([box[1] for box in boxes]), gradient)
    torch.testing.assert_close(torch.cat([box[4] for box in boxes]), evaluated)
    for box in boxes:
        torch.testing.assert_close(box[2], weights)
        torch.testing.assert_close(box[3], buffers)


def test_a_layer_of_bfloat16_counts_rows_in_float32():
    (whole,) = normalised((520,), torch.bfloat16)
    boxes = normalised((260, 260), torch.bfloat16)
    result = torch.cat([box[0] for box in boxes])
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, whole[0], rtol=0, atol=0.05)


def test_a_lazy_layer_is_refused_by_name():
    with pytest.raises(TypeError, match="layer 'norm' is lazy"):
        guest.synchronize_batch_norm(torch.nn.ModuleDict({"norm": torch.nn.LazyBatchNorm1d()}))
