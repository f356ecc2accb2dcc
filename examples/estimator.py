"""Train a ready-made estimator on digits: alone, on replicas, or as any task of a cluster.

    python examples/estimator.py                       # one process
    python examples/estimator.py --replicas 2          # two replicas, MirroredStrategy

Every task of a cluster runs the same command, with its own ``TF_CONFIG``: the chief and the
workers train, parameter servers keep the variables, and the evaluator scores each checkpoint. The
chief, the workers and the evaluator share the folder ``--model_dir``.
"""

from __future__ import annotations

import argparse
from typing import Any

from train_digits import load_data

import ndistribute as nd
from ndistribute.estimator import (
    DNNClassifier,
    EvalSpec,
    RunConfig,
    TrainSpec,
    feature_column,
    train_and_evaluate,
)

BATCH = 32


def train_input(input_context: nd.InputContext) -> nd.Dataset:
    """Return batches of one replica's size, others for each worker."""
    (images, labels), _ = load_data(0)
    data = nd.Dataset.from_tensor_slices(({"pixels": images}, labels))
    data = data.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return data.shuffle(len(data), seed=0).batch(BATCH).repeat()


def eval_input() -> nd.Dataset:
    """Return the test images, once."""
    _, (images, labels) = load_data(0)
    return nd.Dataset.from_tensor_slices(({"pixels": images}, labels)).batch(BATCH)


def main() -> None:
    """Train and evaluate, as the task that this process is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model_dir", help="the folder of checkpoints; default: a new one")
    parser.add_argument("--max_steps", type=int, default=600)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    strategy: Any = None
    if options.replicas > 1:
        strategy = nd.MirroredStrategy([f"cpu:{k}" for k in range(options.replicas)])
    config = RunConfig(
        options.model_dir,
        tf_random_seed=1,
        save_checkpoints_steps=200,
        train_distribute=strategy,
        eval_distribute=strategy,
    )
    estimator = DNNClassifier(
        [64],
        [feature_column.numeric_column("pixels", 64)],
        n_classes=10,
        optimizer=nd.graph.AdamOptimizer(0.003),
        config=config,
    )
    result = train_and_evaluate(
        estimator,
        TrainSpec(train_input, max_steps=options.max_steps),
        EvalSpec(eval_input, steps=None, start_delay_secs=0, throttle_secs=0),
    )
    if result is not None:
        metrics, _ = result
        print(f"step {metrics['global_step']}, test accuracy {metrics['accuracy']:.4f}")
    if strategy is not None:
        strategy.close()


if __name__ == "__main__":
    main()
