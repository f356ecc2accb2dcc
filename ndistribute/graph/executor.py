"""Run the operations of one task: compile their definitions once, then run steps.

A plan without parallelism runs its operations in order on the calling thread. If several operations
take long, or some wait for values of other tasks, more threads help. An operation is then ready
when its inputs are there.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from ndistribute import errors
from ndistribute.autodiff.tracked import Tracked, untrack
from ndistribute.errors import InvalidArgumentError, OperationError
from ndistribute.graph.definition import BodyDef, OperationDef, filler, refuse_objects, unpack
from ndistribute.graph.kernels import run_recorded
from ndistribute.graph.ops import Kernel, op_named
from ndistribute.graph.partition import in_order, needs
from ndistribute.graph.placement import run_on_device
from ndistribute.graph.step import Step
from ndistribute.indexed_slices import IndexedSlices, dense
from ndistribute.mistakes import count_of
from ndistribute.numpy_functions import check_call
from ndistribute.ownership import read_only
from ndistribute.parameter_server.stored_variables import Refused

_LONG_SECONDS = 2e-4  # An operation that takes longer is worth another thread.
_TRIALS = 3  # Steps whose operations are timed.
_REFUSALS = {"unknown": errors.FailedPreconditionError, "full": errors.UnavailableError}
"""The errors for changes that the variables refuse."""
_TOGETHER_BYTES = 1 << 22  # The largest total size of values that go in one message.
_CHECK_SECONDS = 0.05  # The time between looks at whatever may end a waiting step.
_APART_WORK = 1 << 32  # A failed step does not wait for calls of so many multiplications.
_GIVE_UP_SECONDS = 1.0  # For threads of a failed step, which may be in a long call.


class PlanNode:
    """An operation of a plan."""

    def __init__(self, definition: OperationDef, soft: bool) -> None:
        self.definition, self.name, self.type = definition, definition.name, definition.kind
        self.attributes, self.outputs = definition.attributes, definition.outputs
        self.inputs: list[int] = []  # The places of the inputs among the step's values.
        self.slot = 0  # The place of the first output.
        self.last: list[int] = []  # The inputs that no later operation uses.
        self.next: list[int] = []  # The operations that wait for this one.
        self.waits = 0  # The number of operations that this one waits for.
        self.gradients = 0  # The number of operations that compute its gradients.
        self.seconds = 0.0
        self.run_on = run_on_device(definition.device, soft, on_cpu="variable" in self.attributes)
        value = definition.value
        self.constant = None if value is None else read_only(unpack(value))
        self.bodies: Sequence[Plan] = [_plan_of(body) for body in definition.bodies]
        inner = [node for plan in self.bodies for node in plan.nodes]
        # Whether gradients of its gradients are computed.
        self.is_nested: bool = any(node.is_nested or node.type == "gradient" for node in inner)
        self.recorded: PlanNode = self  # The operation whose record its gradient walks back.
        try:
            self.op = op_named(definition.kind)
        except KeyError:
            raise InvalidArgumentError(
                f"operation {definition.name!r} is of type {definition.kind!r}, which this process "
                "does not know.",
                op=definition.name,
            ) from None
        self.compute = self.op.kernel or _calling(self.op.function, definition)

    def run(self, step: Step, values: list[Any]) -> None:
        """Compute the outputs and store them among the values of the step."""
        inputs = [values[k] for k in self.inputs]
        compute = run_recorded if self.gradients else self.compute
        try:
            if self.run_on is None:
                result = compute(step, self, inputs)
            else:
                is_gradient = self.type == "gradient"
                near = step.pullbacks[self.attributes["of"]][0] if is_gradient else inputs
                near = list(map(untrack, near))
                result = self.run_on(functools.partial(compute, step, self), inputs, near)
        except OperationError as error:
            if error.op is None and self.type != "send":  # No program made a send.
                error.op = self.name
            raise
        except Refused as refused:
            kind = _REFUSALS.get(refused.kind, InvalidArgumentError)
            raise kind(str(refused), op=self.name) from None
        except Exception as error:
            device, source = self.definition.device, self.definition.source
            where = f" on {device}" if device else ""
            made = f" It was made in {source}." if source else ""
            raise InvalidArgumentError(
                f"operation {self.name!r} ({self.type}){where} failed: {type(error).__name__}: "
                f"{str(error).rstrip('.')}.{made}",
                op=self.name,
            ) from error
        if self.outputs == 1:
            values[self.slot] = result
        elif self.outputs:
            if len(result) != self.outputs:
                raise InvalidArgumentError(
                    f"operation {self.name!r} ({self.type}) returned "
                    f"{count_of(len(result), 'result')}, expected {self.outputs}.",
                    op=self.name,
                )
            values[self.slot : self.slot + self.outputs] = result


class Plan:
    """Operations in an order in which they can run, and the values to feed and to fetch.

    Args:
        definitions: the operations, all of which run.
        feeds: names of tensors whose values each step gets.
        fetches: names of tensors whose values each step returns.
        soft: whether the CPU replaces GPUs that do not exist.
        is_bound: whether only the thread of the step can run them.

    Raises:
        InvalidArgumentError: an operation is unknown here, lacks an input, or waits for itself.
    """

    def __init__(
        self,
        definitions: Sequence[OperationDef],
        feeds: Sequence[str],
        fetches: Sequence[str],
        soft: bool = False,
        is_bound: bool = False,
    ) -> None:
        slots: dict[str, int] = {name: k for k, name in enumerate(feeds)}
        fed = set(feeds)
        self.nodes: list[PlanNode] = []
        self._first: list[Any] = []  # The values after those of the feeds when a step begins.
        position: dict[str, int] = {}
        for definition in in_order(definitions, fed):
            node = _made(definition, soft)
            node.slot = len(feeds) + len(self._first)
            for k in range(definition.outputs):
                slots.setdefault(f"{definition.name}:{k}", node.slot + k)
            if _is_known(node):
                self._first.append(node.constant)
                continue
            self._first += [None] * definition.outputs
            position[node.name] = len(self.nodes)
            self.nodes.append(node)
        for k, node in enumerate(self.nodes):
            node.inputs = [_slot(slots, name) for name in node.definition.inputs]
            before = {position[name] for name in needs(node.definition, fed) if name in position}
            node.waits = len(before)
            for earlier in before:
                self.nodes[earlier].next.append(k)
            if node.type == "gradient":
                of = self.nodes[_differentiated(node, position)]
                of.gradients += 1
                node.recorded = of.recorded
                of.recorded.is_nested |= of.type == "gradient"
        self.fetches = fetches
        self._fetches = [_slot(slots, name) for name in fetches]
        self._uses = self._count_uses(len(feeds) + len(self._first))
        self._steps = 0
        self.sources = {n.attributes.get("from") for n in self.nodes if n.type == "recv"}
        """The tasks that send values to these operations."""
        self._is_bound = is_bound or any(node.op.bound for node in self.nodes)
        self._is_parallel = not self._is_bound and any(node.op.waits for node in self.nodes)

    def run(self, step: Step, fed: Sequence[Any]) -> list[Any]:
        """Run a step with the values of the feeds, and return the values of the fetches.

        Raises:
            OperationError: an operation failed.
        """
        values = [*fed, *self._first]
        if self._is_parallel:
            _Parallel(self.nodes, step, values, self._uses).run()
        elif self._steps < _TRIALS:
            self._run_timed(step, values)
        else:
            for node in self.nodes:
                node.run(step, values)
                for k in node.last:
                    values[k] = None
                if node.seconds > _LONG_SECONDS:
                    step.check()
        return [values[k] for k in self._fetches]

    def _count_uses(self, size: int) -> list[int]:
        """Return how often each value is used, and note for each operation what it uses last.

        A value is dropped after its last use, so that its variable can be updated in place.
        """
        uses = [0] * size
        for k in self._fetches:
            uses[k] += 1
        seen = set(self._fetches)
        for node in reversed(self.nodes):
            node.last = [k for k in dict.fromkeys(node.inputs) if k not in seen]
            seen.update(node.inputs)
            for k in node.inputs:
                uses[k] += 1
        return uses

    def _run_timed(self, step: Step, values: list[Any]) -> None:
        """Run in order, and measure whether it pays to run operations in parallel."""
        for node in self.nodes:
            start = time.perf_counter()
            node.run(step, values)
            node.seconds = time.perf_counter() - start
            for k in node.last:
                values[k] = None
            step.check()
        self._steps += 1
        if self._steps == _TRIALS and not self._is_bound and (os.cpu_count() or 1) > 1:
            self._is_parallel = _can_overlap(self.nodes)


class _Parallel:
    """A step in which several threads run operations as their inputs get ready."""

    def __init__(
        self, nodes: list[PlanNode], step: Step, values: list[Any], uses: list[int]
    ) -> None:
        self._nodes, self._step, self._values = nodes, step, values
        self._uses = list(uses)  # The uses of each value that are still to come.
        self._waits = [node.waits for node in nodes]
        first = (k for k, node in enumerate(nodes) if not node.waits and node.type != "recv")
        self._ready = deque(first)
        self._left = len(nodes)
        self._changed = threading.Condition()
        self._is_waiting = False  # Whether the thread of the step waits for a change.
        self._helpers: list[threading.Thread] = []
        self._most = os.cpu_count() or 1

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # For example Ctrl-C: the helpers begin no more operations.
            self._step.abort(error)
            raise
        until = None if self._step.error is None else time.monotonic() + _GIVE_UP_SECONDS
        for helper in self._helpers:
            helper.join(None if until is None else max(0.0, until - time.monotonic()))
        if self._step.error is not None:
            raise self._step.error

    def _run(self) -> None:
        self._step.on_abort.append(self._notify)
        for node in self._nodes:
            if node.type == "recv":
                received = functools.partial(self._received, node)
                self._step.outside.receive(node.attributes["key"], received)
        while True:
            self._work()
            with self._changed:
                self._is_waiting = True
                self._changed.wait_for(self._is_due, _CHECK_SECONDS)
                self._is_waiting = False
                if not self._left or self._step.error is not None:
                    return
            self._step.check_outside()

    def _is_due(self) -> bool:
        return bool(self._ready) or not self._left or self._step.error is not None

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _received(self, node: PlanNode, value: Any) -> None:
        """Accept a value of another task, on the thread of its connection."""
        self._values[node.slot] = value
        with self._changed:
            self._finish([node])

    def _finish(self, nodes: Sequence[PlanNode]) -> None:
        """Record that operations have ended; the caller holds the lock of `_changed`."""
        for node in nodes:
            self._left -= 1
            for k in node.inputs:
                self._uses[k] -= 1
                if not self._uses[k]:
                    self._values[k] = None
            for k in node.next:
                self._waits[k] -= 1
                if not self._waits[k]:
                    self._ready.append(k)
        if self._is_waiting and self._is_due():
            self._changed.notify_all()

    def _work(self) -> None:
        """Run ready operations until none is ready."""
        nodes: list[PlanNode] = []
        while True:
            with self._changed:
                self._finish(nodes)
                if not self._ready or self._step.error is not None:
                    return
                node = self._nodes[self._ready.popleft()]
                nodes = self._sends_with(node) if node.type == "send" else [node]
                if self._ready:
                    self._help(node)
            if len(nodes) > 1:
                self._send(nodes)
            elif nodes[0].op.waits:
                self._start(functools.partial(self._run_alone, nodes[0]))
                nodes = []
            else:
                self._run_node(nodes[0])

    def _sends_with(self, first: PlanNode) -> list[PlanNode]:
        """Return a send with others that are ready: one message costs less than several."""
        taken, size = [first], self._bytes(first)
        for k in list(self._ready):
            node = self._nodes[k]
            if node.type == "send" and node.attributes["to"] == first.attributes["to"]:
                size += self._bytes(node)
                if size <= _TOGETHER_BYTES:
                    taken.append(node)
                    self._ready.remove(k)
        return taken

    def _bytes(self, send: PlanNode) -> int:
        return sum(getattr(self._values[k], "nbytes", 0) for k in send.inputs)

    def _send(self, nodes: Sequence[PlanNode]) -> None:
        """Send the values of several operations to their task."""
        values = {
            node.attributes["key"]: self._values[node.inputs[0]] if node.inputs else None
            for node in nodes
        }
        try:
            self._step.outside.send(nodes[0].attributes["to"], values)
        except Exception:
            for node in nodes:  # So that the error names the value that failed.
                self._run_node(node)

    def _run_node(self, node: PlanNode) -> None:
        start = time.perf_counter()
        try:
            node.run(self._step, self._values)
            node.seconds = time.perf_counter() - start
            if node.seconds > _LONG_SECONDS:
                self._step.check()
        except BaseException as error:
            self._step.abort(error)

    def _run_alone(self, node: PlanNode) -> None:
        self._run_node(node)
        with self._changed:
            self._finish([node])

    def _help(self, node: PlanNode) -> None:
        """Start a thread for a long operation that is ready beside another one."""
        others = (self._nodes[k] for k in self._ready)
        if not (_is_long(node) and any(map(_is_long, others))):
            return
        alive = sum(helper.is_alive() for helper in self._helpers) + 1
        if alive < self._most:
            self._start(self._work)

    def _start(self, work: Callable[[], None]) -> None:
        helper = threading.Thread(target=work, name="ndistribute graph", daemon=True)
        try:
            helper.start()
            self._helpers.append(helper)
        except RuntimeError as error:  # The process cannot start more threads.
            self._step.abort(error)


def _calling(function: Any, definition: OperationDef) -> Kernel:
    """Return the kernel that calls a function with the arguments of a definition."""
    fill = filler(definition.call, len(definition.inputs))
    if function is not operator.getitem:  # An index may have slices and None.
        refuse_objects(definition.call)

    def compute(step: Step, node: Any, inputs: Sequence[Any]) -> Any:
        if IndexedSlices in map(type, inputs):  # NumPy would see objects.
            inputs = list(map(dense, inputs))
        args, kwargs = fill(inputs)
        work = check_call(function, inputs, args, kwargs)
        if work > _APART_WORK and node.run_on is None and Tracked not in map(type, inputs):
            return _run_apart(step, functools.partial(function, *args, **kwargs))
        return function(*args, **kwargs)

    return compute


def _run_apart(step: Step, call: Callable[[], Any]) -> Any:
    """Return the result of a long call; if the step fails first, raise its error."""
    result: Future[Any] = Future()
    settings = contextvars.copy_context()  # For example np.errstate.

    def work() -> None:
        try:
            result.set_result(settings.run(call))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name="ndistribute long call", daemon=True).start()
    while not wait([result], _CHECK_SECONDS).done:
        step.check()
    return result.result()


def _plan_of(body: BodyDef) -> Plan:
    """Return the plan of a function of tensors, whose feeds are the function's arguments."""
    operations = [op for op in body.operations if op.name not in body.inputs]
    feeds = [f"{name}:0" for name in body.inputs]
    return Plan(operations, feeds, body.outputs, is_bound=True)


def _made(definition: OperationDef, soft: bool) -> PlanNode:
    try:
        return PlanNode(definition, soft)
    except ValueError as error:
        if isinstance(error, OperationError) and error.op is not None:
            raise
        why = f"operation {definition.name!r} ({definition.kind}): {error}"
        raise InvalidArgumentError(why, op=definition.name) from error


def _differentiated(gradient: PlanNode, position: Mapping[str, int]) -> int:
    """Return the place of the operation whose gradient one computes."""
    of = gradient.attributes["of"]
    if of not in position:
        raise InvalidArgumentError(f"{of!r} is a constant, which has no gradient.")
    return position[of]


def _is_known(node: PlanNode) -> bool:
    """Return True if the value of an operation is the same in all steps."""
    is_constant = node.type == "constant" and node.constant is not None and node.outputs == 1
    return is_constant and node.run_on is None and not node.definition.controls


def _is_long(node: PlanNode) -> bool:
    # Messages to a task share a connection, so threads would not help.
    return node.seconds > _LONG_SECONDS and node.type != "send"


def _slot(slots: Mapping[str, int], name: str) -> int:
    if name not in slots:
        raise InvalidArgumentError(f"there is no tensor {name!r}.")
    return slots[name]


def _can_overlap(nodes: Sequence[PlanNode]) -> bool:
    """Return True if two operations that take long can run at the same time."""
    reach = [0] * len(nodes)  # Bit sets of the operations after each one.
    for k in range(len(nodes) - 1, -1, -1):
        reach[k] = 1 << k
        for later in nodes[k].next:
            reach[k] |= reach[later]
    long = [k for k, node in enumerate(nodes) if _is_long(node)]
    return any(not reach[a] >> b & 1 for a, b in itertools.combinations(long, 2))
