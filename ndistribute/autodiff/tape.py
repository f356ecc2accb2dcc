"""The gradient tape: what users see of the graph.

A tape says when to record, which variables to watch and for which sources to compute gradients. It
holds what was recorded until its gradient has been asked, and lets it all go then, so that no
variable's snapshot outlives the step that read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ndistribute import tree
from ndistribute.autodiff.backward import Entry, backpropagate
from ndistribute.autodiff.dispatch import is_differentiable
from ndistribute.autodiff.graph import Graph
from ndistribute.autodiff.request import Delivery, seeds_of, unconnected_is_zero
from ndistribute.autodiff.tracked import Tracked, untrack
from ndistribute.context import current_frame
from ndistribute.device import as_array

__all__ = ["GradientTape"]

Gradients = Any  # a nest of arrays, IndexedSlices and None


class GradientTape:
    """Record NumPy code, and compute gradients through it.

    Inside the ``with`` block, variables that are read and arrays that are watched can be
    differentiated through NumPy functions, operators and array methods. Tapes may be nested, and
    opened together; each sees what was recorded while it was open. Gradients themselves are
    constants: there are no second derivatives.

    Args:
        persistent: whether `gradient` may be called more than once. What was recorded is then kept
            as long as the tape is.
        watch_accessed_variables: whether trainable variables are watched as soon as they are read;
            if not, call `watch`.

    >>> import numpy as np
    >>> with GradientTape() as tape:
    ...     x = tape.watch(np.array([1.0, 2.0], np.float32))
    ...     loss = np.sum(np.square(x))
    >>> tape.gradient(loss, x)
    array([2., 4.], dtype=float32)
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent = persistent
        self._watch_accessed = watch_accessed_variables
        self._watched: dict[int, Any] = {}
        self._graph: Graph | None = None
        self._entries: list[Entry | None] | None = None
        self._leaves: dict[int, tuple[Any, int]] = {}
        # What was recorded between a start and a stop counts; the last may be open.
        self._spans: list[tuple[int, int | None]] = []
        self._is_open = False

    def __enter__(self) -> GradientTape:
        if self._graph is not None:
            raise RuntimeError("this GradientTape was entered before: make a new one for each use.")
        frame = current_frame()
        known = frame.recorder
        graph = known if isinstance(known, Graph) and known.is_open else Graph(frame)
        self._graph, self._entries, self._leaves = graph, graph.entries, graph.leaves
        self._is_open = True
        self._spans.append((len(graph.entries), None))
        graph.open(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def watch(self, value: Any) -> Any:
        """Make arrays or variables sources.

        Args:
            value: a nest of arrays, numbers or variables.

        Returns:
            The same nest with tracked arrays to compute with, and to name as sources. Variables
            come back as themselves.

        Raises:
            RuntimeError: the tape is not open.
            TypeError: a value is not of a floating dtype.

        >>> with GradientTape() as tape:
        ...     x, y = tape.watch((3.0, 4.0))
        ...     z = x * y
        >>> tape.gradient(z, {"x": x, "y": y})
        {'x': array(4.), 'y': array(3.)}
        """
        if not self._is_open:
            raise RuntimeError("GradientTape.watch needs an open tape: call it in the with block.")
        return tree.map_leaves(self._watch_one, value)

    def watches(self, variable: Any) -> bool:
        """Say whether reading a variable makes it a source."""
        return id(variable) in self._watched or (self._watch_accessed and bool(variable.trainable))

    def watched_variables(self) -> list[Any]:
        """Return the variables that were read and are watched, in the order of the first read."""
        return [variable for variable, _ in self._leaves.values() if self.watches(variable)]

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Pause the tape for a ``with`` block; what is computed there is a constant to it.

        Raises:
            RuntimeError: the tape is not open, or paused already.
        """
        graph, spans = self._graph, self._spans
        if not self._is_open or graph is None or spans[-1][1] is not None:
            raise RuntimeError("GradientTape.stop_recording needs a tape that is recording.")
        self._stop_span()
        graph.pause(self)
        try:
            yield
        finally:
            if self._is_open:
                graph.resume(self)
                spans.append((len(graph.entries), None))

    def gradient(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: str = "none",
        *,
        output_gradients: Any = None,
    ) -> Gradients:
        """Return the gradient of a target with respect to sources.

        Args:
            target: a nest of tracked arrays; the gradient is that of the sum of all elements.
            sources: a nest of variables and of tracked arrays.
            unconnected_gradients: what a source gets on which the target does not depend: None for
                ``"none"``, zeros for ``"zero"``.
            output_gradients: a nest like `target` with the gradient of something else with respect
                to the target, to be carried on to the sources; ones if it is None.

        Returns:
            The structure of `sources` with arrays of the sources' shapes and dtypes, which belong
            to the caller; `IndexedSlices` where a source was only read by rows.

        Raises:
            RuntimeError: the tape is not persistent and was asked before, or was never entered.
            TypeError: an operation has no derivative rule, or a source is a plain array or an
                integer variable.
            ValueError: an argument is not as described, or target and sources are swapped.
        """
        zero = unconnected_is_zero(unconnected_gradients)
        graph, entries = self._recorded()
        # A plain list of variables is what nearly everybody asks for, at each step.
        flat = type(sources) is list and all(map(_is_source, sources))
        leaves = sources if flat else tree.flatten(sources)
        delivery = Delivery(leaves, [self._place(source) for source in leaves], zero)
        pairs = [self._target(one) for one in tree.flatten(target)]
        seeds = seeds_of(pairs, target, output_gradients)
        if not self._persistent:
            self._close()
            self._entries = None
            graph.askers -= 1
        spans = [(start, len(entries) if stop is None else stop) for start, stop in self._spans]
        replica = current_frame().replica
        memory = None if replica is None else replica.communicator.gradient_memory
        backpropagate(
            entries,
            seeds,
            delivery.places,
            delivery,
            spans=spans,
            free=graph.askers == 0,
            memory=memory,
        )
        results = delivery.finish()
        if results and all(one is None for one in results):
            _check_order(graph, entries, leaves, seeds)
        return results if flat else tree.unflatten(sources, results)

    def _recorded(self) -> tuple[Graph, list[Entry | None]]:
        if self._graph is None:
            raise RuntimeError("this GradientTape recorded nothing: enter it with a with block.")
        if self._entries is None:
            raise RuntimeError(
                "a GradientTape that is not persistent gives one gradient, for all sources at "
                "once: pass them together, or make it with persistent=True."
            )
        return self._graph, self._entries

    def _watch_one(self, value: Any) -> Any:
        if getattr(value, "is_distributed_variable", False):
            self._watched[id(value)] = value
            return value
        graph, _ = self._recorded()
        if isinstance(value, Tracked) and value.graph is graph:
            return value
        array = as_array(untrack(value))
        if not is_differentiable(array):
            raise TypeError(
                f"GradientTape.watch got {array.dtype}: only floating values have gradients. "
                "Convert first, for example with x.astype(np.float32)."
            )
        return graph.leaf(array)

    def _place(self, source: Any) -> int | None:
        """Return where a source stands in the graph, None if it is not there."""
        graph = self._graph
        if isinstance(source, Tracked):
            return source.index if source.graph is graph else None
        known = self._leaves.get(id(source))
        if known is None:
            _check_source(source)
            return None
        # A leaf that several tapes share may be there for another one.
        shared = graph is not None and graph.shared
        return None if shared and not self.watches(source) else known[1]

    def _target(self, target: Any) -> tuple[int | None, Any]:
        """Return where a target stands in the graph, and its raw value."""
        if getattr(target, "is_distributed_variable", False):
            return self._place(target), untrack(target.tracked_value())
        if isinstance(target, Tracked) and target.graph is self._graph:
            return target.index, target.value
        return None, target

    def _close(self) -> None:
        if self._is_open and self._graph is not None:
            self._is_open = False
            self._stop_span()
            self._graph.close(self)

    def _stop_span(self) -> None:
        start, stop = self._spans[-1]
        if stop is None and self._entries is not None:
            self._spans[-1] = (start, len(self._entries))


def _is_source(value: Any) -> bool:
    return isinstance(value, Tracked) or getattr(value, "is_distributed_variable", False)


def _check_source(source: Any) -> None:
    if not _is_source(source):
        raise TypeError(
            f"a source of GradientTape.gradient is of type {type(source).__name__}: name "
            "variables, or what tape.watch(array) returned, as in tape.gradient(loss, variables)."
        )
    if not is_differentiable(source):
        raise TypeError(
            f"a source of GradientTape.gradient is {getattr(source, 'name', 'a variable')} of "
            f"dtype {source.dtype}: only variables of a floating dtype have gradients. Leave it "
            "out of the sources, or make it of another dtype."
        )


def _check_order(
    graph: Graph, entries: list[Entry | None], sources: list[Any], seeds: Mapping[int, Any]
) -> None:
    """Raise if everything that was asked for was computed after the target."""
    for source in sources:
        if not isinstance(source, Tracked) or source.graph is not graph:
            return
        if source.index <= max(seeds, default=source.index) or entries[source.index] is None:
            return
    raise ValueError(
        "every source of GradientTape.gradient was computed after the target, which can not depend "
        "on it. Are they swapped? Write tape.gradient(loss, variables)."
    )
