"""The iterator of a dataset, whose position in the epoch can be saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import compress, count, islice
from typing import Any

from ndistribute.data.elements import Element
from ndistribute.data.pipeline import Epoch, Node, ShuffleSeed, check_resumable, run
from ndistribute.mistakes import count_of


class OptionalBatch:
    """The next batch of an iterator, if there is one, with the methods of TensorFlow's optionals.

    Args:
        batches: a tuple with the batch, or an empty one.
    """

    def __init__(self, batches: tuple[Any, ...]) -> None:
        self._batches = batches

    def has_value(self) -> bool:
        """Return True if there is a batch."""
        return bool(self._batches)

    def get_value(self) -> Any:
        """Return the batch.

        Raises:
            ValueError: the input has ended.
        """
        if not self._batches:
            raise ValueError("the input has ended: call has_value() before get_value().")
        return self._batches[0]


class TensorFlowIterator(Iterator[Any]):
    """An iterator with the methods of TensorFlow's iterators."""

    __slots__ = ()

    def get_next(self) -> Any:
        """Return the next element, as `next` does."""
        return next(self)

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next element, or the end of the input, without an exception."""
        return OptionalBatch(tuple(islice(self, 1)))


class ElementIterator(TensorFlowIterator):
    """An iterator over the elements of a dataset, whose position a checkpoint can save.

    >>> from ndistribute.data import Dataset
    >>> dataset = Dataset.range(9).shuffle(9)
    >>> iterator, resumed = iter(dataset), iter(dataset)
    >>> _ = next(iterator)
    >>> resumed.load_state_dict(iterator.state_dict())
    >>> list(iterator) == list(resumed)
    True
    """

    # A slot, because a Python method here would add 65 ns to each element of a loop.
    __slots__ = ("__next__", "__weakref__", "_convert", "_elements", "_epoch", "_node", "_numbers")
    __next__: Any

    def __init__(self, node: Node, convert: Callable[[Element], Element] | None = None) -> None:
        self._node, self._convert = node, convert
        self._begin(Epoch.begin(node))

    def __del__(self) -> None:
        self._epoch.threads.close()

    @property
    def element_spec(self) -> Any:
        """The dtypes and shapes of the elements; see `Dataset.element_spec`."""
        return self._node.element_like

    def close(self) -> None:
        """End the iteration, and stop its threads."""
        self._epoch.threads.close()
        self._number(iter(()), next(self._numbers))

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the seeds of the shuffles, and the number of elements so far.

        Raises:
            ValueError: a loader produces the elements, and this iterator cannot reset a loader.
        """
        check_resumable((self._node,), None, "state_dict")
        number = next(self._numbers)
        self._number(self._elements, number)
        return {
            "count": number - 1,
            "shuffles": [list(seed) for seed in self._epoch.seeds.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an iterator over an equal pipeline.

        Raises:
            ValueError: the state belongs to another pipeline, or a loader produces the elements.
        """
        check_resumable((self._node,), None, "load_state_dict")
        seeds = [ShuffleSeed(int(entropy), int(number)) for entropy, number in state["shuffles"]]
        if len(seeds) != len(self._epoch.seeds):
            raise ValueError(
                "load_state_dict: the state is of a pipeline with "
                f"{count_of(len(seeds), 'shuffle')}, but this one has {len(self._epoch.seeds)}. "
                "Build the pipeline as it was when it was saved."
            )
        self.close()
        self._begin(Epoch.resume(self._node, seeds), int(state["count"]))

    def _begin(self, epoch: Epoch, start: int = 0) -> None:
        self._epoch = epoch
        self._number(run(self._node, epoch, start), start + 1)

    def _number(self, elements: Iterator[Element], first: int) -> None:
        """Return these elements from the next call on, numbered from `first`, which is above 0."""
        self._elements, self._numbers = elements, count(first)
        numbered = compress(elements, self._numbers)  # Takes a number for each element.
        every = numbered if self._convert is None else map(self._convert, numbered)
        self.__next__ = every.__next__
