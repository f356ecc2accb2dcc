"""Workers come and go within an epoch, and each sample counts once, whatever step is made again."""

import json
import threading
from collections import Counter
from fractions import Fraction
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.data import Dataset, InputOptions
from ndistribute.data.pipeline import UNKNOWN_CARDINALITY
from tests.data.test_loaders import Loader, Stateful
from tests.data.test_workers import number_files
from tests.data.workers import (
    DEADLINE_SECONDS,
    cpus,
    distribute,
    distribute_from_function,
    on_workers,
    pieces_of,
    place_of,
    raised,
)


def rows_in(step):
    """Return the rows of a worker's step; the first number of those that are arrays."""
    rows = (row for piece in step.values for row in np.atleast_1d(piece).tolist())
    return [row[0] if isinstance(row, list) else row for row in rows]


class Job:
    """Imitates an elastic job: members with numbers, each with a dataset of its own."""

    def __init__(self, build, counts, options, batch="constant", by_function=False):
        self.build, self.options = build, options
        self.by_function, self.batch = by_function, batch
        self.first = sum(counts)
        self.counts = list(counts)
        self.datasets = [None] * len(counts)
        self.state = None
        self.repeated = None  # The rows of a committed step whose batch comes again.
        self.over = False  # The state is that of an epoch which has ended.
        self.used = [Counter()]  # By the committed steps of each epoch.
        self.steps = []  # The rows of each committed step.
        self.pipelines = [len(counts)]  # Their number in each epoch.

    def change(self, lost, joining):
        """Lose the worker of a rank, if there are others, and admit others behind the rest."""
        if lost is not None and len(self.counts) > 1:
            del self.counts[lost % len(self.counts)], self.datasets[lost % len(self.datasets)]
        self.counts += joining
        self.datasets += [None] * len(joining)

    def go_on(self, steps, again=None):
        """Commit some steps.

        Args:
            steps: how many, at most to the end of the epoch.
            again: "lost": another one was taken when members change, and is made again; "counted":
                it was committed, and is not counted again.
        """

        def work(workers):
            repeated = []
            iterator = self._iterator(workers)
            if self.repeated is not None:
                repeated = rows_in(next(iterator))
            taken, over = [], False
            for _ in range(steps):
                step = next(iterator, None)
                if over := step is None:
                    break
                taken.append(rows_in(step))
            mark = iterator.mark()
            step = next(iterator, None) if again and not over else None
            state = json.dumps(iterator.state_at(mark))
            iterator.close()
            last = None if step is None else rows_in(step)
            return repeated, taken, over, last, state

        if self.over:
            self.used.append(Counter())
            self.pipelines.append(len(self.counts))
        elif self.state is None:  # Nobody has begun.
            self.pipelines[-1] = len(self.counts)
        everyone = raised(on_workers(len(self.counts), work))
        repeated, shares, overs, last, states = zip(*everyone, strict=True)
        assert len(set(states)) == len(set(overs)) == 1
        self.over, self.state = overs[0], None if states[0] == "null" else states[0]
        steps = [[row for part in step for row in part] for step in zip(*shares, strict=True)]
        assert sorted(chain(*repeated)) == (self.repeated or [])
        self.repeated = None
        if again == "counted" and last[0] is not None:
            self.repeated = sorted(chain(*last))
            steps.append([*chain(*last)])
        self.steps += steps
        self.used[-1].update(row for step in steps for row in step)

    def _iterator(self, workers):
        devices = cpus(self.counts[workers.rank])
        place = place_of(devices, workers=workers, replica_counts=self.counts)
        dataset = self.datasets[workers.rank]
        if dataset is None:
            make = distribute_from_function if self.by_function else distribute
            dataset = make(self.build(), devices, self.options)
        scale = Fraction(sum(self.counts), self.first) if self.batch == "scaled" else 1
        dataset = self.datasets[workers.rank] = dataset.divided_among(place, scale)
        iterator = iter(dataset)
        if self.state is not None:
            iterator.load_state_dict(json.loads(self.state))
            if self.over:
                assert next(iterator, None) is None
                iterator = iter(dataset)
        iterator.check_can_go_back(self.batch == "scaled")
        return iterator


def sources():
    lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)
    return st.one_of(
        st.integers(0, 30).map(lambda n: (n, lambda: Dataset.range(n))),
        st.integers(1, 30).map(
            lambda n: (n, lambda: Dataset.from_tensor_slices(np.arange(n, dtype=np.int32)))
        ),
        st.integers(0, 20).map(
            lambda n: (n, lambda: Dataset.from_generator(lambda: iter(range(n))))
        ),
        lengths.map(lambda each: (sum(each), lambda: number_files(each))),
    )


@st.composite
def pipelines(draw):
    """Return how many rows of each number an epoch has, and a function that builds the dataset."""
    rows, source = draw(sources())
    size, repeats = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    shuffle = draw(st.sampled_from([None, "window", "full", "seeded"]))
    maps, caches = draw(st.booleans()), draw(st.booleans())

    def build():
        dataset = source()
        if maps:
            dataset = dataset.map(lambda x: x)
        if shuffle is not None:
            buffer = 3 if shuffle == "window" else 40
            dataset = dataset.shuffle(buffer, seed=5 if shuffle == "seeded" else None)
        if caches:
            dataset = dataset.cache()
        if repeats > 1:
            dataset = dataset.repeat(repeats)
        return dataset.batch(size)

    return Counter(dict.fromkeys(range(rows), repeats)), build


replicas = st.integers(1, 2)
changes = st.tuples(
    st.integers(0, 5),
    st.sampled_from([None, "lost", "counted"]),
    st.none() | st.integers(0, 3),
    st.lists(replicas, max_size=2),
)


def played(job, changes, epochs=3):
    """Play changes of members, each after some steps, and then go on until some epochs are over."""
    for steps, again, lost, joining in changes:
        job.go_on(steps, again)
        job.change(lost, joining[: max(0, 5 - len(job.counts))])
    while len(job.used) < epochs or not job.over:
        job.go_on(1000)
    return job


@pytest.mark.parametrize("batch", ["constant", "scaled"])
@pytest.mark.parametrize("policy", ["auto", "data", "file", "off"])
@settings(max_examples=40)
@given(
    pipelines(),
    st.lists(replicas, min_size=1, max_size=3),
    st.lists(changes, max_size=5),
    st.sampled_from([0, 2]),
)
def test_each_sample_counts_once_whoever_comes_and_goes(
    policy, batch, pipeline, counts, changes, prefetch
):
    expected, build = pipeline
    if policy == "file" and "from_files" not in repr(build()):
        policy = "auto"
    job = played(Job(build, counts, InputOptions(policy, prefetch), batch), changes)
    for used, streams in zip(job.used, job.pipelines, strict=True):
        times = streams if policy == "off" else 1
        assert used == Counter({row: times * count for row, count in expected.items()})


@st.composite
def functions(draw):
    """Return how many rows of each number an epoch has, and a dataset function."""
    rows, size = draw(st.integers(0, 30)), draw(st.integers(1, 3))
    shuffles, seed = draw(st.booleans()), draw(st.none() | st.just(5))
    maps, caches = draw(st.booleans()), draw(st.booleans())

    def make(context):
        pipelines, number = context.num_input_pipelines, context.input_pipeline_id
        dataset = Dataset.range(rows).shard(pipelines, number)
        if maps:
            dataset = dataset.map(lambda x: x)
        if shuffles:
            dataset = dataset.shuffle(4, seed)
        return (dataset.cache() if caches else dataset).batch(size)

    return Counter(range(rows)), make


@pytest.mark.parametrize("mode", ["per_worker", "per_replica"])
@settings(max_examples=40)
@given(
    functions(),
    st.lists(replicas, min_size=1, max_size=3),
    st.lists(changes, max_size=5),
    st.sampled_from([0, 2]),
)
def test_each_sample_of_a_function_counts_once_whoever_reads_it(
    mode, function, counts, changes, prefetch
):
    expected, make = function
    options = InputOptions(prefetch=prefetch, experimental_replication_mode=mode)
    job = played(Job(lambda: make, counts, options, by_function=True), changes)
    assert all(used == expected for used in job.used)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@settings(max_examples=20)
@given(st.lists(replicas, min_size=1, max_size=3), st.lists(changes, max_size=5))
def test_a_loader_with_a_state_goes_back_on_all_workers(prefetch, counts, changes):
    job = played(Job(Stateful, counts, InputOptions("data", prefetch)), changes)
    assert all(used == Counter(range(24)) for used in job.used)


def test_a_sample_that_is_dropped_is_noticed():
    class Careless(Job):
        def go_on(self, steps, again=None):
            super().go_on(steps, again)
            if self.state is not None:
                state = json.loads(self.state)
                state["shards"][0]["batches"] += 1
                self.state = json.dumps(state)

    for kind, same in ((Job, True), (Careless, False)):
        job = kind(lambda: Dataset.range(30).shuffle(9).batch(4), [1, 1, 1], InputOptions())
        played(job, [(2, "lost", 1, [])], epochs=1)
        assert (job.used[0] == Counter(range(30))) is same


@pytest.mark.parametrize("batch", ["constant", "scaled"])
@settings(max_examples=20)
@given(st.lists(replicas, min_size=1, max_size=3), st.lists(changes, max_size=5), st.booleans())
def test_the_order_of_samples_does_not_depend_on_the_workers(batch, counts, changes, drops):
    def build():
        dataset = Dataset.range(29).shuffle(8, seed=1).batch(6, drop_remainder=drops)
        return dataset.map(lambda x: x).repeat(2)

    options = InputOptions("data", 0)
    job = played(Job(build, counts, options, batch), changes)
    alone = played(Job(build, [1], options), [], len(job.used)).steps
    if batch == "constant":
        assert job.steps == alone
    assert [*chain(*job.steps)] == [*chain(*alone)]


def rows_of_steps(build, scale, changes, policy="data", counts=(1, 1, 1, 1)):
    job = Job(build, counts, InputOptions(policy), scale)
    return [len(step) for step in played(job, changes, epochs=1).steps]


def test_a_step_has_a_constant_number_of_rows_or_as_many_as_its_workers_are_worth():
    def build():
        return Dataset.range(100).batch(12)

    lost, joined = [(2, None, 0, [])], [(2, None, None, [1])]
    assert rows_of_steps(build, "constant", lost) == [12] * 8 + [4]
    assert rows_of_steps(build, "scaled", lost) == [12] * 2 + [9] * 8 + [4]
    assert rows_of_steps(build, "scaled", joined) == [12] * 2 + [15] * 5 + [1]
    scaled = distribute(build(), cpus(2)).divided_among(place_of(cpus(1)), 0.5)
    assert (scaled.cardinality(), len(list(scaled))) == (UNKNOWN_CARDINALITY, 17)
    assert repr(scaled.element_spec) == "PerReplicaSpec(int64[None])"
    # The rest of a batch that was begun comes alone, then whole batches again.
    back = [(2, None, 0, []), (1, None, None, [1])]
    assert rows_of_steps(build, "scaled", back) == [12, 12, 9, 3] + [12] * 5 + [4]


def test_texts_of_other_lengths_share_a_step():
    texts = [np.array(["a", "bc"]), np.array(["def", "g"])]
    job = Job(lambda: lambda _: texts, [1, 1], None, by_function=True)
    job.go_on(1, "counted")
    job.change(1, [])
    job.go_on(9)
    assert job.used[0] == Counter(dict.fromkeys(["a", "bc", "def", "g"], 2))


def test_batches_of_other_shapes_do_not_share_a_step():
    def build():
        rows = [np.full(1 + number // 4, number) for number in range(12)]
        return Dataset.from_generator(lambda: iter(rows)).padded_batch(4)

    assert rows_of_steps(build, "scaled", [(0, None, 0, [])]) == [3, 1] * 3


@pytest.mark.parametrize(
    ("batched", "message"),
    [(True, "different shapes or dtypes: pad all"), (False, "elements must be batches")],
)
def test_parts_that_can_not_be_joined_for_a_step_that_is_made_again_say_so(batched, message):
    def make(context):
        rows = [np.full(2 + context.input_pipeline_id, number) for number in range(8)]
        dataset = Dataset.from_generator(lambda: iter(rows))
        return dataset.batch(2) if batched else Dataset.range(4)

    job = Job(lambda: make, [1, 1], None, by_function=True)
    job.go_on(1, "counted")
    job.change(1, [])
    with pytest.raises(ValueError, match=message):
        job.go_on(1)


@pytest.mark.parametrize(("scale", "rows"), [("constant", 12), ("scaled", 9)])
@pytest.mark.parametrize("policy", ["file", "off"])
def test_a_share_of_files_or_of_a_stream_follows_the_number_of_workers(policy, scale, rows):
    def build():
        return number_files([24] * 4).batch(12)

    steps = rows_of_steps(build, scale, [(1, None, 0, [])], policy)
    # The rest of the batches that were begun is 9 rows for each worker.
    assert steps[:6] == [12, 9, 9, 9, rows, rows]


def test_more_workers_than_files_take_part_with_empty_batches():
    job = played(
        Job(lambda: number_files([4, 3]).batch(4), [1, 1], InputOptions("file")),
        [(1, "lost", None, [1, 2]), (0, None, 0, [])],
        epochs=2,
    )
    assert job.used == [Counter(range(7))] * 2


def test_a_cache_keeps_the_orders_of_several_streams_apart():
    """One of two workers finishes its own stream, and the rest of the other's."""

    def build():
        return Dataset.range(20).shuffle(20).cache().batch(2)

    job = played(Job(build, [1, 1], InputOptions("off")), [(3, None, 1, [])], epochs=2)
    assert job.used == [Counter(dict.fromkeys(range(20), 2)), Counter(range(20))]


def test_a_function_is_called_for_what_a_worker_reads_only():
    calls = []

    def make(context):
        calls.append((context.num_input_pipelines, context.input_pipeline_id))
        assert context.num_replicas_in_sync == context.num_input_pipelines
        return Dataset.range(12).shard(*calls[-1]).batch(2)

    job = Job(lambda: make, [1, 1, 1], None, by_function=True)
    job.go_on(1, "lost")
    assert sorted(set(calls)) == [(1, 0), (3, 0), (3, 1), (3, 2)]
    calls.clear()
    job.change(1, [])
    job.go_on(1, "lost")
    assert sorted(calls) == [(3, 1), (3, 2)]  # Worker 0 has called it for pipeline 0.
    calls.clear()
    job.go_on(100)
    job.go_on(100)
    assert job.used == [Counter(range(12))] * 2
    assert sorted(calls) == [(2, 0), (2, 1)]


def test_the_shuffles_of_a_function_go_on_after_a_change():
    """Pipelines that are made anew do not begin with the order of the first epoch."""
    orders = []

    def make(context):
        dataset = Dataset.range(40).shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.shuffle(40, seed=3).batch(1)

    for counts, changes in (([1, 1], []), ([1], [(3, None, None, [1])])):
        job = played(Job(lambda: make, counts, None, by_function=True), changes, epochs=1)
        before = len(job.steps)
        job.go_on(100)
        orders.append(job.steps[before:])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) != orders[0]


@pytest.mark.parametrize(
    ("build", "policy", "scaled", "message"),
    [
        (Loader, "data", False, "a Loader, whose position cannot be saved"),
        (
            Stateful,
            "off",
            False,
            "the Stateful keeps its own position.*AutoShardPolicy.DATA",
        ),
        (Stateful, "data", True, "the Stateful keeps its own position.*batch='constant'"),
        (lambda: Dataset.range(4).batch(2), "file", False, "FILE needs a dataset of files"),
        (lambda: number_files([1, 2]).take(2).batch(2), "file", False, "count elements over all"),
    ],
)
def test_what_other_workers_could_not_continue_is_refused_at_the_start(
    build, policy, scaled, message
):
    iterator = iter(distribute(build(), cpus(1), InputOptions(policy)))
    with pytest.raises(ValueError, match=message):
        iterator.check_can_go_back(scaled)
    stateful = iter(distribute_from_function(lambda _: Stateful(), cpus(1)))
    with pytest.raises(ValueError, match="batches that are equal on all workers"):
        stateful.check_can_go_back()


def test_nothing_reads_a_loader_with_a_state_once_its_iterator_is_closed():
    reading, release = threading.Event(), threading.Event()

    class Slow(Stateful):
        def __iter__(self):
            for batch in super().__iter__():
                if self.given == 3:
                    reading.set()
                    release.wait(DEADLINE_SECONDS)
                    reading.clear()
                yield batch

    iterator = iter(distribute(Slow(), cpus(1), InputOptions(prefetch=2)))
    next(iterator)
    assert reading.wait(DEADLINE_SECONDS)
    timer = threading.Timer(0.05, release.set)
    timer.start()
    iterator.close()
    assert not reading.is_set()
    timer.join()


def test_a_distributed_dataset_can_be_sent_to_a_worker():
    pickled = pytest.importorskip("cloudpickle")
    source = Dataset.range(6).batch(4)
    by_function = distribute_from_function(lambda _: source, cpus(2))
    for dataset in (distribute(source, cpus(2)), by_function):
        sent = pickled.loads(pickled.dumps(dataset))
        assert pieces_of(sent) == pieces_of(dataset)
