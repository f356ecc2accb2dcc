"""Threads of strategies: who owns them, who waits for whom, and how they end."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import (
    DEADLINE,
    closing,
    context,
    host_memory,
    in_thread,
    meet,
    mirrored,
    one_process,
    plain_step,
    pool_threads,
    raised_in,
    rank,
    works,
)
from tests.transport.ends import forked


def test_a_strategy_is_a_context_manager_of_its_scope_that_closes(several):
    with several as entered:
        assert entered is several
        assert nd.get_strategy() is several
        v = nd.Variable(1.0)
        assert works(several)
        threads = 0 if isinstance(several, nd.TPUStrategy) else len(several.devices) - 1
        assert len(pool_threads()) == threads
    assert not nd.has_strategy()
    assert not pool_threads()
    assert v.distribute_strategy is several
    with pytest.raises(RuntimeError, match="closed"):
        several.run(lambda: None)


def test_a_with_block_that_has_not_begun_can_not_end(several):
    with several.scope(), pytest.raises(RuntimeError, match="not in a `with` block"):
        several.__exit__(None, None, None)
    assert works(several)


def test_a_thread_that_can_not_start_is_an_error_of_the_step_and_nothing_stays(monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.endswith(":2"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with mirrored(3) as strategy:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            strategy.run(meet)
        monkeypatch.undo()
        assert works(strategy)


def test_after_closing_variables_stay_and_every_use_says_that_it_is_closed(several):
    with several.scope():
        v = nd.Variable(2.0, aggregation="sum")
    several.run(lambda: v.assign_add(1.0))
    several.close()
    several.close()
    assert float(v) == 2 + several.num_replicas_in_sync
    assert repr(several).startswith("closed ")
    for use in (
        lambda: several.run(lambda: None),
        lambda: several.reduce("sum", 1.0),
        lambda: several.gather(np.zeros(1), 0),
        lambda: several.distribute_dataset(nd.Dataset.range(2).batch(2)),
        lambda: several.distribute_datasets_from_function(lambda context: nd.Dataset.range(2)),
        lambda: several.distribute_values_from_function(lambda context: 1.0),
        lambda: several.scope().__enter__(),
        several.__enter__,
    ):
        with pytest.raises(RuntimeError, match=r"closed .* cannot be used any more: make a new"):
            use()
    assert not pool_threads()


@one_process("workers have a test of their own")
@plain_step("JAX warns of every fork")
def test_run_in_a_forked_child_raises_and_closing_there_closes_nothing(several):
    assert works(several)  # With its threads, which a fork has not.

    def child():
        with pytest.raises(RuntimeError, match="This process is a fork of it") as caught:
            several.run(lambda: None)
        several.close()
        return str(caught.value)

    assert "make a strategy here" in forked(child)
    assert works(several)


@one_process("workers have a test of their own")
@plain_step("no replica forks")
@host_memory("CUDA itself refuses a process that was forked")
def test_a_collective_raises_in_a_child_that_a_replica_forks(several):
    def step():
        told = forked(meet) if rank() == 0 else ""
        return meet(), told

    ((total, told), *_) = several.local_results(several.run(lambda: [step()]))[0]
    assert total == several.num_replicas_in_sync
    assert "This process is a fork of it" in told


def test_a_forked_child_runs_on_one_replica_and_makes_strategies_of_its_own():
    def child():
        own = mirrored(2)
        return works(one), works(own)

    with closing(nd.OneDeviceStrategy("cpu:0")) as one, closing(mirrored(3)) as other:
        assert works(other)
        assert forked(child) == (True, True)


def test_a_strategy_is_told_from_an_earlier_one_that_looks_the_same():
    with closing(mirrored(2)) as first, closing(mirrored(2)) as again:
        with first.scope():
            w = nd.Variable([1.0, 1.0])
            optimizer = nd.optimizers.SGD(1.0)
        first.run(lambda: optimizer.apply_gradients([([1.0, 1.0], w)]))
        by_earlier = r"under Mirrored.*, but an earlier strategy MirroredStrategy\(.*\) made it"
        with pytest.raises(RuntimeError, match=f"variable 'Variable' {by_earlier}"):
            again.run(lambda: w + 1)
        with again.scope():
            w = nd.Variable([1.0, 1.0])
            with pytest.raises(RuntimeError, match="run of an earlier strategy"):
                first.run(lambda: None)
        with pytest.raises(ValueError, match=r"optimizer 'sgd.*' of an earlier strategy Mirrored"):
            again.run(lambda: optimizer.apply_gradients([([1.0, 1.0], w)]))
        with pytest.raises(RuntimeError, match=r"a later strategy .* made it"):
            first.run(lambda: w + 1)


def test_a_thread_that_a_step_starts_is_no_replica(several):
    with several.scope():
        w = nd.Variable([1.0, 1.0])
        optimizer = nd.optimizers.SGD(1.0)
    calls = {
        "all_reduce": lambda: context().all_reduce("sum", 1.0),
        "all_gather": lambda: context().all_gather([1.0], axis=0),
        "merge_call": lambda: context().merge_call(lambda _: None),
        "apply_gradients": lambda: optimizer.apply_gradients([([1.0, 1.0], w)]),
    }

    def step():
        for name, call in calls.items():
            with in_thread(call) as answer, pytest.raises(RuntimeError, match=f"{name} was called"):
                answer.result(DEADLINE)
        with in_thread(lambda: [context().rng.random()]) as drawn:  # Data may be made anywhere.
            drawn.result(DEADLINE)

    several.run(step)
    assert w.numpy().tolist() == [1.0, 1.0]


def test_while_no_step_of_several_replicas_runs_each_thread_is_a_replica_of_its_own():
    def step():
        with in_thread(meet) as answer:
            return answer.result(DEADLINE)

    with closing(mirrored(2)), closing(nd.OneDeviceStrategy("cpu:0")) as one:
        assert one.run(step).values == (1.0,)
        with in_thread(meet) as answer:
            assert answer.result(DEADLINE) == 1.0


def test_the_default_strategy_belongs_to_the_process_and_stays_open():
    with nd.get_strategy():
        pass
    nd.get_strategy().close()
    assert works(nd.get_strategy())


def test_closing_in_a_replica_is_refused(several):
    for use in (several.close, lambda: context().merge_call(lambda s: s.close())):
        with raised_in(several, None, RuntimeError, "close"):
            several.run(use)
        assert works(several)


def test_a_fork_while_another_thread_runs_a_step_raises_and_closing_waits_for_it():
    began, go_on = threading.Event(), threading.Event()

    def step():
        began.set()
        assert go_on.wait(DEADLINE)
        return meet()

    with mirrored(3) as strategy, in_thread(lambda: strategy.run(step)) as running:
        assert began.wait(DEADLINE)
        assert "This process is a fork of it" in forked(lambda: strategy.run(lambda: None))
        with in_thread(strategy.close) as closing_:
            go_on.set()
            assert running.result(DEADLINE).values == (3, 3, 3)
            closing_.result(DEADLINE)
        assert not pool_threads()


def test_a_strategy_that_nobody_holds_is_collected():
    strategy = mirrored(2)
    works(strategy)
    gone = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert gone() is None  # The leak check then waits for its threads.


@one_process("the order of threads is each process's own")
@plain_step("it counts what happens in each call")
def test_runs_of_one_strategy_from_two_threads_take_turns(strategy):
    inside = []
    most = []

    def step():
        inside.append(rank())
        context().merge_call(lambda _: most.append(len(inside)))
        context().merge_call(lambda _: inside.clear())
        return meet()

    size = strategy.num_replicas_in_sync
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(strategy.run, step) for _ in range(20)]
        assert all(run.result(DEADLINE).values == (size,) * size for run in runs)
    assert most == [size] * 20
