"""`TorchLoader`: the position of a `torch.utils.data.DataLoader`, which it does not keep itself.

The order of an epoch follows from the generators of the loader and its samplers where it begins. So
their states and the number of batches taken say where it is: a loader continues by reading the
epoch again up to there. A sampler whose order depends on anything else is refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.guest_tensors import steps_take_tensors, tensor_of, torch_loaded
from ndistribute.values import PerReplica


def is_torch_loader(loader: Any) -> bool:
    """Return True for a `torch.utils.data.DataLoader`."""
    kind = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    return kind is not None and isinstance(loader, kind)


def obstacle(loader: Any) -> str:
    """Return why the order of a loader cannot be restored, and what to do; empty: it can be."""
    if not is_torch_loader(loader):
        return "it has no state_dict and load_state_dict, or is only a part of the dataset"
    for sampler in _samplers_of(loader):
        kind = type(sampler).__name__
        if kind == "_InfiniteConstantSampler":
            return "only its iterable dataset knows its order"
        if getattr(sampler, "generator", None) is not None:
            continue
        if hasattr(sampler, "generator"):
            return (
                f"its {kind} draws from the global generator: pass generator=torch.Generator() to "
                "the DataLoader, or to a sampler of your own"
            )
        if not type(sampler).__module__.startswith("torch.utils.data"):
            return (
                f"nobody knows what the order of its {kind} depends on: give that an attribute "
                "generator, a torch.Generator that it draws from, even if it draws nothing"
            )
    return ""


def as_yielded(value: Any, tensors: list[bool] | None) -> Any:
    """Return a step with tensors where the loader had them, if replicas compute with tensors."""
    if tensors is None or not steps_take_tensors():
        return value
    parts = tree.flatten(value)
    # A worker whose loader has yielded nothing takes all for tensors, as the default collate does.
    flags = tensors if len(tensors) == len(parts) else tensors * len(parts)
    for number, (part, flag) in enumerate(zip(parts, flags, strict=True)):
        if flag:
            parts[number] = PerReplica(map(tensor_of, part.values))
    return tree.unflatten(value, parts)


def check_division(nodes: Iterable[Any], count: int, number: int) -> None:
    """Raise an error if a loader's sampler divides the data among others than its readers."""
    for step in nodes:
        if step.division not in (None, (count, number)):
            parts, part = step.division
            raise ValueError(
                f"the sampler of the {step.name} takes part {part} of {parts} of the data, but "
                f"part {number} of {count} is read here, so rows would be lost or counted twice. "
                "Pass distribute_dataset a loader of global batches without that sampler, to be "
                "divided among the replicas. Or, for a batch per replica, make the loader in the "
                "function of distribute_datasets_from_function, with the sampler's "
                "num_replicas=context.num_input_pipelines and rank=context.input_pipeline_id."
            )


def division_of(loader: Any) -> tuple[int, int] | None:
    """Return the number of parts and the part that a loader's sampler takes; None for all."""
    for sampler in _samplers_of(loader) if is_torch_loader(loader) else ():
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return int(sampler.num_replicas), int(sampler.rank)
    return None


def _samplers_of(loader: Any) -> Iterator[Any]:
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


class TorchLoader:
    """A loader with the methods `state_dict` and `load_state_dict`.

    Args:
        loader: a `torch.utils.data.DataLoader` without an `obstacle`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._begin: dict[str, Any] | None = None  # What the order of the epoch follows from.
        self._taken = 0  # The batches of that epoch that were taken.
        self._resumes = False  # Whether the next iteration goes on there.

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        taken, resumes, self._resumes = self._taken, self._resumes, False
        if resumes and self._begin is not None:
            self._set(self._begin)
        else:
            self._begin, self._taken, taken = self._now(), 0, 0
        with _global_generator_kept() if taken else contextlib.nullcontext():
            batches = iter(self._loader)
            for _ in islice(batches, taken):
                pass
        for batch in batches:
            self._taken += 1
            yield batch
        self._begin, self._taken = self._now(), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        return {"begin": self._now() if self._begin is None else self._begin, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position of `state_dict`.

        Raises:
            ValueError: it is of a loader with other generators or samplers.
        """
        have, want = len(self._now()["generators"]), len(state["begin"]["generators"])
        if have != want:
            raise ValueError(
                f"load_state_dict: the state is of a DataLoader with {want} generator(s), this "
                f"has {have}. Make the loader as it was when the state was saved."
            )
        self._begin, self._taken = dict(state["begin"]), int(state["taken"])
        self._resumes = True

    def _sources(self) -> tuple[list[Any], list[Any]]:
        """Return the generators, and the samplers that number their epochs."""
        samplers = list(_samplers_of(self._loader))
        every = (getattr(each, "generator", None) for each in (self._loader, *samplers))
        generators = {id(each): each for each in every if each is not None}
        return list(generators.values()), [each for each in samplers if hasattr(each, "set_epoch")]

    def _now(self) -> dict[str, Any]:
        generators, samplers = self._sources()
        states = [generator.get_state().numpy().tobytes().hex() for generator in generators]
        return {"generators": states, "epochs": [int(each.epoch) for each in samplers]}

    def _set(self, begin: Mapping[str, Any]) -> None:
        generators, samplers = self._sources()
        for generator, state in zip(generators, begin["generators"], strict=True):
            generator.set_state(tensor_of(np.frombuffer(bytearray.fromhex(state), np.uint8)))
        for sampler, epoch in zip(samplers, begin["epochs"], strict=True):
            sampler.set_epoch(epoch)


@contextlib.contextmanager
def _global_generator_kept() -> Iterator[None]:
    """Let what is read again draw no numbers that the program would get."""
    state = torch_loaded().get_rng_state()
    try:
        yield
    finally:
        torch_loaded().set_rng_state(state)
