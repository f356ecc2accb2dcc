"""The iterator of a dataset, whose position in the epoch can be saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ndistribute.data.elements import Element
from ndistribute.data.pipeline import Epoch, Node, ShuffleSeed, check_resumable, run


class ElementIterator(Iterator[Element]):
    """An iterator over the elements of a dataset; a checkpoint may have it.

    >>> from ndistribute.data import Dataset
    >>> dataset = Dataset.range(9).shuffle(9)
    >>> iterator, resumed = iter(dataset), iter(dataset)
    >>> _ = next(iterator)
    >>> resumed.load_state_dict(iterator.state_dict())
    >>> list(iterator) == list(resumed)
    True
    """

    def __init__(self, node: Node, convert: Callable[[Element], Element] | None = None) -> None:
        self._node, self._epoch, self._count = node, Epoch.begin(node), 0
        self._elements = run(node, self._epoch)
        self._convert = convert

    def __next__(self) -> Element:
        element = next(self._elements)
        self._count += 1
        return element if self._convert is None else self._convert(element)

    def get_next(self) -> Element:
        """Return the next element, as `next` does; this is its name in TensorFlow."""
        return next(self)

    @property
    def element_spec(self) -> Any:
        """The dtypes and shapes of the elements; see `Dataset.element_spec`."""
        return self._node.element_like

    def close(self) -> None:
        """End the iteration, and stop its threads."""
        self._elements.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the seeds of the shuffles, and the number of elements so far.

        Raises:
            ValueError: the elements are of a loader, which this iterator cannot take back.
        """
        check_resumable(self._node, None, "state_dict")
        return {
            "count": self._count,
            "shuffles": [list(seed) for seed in self._epoch.seeds.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an iterator over an equal pipeline.

        Raises:
            ValueError: the state is of another pipeline, or the elements are of a loader.
        """
        check_resumable(self._node, None, "load_state_dict")
        seeds = [ShuffleSeed(int(entropy), int(number)) for entropy, number in state["shuffles"]]
        if len(seeds) != len(self._epoch.seeds):
            raise ValueError(
                f"load_state_dict: the state is of a pipeline with {len(seeds)} shuffle(s), this "
                f"one has {len(self._epoch.seeds)}. Build the pipeline as it was when it was saved."
            )
        self.close()
        self._epoch, self._count = Epoch.resume(self._node, seeds), int(state["count"])
        self._elements = run(self._node, self._epoch, self._count)
