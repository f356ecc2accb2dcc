"""Graphs that no client makes: a server refuses them with an error, and goes on serving."""

import collections
import contextlib
import copy
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import ndistribute as nd
from ndistribute import errors
from ndistribute import graph as g
from ndistribute.graph import requests as m
from ndistribute.graph.definition import BodyDef, OperationDef, pack
from ndistribute.graph.ops import KERNELS
from ndistribute.graph.pool import TaskClient
from ndistribute.graph.session import _pool_to
from ndistribute.numpy_functions import MOST_ELEMENTS, _functions, _registered, check_call
from ndistribute.transport.codec import encode
from tests.processes import HANG_SECONDS, free_addresses, wait_until

MUTATIONS = int(os.environ.get("FAULTS_FRAMES", "200"))
PS = "/job:ps/task:0"


@pytest.fixture
def server() -> Iterator[nd.Server]:
    """Start two servers, and return that of a worker."""
    spec = free_addresses({"ps": 1, "worker": 1})
    with nd.Server(spec, "ps", 0), nd.Server(spec, "worker", 0) as server:
        yield server


@pytest.fixture
def client(server: nd.Server) -> Iterator[TaskClient]:
    with contextlib.closing(_pool_to(server.target)) as pool:
        yield pool.client(server.target)


def run_of(*operations: OperationDef, fetch: str = "a:0", **options: Any) -> m.RunStep:
    feeds = {"fetches": (fetch,), "targets": (), "feeds": (), "values": (), "timeout": 5.0}
    return m.RunStep(session="s", known=0, operations=operations, **(feeds | options))


def op(name: str, kind: str, *inputs: str, **options: Any) -> OperationDef:
    return OperationDef(name, kind, inputs, **options)


ONE = op("one", "constant", value=pack(np.ones(2)))
NESTED: Any = {"$input": 0}
for _ in range(100):
    NESTED = [NESTED]
LINE = op("line", "numpy.zeros_like", "one:0", call=[[{"$input": 0}], {"shape": 1 << 22}])
BYTES = op("bytes", "constant", value=pack(np.array([b"x"], object)))
FOREVER = 1 << 60  # As an exponent of Python's integers.
OBJECTS = "computes with Python objects"
WAIT, CLIENT_ALONE = "wait for each other", "only in the client's process"
BODIES = (BodyDef(("x",), (), ("y:0",)),) * 2
# The operations of a graph, and what the error says.
MISTAKES: dict[str, tuple[list[OperationDef], str]] = {
    "unknown operation": ([op("a", "os.system")], "'os.system', which this process does not know"),
    "writing function": ([op("a", "numpy.save")], "this process does not know"),
    "missing operation": ([op("a", "identity", "b:0")], "no operation 'b'"),
    "missing result": ([ONE, op("a", "identity", "one:7")], "one:7"),
    "missing fetch": ([ONE], "no tensor 'one:1'"),
    "bad name": ([op("a", "identity", "nonsense")], "no operation ''"),
    "cycle": ([op("a", "identity", "b:0"), op("b", "identity", "a:0")], WAIT),
    "control cycle": ([op("a", "group", controls=("a",))], WAIT),
    "cycle over tasks": (
        [op("a", "identity", "b:0", device=PS), op("b", "identity", "a:0", controls=("one",)), ONE],
        WAIT,
    ),
    "wrong template": ([ONE, op("a", "cast", "one:0", call=["call"])], "no valid structure"),
    "unknown template": (
        [ONE, op("a", "cast", "one:0", call=[[{"$x": 1}], {}])],
        "no valid structure",
    ),
    "number as a key": ([ONE, op("a", "cast", "one:0", call=[[{1: 2}], {}])], "no valid structure"),
    "deep template": ([ONE, op("a", "cast", "one:0", call=[[NESTED], {}])], "no valid structure"),
    "missing input": ([op("a", "numpy.add", call=[[{"$input": 0}], {}])], "has 0 inputs"),
    "no attributes": ([op("a", "read")], "'a' .read.* failed: KeyError"),
    "gradient of nothing": ([op("a", "gradient")], "names no operation"),
    "no bodies": ([ONE, op("a", "cond", "one:0")], "'a' .cond.* failed"),
    "device": ([op("a", "identity", device="/nowhere")], "not the name of a device"),
    "other task": ([op("a", "group", device="/job:x")], "tasks are /job:ps/task:0"),
    "Python function": ([op("a", "py_function", attributes={"function": "f"})], CLIENT_ALONE),
    "body without its input": ([ONE, op("a", "cond", "one:0", bodies=BODIES)], "no tensor 'y:0'"),
    "feeds without values": ([ONE, op("a", "identity", "one:0")], "1 feed got 0 values"),
    "integers among bytes": (
        [
            BYTES,
            op("b", "numpy.full_like", "bytes:0", call=[[{"$input": 0}, 7], {}]),
            op("a", "numpy.power", "b:0", call=[[{"$input": 0}, FOREVER], {}]),
        ],
        OBJECTS,
    ),
    "multiplied bytes": (
        [BYTES, op("a", "numpy.multiply", "bytes:0", call=[[{"$input": 0}, 1 << 40], {}])],
        OBJECTS,
    ),
    "random numbers without end": (
        [
            op("one", "constant", value=pack(np.full(3, 1 << 20))),
            op("a", "random", "one:0", attributes={"seed": 1, "low": 0.0, "high": 1.0}),
        ],
        f"more than {MOST_ELEMENTS} elements",
    ),
    "numbers as objects of a variable": (
        [ONE, op("a", "assign", "one:0", attributes={"variable": "v", "dtype": "O"})],
        "cannot hold an array of Python objects",
    ),
}
OPTIONS = {"missing fetch": {"fetch": "one:1"}, "feeds without values": {"feeds": ("one:0",)}}
# Arguments of calls that would compute for ever, make too much, or multiply too often.
ENDLESS: dict[str, Any] = {
    "dtype": [[{"$input": 0}, FOREVER], {"dtype": {"$dtype": "object"}}],
    "text for a dtype": [[{"$input": 0}, FOREVER], {"dtype": "|O"}],
    "signature": [[{"$input": 0}, FOREVER], {"signature": "OO->O"}],
    "signature of several": [[{"$input": 0}, FOREVER], {"signature": {"$tuple": ["O", "O", "O"]}}],
    "list with None": [[[7, None], FOREVER], {}],
    "list in a list": [[{"$tuple": [7, [{"$ellipsis": None}]]}, FOREVER], {}],
}
LONG: dict[str, Any] = {
    "tile": [[{"$input": 0}, [1 << 20, 1 << 20]], {}],
    "repeat": [[{"$input": 0}, 1 << 40], {}],
    "resize": [[{"$input": 0}, {"$tuple": [1 << 20, 1 << 20]}], {}],
    "broadcast_to": [[{"$input": 0}, {"$tuple": [1 << 40, 2]}], {}],
    "zeros_like": [[{"$input": 0}], {"shape": {"$tuple": [1 << 20, 1 << 20]}}],
    "linspace": [[0.0, 1.0, 1 << 40], {}],
    "multiply.outer": [[{"$input": 1}, {"$input": 1}], {}],
    "add": [[{"$input": 1}, {"$input": 2}], {}],
    "matmul": [[{"$input": 2}, {"$input": 3}], {}],
    "tensordot": [[{"$input": 1}, {"$input": 1}], {"axes": 0}],
    "diag": [[{"$input": 1}], {}],
    "diagflat": [[{"$input": 0}], {"k": 1 << 40}],
    "meshgrid": [[{"$input": 1}, {"$input": 1}], {}],
    "pad": [[{"$input": 2}, 1 << 20], {}],
    "vander": [[{"$input": 1}], {}],
    "histogram": [[{"$input": 0}], {"bins": 1 << 40}],
    "array_split": [[{"$input": 0}, 1 << 40], {}],
}
ENDLESS_WORK: dict[str, Any] = {
    "convolve": [[{"$input": 0}, {"$input": 0}], {}],
    "correlate": [[{"$input": 0}, {"$input": 0}], {"mode": "full"}],
    "polyval": [[{"$input": 0}, {"$input": 0}], {}],
    "poly": [[{"$input": 0}], {}],
    "roots": [[{"$input": 0}], {}],
    "diff": [[{"$input": 0}], {"n": 1 << 60}],
    "einsum": [["i,j,k->", *[{"$input": 0}] * 3], {}],
}
INPUTS = [
    op("line", "constant", value=pack(np.zeros(1 << 17, np.int8))),
    op("column", "numpy.reshape", "line:0", call=[[{"$input": 0}, {"$tuple": [-1, 1]}], {}]),
    op("row", "numpy.reshape", "line:0", call=[[{"$input": 0}, {"$tuple": [1, -1]}], {}]),
]
NAMES = ("one:0", "line:0", "column:0", "row:0")
for name, call in ENDLESS.items():
    operations = [ONE, op("a", "numpy.power", "one:0", call=call)]
    MISTAKES[f"{name} of objects"] = (operations, "only with numbers and text")
for name, call in LONG.items():
    operations = [ONE, *INPUTS, op("a", f"numpy.{name}", *NAMES, call=call)]
    MISTAKES[f"a long {name}"] = (operations, f"more than {MOST_ELEMENTS} elements")
for name, call in ENDLESS_WORK.items():
    operations = [ONE, LINE, op("a", f"numpy.{name}", "line:0", call=call)]
    MISTAKES[f"an endless {name}"] = (operations, "multiplications, more than")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_graph_that_cannot_run_is_an_error_that_says_why(server, client, mistake):
    operations, message = MISTAKES[mistake]
    reply = client.call(run_of(*operations, **OPTIONS.get(mistake, {})), HANG_SECONDS)
    assert isinstance(reply, m.Failure)
    with pytest.raises(errors.InvalidArgumentError, match=message):
        raise m.error_of(reply)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        (np.convolve, (np.zeros(1 << 24), np.zeros(100))),
        (np.diag, (np.broadcast_to(0.0, (1 << 17, 10)),)),
        (np.diff, (np.zeros(1 << 24),)),
        (np.einsum, ("...ij,...jk->...ik", np.broadcast_to(0, (8, 999, 999)), np.ones((999, 9)))),
        (np.histogram, (np.zeros(9), [0, 1 << 40, 1 << 60])),
        (np.pad, (np.zeros((9, 9)), ((1, 2), (3, 4)))),
        (np.split, (np.zeros(1 << 20), [5, 9])),
        (np.tensordot, (np.broadcast_to(0, (9999, 9999)), np.broadcast_to(0, (9999, 9999)), 1)),
        (np.tensordot, (np.broadcast_to(0, (9999, 99)), np.broadcast_to(0, (99, 9)), [[1], [0]])),
        (np.vander, (np.zeros(1 << 20), 3)),
    ],
)
def test_calls_that_end_are_not_refused(call, args):
    check_call(call, args, args, {})


@pytest.mark.parametrize("how", ["deadline", "closed"])
def test_a_step_ends_although_a_long_call_goes_on(server, client, monkeypatch, how):
    begun, end = threading.Event(), threading.Event()

    def wait(x: Any) -> Any:
        begun.set()
        end.wait(HANG_SECONDS)
        return x

    monkeypatch.setitem(_registered, f"tests.wait until {how}", wait)
    step = run_of(ONE, LINE, op("a", f"tests.wait until {how}", "line:0"))
    timeout = 1.0 if how == "deadline" else None
    pending = client.start(msgspec.structs.replace(step, timeout=timeout))
    try:
        assert begun.wait(HANG_SECONDS)
        if how == "closed":
            client.call(m.Close("s"), HANG_SECONDS)
        reply = pending.result(time.monotonic() + HANG_SECONDS / 2)
        assert reply.kind == ("CancelledError" if how == "closed" else "DeadlineExceededError")
    finally:
        end.set()
        pending.cancel()


def program() -> m.RunStep:
    """Return a step of a graph that has something of all."""
    with g.Graph().as_default() as graph:
        x = g.placeholder(np.float64, [2])
        with graph.device(PS):
            w = g.Variable(np.ones(2), name="w")
        y = np.tanh(w * x)[::-1] + g.random_normal([2], seed=1)
        z = g.cond(np.sum(y) < 0, lambda: y, lambda: y * 2)
        loop = g.while_loop(lambda i, a: i < 2, lambda i, a: [i + 1, a * 2], [g.constant(0), z])[1]
        text = g.constant(["some", "text"])
        slope = g.gradients(np.sum(loop), w)[0]
        with graph.control_dependencies([w.initializer]):
            step = w.assign_sub(slope)
        definitions = tuple(one.definition for one in g.get_default_graph().get_operations())
    fetches = (loop.name, slope.name, step.name, text.name)
    options = {"feeds": (x.name,), "values": (pack(np.ones(2)),), "targets": (w.initializer.name,)}
    options |= {"fetches": fetches, "timeout": 1.0}  # A changed loop may not end.
    return run_of(*definitions, fetch=loop.name, **options)


def messages() -> list[m.Request]:
    """Return messages of all kinds, those of whole graphs more often."""
    step, one = program(), pack(np.ones(2))
    return [
        *[step] * 12,
        m.Register("s/0", "s", step.operations[:2], ("x:0",), ("x:0",)),
        m.RunPart("s/0", "s/1", (one,)),
        m.Deliver("s/1", {"k": one}),
        m.Abort("s/1", m.Failure("InvalidArgumentError", "why", None, PS)),
        m.ForgetParts("s"),
        m.Close("s"),
        m.Reset(False),
    ]


def plain(value: Any) -> Any:
    """Return a message as nested lists, dictionaries and arrays."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        return [tag, *(plain(getattr(value, name)) for name in value.__struct_fields__)]
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value


KINDS = [*KERNELS, *_functions()]
PLAIN = [None, True, -1, 0, 1, 2, 1 << 63, -1.5, float("nan"), "", "w", b"\0", [], {}]


def mutate(tree: Any, draw: random.Random) -> None:
    """Change, drop, double or exchange one of the parts of a message."""
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        if isinstance(node, dict | list):
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                visit(node[key])

    visit(tree)
    if not places:  # All was dropped.
        return
    (parent, key), (other, place) = draw.choice(places), draw.choice(places)
    what = draw.randrange(6)
    if what == 0 and isinstance(parent, list):
        del parent[key]
    elif what == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif what == 2:
        parent[key] = copy.deepcopy(other[place])
    elif isinstance(parent[key], str) and what < 5:
        parent[key] = draw.choice(KINDS)
    else:
        parent[key] = draw.choice(PLAIN)


def mutants(draw: random.Random) -> Iterator[Any]:
    """Yield what looks like messages, some of it changed byte by byte."""
    whole = messages()
    for number in itertools.count():
        message = draw.choice(whole)
        if number % 2 and isinstance(message, m.RunStep):  # In a session without earlier mistakes.
            message = msgspec.structs.replace(message, session=f"s{number}")
        tree = plain(message)
        if draw.random() < 0.2:
            control = bytearray(encode(tree)[0])  # type: ignore[arg-type]
            for _ in range(draw.choice([1, 1, 4])):
                control[draw.randrange(len(control))] = draw.randrange(256)
            yield msgspec.Raw(control)
            continue
        for _ in range(draw.choice([1, 1, 1, 2, 5])):
            mutate(tree, draw)
        yield tree


_ran: list[str] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _ran is None:
        return
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes or event.startswith(("os.system", "os.exec", "os.posix", "os.fork", "subprocess.")):
        _ran.append(f"{event} {args}")
    if event.startswith(("pickle.", "os.remove", "os.rename", "os.mkdir", "ctypes.")):
        _ran.append(f"{event} {args}")


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """Return the list of what this process writes, removes, starts and unpickles from now on."""
    global _ran
    sys.addaudithook(_audit)  # For the rest of the process.
    _ran = []
    yield _ran
    _ran = None


def test_mutated_messages_run_nothing_and_the_servers_go_on(server, client, ran):
    draw = random.Random(os.environ.get("FAULTS_SEED", "7"))
    outcomes: collections.Counter[str] = collections.Counter()
    for mutant in itertools.islice(mutants(draw), MUTATIONS):
        pending = client.start(mutant)
        try:
            reply = pending.result(time.monotonic() + 0.1)
        except errors.UnavailableError:  # It was no message at all.
            outcomes["refused"] += 1
            continue
        if reply is None:  # It was one without a reply, or a loop that does not end.
            pending.cancel()
        outcomes[getattr(reply, "kind", type(reply).__name__)] += 1
    assert outcomes["refused"]
    assert outcomes["InvalidArgumentError"]
    assert not outcomes["Failed"], outcomes
    assert not ran
    client.close()
    graphs = server._services["graph"]
    assert graphs is not None
    wait_until(lambda: not (graphs._sessions or graphs._steps or graphs._parts))
    with g.Graph().as_default(), g.Session(server.target) as session:
        with g.get_default_graph().device(PS):
            x = g.constant(2.0)
        assert session.run(x + 1.0) == 3.0
