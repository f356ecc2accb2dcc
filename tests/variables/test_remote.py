"""Variables on servers: what is fetched when, what closures keep back, and handles elsewhere."""

import contextlib
import pickle
import random
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.parameter_server.client import closure
from ndistribute.parameter_server.store_service import LocalServer
from ndistribute.variables.served import ServedVariable
from tests.kinds import DEADLINE, closing, in_thread
from tests.strategies.on_servers import holders, served, worker_of, workers


def variable(strategy: nd.Strategy, value: Any, **options: Any) -> nd.Variable:
    with strategy.scope():
        return nd.Variable(value, **options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of requests that went to servers, in order."""
    kinds: list[str] = []
    handle = LocalServer.handle

    def note(server: LocalServer, peer: Any, call: Any, request: Any) -> Any:
        kinds.append(type(request).__name__)
        return handle(server, peer, call, request)

    monkeypatch.setattr(LocalServer, "handle", note)
    return kinds


def test_variables_go_to_servers_in_turn_under_names_of_their_own() -> None:
    with served(2) as strategy:
        made = [variable(strategy, 1.0, name=name) for name in (None, None, "w", "w", "w_1")]
        assert all(isinstance(v, ServedVariable) for v in made)
        assert [v.places[0].name for v in made] == ["Variable", "Variable_1", "w", "w_1", "w_1_1"]
        assert [v.places[0].servers for v in made] == [(0,), (1,), (0,), (1,), (0,)]


def test_workers_share_what_the_first_one_made_and_must_make_the_same() -> None:
    with workers(2, servers=2) as (first, second):
        ours, theirs = variable(first, [1.0, 2.0]), variable(second, [7.0, 7.0])
        assert theirs.numpy().tolist() == [1.0, 2.0]
        theirs.assign_add([1.0, 1.0])
        assert ours.numpy().tolist() == [2.0, 3.0]
        variable(first, [1.0, 2.0])
        with pytest.raises(ValueError, match="same variables in the same order"):
            variable(second, [1.0])


def test_a_step_fetches_once_from_each_server_what_the_last_step_read(asked: list[str]) -> None:
    with served(2) as strategy:
        variables = [variable(strategy, float(i)) for i in range(6)]

        def step() -> float:
            return sum(float(v) for v in variables) + sum(float(v) for v in variables)

        strategy.run(step)
        del asked[:]
        assert strategy.run(step).values == (30.0,)
        assert asked == ["Read", "Read"]


def test_within_a_step_values_stay_but_for_what_this_process_changes() -> None:
    with workers(2, servers=1) as (first, second):
        ours = [variable(first, 0.0), variable(first, 0.0)]
        theirs = [variable(second, 0.0), variable(second, 0.0)]

        def step() -> list[float]:
            seen = [float(v) for v in ours]
            with in_thread(lambda: [v.assign_add(1.0) for v in theirs]) as written:
                written.result(DEADLINE)
            seen += [float(v) for v in ours]
            ours[0].assign_add(1.0)
            return seen + [float(v) for v in ours]

        found = [part.values[0] for part in first.run(step)]
        assert found == [0, 0, 0, 0, 2, 0]
        assert [float(v) for v in ours] == [2, 1]


def test_a_closure_changes_all_at_its_end_and_each_once() -> None:
    with workers(2, servers=2) as (mine, other):
        ours = [variable(mine, [0.0, 0.0]) for _ in range(2)]
        theirs = [variable(other, [0.0, 0.0]) for _ in range(2)]
        for _ in range(2):  # The second time as if another worker ran it again.
            value = np.ones(2)
            with closure("chief", 1):
                ours[0].assign_add(value)
                ours[1].scatter_add([1], [5.0])
                value[:] = 7.0  # What was passed counts, not what becomes of it.
                seen = theirs[0].numpy().tolist()
        assert seen == [1.0, 1.0]
        assert [v.numpy().tolist() for v in theirs] == [[1.0, 1.0], [0.0, 5.0]]


def test_what_closures_keep_of_large_values_does_not_mix() -> None:
    with served() as strategy:
        ours = [variable(strategy, np.zeros(20_000)) for _ in range(2)]
        value = np.empty(20_000)
        for number in range(1, 5):
            with closure("chief", number):
                for k, v in enumerate(ours):  # Both copies are of one shape, and in use at once.
                    value[:] = 10 * number + k
                    v.assign_add(value)
        assert [v.numpy()[[0, -1]].tolist() for v in ours] == [[100.0] * 2, [104.0] * 2]


def test_a_closure_reads_what_it_wrote() -> None:
    with workers(2, servers=2) as (mine, other):
        ours, theirs = ([variable(s, 0.0) for _ in range(2)] for s in (mine, other))
        seen = []
        for _ in range(2):  # The second time as if another worker ran it again.
            with closure("chief", 3):
                ours[0].assign_add(1.0)
                seen += [float(v) for v in (*ours, ours[0])]
                ours[0].assign_add(2.0)
        assert seen == [1.0, 0.0, 1.0, 3.0, 0.0, 3.0]
        assert [float(v) for v in theirs] == [3.0, 0.0]


def test_a_closure_that_reads_elsewhere_when_it_runs_again_makes_what_is_missing() -> None:
    """The parts in which it sent its changes were counted, and not the changes."""
    chance = random.Random(1)
    with workers(2, servers=2) as (mine, other):
        ours, theirs = ([variable(s, [0.0]) for _ in range(3)] for s in (mine, other))
        for number in range(1, 41):
            for attempt in range(4):
                with contextlib.suppress(LookupError), closure("chief", number):
                    for step in range(9):
                        ours[step % 3].assign_add([1.0])
                        if chance.random() < 0.4:
                            ours[chance.randrange(3)].numpy()
                        if attempt < 3 and chance.random() < 0.1:
                            raise LookupError("The worker ends here.")
        assert [v.numpy().tolist() for v in theirs] == [[120.0]] * 3


def test_a_closure_that_raises_changes_nothing() -> None:
    with served(2) as strategy:
        v = variable(strategy, 0.0)
        with contextlib.suppress(LookupError), closure("chief", 1):
            v.assign_add(1.0)
            raise LookupError
        with closure("chief", 2):
            v.assign_add(2.0)
        assert float(v) == 2.0


def test_a_closure_makes_no_variables() -> None:
    with (
        served() as strategy,
        closure("chief", 1),
        pytest.raises(RuntimeError, match="create variables on the chief"),
    ):
        variable(strategy, 1.0)


def test_a_handle_is_the_same_variable() -> None:
    with served() as strategy:
        v = variable(strategy, 1.0)
        again, own = pickle.loads(pickle.dumps((v, strategy)))
        assert again is v
        assert own is strategy


def test_what_is_deleted_is_gone_from_all_servers() -> None:
    with holders(2) as held, closing(worker_of(held)) as strategy:
        kept, gone = variable(strategy, [1.0]), variable(strategy, np.zeros((4, 2)))
        optimizer = nd.optimizers.Adam(0.1)
        optimizer.apply_gradients([(np.ones((4, 2)), gone)])
        strategy.delete([gone, *optimizer.variables])
        strategy.delete([gone])
        assert [list(one.store.variables.cells) for one in held] == [[kept.places[0].name], []]
        with pytest.raises(nd.DistributeError, match="no variable"):
            gone.numpy()
        assert kept.numpy().tolist() == [1.0]
        with pytest.raises(ValueError, match="is not on servers"):
            strategy.delete([nd.Variable(1.0)])


def test_a_variable_of_a_closed_strategy_keeps_what_was_read() -> None:
    with nd.ParameterServerStrategy() as strategy:
        v = variable(strategy, 2.0)
        v.assign_add(1.0)
    assert float(v) == 3.0
