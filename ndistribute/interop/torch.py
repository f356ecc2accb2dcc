"""PyTorch under every strategy: gradients are averaged over replicas, and state is shared.

Modules and optimizers stay PyTorch's; each replica has its own pair. `DistributedOptimizer` reduces
the gradients at the end of each backward pass, so later code sees gradients of all replicas. Only
this file imports PyTorch; `import ndistribute` does not load it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.collective.communicator import CommunicationOptions
from ndistribute.collective.objects import all_gather_object
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.context import (
    ReplicaContext,
    current_frame,
    get_replica_context,
    get_strategy,
    guests,
    strategies_of_several,
)
from ndistribute.devices import as_array
from ndistribute.errors import CollectiveMismatchError, MissingDependencyError
from ndistribute.guest_tensors import tensor_of
from ndistribute.interop.guest_states import HeldStates, array_of, load_plain_state, plain_state
from ndistribute.mistakes import count_of
from ndistribute.optimizers import SGD
from ndistribute.strategies.parameter_server import ParameterServerStrategy
from ndistribute.values import DistributedValues, PerReplica
from ndistribute.variables.variable import Variable

try:
    import torch
except ImportError as error:
    raise MissingDependencyError(
        "ndistribute.interop.torch needs PyTorch: pip install 'ndistribute[torch]'."
    ) from error

_LINEAR = ReduceOp.SUM, ReduceOp.MEAN
_numbers = itertools.count()  # The reductions of optimizers, in the order in which they were made.


# For each backward pass that runs, by its number: the optimizers whose gradients it has computed,
# and the parameters whose gradients are summed already.
_passes: dict[int, tuple[dict[int, weakref.ref[_Reduction]], set[int]]] = {}
# The states that elastic workers keep for modules, optimizers and schedulers in use.
_held = weakref.WeakKeyDictionary[Any, HeldStates]()


def DistributedOptimizer(  # noqa: N802 - Horovod's name.
    optimizer: Any, op: Any = "mean", *, backward_passes_per_step: int = 1
) -> Any:
    """Return the optimizer; from now on, its gradients are reduced over all replicas.

    They are reduced at the end of each backward pass, with one all-reduce. If a parameter has no
    gradient on a replica, zeros count there; if it has none on any replica, it stays None.
    Schedulers, parameter groups and `state_dict` stay as they are. ``synchronize()``, like `step`,
    reduces gradients of fewer than `backward_passes_per_step` passes, and gradients that the
    program has set. If the replicas' parts of a batch that was passed to `run` differ in size, the
    mean is weighted by rows.

    Args:
        optimizer: an optimizer of PyTorch, of one replica.
        op: ``"mean"``, or ``"sum"`` for losses that are divided by the size of the global batch.
        backward_passes_per_step: the number of passes after which the gradients are reduced, with
            one all-reduce, before each `step`. Gradients add up, as in PyTorch, so divide the loss.

    Raises:
        TypeError: `optimizer` is not a PyTorch optimizer, or is already distributed.

    >>> import ndistribute as nd
    >>> def make():
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0))
    >>> def step(model, optimizer):
    ...     optimizer.zero_grad()
    ...     rank = nd.get_replica_context().replica_id_in_sync_group
    ...     model(torch.full((1, 1), rank + 1.0)).sum().backward()
    ...     return model.weight.grad.item()
    >>> with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
    ...     strategy.run(step, args=replicate(make)).values
    (1.5, 1.5)
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "reduction"):
        what = "an optimizer of PyTorch that is not distributed yet"
        raise TypeError(f"DistributedOptimizer needs {what}, got {optimizer!r}.")
    op = ReduceOp.parse(op)
    if op not in _LINEAR or backward_passes_per_step < 1:
        what = f"backward_passes_per_step of 1 or more, got {op.name}, {backward_passes_per_step}."
        raise ValueError(f"DistributedOptimizer needs op='mean' or 'sum', and {what}")
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_DistributedMethods, kind), {})
    optimizer.reduction = reduction = _Reduction(optimizer, op, backward_passes_per_step)
    optimizer.register_step_pre_hook(
        lambda optimizer, *call: optimizer.reduction.before_step(*call)
    )
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.reduction.after_step())
    for group in optimizer.param_groups:
        reduction.watch(group["params"])
    return optimizer


class _DistributedMethods:
    """The methods that a distributed optimizer has besides those of its class."""

    reduction: _Reduction

    def synchronize(self) -> None:
        """Reduce the gradients of passes since the last reduction, if there are any."""
        self.reduction.before_step()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Return a context without effect: `step` never reduces gradients a second time."""
        return nullcontext()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients, and forget the passes that are not reduced yet."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self.reduction.passes = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; their gradients are reduced too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self.reduction.watch(param_group["params"])

    def __reduce__(self) -> Any:
        raise TypeError("a distributed optimizer cannot be copied or pickled: copy state_dict().")


class _Reduction:
    """Reduces the gradients of an optimizer, and pushes its steps to parameter servers."""

    def __init__(self, optimizer: Any, op: ReduceOp, every: int) -> None:
        self.number, self._strategy = next(_numbers), get_strategy()
        # For each pass since the last reduction, the lengths of the arrays of this replica's batch.
        self.passes: list[list[int]] = []
        self.added: dict[int, Any] = {}  # The latest gradients to be summed, by parameter.
        # The dtype in which gradients are sent; None means their own dtype.
        self.sent_as: Any = None
        self.served: list[Variable] = []  # The parameters on servers,
        # and the optimizer that applies there what a step changes here.
        self.server: Any = None
        self._pulled: list[Any] = []  # Their last values from the servers.
        self.op, self._every = op, every
        # No cycle: hooks of a dropped optimizer must end at the same time on all replicas.
        self._optimizer = weakref.ref(optimizer)

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters of the optimizer by group and place, with the name if it is known."""
        groups: Any = enumerate(self._optimizer().param_groups)  # type: ignore[union-attr]
        return {
            f"{number}.{k} {group['param_names'][k] if 'param_names' in group else ''}": parameter
            for number, group in groups
            for k, parameter in enumerate(group["params"])
        }

    def watch(self, parameters: Sequence[Any]) -> None:
        """Watch the gradients of parameters from now on."""
        for parameter in parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # It never has a gradient.
            trained = parameter.requires_grad
            # Otherwise it accepts no hooks, and it may be trained later.
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(
                functools.partial(_note, weakref.ref(self))
            )
            if self.op is ReduceOp.SUM:
                parameter.register_hook(functools.partial(_kept, weakref.ref(self), id(parameter)))
            parameter.requires_grad_(trained)

    def end_pass(self) -> None:
        """Count a backward pass, and reduce the gradients if enough passes were made."""
        self.passes.append(_lengths())
        if len(self.passes) == self._every:
            self.reduce()

    @property
    def is_due(self) -> bool:
        """Whether a gradient is not reduced yet: after a pass, or because the program set it."""
        if self.passes or self.size() == 1:
            return bool(self.passes)
        each = (p.grad for p in self.parameters.values() if p.requires_grad)
        due = not all(hasattr(gradient, "is_reduced") for gradient in each if gradient is not None)
        if due and self.op is ReduceOp.SUM:
            why = "change gradients of backward() only in place, and set no other gradients."
            raise RuntimeError(f"the optimizer has op='sum': {why}")
        return due

    def size(self) -> int:
        """Return the number of replicas whose gradients are reduced."""
        strategy = _strategy_of(self._strategy)
        shared = self._optimizer() in _held
        if not shared and (strategy.session or isinstance(strategy, ParameterServerStrategy)):
            how = "make both with replicate, or pass both to broadcast"
            raise RuntimeError(f"{strategy!r} does not know the module and the optimizer: {how}.")
        return strategy.num_replicas_in_sync  # type: ignore[no-any-return]

    def reduce(self) -> None:
        """Set each gradient to its mean over all replicas."""
        passes, self.passes = self.passes or [_lengths()], []
        rows = sum(map(sum, passes))
        is_mixed = len(passes[0]) > 1 or any(each != passes[0] for each in passes)
        trained = {name: each for name, each in self.parameters.items() if each.requires_grad}
        gradients = list(itertools.starmap(_checked_gradient, trained.items()))
        if self.size() == 1:
            return
        pairs = zip(trained.values(), gradients, strict=True)
        sent = [torch.zeros_like(p) if g is None else g for p, g in pairs]
        arrays = [array_of(g.to(self.sent_as) if self.sent_as else g) for g in sent]
        flags = [gradient is not None for gradient in gradients]

        def reduced(replica: ReplicaContext) -> Any:
            try:
                first = np.array([*flags, rows, rows**2, is_mixed], np.float64)
                return replica.communicator.all_reduce(ReduceOp.MEAN, [first, *arrays])
            except CollectiveMismatchError as error:
                names = ", ".join(f"{name} {list(each.shape)}" for name, each in trained.items())
                error.add_note(f"flags, then the gradients of this replica's parameters: {names}")
                raise

        (*flags, mean, square, mixed), *means = in_replica(reduced, self._strategy)
        # The parts of a short batch differ; smaller differences are rounding.
        if self.op is ReduceOp.MEAN and square - mean**2 > 1e-12 * square:
            if mixed:
                what = "the replicas' parts of a batch differ in length, as do its arrays or passes"
                raise ValueError(f"{what}: use op='sum', and divide by the global batch size.")
            arrays = [x * x.dtype.type(rows / mean) if rows else np.zeros_like(x) for x in arrays]
            _, *means = in_replica(reduced, self._strategy)
        pairs = zip(trained.values(), means, strict=True)
        for parameter, value in itertools.compress(pairs, flags):
            parameter.grad = tensor_of(value).to(parameter.dtype)
            parameter.grad.is_reduced = True

    def before_step(self, args: Any = (), kwargs: Any = None) -> Any:
        """Reduce the remaining gradients; check servers; return the arguments of LBFGS's step."""
        if self.is_due:
            self.reduce()
        if self.served:
            pairs = itertools.zip_longest(self._pulled, self.parameters.values())
            if any(a is None or ((a != b) & ~a.isnan()).any() for a, b in pairs):
                what = "parameters on servers were changed or added outside of the optimizer's step"
                raise RuntimeError(f"{what}: call broadcast(module, optimizer) again.")
        if args and isinstance(args[0], torch.optim.LBFGS) and self.size() > 1:
            closure = args[1] if len(args) > 1 else kwargs["closure"]
            return (args[0], lambda: self._agreed(torch.as_tensor(closure()))), {}
        return None

    def _agreed(self, loss: Any) -> Any:
        """Return a loss that is equal on all replicas, so that all make the same decisions."""
        sent = array_of(loss.detach()).reshape(1)
        losses = in_replica(lambda each: each.communicator.all_gather(sent, 0), self._strategy)
        equal = self.op is ReduceOp.MEAN or (losses == losses[0]).all()
        return loss.new_tensor(losses.mean() if equal else losses.sum())

    def after_step(self) -> None:
        """Add the changes of a step to the parameters on servers, and get their new values."""
        if self.served:
            pairs = zip(self._pulled, self.parameters.values(), strict=True)
            changes = [array_of(old - new.detach()) for old, new in pairs]
            self.server.apply_gradients(zip(changes, self.served, strict=True), True)
            self.pull()

    def pull(self) -> None:
        """Set parameters to their values on servers."""
        for parameter, variable in zip(self.parameters.values(), self.served, strict=True):
            parameter.detach().copy_(tensor_of(as_array(variable)))
        self._pulled = [each.detach().clone() for each in self.parameters.values()]


def _lengths() -> list[int]:
    """Return the lengths of this replica's parts of the batch that was passed to `run`."""
    frame: Any = current_frame()
    parts = (leaf for leaf in tree.flatten(frame.args) if isinstance(leaf, PerReplica))
    arrays = (part.values[frame.replica.local_replica_id] for part in parts)
    return sorted({each.shape[0] for each in arrays if len(getattr(each, "shape", ()))})


def _checked_gradient(name: str, parameter: Any) -> Any:
    """Return the gradient of a parameter, or None; refuse gradients that cannot be reduced."""
    gradient, what = parameter.grad, f"DistributedOptimizer: parameter {name}"
    if gradient is not None and gradient.layout is not torch.strided:
        raise NotImplementedError(f"{what} has a sparse gradient: make the layer dense.")
    if gradient is not None and gradient.requires_grad:
        instead = "use torch.autograd.grad(..., create_graph=True) for inner derivatives."
        raise NotImplementedError(f"{what} has a gradient with a graph: {instead}")
    return gradient


def _note(reduction: weakref.ref[_Reduction], parameter: Any) -> None:
    """Record that a backward pass has computed a gradient of an optimizer."""
    task: int = torch._C._current_graph_task_id()
    if (me := reduction()) is None:
        return
    if task not in _passes:
        _passes[task] = {}, set()
        end = functools.partial(_end_pass, task)
        torch.autograd.Variable._execution_engine.queue_callback(end)
    reductions, summed = _passes[task]
    reductions[me.number] = reduction
    # Another optimizer may have the parameter too.
    if me.op is ReduceOp.SUM and id(parameter) not in summed:
        summed.add(id(parameter))
        parameter.grad.add_(me.added.pop(id(parameter)), alpha=me.size() - 1)


def _kept(reduction: weakref.ref[_Reduction], parameter: int, gradient: Any) -> None:
    """Keep a computed gradient; inside a backward pass, it is summed later."""
    if (me := reduction()) is not None:
        me.added[parameter] = gradient.detach()


def _end_pass(task: int) -> None:
    """Reduce the gradients of a backward pass, in the order in which optimizers were made."""
    for _, reduction in sorted(_passes.pop(task)[0].items()):
        if (me := reduction()) is not None:
            me.end_pass()


def replicate(make: Callable[[], Any]) -> Any:
    """Return the results of a function, called once for each replica, as `DistributedValues`.

    Pass the result to `run`. Objects with a `state_dict` get the state of the job's first replica.
    PyTorch's random numbers continue as if the function had been called once.

    Args:
        make: a function that returns a module, or a nest of modules, optimizers and schedulers.

    >>> import ndistribute as nd
    >>> with nd.MirroredStrategy(["cpu:0", "cpu:1"]):
    ...     first, second = replicate(lambda: torch.nn.Linear(2, 1)).values
    >>> torch.equal(first.weight, second.weight), first is second
    (True, False)
    """
    strategy, start, made = _strategy_of(None), torch.get_rng_state(), []
    for _ in strategy.devices:
        torch.set_rng_state(start)
        made.append(make())
    replicas = tree.regroup(made, DistributedValues)  # New workers get these.
    parts = [[leaf for leaf in tree.flatten(each) if hasattr(leaf, "state_dict")] for each in made]
    _share_out(strategy, parts, 0)
    return replicas


def broadcast(module: Any = None, optimizer: Any = None, root: int = 0) -> None:
    """Copy the state of one replica to all: parameters, buffers and an optimizer's state.

    Args:
        module: the module; if this process has several replicas, the result of `replicate`.
        optimizer: its optimizer, likewise.
        root: the index of the replica whose state all replicas get.

    Raises:
        ValueError: there is no replica `root`, or not one module for each replica.
        RuntimeError: a module has other parameters than the module of `root`, or this was called in
            a replica.

    >>> broadcast(torch.nn.Linear(2, 1))
    """
    strategy, things = _strategy_of(None), [x for x in (module, optimizer) if x is not None]
    parts = strategy.local_results(things)
    if len(parts) != len(strategy.devices):
        count = f"broadcast: this process has {count_of(len(strategy.devices), 'replica')}"
        raise ValueError(f"{count}, and each needs its own module: make them with replicate.")
    _share_out(strategy, parts, root)


def _share_out(strategy: Any, parts: Sequence[Sequence[Any]], root: int) -> None:
    """Copy the states of one replica to all replicas, to elastic workers and to servers."""
    trained = [
        {id(p) for x in part if hasattr(x, "reduction") for p in x.reduction.parameters.values()}
        for part in parts
    ]
    if len(set().union(*trained)) < sum(map(len, trained)):
        raise ValueError("replicas train the same parameters: make a module for each, or copy it.")
    strategy.run(_share, args=(DistributedValues(parts), root))
    states = HeldStates(parts)
    _held.update(dict.fromkeys(itertools.chain(*parts), states))
    strategy.note_state(states)
    for column in zip(*parts, strict=True):  # One object per column, of each replica.
        if isinstance(strategy, ParameterServerStrategy) and hasattr(column[0], "reduction"):
            with strategy.scope():
                _serve([each.reduction for each in column])


def _serve(reductions: Sequence[_Reduction]) -> None:
    """Keep the parameters of an optimizer on servers; each replica has such an optimizer."""
    arrays, server = map(array_of, reductions[0].parameters.values()), SGD(1.0)
    served = list(map(Variable, arrays))
    for each in reductions:
        each.server, each.served = server, served
        each.pull()


def _share(things: Sequence[Any], root: int) -> None:
    """Copy the states of one replica to all; every replica calls this."""
    replica: Any = get_replica_context()
    me, count = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    if not 0 <= root < count:
        raise ValueError(f"broadcast: root must be in [0, {count}), got {root}.")
    mine = [plain_state(each) for each in things] if me == root else None
    states = all_gather_object(replica.communicator, mine)[root]
    for each, state in zip(things, states, strict=True) if me != root else ():
        load_plain_state(each, state)


def takes(value: Any) -> bool:
    """Return True if a nest has a tensor, so that this module makes its collectives."""
    return any(isinstance(leaf, torch.Tensor) for leaf in tree.flatten(value))


def all_reduce(op: Any, value: Any, options: CommunicationOptions | None = None) -> Any:
    """Return tensors reduced over all replicas; gradients flow back through SUM and MEAN.

    Once this module is imported, `ReplicaContext.all_reduce` calls this for tensors. If this
    process has one replica, it may also be called outside of replicas, and then runs a separate
    step.

    Args:
        op: a `ReduceOp`, or its name in any case.
        value: a tensor or a nest of tensors, arrays and numbers, with the same shapes everywhere.
        options: `CommunicationOptions`; only the timeout is used.

    >>> all_reduce("sum", torch.ones(2, requires_grad=True))
    tensor([1., 1.], grad_fn=<_AllReduceBackward>)
    """
    op = ReduceOp.parse(op)
    return _over_tensors(value, lambda tensors: _AllReduce.apply(op, options, *tensors))


def all_gather(value: Any, axis: int = 0, options: CommunicationOptions | None = None) -> Any:
    """Return the tensors of all replicas, concatenated in replica order; gradients flow back.

    Once this module is imported, `ReplicaContext.all_gather` calls this for tensors.

    Args:
        value: a tensor or a nest of tensors, arrays and numbers.
        axis: the axis along which to concatenate, and along which lengths may differ.
        options: `CommunicationOptions`.

    >>> all_gather(torch.ones(2, 1)).shape
    torch.Size([2, 1])
    """

    def gathered(tensors: Sequence[Any]) -> Any:
        joined = _AllGather.apply(options, *[tensor.movedim(axis, 0) for tensor in tensors])
        return [tensor.movedim(0, axis) for tensor in joined]

    return _over_tensors(value, gathered)


def _over_tensors(value: Any, call: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    """Return a nest with the results of a function of its leaves, which are passed as tensors."""
    leaves = tree.flatten(value)
    sent = [each if takes(each) else tensor_of(as_array(each)) for each in leaves]
    pairs = zip(leaves, call(sent), strict=True)
    return tree.unflatten(value, [new if takes(old) else array_of(new)[()] for old, new in pairs])


class _AllReduce(torch.autograd.Function):  # type: ignore[misc]
    """An all-reduce, whose gradient is an all-reduce too."""

    @staticmethod
    def forward(ctx: Any, op: ReduceOp, options: Any, *tensors: Any) -> tuple[Any, ...]:
        ctx.op, arrays = op, list(map(array_of, tensors))
        reduced = in_replica(lambda replica: replica.communicator.all_reduce(op, arrays, options))
        return tuple(map(tensor_of, reduced))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if ctx.op not in _LINEAR:
            raise NotImplementedError(
                f"all_reduce of tensors has no gradient for {ctx.op.name}, only for SUM and MEAN."
            )
        return None, None, *_AllReduce.apply(ctx.op, None, *gradients)


class _AllGather(torch.autograd.Function):  # type: ignore[misc]
    """Concatenation along the first axis; its gradient is this replica's part of the sum."""

    @staticmethod
    def forward(ctx: Any, options: Any, *tensors: Any) -> tuple[Any, ...]:
        ctx.lengths, arrays = list(map(len, tensors)), list(map(array_of, tensors))

        def gathered(replica: ReplicaContext) -> Any:
            sent = [np.array([ctx.lengths]), *arrays]
            table, *joined = replica.communicator.all_gather(sent, 0, options)
            ctx.starts = table[: replica.replica_id_in_sync_group].sum(0).tolist()
            return joined

        return tuple(map(tensor_of, in_replica(gathered)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        totals = _AllReduce.apply(ReduceOp.SUM, None, *gradients)
        rows = zip(totals, ctx.starts, ctx.lengths, strict=True)
        return None, *(total.narrow(0, start, length) for total, start, length in rows)


guests.append(sys.modules[__name__])


def synchronize_batch_norm(module: Any) -> Any:
    """Return a module whose layers of batch normalisation use the statistics of all replicas.

    The module is changed in place; its layers keep their parameters and buffers. In training mode,
    each layer makes an all-gather in the forward pass and an all-reduce in the backward pass.

    Raises:
        TypeError: a layer is lazy, so its parameters do not exist yet.

    >>> synchronize_batch_norm(torch.nn.BatchNorm1d(2))
    BatchNormOverReplicas(2, ...)
    """
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
                raise TypeError(f"synchronize_batch_norm: layer {name!r} is lazy: call it once.")
            layer.__class__ = BatchNormOverReplicas
    return module


class BatchNormOverReplicas(torch.nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    """Batch normalisation over all replicas, see `synchronize_batch_norm`."""

    def _check_input_dim(self, _: Any) -> None: ...

    def forward(self, inputs: Any) -> Any:
        if not self.training or _strategy_of(None).num_replicas_in_sync == 1:
            return super().forward(inputs)
        wide = inputs if inputs.dtype in (torch.float32, torch.float64) else inputs.float()
        axes, shape = [0, *range(2, inputs.ndim)], [1, -1] + [1] * (inputs.ndim - 2)
        rows = inputs.numel() // inputs.shape[1]
        mean = wide.sum(axes) / max(rows, 1)
        variance = (wide - mean.view(shape)).square().sum(axes) / max(rows, 1)
        sent = wide.new_full((1, 1), rows), mean[None], variance[None]
        counts, means, variances = all_gather(sent)
        total, share = counts.sum(), counts / counts.sum()
        if total == 1:
            raise ValueError("batch normalisation over all replicas needs more than one value.")
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        if self.track_running_stats:
            self.num_batches_tracked += 1
            count = self.num_batches_tracked.item()
            factor = 1 / count if self.momentum is None else self.momentum
            unbiased = variance * total / (total - 1)
            for old, new in (self.running_mean, mean), (self.running_var, unbiased):
                old.lerp_(new.detach().to(old.dtype), factor)
        result = (wide - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            result = result * self.weight.view(shape)
        if self.bias is not None:
            result = result + self.bias.view(shape)
        return result.to(inputs.dtype)


def in_replica(call: Callable[[ReplicaContext], Any], made_in: Any = None) -> Any:
    """Return the result of a function of this replica's context; outside, run a step for it.

    The step runs under the current strategy, or, if there is none, under `made_in`.
    """
    frame = current_frame()
    if frame.replica is not None:
        return call(frame.replica)
    strategy = _strategy_of(made_in)
    if (count := len(strategy.devices)) > 1:
        what = f"outside of replicas, and this process has {count} of {strategy!r}"
        raise RuntimeError(f"tensors were reduced {what}: call backward() in the function of run.")
    results: list[Any] = []  # `run` would convert the tensors.
    strategy.run(lambda: results.append(call(get_replica_context())))  # type: ignore[arg-type]
    return results[-1]


def _strategy_of(made_in: Any) -> Any:
    """Return the current strategy, or else `made_in`; raise an error if that is ambiguous."""
    strategy: Any = get_strategy()
    if strategy.is_default and made_in is not None:
        strategy = made_in
    others = strategies_of_several() if strategy.is_default else []
    for other in others:
        if not other._refusal:  # It is still open.
            what = f"this is outside the scope of {other!r}, so tensors would not be reduced"
            raise RuntimeError(f"{what}: make the optimizer in its scope, or train in its run.")
    return strategy
