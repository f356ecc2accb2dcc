"""The gradient tape, which computes the gradients of what its graph recorded.

A tape determines when to record, which variables to watch, and for which sources to compute
gradients.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.autodiff import recorder
from ndistribute.autodiff.recorder import Entry, Spans, TapeGraph, finished
from ndistribute.autodiff.rules.unbroadcast import identity
from ndistribute.autodiff.tracked import Tracked, is_differentiable, refuse_detached, untrack
from ndistribute.context import current_frame
from ndistribute.devices import as_array
from ndistribute.indexed_slices import dense

Gradients = Any  # a nest of arrays, IndexedSlices and None


class GradientTape:
    """A tape that records NumPy code, and computes gradients through it.

    Inside the ``with`` block, it records the NumPy functions, operators and array methods that use
    variables or watched arrays. Several tapes may be open at once; each uses the operations that
    were recorded while it was open. For second derivatives, nest two tapes and open the outer tape
    first: it records the computation of the inner tape's `gradient`.

    Args:
        persistent: whether you may call `gradient` more than once. The tape then keeps the recorded
            arrays in memory as long as it exists.
        watch_accessed_variables: whether the tape watches every trainable variable that the block
            reads. If False, call `watch`.

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
        self._graph: TapeGraph | None = None
        self._entries: list[Entry | None] | None = None
        self._leaves: dict[int, tuple[Any, int]] = {}
        # Recorded ranges of entries, from start to stop; a stop of None means that it records.
        self._spans: list[tuple[int, int | None]] = []
        self._is_open = False

    def __enter__(self) -> GradientTape:
        if self._graph is not None:
            raise RuntimeError("this GradientTape was already used: create a new one for each use.")
        self._graph = graph = TapeGraph.joined(self)
        self._entries, self._leaves = graph.entries, graph.leaves
        self._is_open = True
        self._spans.append((len(graph.entries), None))
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def watch(self, value: Any) -> Any:
        """Watch arrays and variables; return the arrays as tracked arrays, for use with `gradient`.

        Args:
            value: a nest of arrays, numbers or variables of floating or complex dtypes.

        Returns:
            The same nest with tracked arrays instead of arrays and numbers: compute with these, and
            pass them to `gradient`. Variables stay unchanged.

        Raises:
            RuntimeError: the tape is not open.
            TypeError: an array or a number has another dtype.

        >>> with GradientTape() as tape:
        ...     x, y = tape.watch((3.0, 4.0))
        ...     z = x * y
        >>> tape.gradient(z, {"x": x, "y": y})
        {'x': array(4.), 'y': array(3.)}
        """
        if not self._is_open:
            raise RuntimeError(
                "GradientTape.watch needs an open tape: call it inside the with block of the tape."
            )
        return tree.map_leaves(self._watch_one, value)

    def watches(self, variable: Any) -> bool:
        """Return True if the tape watches a variable."""
        return id(variable) in self._watched or (self._watch_accessed and bool(variable.trainable))

    def watched_variables(self) -> list[Any]:
        """Return the watched variables that were read, in the order of their first reads."""
        return [variable for variable, _ in self._leaves.values() if self.watches(variable)]

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Return a context manager that pauses the tape; results of its block are constants.

        Raises:
            RuntimeError: the tape is not open, or is already paused.
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
            target: a nest of tracked arrays or variables; the function to differentiate is the sum
                of all their elements.
            sources: a nest of variables and tracked arrays.
            unconnected_gradients: the result for a source that does not affect the target: None
                with ``"none"``, zeros with ``"zero"``.
            output_gradients: a nest like `target`, with the gradient of another value with respect
                to the target, to propagate to the sources; None means ones.

        Returns:
            The structure of `sources`, with new arrays of the sources' shapes and dtypes;
            `IndexedSlices` for a source of which only rows were read.

        Raises:
            RuntimeError: the tape is not persistent and was used before, or was never entered.
            TypeError: an operation has no derivative rule, a target is None, or a source is a plain
                array or an integer variable.
            ValueError: an argument is invalid, or target and sources are swapped.
        """
        zero = str(getattr(unconnected_gradients, "value", unconnected_gradients)).lower()
        if zero not in ("none", "zero"):
            raise ValueError(
                f"unconnected_gradients must be 'none' or 'zero', got {unconnected_gradients!r}."
            )
        graph, entries = self._recorded()
        # Nearly all programs pass a plain list of variables, at each step.
        flat = type(sources) is list and all(map(_is_source, set(map(type, sources))))
        leaves = sources if flat else tree.flatten(sources)
        seeds = self._seeds(target, output_gradients)
        places = [self._place(source) for source in leaves]
        if not self._persistent:
            self._close()
            self._entries = None
            graph.askers -= 1
        spans = [(start, len(entries) if stop is None else stop) for start, stop in self._spans]
        if graph.entries is entries and graph is current_frame().recorder:
            gradients = recorder.tracked_pass(graph, seeds, set(places), spans)
        else:
            gradients = _backward(entries, seeds, places, spans, free=graph.askers == 0)
        results = _results(leaves, places, gradients, zero == "zero")
        if leaves and not gradients:
            _check_order(graph, entries, leaves, set(seeds))
        return results if flat else tree.unflatten(sources, results)

    def jacobian(self, target: Any, sources: Any, unconnected_gradients: str = "none") -> Gradients:
        """Return the derivative of each element of a target by each element of the sources.

        This makes a backward pass for each element of the target. The arguments are those of
        `gradient`, but the target is one array or variable.

        Returns:
            The structure of `sources`, with arrays of shape ``target.shape + source.shape``.

        >>> with GradientTape() as tape:
        ...     x = tape.watch(np.array([2.0, 3.0]))
        ...     y = x**2
        >>> tape.jacobian(y, x)
        array([[4., 0.],
               [0., 6.]])
        """
        return self._jacobian(target, sources, unconnected_gradients, 0)

    def batch_jacobian(
        self, target: Any, source: Any, unconnected_gradients: str = "none"
    ) -> Gradients:
        """Return the Jacobian of each example of a batch whose examples are independent.

        This makes a backward pass for each element of one example. The first axis of target and
        source is the batch; a ValueError is raised if its length differs.

        Returns:
            An array of shape ``(batch, *target.shape[1:], *source.shape[1:])``.

        >>> with GradientTape() as tape:
        ...     x = tape.watch(np.array([[2.0], [3.0]]))
        ...     y = np.concatenate([x, x**2], axis=1)
        >>> tape.batch_jacobian(y, x).tolist()
        [[[1.0], [4.0]], [[1.0], [6.0]]]
        """
        shapes = _raw(target).shape, _raw(source).shape
        if not all(shapes) or shapes[0][0] != shapes[1][0]:
            raise ValueError(
                "GradientTape.batch_jacobian needs a target and a source with the same first axis, "
                f"the batch, but got the shapes {shapes[0]} and {shapes[1]}."
            )
        return self._jacobian(target, source, unconnected_gradients, 1)

    def _jacobian(self, target: Any, sources: Any, unconnected: Any, axis: int) -> Gradients:
        """Return the Jacobians of each element on the axes from `axis` on, stacked there."""
        (graph, _), value, leaves = self._recorded(), _raw(target), tree.flatten(sources)
        size, persistent = math.prod(value.shape[axis:]), self._persistent
        if not persistent:
            self._close()
        self._persistent = True
        rows = []
        for k in range(size):
            seed = np.zeros_like(value, shape=(*value.shape[:axis], size))
            seed[..., k] = 1
            seed = seed.reshape(value.shape)
            options = {"unconnected_gradients": unconnected, "output_gradients": seed}
            rows.append(self.gradient(target, leaves, **options))
        self._persistent = persistent
        if not persistent:
            self._entries, graph.askers = None, graph.askers - 1
        results: list[Any] = []
        for source, *parts in zip(leaves, *rows, strict=True):
            zero = np.zeros_like(_raw(source))
            stack = [zero if part is None else dense(part) for part in parts] or [zero[None][:0]]
            joined = np.stack(stack, axis).reshape(value.shape + zero.shape[axis:])
            known = not size or any(part is not None for part in parts)
            results.append(joined if known else None)
        return tree.unflatten(sources, results)

    def _recorded(self) -> tuple[TapeGraph, list[Entry | None]]:
        if self._graph is None:
            raise RuntimeError("this GradientTape has recorded nothing: use it in a with block.")
        if self._entries is None:
            raise RuntimeError(
                "GradientTape.gradient can be called only once if the tape is not persistent: pass "
                "all sources together, or create the tape with persistent=True."
            )
        return self._graph, self._entries

    def _watch_one(self, value: Any) -> Any:
        if _is_variable(value):
            self._watched[id(value)] = value
            return value
        graph, _ = self._recorded()
        if isinstance(value, Tracked) and value.graph is graph:
            return value
        refuse_detached("GradientTape.watch", value)
        array = as_array(untrack(value))
        if not is_differentiable(array):
            raise TypeError(
                f"GradientTape.watch got {array.dtype}: only floating dtypes have gradients. "
                "Convert first, for example with x.astype(np.float32)."
            )
        return graph.leaf(array)

    def _place(self, source: Any) -> int | None:
        """Return the entry of a source in the graph; None if it has none."""
        if isinstance(source, Tracked):
            return source.index if source.graph is self._graph else None
        known = self._leaves.get(id(source))
        if known is None:
            _check_source(source)
            return None
        # Another tape that shares the graph may have recorded this leaf.
        return known[1] if self.watches(source) else None

    def _seeds(self, targets: Any, output_gradients: Any) -> dict[int, Any]:
        """Return the gradients at the start of the backward pass, by entry."""
        flat = tree.flatten(targets)
        gradients: list[Any] = [None] * len(flat)
        if output_gradients is not None:
            if not tree.same_structure(targets, output_gradients):
                raise ValueError("output_gradients must have the same structure as the target.")
            gradients = tree.flatten(output_gradients)
        seeds: dict[int, Any] = {}
        place: int | None
        for target, gradient in zip(flat, gradients, strict=True):
            if target is None:
                raise TypeError(
                    "GradientTape.gradient: a target is None, such as the gradient of a source "
                    "on which nothing depends. Leave it out, or ask for it with "
                    "unconnected_gradients='zero'."
                )
            if isinstance(target, Tracked) and target.graph is self._graph:
                place, value = target.index, target.value
            elif _is_variable(target):
                place, value = self._place(target), _raw(target)
                if place is None and self.watches(target) and is_differentiable(value):
                    # It was not read, but it may be a source.
                    place = len(self._recorded()[1])
                    self._leaves[id(target)] = target, place
                    self._recorded()[1].append(None)
            else:
                continue
            if place is not None:
                _add_seed(seeds, place, _seed(value, gradient))
        return seeds

    def _close(self) -> None:
        if self._is_open and self._graph is not None:
            self._is_open = False
            self._stop_span()
            self._graph.close(self)

    def _stop_span(self) -> None:
        start, stop = self._spans[-1]
        if stop is None and self._entries is not None:
            self._spans[-1] = (start, len(self._entries))


def vjp(
    function: Callable[[Any], Any], arguments: Sequence[Any], nested: bool = False
) -> tuple[Any, Pullback]:
    """Return a function's result, and a `Pullback` that computes the gradients of its arguments.

    It differentiates like a tape that watches only these arguments, in a third of a tape's time.
    Tapes that are open outside have no effect on it. Inside the function of another `vjp`, that
    `vjp` tracks the result and the gradients.

    Args:
        function: takes the list of arguments, and returns an array or a sequence of arrays.
        arguments: arrays, numbers and other values; only values of floating dtypes have gradients.
        nested: whether the gradients can be differentiated: see `Pullback.recorded`.

    >>> result, pullback = vjp(lambda xs: xs[0] * xs[1], [np.array(3.0), np.array(4.0)])
    >>> pullback([np.array(1.0)], [0, 1])
    [array(4.), array(3.)]
    """
    frame = current_frame()
    outer: Any = frame.recorder
    if isinstance(outer, TapeGraph) and outer.nested and not outer.is_recording:
        leaves = [_separate(outer, x) for x in arguments]
        start, result = len(outer.entries), function(leaves)
        return result, Pullback(outer, leaves, result, [(start, len(outer.entries))])
    graph = TapeGraph(frame)
    if nested:
        graph.nested, graph.lock = True, threading.Lock()
    leaves = [graph.leaf(x) if is_differentiable(x) else x for x in arguments]
    frame.recorder = graph
    try:
        result = function(leaves)
    finally:
        frame.recorder = outer
    return untrack(result), Pullback(graph, leaves, result, [(0, len(graph.entries))])


class Pullback:
    """A function from the gradients of the results of `vjp` to the gradients of its arguments."""

    def __init__(self, graph: TapeGraph, arguments: list[Any], result: Any, spans: Spans) -> None:
        self._graph, self._arguments, self._spans = graph, arguments, spans
        self._results = list(result) if isinstance(result, list | tuple) else [result]
        self._rules: dict[Any, Any] = {}  # By argument, if the result is of one operation.
        *leaves, last = graph.entries or [None]
        if last is None or graph.nested or any(leaves) or type(last[1]) is not tuple:
            return
        if isinstance(result, Tracked) and result.index == len(leaves):
            parents, rules = last
            if len(set(parents)) == len(parents):  # Most functions are like this, and need no pass.
                self._rules = dict(zip(parents, rules, strict=True))

    def __call__(
        self, gradients: Sequence[Any], positions: Sequence[int], again: bool = False
    ) -> list[Any]:
        """Return the gradients of some arguments; zeros for an argument without influence.

        Args:
            gradients: the gradients of all results; None for a result without a gradient.
            positions: the positions of these arguments.
            again: whether it will be called again; it then keeps its arrays.
        """
        seeds: dict[int, Any] = {}
        for target, gradient in zip(self._results, gradients, strict=True):
            if gradient is not None and isinstance(target, Tracked):
                _add_seed(seeds, target.index, _seed(target.value, gradient, copied=False))
        sources, graph = [self._arguments[k] for k in positions], self._graph
        places = [source.index if isinstance(source, Tracked) else None for source in sources]
        if graph.nested and graph is current_frame().recorder:
            changes = recorder.tracked_pass(graph, seeds, set(places), self._spans)
        elif self._rules and seeds and current_frame().replica is None:
            (seed,) = seeds.values()
            changes = {k: finished(rule(seed)) for k, rule in self._rules.items() if k in places}
        else:
            free = not (again or graph.nested)
            changes = _backward(graph.entries, seeds, places, self._spans, free=free)
        return _results(sources, places, changes, zero=True)

    def recorded(
        self, gradients: Sequence[Any], positions: Sequence[int]
    ) -> tuple[list[Any], Pullback]:
        """Return the gradients of some arguments, and a pullback for their own gradients.

        The arguments of the new pullback are the gradients that are not None, and the arguments of
        this one.
        """
        frame, graph = current_frame(), self._graph
        outer, frame.recorder = frame.recorder, graph
        try:
            with graph.lock:  # Several threads may differentiate the same results.
                upstream = [None if g is None else _separate(graph, g) for g in gradients]
                start, tracked = len(graph.entries), self(upstream, positions)
                spans, has_rows = [*self._spans, (start, len(graph.entries))], graph.has_rows
        finally:
            frame.recorder = outer
        arguments = [*(g for g in upstream if g is not None), *self._arguments]
        # Rows stay rows, so their user computes the same whether or not this is recorded.
        plain = self(gradients, positions, again=True) if has_rows else untrack(tracked)
        return tracked if outer is graph else plain, Pullback(graph, arguments, tracked, spans)


def _separate(graph: TapeGraph, value: Any) -> Any:
    """Return an argument with an entry that no other value has, if it can have a gradient."""
    if not isinstance(value, Tracked):
        return graph.leaf(value) if is_differentiable(value) else value
    copied = graph.record(value.value, (value.index,), (identity,))
    graph.again[copied.index] = None, lambda: (identity,)
    return copied


def _backward(
    entries: list[Entry | None],
    seeds: Mapping[int, Any],
    places: Sequence[int | None],
    spans: Spans,
    free: bool,
) -> dict[Any, Any]:
    """Return the gradients at some places, in the memory that this replica reduces, if any."""
    replica = current_frame().replica
    memory = None if replica is None else replica.communicator.gradient_memory
    sources = {place for place in places if place is not None}
    return recorder.backpropagate(entries, seeds, sources, spans=spans, free=free, memory=memory)


def _add_seed(seeds: dict[int, Any], place: int, seed: Any) -> None:
    seeds[place] = seeds[place] + seed if place in seeds else seed


def _results(
    sources: Sequence[Any], places: Sequence[int | None], gradients: dict[Any, Any], zero: bool
) -> list[Any]:
    """Return the gradient of each source, each in a separate array."""
    results: list[Any] = []
    for k, (source, place) in enumerate(zip(sources, places, strict=True)):
        gradient = gradients.get(place)
        if gradient is None:
            results.append(np.zeros_like(_raw(source)) if zero else None)
            continue
        if place in places[:k]:
            gradient = copy.deepcopy(gradient)
        if gradient.dtype.kind == "c":
            # The rules compute the derivative of the analytic function; the result is the
            # direction of steepest ascent, as in TensorFlow.
            gradient = np.conj(gradient)
        results.append(gradient)
    return results


def _raw(value: Any) -> Any:
    return as_array(untrack(value.tracked_value() if _is_variable(value) else value))


def _is_variable(value: Any) -> bool:
    return getattr(value, "is_distributed_variable", False)


def _seed(value: Any, gradient: Any, copied: bool = True) -> Any:
    """Return the gradient of a target, in its shape and dtype; ones if the user passed none.

    Rules may keep it, so it is a copy if the user could change the original.
    """
    if gradient is None:
        return type(value)(1) if isinstance(value, np.generic) else np.ones_like(value)
    if not (isinstance(gradient, Tracked) and gradient.graph is current_frame().recorder):
        gradient = as_array(untrack(gradient))
    if gradient.shape != value.shape:
        raise ValueError(
            f"output_gradients has shape {gradient.shape}, but the target has {value.shape}: they "
            "must be the same."
        )
    gradient = gradient.astype(value.dtype, copy=copied)
    return np.conj(gradient) if value.dtype.kind == "c" else gradient


def _is_source(kind: type) -> bool:
    return issubclass(kind, Tracked) or getattr(kind, "is_distributed_variable", False)


def _check_source(source: Any) -> None:
    if not _is_source(type(source)):
        raise TypeError(
            f"a source of GradientTape.gradient is of type {type(source).__name__}: pass "
            "variables, or results of tape.watch(array), as in tape.gradient(loss, variables)."
        )
    if not is_differentiable(source):
        raise TypeError(
            f"a source of GradientTape.gradient is {getattr(source, 'name', 'a variable')} of "
            f"dtype {source.dtype}: only variables of a floating dtype have gradients. Remove "
            "it from the sources, or create it with another dtype."
        )


def _check_order(graph: TapeGraph, entries: list[Any], sources: list[Any], seeds: set[int]) -> None:
    """Raise an error if all sources were computed after the target."""
    for source in sources:
        if not isinstance(source, Tracked) or source.graph is not graph:
            return
        if source.index <= max(seeds, default=source.index) or entries[source.index] is None:
            return
    raise ValueError(
        "all sources of GradientTape.gradient were computed after the target, which therefore does "
        "not depend on them. Are they swapped? Write tape.gradient(loss, variables)."
    )
