"""PyTorch under every strategy: gradients are averaged over replicas, and state is shared.

A module and its optimizer stay PyTorch's own; each replica has its own pair. `DistributedOptimizer`
reduces the gradients at the end of each backward pass, so what follows sees those of all replicas.
Only this file imports PyTorch; `import ndistribute` does not load it.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.collective.objects import all_gather_object
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.context import (
    ReplicaContext,
    current_frame,
    get_replica_context,
    get_strategy,
    strategies_of_several,
)
from ndistribute.dtypes import dtype_named
from ndistribute.errors import CollectiveMismatchError, MissingDependencyError
from ndistribute.values import PerReplica

try:
    import torch
except ImportError as error:
    raise MissingDependencyError(
        "ndistribute.interop.torch needs PyTorch: pip install 'ndistribute[torch]'."
    ) from error

Array = np.ndarray[Any, Any]

_numbers = itertools.count()  # Of optimizers, in the order in which they were made.


class _Thread(threading.local):
    """What a thread does: its backward passes, and whether it is in `replicate`."""

    def __init__(self) -> None:
        # By the number of the pass: the optimizers whose gradients it has computed.
        self.touched: dict[int, dict[int, weakref.ref[_Reduction]]] = {}
        self.replicates = False


_thread = _Thread()
# What elastic workers keep for modules, optimizers and schedulers that are in use.
_held = weakref.WeakKeyDictionary[Any, "_States"]()


def DistributedOptimizer(  # noqa: N802 - Horovod's name.
    optimizer: Any, op: Any = "mean", *, backward_passes_per_step: int = 1
) -> Any:
    """Return the optimizer, which from now on gets gradients that are reduced over all replicas.

    The gradients are reduced at the end of each backward pass, with one all-reduce. A parameter
    without a gradient on a replica counts as zeros there; without one on any, it stays None. It is
    the same object, so schedulers, parameter groups and `state_dict` stay as they are.

    The optimizer has two more methods. ``synchronize()`` reduces gradients that are not reduced
    yet, as `step` does: those of fewer than `backward_passes_per_step` passes.
    ``skip_synchronize()`` is a context manager for Horovod's programs, which changes nothing.

    Args:
        optimizer: an optimizer of PyTorch, of one replica.
        op: ``"mean"``, or ``"sum"`` for losses that are divided by the size of the global batch.
        backward_passes_per_step: after how many passes the gradients are reduced, with one
            all-reduce, before each `step`. They add up, as in PyTorch: divide the loss.

    Raises:
        ValueError: `op` or `backward_passes_per_step` is something else.
        TypeError: `optimizer` is no optimizer of PyTorch, or is distributed already.

    >>> import torch, ndistribute as nd
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
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer needs a torch.optim.Optimizer, got {optimizer!r}.")
    if isinstance(optimizer, _DistributedMethods):
        raise TypeError("DistributedOptimizer: this optimizer is distributed already.")
    op = ReduceOp.parse(op)
    if op not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise ValueError(f"DistributedOptimizer: op must be 'mean' or 'sum', got {op.name}.")
    if backward_passes_per_step < 1:
        what = f"backward_passes_per_step must be 1 or more, got {backward_passes_per_step}."
        raise ValueError(f"DistributedOptimizer: {what}")
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_DistributedMethods, kind), {})
    optimizer.reduction = reduction = _Reduction(optimizer, op, backward_passes_per_step)
    optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.synchronize())
    for group in optimizer.param_groups:
        reduction.watch(group["params"])
    if not _thread.replicates:
        _hold([[optimizer]], reduction.strategy)
    return optimizer


class _DistributedMethods:
    """What a distributed optimizer has besides the methods of its class."""

    reduction: _Reduction

    def synchronize(self) -> None:
        """Reduce the gradients of passes since the last reduction, if there are any."""
        if self.reduction.passes:
            self.reduction.reduce()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Change nothing: `step` does not reduce gradients a second time."""
        yield

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients, and the number of passes that are not reduced yet."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self.reduction.passes = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose gradients are reduced too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self.reduction.watch(param_group["params"])


class _Reduction:
    """Reduces the gradients of an optimizer."""

    def __init__(self, optimizer: Any, op: ReduceOp, every: int) -> None:
        self.number, self.strategy = next(_numbers), get_strategy()
        self.passes = 0  # Since the last reduction.
        self._op, self._every = op, every
        # No cycle: hooks of a dropped optimizer must end at the same time on all replicas.
        self._optimizer = weakref.ref(optimizer)

    def watch(self, parameters: Sequence[Any]) -> None:
        """Take notice of the gradients of parameters from now on."""
        me = weakref.ref(self)
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(_note, me))
                if self._op is ReduceOp.SUM:
                    parameter.register_hook(functools.partial(_scaled, me))

    def end_pass(self) -> None:
        """Count a backward pass, and reduce if it is time."""
        self.passes += 1
        if self.passes == self._every:
            self.reduce()

    def reduce(self) -> None:
        """Set each gradient to its mean over all replicas."""
        self.passes = 0
        named = self.parameters()
        gradients = [_checked_gradient(name, parameter) for name, parameter in named]
        has = np.array([gradient is not None for gradient in gradients], np.float32)
        pairs = zip(gradients, named, strict=True)
        sent = [torch.zeros_like(p) if gradient is None else gradient for gradient, (_, p) in pairs]
        arrays = [*map(array_of, sent), has]

        def reduced(replica: ReplicaContext) -> Any:
            try:
                return replica.communicator.all_reduce(ReduceOp.MEAN, arrays)
            except CollectiveMismatchError as error:
                shown = (f"{k} {name} {tuple(p.shape)}" for k, (name, p) in enumerate(named))
                me = replica.replica_id_in_sync_group
                error.add_note(f"the gradients of replica {me}: {', '.join(shown)}")
                raise

        *means, has = in_replica(reduced, self.strategy)
        for (_, parameter), gradient, mean, any_has in zip(
            named, gradients, means, has, strict=True
        ):
            if gradient is not None:
                gradient.copy_(tensor_of(mean))
            elif any_has:
                parameter.grad = tensor_of(np.array(mean))

    def parameters(self) -> list[tuple[str, Any]]:
        """Return the parameters that are trained, with their names or places in the optimizer."""
        groups: Any = self._optimizer().param_groups  # type: ignore[union-attr]
        return [
            (names[k] if (names := group.get("param_names")) else f"group {number}, {k}", parameter)
            for number, group in enumerate(groups)
            for k, parameter in enumerate(group["params"])
            if parameter.requires_grad
        ]


def _note(reduction: weakref.ref[_Reduction], _: Any) -> None:
    """Note that a backward pass has computed a gradient of an optimizer."""
    me, task = reduction(), torch._C._current_graph_task_id()
    if me is None:
        return
    touched = _thread.touched.get(task)
    if touched is None:
        touched = _thread.touched[task] = {}
        end = functools.partial(_end_pass, task)
        torch.autograd.Variable._execution_engine.queue_callback(end)
    touched[me.number] = reduction


def _scaled(reduction: weakref.ref[_Reduction], gradient: Any) -> Any:
    """Return a gradient times the number of replicas, whose mean is then the sum."""
    me = reduction()
    if me is None:
        return gradient
    replica = current_frame().replica
    strategy = me.strategy if replica is None else replica
    return gradient * strategy.num_replicas_in_sync


def _end_pass(task: int) -> None:
    """Reduce the gradients of a backward pass, in the order in which optimizers were made."""
    for _, reduction in sorted(_thread.touched.pop(task).items()):
        if (me := reduction()) is not None:
            me.end_pass()


def _checked_gradient(name: str, parameter: Any) -> Any:
    """Return the gradient of a parameter, or None; refuse what is not reduced."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise NotImplementedError(
            f"parameter {name}: DistributedOptimizer does not reduce sparse gradients: make the "
            "layer with sparse=False."
        )
    if gradient.requires_grad:
        raise NotImplementedError(
            f"parameter {name}: DistributedOptimizer does not differentiate through the reduction "
            "of gradients: call torch.autograd.grad(..., create_graph=True) for inner derivatives, "
            "and backward() without create_graph."
        )
    return gradient


def replicate(make: Callable[[], Any]) -> Any:
    """Return what a function makes, once for each replica of this process.

    All replicas of the job get the state of the first one. PyTorch's random numbers go on as if
    the function had been called once.

    Args:
        make: returns a module, or a nest of modules, optimizers and schedulers.

    Returns:
        The nest of `make`, with a `PerReplica` at each leaf, to be passed to `run`.

    Raises:
        RuntimeError: called inside a replica or outside the scope of a strategy of several.

    >>> import torch, ndistribute as nd
    >>> with nd.MirroredStrategy(["cpu:0", "cpu:1"]):
    ...     models = replicate(lambda: torch.nn.Linear(2, 1))
    >>> first, second = models.values
    >>> torch.equal(first.weight, second.weight), first is second
    (True, False)
    """
    if current_frame().replica is not None:
        raise RuntimeError("replicate was called inside a replica: call it before strategy.run.")
    strategy, start, made = _strategy_of(None), torch.get_rng_state(), []
    _thread.replicates = True
    try:
        for _ in strategy.devices:
            torch.set_rng_state(start)
            made.append(make())
    finally:
        _thread.replicates = False
    replicas = tree.regroup(made, PerReplica)
    parts = [[leaf for leaf in tree.flatten(each) if hasattr(leaf, "state_dict")] for each in made]
    strategy.run(_share, args=(PerReplica(parts), 0))
    _hold(parts, strategy)
    return replicas


def broadcast(module: Any = None, optimizer: Any = None, root: int = 0) -> None:
    """Give the state of one replica to all: parameters, buffers and state of an optimizer.

    Args:
        module: the module of this replica, or a `PerReplica` outside of replicas; None: none.
        optimizer: its optimizer, likewise.
        root: the index of the replica whose state all get.

    Raises:
        ValueError: there is no replica `root`.
        RuntimeError: the module or optimizer of a replica has other parameters.

    >>> import torch
    >>> broadcast(torch.nn.Linear(2, 1))
    """
    things = [each for each in (module, optimizer) if each is not None]
    if current_frame().replica is not None:
        _share(things, root)
        return
    strategy = _strategy_of(None)
    count = len(strategy.devices)
    parts = [tree.select(things, k, count) for k in range(count)]
    if count > 1 and not all(isinstance(each, PerReplica) for each in things):
        raise RuntimeError(
            f"broadcast was called outside of replicas, and this process has {count}: make the "
            "module and the optimizer with replicate, and pass what it returns."
        )
    strategy.run(_share, args=(PerReplica(parts), root))
    if not any(each in _held for each in parts[0]):
        _hold(parts, strategy)


def _share(things: Sequence[Any], root: int) -> None:
    """Give the states of one replica to all, each of which calls this."""
    replica: Any = get_replica_context()
    me, count = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    if not 0 <= root < count:
        raise ValueError(f"broadcast: root must be in [0, {count}), got {root}.")
    mine = [plain_state(each) for each in things] if me == root else None
    states = all_gather_object(replica.communicator, mine)[root]
    if me != root:
        for each, state in zip(things, states, strict=True):
            load_plain_state(each, state)


def _hold(parts: Sequence[Sequence[Any]], strategy: Any) -> None:
    """Let elastic workers keep the states of modules, optimizers and schedulers of each replica."""
    states = _States(parts)
    _held.update(dict.fromkeys(itertools.chain(*parts), states))
    strategy.note_state(states)


class _States:
    """The states of what the replicas of this process have, for elastic workers.

    Those of optimizers have their parameters and gradients, which a step that is run again changes.
    """

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self._parts = [[weakref.ref(each) for each in part] for part in parts]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of each replica; they differ in their gradients alone."""
        return {
            str(replica): [self._state(each()) for each in part]
            for replica, part in enumerate(self._parts)
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Set the states of the replicas; those of another worker may be fewer."""
        for replica, part in enumerate(self._parts):
            for each, state in zip(part, states.get(str(replica), states["0"]), strict=True):
                if (thing := each()) is not None and state is not None:
                    self._load(thing, state)

    def _state(self, thing: Any) -> Any:
        if thing is None:
            return None
        state = {"state": plain_state(thing)}
        if isinstance(thing, _DistributedMethods):
            parameters = [parameter for _, parameter in thing.reduction.parameters()]
            state["parameters"] = [array_of(each).copy() for each in parameters]
            state["gradients"] = [
                None if each.grad is None else array_of(each.grad).copy() for each in parameters
            ]
            state["passes"] = thing.reduction.passes
        return state

    def _load(self, thing: Any, state: Any) -> None:
        load_plain_state(thing, state["state"])
        if isinstance(thing, _DistributedMethods):
            thing.reduction.passes = state["passes"]
            both = zip(state["parameters"], state["gradients"], strict=True)
            for (_, parameter), (value, gradient) in zip(
                thing.reduction.parameters(), both, strict=True
            ):
                parameter.detach().copy_(tensor_of(value))
                parameter.grad = None if gradient is None else tensor_of(gradient)


def plain_state(thing: Any) -> Any:
    """Return the state of a module, optimizer or scheduler with copies of tensors as arrays."""
    return _mapped(
        thing.state_dict(),
        lambda leaf: array_of(leaf).copy() if isinstance(leaf, torch.Tensor) else leaf,
    )


def load_plain_state(thing: Any, state: Any) -> None:
    """Set the state of a module, optimizer or scheduler to one of `plain_state`."""
    thing.load_state_dict(
        _mapped(state, lambda leaf: tensor_of(leaf) if isinstance(leaf, np.ndarray) else leaf)
    )


def _mapped(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nest of dicts, lists and tuples with changed leaves; the order of keys stays."""
    if isinstance(nest, dict):
        return {key: _mapped(value, change) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)([_mapped(value, change) for value in nest])
    return change(nest)


def in_replica(call: Callable[[ReplicaContext], Any], made_in: Any = None) -> Any:
    """Return what a function of this replica's context returns.

    Outside of replicas, it is called in a step of its own, if this process has one replica.

    Args:
        call: the function.
        made_in: the strategy to use outside of the scope of any; None: the default one.
    """
    frame = current_frame()
    if frame.replica is not None:
        return call(frame.replica)
    strategy = _strategy_of(made_in)
    if (count := len(strategy.devices)) > 1:
        raise RuntimeError(
            f"a collective of tensors was called outside of replicas, and this process has {count} "
            f"of {strategy!r}: put backward() and what else reduces into the function that "
            "strategy.run executes."
        )
    results: list[Any] = []  # `run` would convert them.
    strategy.run(lambda: results.append(call(get_replica_context())))  # type: ignore[arg-type]
    return results[-1]


def _strategy_of(made_in: Any) -> Any:
    """Return the current strategy, or `made_in` outside of any; refuse if that is ambiguous."""
    strategy: Any = get_strategy()
    if strategy.is_default and made_in is not None:
        strategy = made_in
    others = [each for each in strategies_of_several() if not each._refusal]
    if strategy.is_default and others:
        raise RuntimeError(
            f"tensors would be reduced over one replica, because this is outside the scope of "
            f"{others[0]!r}: make the optimizer `with strategy.scope():`, or train in a function "
            "that strategy.run executes."
        )
    return strategy


def array_of(tensor: Any) -> Array:
    """Return a tensor in host memory as an array of the same memory.

    Raises:
        TypeError: the tensor is elsewhere.
    """
    if tensor.device.type != "cpu":
        raise TypeError(
            f"a tensor on {tensor.device} cannot be reduced: collectives take tensors in host "
            "memory. Move the module with .cpu(), or use CuPy's arrays for GPUs."
        )
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        whole: Array = tensor.view(torch.int16).numpy().view(dtype_named("bfloat16"))
        return whole
    array: Array = tensor.resolve_conj().resolve_neg().numpy()
    return array


def tensor_of(array: Any) -> Any:
    """Return an array as a tensor, of the same memory if it may be written."""
    array = np.asarray(array)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
