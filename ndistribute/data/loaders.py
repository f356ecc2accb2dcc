"""`TorchLoader`: saves and restores the position of a `torch.utils.data.DataLoader`.

PyTorch's loader does not keep its position. But the states of the generators of the loader and its
samplers at the start of an epoch determine the order of the epoch. So these states and the number
of batches read are the position: to continue there, the loader reads the epoch again up to that
batch. A sampler whose order depends on anything else is refused.
"""

from __future__ import annotations

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
    """Return why a loader's order cannot be restored, and what to do; empty text if it can be."""
    if not is_torch_loader(loader):
        return "it has no state_dict and load_state_dict, or is only a part of the dataset"
    if getattr(loader, "persistent_workers", False):
        return (
            "its workers keep random generators from epoch to epoch: pass persistent_workers=False"
        )
    for sampler in _samplers_of(loader):
        kind, known = type(sampler), type(sampler).__module__.startswith("torch.utils.data")
        if kind.__name__ == "_InfiniteConstantSampler":
            return "only its iterable dataset knows its order"
        if getattr(sampler, "generator", None) is None and (
            hasattr(sampler, "generator") or not known
        ):
            return (
                f"its {kind.__name__} has no generator that determines its order: pass "
                "generator=torch.Generator() to the DataLoader or to the sampler. A sampler that "
                "you write needs an attribute generator, even if it draws no numbers"
            )
    return ""


def as_yielded(value: Any, tensors: list[bool] | None) -> Any:
    """Return a step with tensors where the loader had tensors, if replicas compute with them."""
    if tensors is None or not steps_take_tensors():
        return value
    parts = tree.flatten(value)
    # If a worker's loader has yielded nothing, all leaves become tensors, as the default collate
    # makes them.
    flags = tensors if len(tensors) == len(parts) else tensors * len(parts)
    pairs = zip(parts, flags, strict=True)
    made = [PerReplica(map(tensor_of, part.values)) if flag else part for part, flag in pairs]
    return tree.unflatten(value, made)


def check_division(loaders: Iterable[Any], count: int, number: int) -> None:
    """Raise an error if a loader's sampler divides the data among other processes."""
    for loader in (getattr(each, "loader", each) for each in loaders):
        for sampler in _samplers_of(loader) if is_torch_loader(loader) else ():
            parts, part = getattr(sampler, "num_replicas", count), getattr(sampler, "rank", number)
            if (parts, part) != (count, number):
                raise ValueError(
                    f"the sampler of the {type(loader).__name__} takes part {part} of {parts} of "
                    f"the data, but this worker reads part {number} of {count}, so rows would be "
                    "lost or counted twice. Pass distribute_dataset a loader of global batches "
                    "without that sampler, which it divides among the replicas. Or, for a batch "
                    "per replica, make the loader in the function of "
                    "distribute_datasets_from_function, with "
                    "num_replicas=context.num_input_pipelines and rank=context.input_pipeline_id."
                )


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
        self.loader = loader
        # The states that determine the order of the epoch.
        self._begin: dict[str, Any] | None = None
        self._taken = 0  # The number of batches of that epoch that were read.
        self._resumes = False  # Whether the next iteration continues there.

    def __iter__(self) -> Iterator[Any]:
        if self._resumes and self._begin is not None:
            self._set(self._begin)
        else:
            self._begin, self._taken = self._now(), 0
        self._resumes, taken, drawn = False, self._taken, torch_loaded().get_rng_state()
        batches = iter(self.loader)
        for _ in islice(batches, taken):
            pass
        if taken:  # Reading batches again must not draw random numbers that the program would get.
            torch_loaded().set_rng_state(drawn)
        for batch in batches:
            self._taken += 1
            yield batch
        self._begin, self._taken = self._now(), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        return {"begin": self._begin or self._now(), "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that `state_dict` returned.

        Raises:
            ValueError: the position belongs to a loader with other generators or samplers.
        """
        begin, now = dict(state["begin"]), self._now()
        if [*map(len, begin.values())] != [*map(len, now.values())]:
            raise ValueError(
                "load_state_dict: the state is of a DataLoader with other generators or samplers: "
                "make the loader as it was when the state was saved."
            )
        self._begin, self._taken, self._resumes = begin, int(state["taken"]), True

    def _sources(self) -> tuple[list[Any], list[Any]]:
        """Return the generators, and the samplers that number their epochs."""
        samplers = list(_samplers_of(self.loader))
        every = (getattr(each, "generator", None) for each in (self.loader, *samplers))
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
