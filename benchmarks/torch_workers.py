"""PyTorch's modules under our strategies, beside DistributedDataParallel with gloo.

A step is a forward and a backward pass of a global batch, and an update by fused Adam. Two
processes with a thread each share the batch; or two replicas of a process do, beside one thread
that has it alone. Our interpreter needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import peer
from benchmarks.harness import OURS, TORCH, Benchmark, Group, contenders, main
from benchmarks.report import markdown
from benchmarks.worker import Prepared, strategy_of

BATCHES, REPLICA_BATCH = (32, 256, 2048), 2048


def network(kind: str) -> Any:
    """Return a module: a dense network of 670,000 parameters, or a small convolutional one."""
    from torch import nn

    if kind == "MLP":
        layers = nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        return nn.Sequential(nn.Flatten(), *layers)
    first = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(800, 10))


def made(kind: str) -> Any:
    """Return a module and an optimizer."""
    import torch

    torch.manual_seed(0)
    model = network(kind)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def part(batch: int, rank: int, count: int) -> Any:
    """Return a replica's images and labels."""
    import torch

    random = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 1, 28, 28, generator=random)
    labels = torch.randint(0, 10, (batch,), generator=random)
    return images[rank::count].clone(), labels[rank::count].clone()


def step(model: Any, optimizer: Any, images: Any, labels: Any) -> None:
    """Make a step."""
    import torch

    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


def prepared(model: Any, once: Callable[[], Any]) -> Prepared:
    """Return a step, with a check of the parameters after the first one."""
    once()
    check = sum(parameter.detach().abs().sum().item() for parameter in model.parameters())
    return Prepared(once, check)


@contextmanager
def ours(kind: str, batch: int) -> Iterator[Prepared]:
    """Train in this process, as a script does, with gradients of all workers."""
    from ndistribute.interop.torch import DistributedOptimizer, broadcast

    strategy = strategy_of("MultiWorkerMirroredStrategy")
    topology = strategy.input_topology
    rows = part(batch, topology.worker_index, topology.num_workers)
    with strategy.scope():
        model, optimizer = made(kind)
        optimizer = DistributedOptimizer(optimizer)
        broadcast(model, optimizer)
    yield prepared(model, lambda: step(model, optimizer, *rows))


@contextmanager
def ddp(kind: str, batch: int) -> Iterator[Prepared]:
    """The same with DistributedDataParallel."""
    torch, rank = peer.torch_group()
    rows = part(batch, rank, torch.distributed.get_world_size())
    model, optimizer = made(kind)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    yield prepared(model, lambda: step(parallel, optimizer, *rows))


@contextmanager
def replicas(kind: str, batch: int, count: int) -> Iterator[Prepared]:
    """Train on threads of one process."""
    import ndistribute as nd
    from ndistribute.interop.torch import DistributedOptimizer, replicate

    def make() -> Any:
        model, optimizer = made(kind)
        return model, DistributedOptimizer(optimizer)

    with nd.MirroredStrategy([f"cpu:{i}" for i in range(count)]) as strategy:
        models, optimizers = replicate(make)
        parts = [part(batch, rank, count) for rank in range(count)]
        rows = [nd.PerReplica(column) for column in zip(*parts, strict=True)]
        args = (models, optimizers, *rows)
        yield prepared(models.values[0], lambda: strategy.run(step, args=args))


@contextmanager
def alone(kind: str, batch: int) -> Iterator[Prepared]:
    """Train with PyTorch alone."""
    model, optimizer = made(kind)
    rows = part(batch, 0, 1)
    yield prepared(model, lambda: step(model, optimizer, *rows))


def _groups(quick: bool) -> list[Group]:
    groups = []
    for kind in ("MLP", "CNN"):
        for batch in BATCHES[:1] if quick else BATCHES:
            facts = {"kind": kind, "batch": batch}
            ways = [("2 processes", OURS, "ours", facts), ("DDP, gloo", TORCH, "ddp", facts)]
            two = contenders("torch_workers", ways, jobs=("worker", "worker"))
            groups.append(Group(f"2 processes, {kind}, batch {batch}", two))
        facts = {"kind": kind, "batch": BATCHES[0] if quick else REPLICA_BATCH}
        ways = [("2 replicas", OURS, "replicas", {**facts, "count": 2})]
        ways += [("1 thread", OURS, "alone", facts)]
        title = f"1 process, {kind}, batch {facts['batch']}"
        groups.append(Group(title, contenders("torch_workers", ways)))
    return groups


def _ratios(entries: list[dict[str, Any]]) -> str:
    """Return a table of how many times as fast the first of each group is."""
    rows = []
    for group in dict.fromkeys(entry["group"] for entry in entries):
        both = [entry for entry in entries if entry["group"] == group]
        if len(both) == 2:
            first, other = (entry["figure"]["median"] for entry in both)
            rows.append([group, both[0]["name"], both[1]["name"], f"{other / first:.2f}"])
    return markdown(["group", "of", "beside", "times as fast"], rows)


BENCHMARK = Benchmark(
    "torch_workers", "A step of PyTorch", "us", _groups, rate=False, conclude=_ratios
)

if __name__ == "__main__":
    main(BENCHMARK)
