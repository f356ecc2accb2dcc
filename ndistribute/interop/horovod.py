"""Horovod's names for PyTorch: Horovod programs run after changing one import.

Write ``import ndistribute.interop.horovod as hvd`` in place of ``import horovod.torch as hvd``.
Calls are matched by their order, not by their names, and are complete when they return. If workers
make different calls, they get an error that names the calls. Features that are missing here raise
an error that names them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from ndistribute.collective.bootstrap import host_identity
from ndistribute.collective.membership import Elastic
from ndistribute.collective.objects import all_gather_object
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.context import set_strategy
from ndistribute.data import Dataset
from ndistribute.data.sources import has_state
from ndistribute.guest_tensors import tensor_of
from ndistribute.interop import torch as guest
from ndistribute.interop.guest_states import array_of, mapped
from ndistribute.strategies.local import MultiWorkerMirroredStrategy

torch: Any = vars(guest)["torch"]  # Only that file imports PyTorch.
Sum, Average, Min, Max, Product = ReduceOp
SyncBatchNorm = guest.BatchNormOverReplicas
Adasum = "Adasum"  # Using it raises an error; programs may still offer the choice.
global_process_set = "the set of all processes"

_REFUSED = {
    "alltoall": "call allgather, and take your part",
    "reducescatter": "call allreduce, and take your part",
    "sparse_allreduce_async": "make the layer with sparse=False",
    "ElasticSampler": "make a DistributedSampler in the function of elastic.run",
    "ProcessSet": "use ndistribute's strategies for groups of replicas of one process",
    "add_process_set": "use ndistribute's strategies for groups of replicas of one process",
    "start_timeline": "set NDISTRIBUTE_TRACE=DIR when you start the job",
    "run": "start the program with: ndistribute run -n 4 train.py",
}


def __getattr__(name: str) -> NoReturn:
    instead = f": {_REFUSED[name]}." if name in _REFUSED else "."
    raise AttributeError(f"ndistribute.interop.horovod has no {name}{instead}")


class Compression:
    """How gradients and tensors are sent: `none` leaves them unchanged; `fp16` halves the bytes."""

    none = None
    fp16 = torch.float16


class _Job(NamedTuple):
    strategy: Any
    hosts: list[str]  # The host of each rank.


_jobs: list[_Job] = []  # Contains at most the job of this process.


def _job() -> _Job:
    if not _jobs:
        raise ValueError("Horovod has not been initialized: call hvd.init() first.")
    return _jobs[0]


def init(comm: Any = None, process_sets: Any = None, *, elastic: Elastic | None = None) -> None:
    """Join the job, and make its strategy the current one; a second call does nothing.

    Args:
        comm: must be None: all processes of the job take part.
        process_sets: must be None.
        elastic: an `nd.Elastic` if workers may come and go during `elastic.run`.

    Raises:
        ValueError: `comm` or `process_sets` is something else.

    >>> init()
    >>> rank(), size(), local_rank(), is_initialized()
    (0, 1, 0, True)
    >>> shutdown()
    """
    if comm is not None or process_sets is not None:
        raise ValueError("hvd.init: comm and process_sets must be None: all processes take part.")
    if not _jobs:
        strategy = MultiWorkerMirroredStrategy(devices=["cpu:0"], elastic=elastic)
        set_strategy(strategy)
        _look_around(strategy)


def _look_around(strategy: Any) -> None:
    """Record the hosts of all workers, including workers that joined at the last commit."""
    _jobs[:] = [_Job(strategy, allgather_object(host_identity()))]


def shutdown() -> None:
    """Leave the job."""
    if _jobs:
        set_strategy(None)
        _jobs.pop().strategy.close()


def is_initialized() -> bool:
    """Return True between `init` and `shutdown`."""
    return bool(_jobs)


def rank() -> int:
    """Return the rank of this process in the job."""
    number: int = _job().strategy.replica_contexts[0].replica_id_in_sync_group
    return number


def size() -> int:
    """Return the number of processes of the job."""
    count: int = _job().strategy.num_replicas_in_sync
    return count


def local_rank() -> int:
    """Return the rank of this process among the processes on its host."""
    return _job().hosts[: rank()].count(_job().hosts[rank()])


def local_size() -> int:
    """Return the number of processes on this host."""
    return _job().hosts.count(_job().hosts[rank()])


def _peers() -> list[str]:
    """Return the hosts that have a process of this local rank."""
    hosts = _job().hosts
    return [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank()]


def cross_rank() -> int:
    """Return the rank of this host among the hosts that have a process of this local rank."""
    return _peers().index(_job().hosts[rank()])


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    return len(_peers())


def is_homogeneous() -> bool:
    """Return True if all hosts have equally many processes."""
    return len({_job().hosts.count(host) for host in _job().hosts}) == 1


def nccl_built() -> bool:
    """Return False, because tensors are reduced in host memory."""
    return False


mpi_built = gloo_built = mpi_enabled = gloo_enabled = mpi_threads_supported = nccl_built
cuda_built = rocm_built = ddl_built = ccl_built = nccl_built


def _reduction(
    op: Any, average: bool | None = None, process_set: Any = None, compression: Any = None
) -> ReduceOp:
    """Return the reduction that Horovod's arguments name; refuse unsupported ones."""
    if compression not in (Compression.none, Compression.fp16):
        raise ValueError(f"compression must be hvd.Compression.none or fp16, got {compression!r}.")
    if process_set not in (None, global_process_set):
        raise ValueError("process_set must be hvd.global_process_set: all processes take part.")
    if average is not None:
        if op is not None:
            raise ValueError("pass op, and leave average out, which means the same.")
        op = Average if average else Sum
    if op == Adasum:
        raise NotImplementedError("op=hvd.Adasum is not available: use hvd.Average or hvd.Sum.")
    return Average if op is None else ReduceOp.parse(op)


def _scaled(tensor: Any, factor: float) -> Any:
    if factor == 1.0:
        return tensor
    return (tensor if tensor.is_floating_point() else tensor.double()).mul(factor).to(tensor.dtype)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    """Return a tensor reduced over all processes, differentiable if it requires a gradient.

    Args:
        tensor: the tensor, with the same shape and dtype on all processes.
        average: True for the mean, False for the sum; or pass `op`.
        name: has no effect.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average`, the default, `Sum`, `Min`, `Max` or `Product`. The mean of integers is
            truncated.
        prescale_factor: the factor by which the tensor is multiplied before the reduction.
        postscale_factor: the factor by which the result is multiplied.
        process_set: must be `global_process_set`.

    >>> init()
    >>> allreduce(torch.tensor([1.0, 2.0]), op=Sum)
    tensor([1., 2.])
    >>> shutdown()
    """
    reduction = _reduction(op, average, process_set, compression)
    sent = _scaled(tensor, prescale_factor)
    if compression is not None and sent.is_floating_point():
        sent = sent.to(compression)
    return _scaled(guest.all_reduce(reduction, sent).to(tensor.dtype), postscale_factor)


def allreduce_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Reduce a tensor in place, as `allreduce` does, and return it."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, *args, **kwargs))


def grouped_allreduce(tensors: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Return the results of `allreduce` for several tensors."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


def grouped_allreduce_(tensors: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Reduce several tensors in place, as `allreduce` does, and return them."""
    return [allreduce_(tensor, *args, **kwargs) for tensor in tensors]


def allgather(tensor: Any, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """Return all processes' tensors, joined along the first axis, whose length may differ."""
    _reduction(None, None, process_set)
    return guest.all_gather(tensor, 0)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return the tensor of one process, differentiable if it requires a gradient."""
    _reduction(None, None, process_set)
    if tensor.requires_grad:  # The gradient goes to the root.
        mine = torch.tensor(rank() == _root(root_rank))
        return guest.all_reduce(Sum, torch.where(mine, tensor, torch.zeros_like(tensor)))
    return _sent([tensor], root_rank)[0]


def broadcast_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Set a tensor to the tensor of one process, as `broadcast` does, and return it."""
    with torch.no_grad():
        return tensor.copy_(broadcast(tensor.detach(), *args, **kwargs))


# They are complete when they return, so their result is the handle.
allreduce_async, allreduce_async_ = allreduce, allreduce_
grouped_allreduce_async, grouped_allreduce_async_ = grouped_allreduce, grouped_allreduce_
allgather_async, broadcast_async, broadcast_async_ = allgather, broadcast, broadcast_


def synchronize(handle: Any) -> Any:
    """Return the result of an asynchronous call."""
    return handle


def poll(handle: Any) -> bool:
    """Return True: an asynchronous call is complete when it returns."""
    return True


def _root(rank: int) -> int:
    if not 0 <= rank < size():
        raise ValueError(f"root_rank must be in [0, {size()}), got {rank}.")
    return rank


def _sent(tensors: list[Any], root: int) -> list[Any]:
    """Return the tensors of one process."""
    arrays, root = [array_of(tensor) for tensor in tensors], _root(root)
    values = guest.in_replica(lambda replica: replica.communicator.broadcast(arrays, root))
    return list(map(tensor_of, values))


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Set parameters to the parameters of one process.

    Args:
        params: the ``state_dict()`` of a module, its ``named_parameters()``, or tensors.
        root_rank: the rank of that process.

    Raises:
        ValueError: `params` is something else.
    """
    if isinstance(params, dict):
        params = sorted(params.items())
    elif isinstance(params, torch.Tensor | str) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}: pass model.state_dict().")
    tensors = [pair[1] if isinstance(pair, tuple) else pair for pair in params]
    tensors = [tensor for tensor in tensors if tensor is not None]
    with torch.no_grad():
        for tensor, value in zip(tensors, _sent(tensors, root_rank), strict=True):
            tensor.copy_(value)


def broadcast_optimizer_state(optimizer: Any, root_rank: int = 0) -> None:
    """Set the state and the parameter groups of an optimizer to those of one process."""
    guest.broadcast(optimizer=optimizer, root=root_rank)


class _Sent(NamedTuple):
    """A tensor in the form in which it is sent."""

    array: Any


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all processes: nests of plain values, arrays and tensors.

    >>> init()
    >>> allgather_object({"epoch": 3})
    [{'epoch': 3}]
    >>> shutdown()
    """
    sent = mapped(obj, lambda x: _Sent(array_of(x)) if torch.is_tensor(x) else x)
    objects = guest.in_replica(lambda replica: all_gather_object(replica.communicator, sent))
    received: list[Any] = mapped(
        objects, lambda x: tensor_of(x.array) if isinstance(x, _Sent) else x
    )
    return received


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the object of one process: a nest of plain values, arrays and tensors."""
    return allgather_object(obj if rank() == _root(root_rank) else None)[root_rank]


def barrier(process_set: Any = global_process_set) -> None:
    """Wait until all processes have called this."""
    _reduction(None, None, process_set)
    allgather_object(None)


def join(device: int = -1) -> int:
    """Wait until all processes have called this, and return the last rank.

    All processes must have made equally many reductions. A process without data left does not take
    part in the reductions of others, so unequal numbers raise an error. Give all processes equally
    many batches, as `DistributedSampler` does.
    """
    barrier()
    return size() - 1


def DistributedOptimizer(  # noqa: N802 - Horovod's name.
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Return the optimizer; from now on, its gradients are reduced over all processes.

    They are reduced at the end of each backward pass: see `interop.torch.DistributedOptimizer`.

    Args:
        optimizer: an optimizer of PyTorch.
        named_parameters: the module's named parameters; they are only checked.
        compression: `Compression.none`, or `Compression.fp16` to send half as many bytes.
        backward_passes_per_step: the number of backward passes after which the gradients are
            reduced.
        op: `Average` or `Sum`.
        gradient_predivide_factor: has no effect on the mean, and needs ``op=Average``.
        num_groups: has no effect: all gradients are reduced together.
        groups: has no effect, as `num_groups`.
        sparse_as_dense: must be False: sparse gradients are refused.
        process_set: must be `global_process_set`.

    Raises:
        ValueError: names are missing or repeated, or an argument has an unsupported value.

    >>> init()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> shutdown()
    """
    reduction = _reduction(op, None, process_set, compression)
    if gradient_predivide_factor != 1.0 and reduction is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if sparse_as_dense:
        raise ValueError("sparse_as_dense must be False: make the layer with sparse=False.")
    if named_parameters is not None:
        _check_names(optimizer, list(named_parameters))
    distributed = guest.DistributedOptimizer(
        optimizer, reduction, backward_passes_per_step=backward_passes_per_step
    )
    distributed.reduction.sent_as = compression
    return distributed


def _check_names(optimizer: Any, named: list[Any]) -> None:
    """Raise an error unless the parameters of an optimizer have distinct names."""
    if not all(isinstance(pair, tuple) for pair in named):
        what = "a sequence of tuples (name, parameter), usually model.named_parameters()."
        raise ValueError(f"named_parameters should be {what}")
    names, known = [name for name, _ in named], {id(parameter) for _, parameter in named}
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"named_parameters: names must be unique, but these occur twice: {', '.join(twice)}."
        )
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(id(parameter) not in known for parameter in every):
        raise ValueError("named_parameters: some parameters of the optimizer were not named.")


class _MembersChangedError(Exception):
    """Workers have come or gone since the last commit."""


class TorchState:
    """The state from which training continues: a module, an optimizer, and further attributes.

    Args:
        model: a module, or None.
        optimizer: its optimizer, or None.
        attributes: objects with a `state_dict`, plain values and nests of them.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **attributes: Any) -> None:
        self.model, self.optimizer, self._names = model, optimizer, [*attributes]
        self._callbacks: list[Callable[[], Any]] = []
        self._loop: Any = None  # Set while training runs.
        self._seen = 0  # The number of changes of members that the training function has seen.
        vars(self).update(attributes)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions that are called when workers have come or gone."""
        self._callbacks.extend(callbacks)

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes, without the module and the optimizer."""
        values = ((name, getattr(self, name)) for name in self._names)
        states = ((name, x.state_dict() if has_state(x) else x) for name, x in values)
        return copy.deepcopy(dict(states))

    def load_state_dict(self, state: Any) -> None:
        """Set the attributes."""
        for name, value in copy.deepcopy(state).items():
            if has_state(getattr(self, name)):
                getattr(self, name).load_state_dict(value)
            else:
                setattr(self, name, value)

    def sync(self) -> None:
        """Set the state to that of rank 0."""
        guest.broadcast(self.model, self.optimizer)
        self.load_state_dict(broadcast_object(self.state_dict()))

    def commit(self) -> None:
        """Let workers join; if members have changed, the training function starts again.

        No state is copied: the remaining workers have the state of the last complete reduction.
        """
        if self._loop is not None:
            next(self._loop)
            _look_around(_job().strategy)
            if _changes() != self._seen:
                raise _MembersChangedError

    check_host_updates = commit


def _changes() -> int:
    return getattr(_job().strategy.session, "changes", 0)


def _run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training function of a state; it starts again when workers have come or gone."""

    @functools.wraps(func)
    def train(state: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = _job().strategy
        state.sync()
        strategy.note_state(state)
        state._loop = iter(strategy.elastic(Dataset.counter().batch(1)))
        try:
            next(state._loop)
            _look_around(strategy)
            while True:
                state._seen = _changes()
                try:
                    return func(state, *args, **kwargs)
                except _MembersChangedError:
                    for callback in state._callbacks:
                        callback()
        finally:
            state._loop = None

    return train


class _Elastic:
    TorchState = TorchState
    run = staticmethod(_run)

    def __getattr__(self, name: str) -> NoReturn:
        __getattr__(name)


elastic = _Elastic()
