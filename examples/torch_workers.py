"""Train a network of PyTorch on handwritten digits, with the strategy of your choice.

    python examples/torch_workers.py --strategy mirrored --replicas 2
    ndistribute run -n 2 examples/torch_workers.py --strategy multi_worker
    ndistribute run --workers 2 --ps 1 examples/torch_workers.py --strategy parameter_server

The module, its optimizer and the schedule are PyTorch's. Each replica gets its part of every batch,
also of a short last one, so all strategies give the same result up to rounding, except several
workers of parameter servers, which do not wait for each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from train_digits import BATCH, load_data, make_parser, make_strategy, report, serves

import ndistribute as nd
from ndistribute.interop.torch import (
    DistributedOptimizer,
    all_reduce,
    replicate,
    synchronize_batch_norm,
)


def make() -> tuple[Any, Any, Any]:
    """Return a network, its optimizer and the schedule of the learning rate, for one replica."""
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.BatchNorm1d(128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    synchronize_batch_norm(model)
    adam = torch.optim.Adam(model.parameters(), 0.003, fused=True)
    # Each replica has a part of a batch, so the losses of all are added up.
    optimizer = DistributedOptimizer(adam, op="sum")
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def step(model: Any, optimizer: Any, images: Any, labels: Any) -> Any:
    """Make a step with a replica's part of a batch, and return the mean loss of the whole."""
    count = nd.get_replica_context().all_reduce("sum", len(labels))
    optimizer.zero_grad()
    logits = model(torch.tensor(images))
    loss = cross_entropy(logits, torch.tensor(labels), reduction="sum") / count
    loss.backward()
    optimizer.step()
    return all_reduce("sum", loss.detach())


def train(strategy: nd.Strategy, epochs: int, seed: int) -> tuple[float, float]:
    """Train; return the loss of the last epoch and the accuracy on the test images."""
    (images, labels), (test_images, test_labels) = load_data(seed)
    torch.manual_seed(seed)
    with strategy.scope():
        models, optimizers, schedules = replicate(make)
    dataset = nd.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=seed)
    batches = strategy.distribute_dataset(dataset.batch(BATCH))
    for _ in range(epochs):
        totals = [strategy.run(step, args=(models, optimizers, *batch)) for batch in batches]
        for schedule in schedules.values:
            schedule.step()
    model = models.values[0].eval()
    with torch.no_grad():
        guesses = model(torch.tensor(test_images)).argmax(1)
    losses = [total.values[0].item() for total in totals]
    accuracy = (guesses == torch.tensor(test_labels)).double().mean().item()
    return sum(losses) / len(losses), accuracy


def main() -> None:
    """Parse the command line, train, and print the result."""
    options = make_parser(__doc__, epochs=15).parse_args()
    if options.strategy == "parameter_server" and serves():
        return
    with make_strategy(options.strategy, options.replicas) as strategy:
        loss, accuracy = train(strategy, options.epochs, options.seed)
        if strategy.is_chief:
            replicas = strategy.num_replicas_in_sync
            report(
                f"{options.strategy}, {replicas} replica(s): "
                f"loss {loss:.6f}, test accuracy {accuracy:.4f}"
            )


if __name__ == "__main__":
    main()
