"""Pure functions that choose the operations of a step and cut them by task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ndistribute.errors import InvalidArgumentError
from ndistribute.graph.definition import OperationDef


@dataclass
class Part:
    """The operations that one task runs in a step."""

    operations: list[OperationDef] = field(default_factory=list)
    feeds: list[str] = field(default_factory=list)  # The step's feeds that the task needs.
    fetches: list[str] = field(default_factory=list)  # The step's fetches that the task has.


def needs(definition: OperationDef, fed: set[str]) -> list[str]:
    """Return the names of the operations that run before an operation."""
    inputs = [name.rpartition(":")[0] for name in definition.inputs if name not in fed]
    controls = [name for name in definition.controls if f"{name}:0" not in fed]
    of = [_gradient_of(definition)] if definition.kind == "gradient" else []
    return [*inputs, *controls, *of]


def pruned(
    definitions: Mapping[str, OperationDef],
    fetches: Sequence[str],
    targets: Sequence[str],
    feeds: Sequence[str],
) -> list[OperationDef]:
    """Return the operations that a step needs, each after the operations that it needs itself.

    Args:
        definitions: all operations by name.
        fetches: names of tensors to compute.
        targets: names of operations to run.
        feeds: names of tensors whose values each step gets.

    Raises:
        InvalidArgumentError: an operation is missing, or needs itself.
    """
    fed = set(feeds)
    needed: set[str] = set()
    stack = [*targets, *(name.rpartition(":")[0] for name in fetches if name not in fed)]
    while stack:
        name = stack.pop()
        if name in needed:
            continue
        if name not in definitions:
            raise InvalidArgumentError(f"there is no operation {name!r} in the graph.")
        needed.add(name)
        stack += needs(definitions[name], fed)
    return in_order([op for name, op in definitions.items() if name in needed], fed)


def in_order(definitions: Sequence[OperationDef], fed: set[str]) -> list[OperationDef]:
    """Return the operations in an order in which each comes after those that it needs.

    Raises:
        InvalidArgumentError: an input is not there, or an operation needs itself.
    """
    by_name = {definition.name: definition for definition in definitions}
    ordered: dict[str, OperationDef] = {}
    begun: set[str] = set()  # Operations whose inputs are visited.
    for definition in definitions:
        stack = [definition]
        while stack:
            op = stack[-1]
            later = []
            if op.name not in begun:
                begun.add(op.name)
                later = [name for name in needs(op, fed) if name not in ordered]
            if not later:
                ordered.setdefault(op.name, stack.pop())
                continue
            for name in later:
                if name in begun:
                    why = f"operations {op.name!r} and {name!r} wait for each other."
                    raise InvalidArgumentError(why, op=op.name)
                if name not in by_name:
                    why = f"operation {op.name!r} needs {name!r}, which is not in the graph."
                    raise InvalidArgumentError(why, op=op.name)
            stack += [by_name[name] for name in reversed(later)]
    return list(ordered.values())


def placed(
    operations: Sequence[OperationDef], task_of: Callable[[OperationDef], str]
) -> dict[str, str]:
    """Return the task of each operation; a gradient is computed where its operation is.

    Raises:
        InvalidArgumentError: a body changes a variable of another task than its own.
    """
    tasks = {op.name: task_of(op) for op in operations if op.kind != "gradient"}
    for op in operations:
        if op.kind == "gradient":
            tasks[op.name] = tasks.get(_gradient_of(op)) or task_of(op)
        for inner in within(op):
            if "variable" in inner.attributes and task_of(inner) != tasks[op.name]:
                raise InvalidArgumentError(
                    f"operation {op.name!r} runs on {tasks[op.name]}, but changes a variable on "
                    f"{task_of(inner)}: place the operation there, with device().",
                    op=op.name,
                )
    return tasks


def within(definition: OperationDef) -> Iterator[OperationDef]:
    """Yield the operations in the bodies of an operation."""
    for body in definition.bodies:
        for inner in body.operations:
            yield inner
            yield from within(inner)


def cut(
    operations: Sequence[OperationDef],
    tasks: Mapping[str, str],
    fetches: Sequence[str],
    feeds: Sequence[str],
) -> dict[str, Part]:
    """Return the part of each task, with operations that send and receive at the cuts.

    A value goes once from its task to each task that uses it, even if many operations use it.

    Args:
        operations: the operations of a step.
        tasks: the task of each operation.
        fetches: names of tensors to return.
        feeds: names of tensors whose values each step gets.
    """
    parts: dict[str, Part] = {}
    fed, moved = set(feeds), set()

    def part_of(task: str) -> Part:
        return parts.setdefault(task, Part())

    def moving(producer: str, tensor: str, to: str) -> str:
        """Return the operation in task `to` that receives a tensor, or the end of a producer."""
        receiver = f"_recv/{tensor or producer}"
        if (receiver, to) not in moved:
            moved.add((receiver, to))
            key = tensor or f"^{producer}"
            controls = () if tensor else (producer,)
            inputs = (tensor,) if tensor else ()
            name = f"_send/{tensor or producer}{to}"
            attributes = {"key": key, "to": to}
            sender = OperationDef(name, "send", inputs, controls, 0, attributes=attributes)
            part_of(tasks[producer]).operations.append(sender)
            attributes = {"key": key, "from": tasks[producer]}
            part_of(to).operations.append(OperationDef(receiver, "recv", attributes=attributes))
        return receiver

    for op in _with_free_ends(operations, tasks, fed):
        task = tasks[op.name]
        part, inputs, controls = part_of(task), [], []
        for tensor in op.inputs:
            producer = tensor.rpartition(":")[0]
            if tensor in fed:
                if tensor not in part.feeds:
                    part.feeds.append(tensor)
                inputs.append(tensor)
            elif tasks.get(producer, task) == task:
                inputs.append(tensor)
            else:
                inputs.append(f"{moving(producer, tensor, task)}:0")
        for producer in op.controls:
            if f"{producer}:0" in fed:
                continue
            here = tasks.get(producer, task) == task
            controls.append(producer if here else moving(producer, "", task))
        changes = {"inputs": tuple(inputs), "controls": tuple(controls)}
        part.operations.append(msgspec.structs.replace(op, **changes))
    for tensor in dict.fromkeys(fetches):
        part_of(tasks[tensor.rpartition(":")[0]]).fetches.append(tensor)
    return parts


def _with_free_ends(
    operations: Sequence[OperationDef], tasks: Mapping[str, str], fed: set[str]
) -> Iterator[OperationDef]:
    """Yield the operations; a group at the end of a step waits only for its own task.

    The step ends when all tasks have reported that their operations have ended.
    """
    awaited = {name for op in operations for name in needs(op, fed)}
    for op in operations:
        if op.kind == "group" and op.name not in awaited:
            near = [name for name in op.controls if tasks.get(name) == tasks[op.name]]
            yield msgspec.structs.replace(op, controls=tuple(near))
        else:
            yield op


def _gradient_of(definition: OperationDef) -> str:
    """Return the operation whose gradient one computes."""
    of = definition.attributes.get("of")
    if not isinstance(of, str):
        raise InvalidArgumentError(
            f"gradient {definition.name!r} names no operation whose gradient it is."
        )
    return of
