"""A function that runs again makes each update exactly once, or raises."""

import contextlib
import functools
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.errors import DistributeError
from ndistribute.parameter_server.client import RunningClosure, closure
from ndistribute.parameter_server.store_service import LocalServer
from tests.strategies.on_servers import served

OTHER_UPDATES = "function 7 runs again, but does not update the same variables in the same order"


def run(strategy: Any, attempt: int, steps: list[str], names: Any, dies: bool = False) -> None:
    """Run function 7, whose worker may die at its end."""
    with contextlib.suppress(LookupError), closure("chief", 7) as running:
        if attempt > 1:
            running.begin_again(attempt, strategy)
        for step in steps:
            exec(step, names)
        if dies:
            raise LookupError("The worker ends here.")


def run_elsewhere(*args: Any) -> None:
    """Run a function as another worker does while this one runs it."""
    late, RunningClosure.current = RunningClosure.current, None
    run(*args)
    RunningClosure.current = late


A, B, READ_A, READ_B = "a.assign_add(ONE)", "b.assign_add(ONE)", "a.numpy()", "b.numpy()"
TRAIN_A, TRAIN_B = "sgd.apply_gradients([(ONE, a)])", "sgd.apply_gradients([(ONE, b)])"
DIFFERENT = {
    "other order": ([A, READ_A, B, READ_B], [B, A]),
    "only a variable of another server": ([A, READ_A], [B]),
    "fewer": ([A, READ_A, B, READ_B], [A]),
    "fewer, all of which it reads": ([A, READ_A, B, READ_B], [A, READ_A]),
    "none": ([A, READ_A], []),
    "another kind": ([A, READ_A], ["a.assign(ONE)"]),
    "another optimizer": ([TRAIN_A, READ_A], ["adam.apply_gradients([(ONE, a)])"]),
    "the same optimizer, another variable": ([TRAIN_A, READ_A], [TRAIN_B]),
    "rows on another server": (
        ["rows.scatter_add([0], [1.0])", "rows.numpy()"],
        ["rows.scatter_add([3], [1.0])"],
    ),
    "the error is caught": ([A, READ_A], [f"with suppress(ValueError): {B}"]),
}


def names_on(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        made: dict[str, Any] = {"a": nd.Variable(np.zeros(2)), "b": nd.Variable(np.zeros(2))}
        made |= {"sgd": nd.optimizers.SGD(1.0), "adam": nd.optimizers.Adam(1.0)}
        strategy._partitioner = nd.partitioners.FixedShardsPartitioner(2)
        made["rows"] = nd.Variable(np.zeros(4))
    for optimizer in (made["sgd"], made["adam"]):
        optimizer.build([made["a"], made["b"]])
    return made | {"ONE": np.ones(2), "suppress": contextlib.suppress}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("first", "second"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_function_that_makes_other_updates_when_it_runs_again_is_told(first, second, servers):
    with served(servers) as strategy:
        names = names_on(strategy)
        run(strategy, 1, first, names, dies=True)
        with pytest.raises(ValueError, match=OTHER_UPDATES):
            run(strategy, 2, second, names)
        assert max(abs(names[v].numpy()).max() for v in ("a", "b", "rows")) == 1.0


def test_an_attempt_that_makes_the_same_updates_goes_on_wherever_each_was_cut():
    with served(2) as strategy:
        names = names_on(strategy)
        steps = [A, B, "rows.scatter_add([0, 3], [1.0, 1.0])", A, TRAIN_B]
        for number in range(1, len(steps) + 2):  # Each one more than the one before.
            last = number > len(steps)
            reads = [] if last else [READ_A, READ_B, "rows.numpy()"]
            run(strategy, number, steps[:number] + reads, names, dies=not last)
        values = [names[v].numpy().tolist() for v in ("a", "b", "rows")]
        assert values == [[2.0, 2.0], [0.0, 0.0], [1.0, 0.0, 0.0, 1.0]]


def test_a_worker_that_counts_as_lost_and_goes_on_can_update_nothing_any_more():
    with served(2) as strategy:
        names = names_on(strategy)
        names["elsewhere"] = functools.partial(run_elsewhere, strategy, 2, [A], names)
        with pytest.raises(DistributeError, match="function 7 runs on another worker"):
            run(strategy, 1, ["elsewhere()", B], names)
        assert (names["a"].numpy().tolist(), names["b"].numpy().tolist()) == ([1, 1], [0, 0])


def test_a_first_attempt_asks_the_servers_nothing_more(monkeypatch):
    asked: list[str] = []
    handle = LocalServer.handle

    def note(server: LocalServer, peer: Any, call: Any, request: Any) -> Any:
        asked.append(type(request).__name__)
        return handle(server, peer, call, request)

    with served(2) as strategy:
        names = names_on(strategy)
        monkeypatch.setattr(LocalServer, "handle", note)
        run(strategy, 1, [A, B, READ_A, B], names)
        assert asked == ["Transaction", "Transaction", "Read", "Transaction"]
        run(strategy, 2, [A, B, B], names)
        assert asked[4:] == ["Rerun", "Rerun", "Transaction", "Transaction"]
