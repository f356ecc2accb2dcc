"""A program of a user, which `make package` types and runs beside the installed package alone."""

import importlib.metadata
import subprocess
import sys

import numpy as np

import ndistribute as nd


def train() -> list[float]:
    strategy = nd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        weights = nd.Variable(np.zeros(2))
        optimizer = nd.optimizers.SGD(0.1)

    def step(x: np.ndarray) -> np.ndarray:
        with nd.GradientTape() as tape:
            loss = np.sum((x @ weights - 1) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, [weights]), [weights], strict=True))
        return np.asarray(loss)

    runs = [strategy.run(step, args=(np.eye(2),)) for _ in range(3)]
    losses = [float(strategy.reduce("sum", each)) for each in runs]
    strategy.close()
    return losses


if __name__ == "__main__":
    losses = train()
    if not losses[0] > losses[1] > losses[2]:
        raise SystemExit(f"the loss does not fall: {losses}")
    if importlib.metadata.version("ndistribute") != nd.__version__:
        raise SystemExit("the package and its metadata disagree on the version.")
    command = [sys.executable, "-I", "-m", "ndistribute", "--version"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(f"installed: {said.strip()}, losses {losses}")
