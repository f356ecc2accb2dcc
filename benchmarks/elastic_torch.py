"""A worker of torchrun that trains with gloo: the peer of `benchmarks/elastic.py`.

As torchrun's documentation recommends, the loss of a worker restarts all, which continue from the
last checkpoint. It reports as `tests/jobs/elastic_program.py` does, with the samples of each step.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

COLUMNS = 20


def main() -> None:
    """Train until the driver ends the job."""
    options = json.loads(os.environ["ELASTIC_OPTIONS"])
    line = socket.socket(socket.AF_UNIX)
    line.connect(os.environ["ELASTIC_DOOR"])

    def tell(what: str, **facts: Any) -> None:
        text = json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **facts})
        line.sendall(f"{text}\n".encode())

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tell("start", index=rank)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(options["rows"], COLUMNS, generator=random)
    y = x @ torch.randn(COLUMNS, generator=random)
    model = torch.nn.Linear(COLUMNS, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    saved, done = Path(options["checkpoint"]), 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    parallel = DistributedDataParallel(model)
    share = options["batch"] // size
    while True:
        order = torch.randperm(options["rows"], generator=torch.Generator().manual_seed(done))
        rows = order[rank * share : (rank + 1) * share]
        time.sleep(options["seconds"])
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(parallel(x[rows])[:, 0], y[rows]).backward()
        optimizer.step()
        done += 1
        tell(
            "step",
            epoch=0,
            step=done,
            size=size,
            changes=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        )
        if rank == 0 and options["every"] and done % options["every"] == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, f"{saved}.part")
            os.replace(f"{saved}.part", saved)


if __name__ == "__main__":
    main()
