"""Kernels: variables, control flow, random numbers, gradients and other stateful operations.

A kernel gets the step, its node and the values of its inputs, and returns the value of its output,
or a list if it has another number of outputs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ndistribute import event_files
from ndistribute.autodiff.tape import vjp
from ndistribute.autodiff.tracked import Tracked, stop_gradient, untrack
from ndistribute.devices import as_array, to_host
from ndistribute.errors import AbortedError, InvalidArgumentError
from ndistribute.graph.definition import OperationDef
from ndistribute.graph.ops import kernel
from ndistribute.graph.shapes import Known, Shape, shared_by
from ndistribute.graph.step import Node, Step
from ndistribute.indexed_slices import IndexedSlices, dense, map_values
from ndistribute.numpy_functions import check_shape
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.stored_variables import Aggregation

kernel("identity")(lambda step, node, inputs: inputs[0])
kernel("constant")(lambda step, node, inputs: node.constant)
kernel("group")(lambda step, node, inputs: [])
kernel("stop_gradient", smooth=False)(lambda step, node, inputs: stop_gradient(inputs[0]))
kernel("add_gradients", keeps_rows=True)(lambda step, node, inputs: _total(inputs))
kernel("variable", reads=True, smooth=False, pure=False)(lambda step, node, inputs: [])


@kernel("placeholder", pure=False)
def _placeholder(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    why = f"placeholder {node.name!r} has no value: add it to feed_dict of this run."
    raise InvalidArgumentError(why)


@kernel("read", reads=True, pure=False)
def _read(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    return step.resources.variables.value(node.attributes["variable"])


@kernel("initialized_value", reads=True, pure=False)
def _initialized_value(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    value = step.resources.variables.get(node.attributes["variable"])
    return inputs[0] if value is None else value


@kernel("is_initialized", reads=True, smooth=False, pure=False)
def _is_initialized(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    return np.bool_(step.resources.variables.get(node.attributes["variable"]) is not None)


@kernel("assign", smooth=False, pure=False)
def _assign(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    name = node.attributes["variable"]
    dtype, shape = node.attributes.get("dtype"), node.attributes.get("shape")
    value = as_array(inputs[0])
    if dtype is not None and value.dtype.kind not in "USO":
        value = value.astype(dtype, copy=False)
        if value.dtype.hasobject:
            raise InvalidArgumentError(
                f"variable {name!r} cannot hold an array of Python objects: assign numbers of a "
                "NumPy dtype."
            )
    if shape is not None and value.shape != tuple(shape):
        raise InvalidArgumentError(
            f"variable {name!r} has shape {tuple(shape)}, but the value to assign has shape "
            f"{value.shape}: they must be the same."
        )
    step.resources.variables.assign(name, value, keeps_shape=shape is not None)
    return value


@kernel("assign_add", "assign_sub", smooth=False, pure=False)
def _assign_changed(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    by, update = inputs[0], step.resources.variables.update
    if isinstance(by, IndexedSlices):
        return update(node.attributes["variable"], node.type, by.values, by.indices)
    return update(node.attributes["variable"], node.type, as_array(by))


@kernel("send")
def _send(step: Step, node: Node, inputs: Sequence[Any]) -> list[Any]:
    value = inputs[0] if inputs else None
    step.outside.send(node.attributes["to"], {node.attributes["key"]: value})
    return []


@kernel("recv", waits=True)
def _recv(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    raise InvalidArgumentError(
        f"{node.name!r} waits for another task inside a cond or while_loop: place everything "
        "inside on one task."
    )


@kernel("apply_rule", pure=False)
def _apply_rule(step: Step, node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Update a variable and its slots by a gradient and a learning rate."""
    step.resources.variables.apply(_optimizer_step(node.attributes, *inputs))
    return []


def _optimizer_step(options: dict[str, Any], gradient: Any, learning_rate: Any) -> m.Apply:
    if isinstance(gradient, IndexedSlices) and options["rows_alone"]:
        rows = gradient.summed()
        part = m.Gradient(rows.values, rows.indices)
    else:
        array = as_array(dense(gradient))
        part = m.Gradient(array.astype(np.float64) if array.dtype.kind in "biu" else array)
    names, slots, rate = (options["variable"],), (tuple(options["slots"]),), float(learning_rate)
    rule, hyperparameters = options["rule"], options["hyperparameters"]
    return m.Apply(names, (part,), slots, options["count"], rule, rate, hyperparameters)


class _Collected(Aggregation):
    """The gradients of one step of a variable that several workers update together."""

    def __init__(self) -> None:
        super().__init__(step=-1)  # The first gradient tells for which step to collect.
        self.changed = threading.Condition()
        self.round = 0  # The number of calls of `begin`.

    def begin(self, step: int) -> None:
        """Drop the collected gradients, collect for a step, and wake the waiting workers."""
        super().begin(step)
        self.round += 1
        self.changed.notify_all()

    def wake(self) -> None:
        """Wake the waiting workers to check their steps, because one of these has failed."""
        with self.changed:
            self.changed.notify_all()


def _collected(step: Step, node: Node) -> _Collected:
    return step.resources.get("aggregate", node.attributes["variable"], _Collected)


@kernel("aggregate", waits=True, pure=False)
def _aggregate(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    """Add a worker's gradient to those of its step, wait for the update, return the next step.

    The last gradient that is needed makes the update, and later gradients are dropped. A worker
    that must contribute to the same step again does not wait. If an earlier step was restored, a
    worker may be ahead. It then contributes to the restored step, maybe for the second time.
    Otherwise it would wait for the others in one task, and they for it in another.
    """
    gradient, stamp, again, learning_rate = inputs
    change = _optimizer_step(node.attributes, gradient, learning_rate)
    aggregate = _collected(step, node)
    step.on_abort.append(aggregate.wake)
    with aggregate.changed:
        if aggregate.step < 0:
            aggregate.begin(int(stamp))
        if stamp >= aggregate.step:
            current, count = aggregate.round, len(aggregate.contributors)
            aggregate.check(change, aggregate.step)
            aggregate.add(f"gradient {count}", change, aggregate.step)
            if count + 1 >= node.attributes["replicas"]:
                means = tuple(aggregate.finish())
                step.resources.variables.apply(msgspec.structs.replace(change, gradients=means))
            elif again:
                return np.int64(aggregate.step)
            aggregate.changed.wait_for(lambda: aggregate.round != current or step.error is not None)
            step.check()
        return np.int64(aggregate.step)


@kernel("restart_aggregate", pure=False)
def _restart_aggregate(step: Step, node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Start over to collect for a step that was restored."""
    aggregate = _collected(step, node)
    with aggregate.changed:
        aggregate.begin(int(inputs[0]))
    return []


@kernel("count_step", pure=False)
def _count_step(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    """Set the step count to the step that all variables have reached.

    A worker that contributed to a variable's last step had counted the step before. So a variable
    that is further still collects for steps from before the count was set back.
    """
    reached, furthest = inputs
    variables, name = step.resources.variables, node.attributes["variable"]
    with variables.find(name).lock:
        old = variables.value(name)
        if furthest > old + 1:
            raise AbortedError(
                f"gradients are collected for step {furthest}, but global_step is {old}: the chief "
                "must run chief_init_op after it has initialised or restored the variables, as the "
                "hook of make_session_run_hook() does. Then a new session can continue."
            )
        variables.assign(name, as_array(np.maximum(old, reached).astype(old.dtype)))
        return variables.value(name)


@kernel("local_step", pure=False)
def _local_step(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    """Return the last step that all variables of the session have made, and whether to continue.

    A worker contributes to each step as often as the attribute `turns` says.
    """
    kept = step.kept("local step", node.name, lambda: [inputs[0]])
    number = min(kept[0], inputs[0])  # After a restore, the input is lower.
    turn = step.kept("turn", node.name, lambda: [number, 0])
    turn[:] = number, turn[1] + 1 if turn[0] == number else 1
    return [number, np.bool_(turn[1] < node.attributes["turns"])]


@kernel("keep_local_step", pure=False)
def _keep_local_step(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    step.kept("local step", node.attributes["of"], lambda: [0])[0] = inputs[0]
    return inputs[0]


@kernel("cond")
def _cond(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    taken, other = node.bodies
    results = (taken if inputs[0] else other).run(step, inputs[1:])
    return results[0] if node.outputs == 1 else results


@kernel("while")
def _while(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    condition, body = node.bodies
    loop, captured = list(inputs[: node.outputs]), list(inputs[node.outputs :])
    left = node.attributes.get("maximum_iterations")
    while (left is None or left > 0) and condition.run(step, [*loop, *captured])[0]:
        loop = body.run(step, [*loop, *captured])
        left = None if left is None else left - 1
        step.check()
    return loop[0] if node.outputs == 1 else loop


def _of_client(step: Step, node: Node) -> Any:
    """Return the function or iterator of the client's process that an operation calls."""
    function = step.functions.get(node.attributes["function"])
    if function is None:
        raise InvalidArgumentError(
            f"{node.name!r} calls a Python function, which exists only in the client's process: "
            "place it on the task of a server in that process, use a session without a target, or "
            "feed its result."
        )
    return function


@kernel("next_batch", waits=True, pure=False)
def _next_batch(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    iterator = _of_client(step, node)
    position = step.resources.get("position", iterator.number, iterator.begin)
    batch = iterator.take(position)
    return batch[0] if node.outputs == 1 else batch


@kernel("first_batch", pure=False)
def _first_batch(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    iterator = _of_client(step, node)
    iterator.restart(step.resources.get("position", iterator.number, iterator.begin))
    return []


@kernel("py_function", waits=True, smooth=False, pure=False)
def _py_function(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    result = _of_client(step, node)(*map(untrack, inputs))
    if node.outputs == 1:
        return as_array(result).copy()  # The function may change it later.
    return [as_array(value).copy() for value in (result if node.outputs else ())]


def _drawn(definition: OperationDef, inputs: Sequence[Known]) -> list[Known]:
    """Return what is known of random numbers, whose shape is the only input."""
    dtype = np.dtype(definition.attributes["dtype"])
    lengths = inputs[0].values or ()
    return [shared_by([Known(dtype, Shape(shape)) for shape in lengths]) if lengths else Known()]


@kernel("random", smooth=False, pure=False, shape=_drawn)
def _random(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    options = node.attributes
    generator, lock = step.kept(
        "generator",
        node.name,
        lambda: (np.random.Generator(np.random.PCG64(options["seed"])), threading.Lock()),
    )
    shape = tuple(int(n) for n in to_host(inputs[0]).reshape(-1))
    check_shape(shape)
    low, high, dtype = options["low"], options["high"], np.dtype(options["dtype"])
    with lock:
        if options["distribution"] == "normal":
            return (low + high * generator.standard_normal(shape)).astype(dtype)
        if options["distribution"] == "truncated_normal":
            return (low + high * _truncated(generator, shape)).astype(dtype)
        if dtype.kind in "iu":
            return generator.integers(low, high, shape, dtype)
        return (low + (high - low) * generator.random(shape)).astype(dtype)


def _truncated(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Return normal numbers within two standard deviations; numbers outside are drawn again."""
    drawn = generator.standard_normal(shape)
    while (outside := np.abs(drawn) > 2).any():
        drawn[outside] = generator.standard_normal(int(outside.sum()))
    return drawn


def run_recorded(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    """Run a node whose gradient is an operation of the same step, and keep the way back."""
    if node.type == "gradient":
        return _gradient(step, node, inputs)
    function, arguments = functools.partial(node.compute, step, node), inputs
    if IndexedSlices in map(type, inputs):
        if node.type == "sum_of_squares":
            raise InvalidArgumentError(
                f"{node.name!r} is a norm of IndexedSlices whose rows for the same index are not "
                "added yet, so it has no gradient. Convert the IndexedSlices to an array first, "
                "for example with np.positive(gradient)."
            )
        arguments = list(map(dense, inputs))
    result, pullback = vjp(function, arguments, node.is_nested)
    step.pullbacks[node.name] = inputs, pullback, node.gradients > 1
    is_of_rows = arguments is not inputs and node.op.keeps_rows
    return function(inputs) if is_of_rows and not isinstance(result, Tracked) else result


@kernel("gradient")
def _gradient(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    """Return the gradients of an operation's arguments from those of its outputs.

    The arguments of a gradient operation are its inputs, and then those of its operation.
    """
    of, seeds_left = node.attributes["of"], iter(inputs)
    near, pullback, again = step.pullbacks[of]
    if not again:  # No other gradient needs what it keeps.
        del step.pullbacks[of]
    seeds = [dense(next(seeds_left)) if there else None for there in node.attributes["upstream"]]
    positions = node.attributes["inputs"]
    if node.gradients:
        gradients, back = pullback.recorded(seeds, positions)
        step.pullbacks[node.name] = near, back, node.gradients > 1
    else:
        gradients = pullback(seeds, positions, again)
    return gradients[0] if node.outputs == 1 else gradients


def _total(gradients: Sequence[Any]) -> Any:
    """Return the sum of gradients: rows, if all are rows."""
    if all(isinstance(gradient, IndexedSlices) for gradient in gradients):
        values = np.concatenate([rows.values for rows in gradients])
        indices = np.concatenate([rows.indices for rows in gradients])
        return IndexedSlices(values, indices, gradients[0].dense_shape)
    total = dense(gradients[0])
    for gradient in gradients[1:]:
        total = total + dense(gradient)
    return total


@kernel("sum_of_squares")
def _sum_of_squares(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    """Return the sum of the squares; rows of the same index are not added up first."""
    return np.sum(np.square(getattr(inputs[0], "values", inputs[0])))


@kernel("scaled", keeps_rows=True)
def _scaled(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    """Return an array or rows times a number."""
    return map_values(lambda values: values * inputs[1], inputs[0])


@kernel("summary")
def _summary(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    tag, kind, value = node.attributes["tag"], node.attributes["kind"], to_host(dense(inputs[0]))
    if kind == "scalar":
        return _bytes(event_files.scalar(tag, float(value)))
    if kind == "histogram":
        return _bytes(event_files.histogram(tag, value))
    pictures = enumerate(map(_pixels, value[: node.attributes["most"]]))
    return _bytes(b"".join(event_files.image(f"{tag}/image/{k}", each) for k, each in pictures))


@kernel("merge_summaries")
def _merge_summaries(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    return _bytes(b"".join(part.item() for part in inputs))


def _bytes(value: bytes) -> Any:
    return np.array(value, object)


def _pixels(picture: Any) -> Any:
    """Return a picture as bytes; floats are scaled to their range, as TensorFlow does."""
    if picture.dtype == np.uint8:
        return picture
    least, most = float(picture.min()), float(picture.max())
    if least >= 0:
        return (picture * (255.0 / (most or 1.0))).astype(np.uint8)
    return (picture * (127.0 / max(-least, most)) + 128.0).astype(np.uint8)
