"""A checkpoint is restored as a whole or not at all, also into models without variables."""

import copy
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import graph
from ndistribute.models import Model, Sequential, layers
from ndistribute.models.checkpoint import Checkpoint
from ndistribute.models.checkpoint_manager import CheckpointManager
from tests.contract_rows import served
from tests.processes import Ranks


class Holder:
    """An object whose state is its own array and lists, which a program goes on to change."""

    def __init__(self, value: float, *, fails: bool = False) -> None:
        self.state = {"array": np.full(50_000, value), "nested": {"list": [value], "pair": (1, 2)}}
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        """Return the state itself."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state, and then fail once if this is asked for."""
        self.state = state
        if self.fails:
            self.fails = False
            raise RuntimeError("the object refuses")


def test_an_asynchronous_save_has_the_state_of_its_call(tmp_path):
    holder, v = Holder(0.0), nd.Variable(np.zeros(1000))
    checkpoint = Checkpoint(holder=holder, v=v)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=None, asynchronous=True)
    for step in range(8):
        v.assign(np.full(1000, float(step)))
        holder.state["array"][:] = step
        holder.state["nested"]["list"][0] = step
        manager.save(step)
        v.assign(np.full(1000, -1.0))
        holder.state["array"][:] = -1.0
        holder.state["nested"]["list"].append(-1.0)
        holder.state["nested"]["list"] = [0]
    manager.wait()
    for step, path in enumerate(manager.checkpoints):
        read = Holder(9.0)
        Checkpoint(holder=read, v=v).restore(path)
        assert (v.numpy() == step).all()
        assert (read.state["array"] == step).all()
        assert read.state["nested"] == {"list": [step], "pair": (1, 2)}


def objects(value: float) -> dict[str, Any]:
    """Return objects of each kind in a state that differs with a value."""
    model = Sequential([layers.Dense(2, dtype="float64")])
    model.compile(nd.optimizers.LossScale(nd.optimizers.Adam(), 2.0 + value), "mse")
    model(np.ones((1, 3)))
    model.set_weights([np.full(one.shape, value) for one in model.get_weights()])
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations = int(value)
    return {"first": Holder(value), "model": model, "v": nd.Variable(value), "last": Holder(value)}


def values(found: dict[str, Any]) -> Any:
    """Return all values of objects."""
    states = [copy.deepcopy(found[name].state) for name in ("first", "last")]
    optimizer, draw = found["model"].optimizer, nd.get_strategy().run(lambda: None)
    own = [one.numpy().tolist() for one in (found["v"], *optimizer.variables)]
    weights = [one.tolist() for one in found["model"].get_weights()]
    arrays = [state.pop("array").tolist() for state in states]
    return states, arrays, own, weights, optimizer.state_dict(), draw


def with_steps(steps: Any) -> Any:
    """Return a function that gives an optimizer an impossible number of steps."""

    def change(found: dict[str, Any]) -> None:
        found["model"].optimizer.variables[0].assign(steps)

    return change


CASES = {
    "a dtype that would cut": (lambda old: old.update(v=nd.Variable(1.5)), "int", "v has float64"),
    "a shape": (lambda old: old.update(v=nd.Variable([1.0])), None, r"v has shape \(1,\)"),
    "a value too large": (
        lambda old: old.update(v=nd.Variable(1e300)),
        "float16",
        "v has float64 values that float16 cannot hold",
    ),
    "steps below 0": (with_steps(-3), None, "model/optimizer/iterations is below 0"),
    "a state too few": (lambda old: old.pop("last"), None, "the state of last is missing"),
    "a variable too few": (lambda old: old.pop("v"), None, "v is missing"),
    "another kind of object": (
        lambda old: old.update(last=nd.Variable(1.0)),
        None,
        "the state of last is missing",
    ),
    "a layer too many": (
        lambda old: old["model"].__dict__.update(more=nd.Variable(1.0)),
        None,
        "only the checkpoint has model/more",
    ),
    "an object that refuses": (lambda old: None, "refuses", "the object refuses"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_restore_that_raises_changes_nothing(case, tmp_path):
    change, here, says = CASES[case]
    saved, found = objects(3.0), objects(1.0)
    change(saved)
    path = Checkpoint(**saved).save(tmp_path / "run")
    if here == "refuses":
        found["last"].fails = True
    elif here is not None:
        found["v"] = nd.Variable(1, dtype=here)
    before = values(found)
    for restore in (
        lambda: Checkpoint(**found).restore(path),
        lambda: CheckpointManager(Checkpoint(**found), tmp_path).restore_or_initialize(),
    ):
        if here == "refuses":
            found["last"].fails = True
        path.rename(path := path.with_name("checkpoint.000001"))
        with pytest.raises((ValueError, RuntimeError), match=says):
            restore()
        assert values(found) == before


def test_numbers_that_are_not_finite_are_kept_and_others_rounded(tmp_path):
    numbers, held = [np.nan, np.inf, -np.inf, 0.1], Holder(1.0)
    held.state = {"best": np.inf, "more": [-np.inf, (np.nan,)]}
    path = Checkpoint(v=nd.Variable(numbers), held=held).save(tmp_path / "run")
    held.state, v = {}, nd.Variable(np.zeros(4, np.float16))
    Checkpoint(v=v, held=held).restore(path)
    assert np.array_equal(v, np.array(numbers, np.float16), equal_nan=True)
    assert repr(held.state) == repr({"best": np.inf, "more": [-np.inf, (np.nan,)]})


@pytest.mark.parametrize(
    "restore",
    [Model.load_weights, lambda model, path: Checkpoint(model=model).restore(path)],
    ids=["load_weights", "Checkpoint"],
)
def test_a_model_without_variables_that_the_file_does_not_have_is_refused(restore, tmp_path):
    """It stayed without variables, and got initial values at its first call."""
    saved, model = Sequential([layers.Dense(2)]), Sequential([layers.Dense(2)])
    saved(A)
    path = Checkpoint(encoder=saved, dropout=layers.Dropout(0.5)).save(tmp_path / "run")
    with pytest.raises(ValueError, match="model is missing"):
        restore(model, path)
    Checkpoint(dropout=layers.Dropout(0.5)).restore(path)


def test_the_state_of_a_wrapper_around_the_optimizer_must_fit(tmp_path):
    """A plain optimizer dropped the scale, and two sums of three counted as two sums of two."""

    def trained(optimizer):
        model = Sequential([layers.Dense(2)])
        model.compile(optimizer, "mse")
        model(A)
        optimizer.build(model.trainable_variables)
        return Checkpoint(model=model)

    adam = nd.optimizers.Adam
    path = trained(nd.optimizers.LossScale(adam())).save(tmp_path / "scaled")
    with pytest.raises(ValueError, match="only the checkpoint has model/optimizer"):
        trained(adam()).restore(path)
    sums = nd.optimizers.GradientAccumulation
    path = trained(sums(adam(), 3)).save(tmp_path / "sums")
    with pytest.raises(ValueError, match="saved with steps=3, but this object has steps=2"):
        trained(sums(adam(), 2)).restore(path)


def test_an_invalid_seed_changes_no_value(tmp_path):
    v = nd.Variable(1.0)
    tensors, data = Checkpoint(v=nd.Variable(2.0)).state()
    data["random"]["children"] = "text"
    with pytest.raises(TypeError):
        Checkpoint(v=v).load("run", tensors, data)
    assert float(v) == 1.0


@pytest.mark.parametrize("keep", [1.5, "2"])
def test_steps_and_numbers_to_keep_are_not_cut_to_integers(keep, tmp_path):
    checkpoint = Checkpoint(v=nd.Variable(1.0))
    with pytest.raises(TypeError, match="as an integer"):
        CheckpointManager(checkpoint, tmp_path, keep)
    with pytest.raises(TypeError, match="as an integer"):
        CheckpointManager(checkpoint, tmp_path).save(keep)
    with pytest.raises(ValueError, match="save_freq must be"):
        nd.callbacks.ModelCheckpoint(tmp_path, save_freq=keep)
    assert not list(tmp_path.iterdir())


def test_what_is_under_other_keywords_and_the_optimizer_of_a_model_without_one_are_ignored(
    tmp_path,
):
    saved = objects(3.0)
    path = Checkpoint(**saved).save(tmp_path / "run")
    plain = Sequential([layers.Dense(2, dtype="float64")])
    Checkpoint(model=plain).restore(path)
    assert (plain.get_weights()[0] == 3.0).all()


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"x": {4}}, r"held/state/x is \{4\}"),
        ({"x": np.ma.masked_array([1.0], [True])}, "held/state/x is masked_array"),
    ],
)
def test_a_state_that_files_would_change_is_refused_by_name(state, says, tmp_path):
    held = Holder(1.0)
    held.state = state
    with pytest.raises(ValueError, match=says):
        Checkpoint(held=held).save(tmp_path / "run")


def test_each_part_has_a_path_of_its_own(tmp_path):
    v, held = nd.Variable(1.0), Holder(1.0)
    with pytest.raises(ValueError, match="two variables have the path 'a/b'"):
        Checkpoint(**{"a/b": v, "a": {"b": nd.Variable(2.0)}}).save(tmp_path / "run")
    held.state = {"x/y": np.ones(2), "x": {"y": np.zeros(2)}}
    path = Checkpoint(held=held).save(tmp_path / "run")
    held.state = {}
    Checkpoint(held=held).restore(path)
    assert held.state["x/y"].tolist() == [1.0, 1.0]
    assert held.state["x"]["y"].tolist() == [0.0, 0.0]


def test_slots_that_only_other_processes_know_are_asked_for(tmp_path):
    with served(1) as strategy, strategy.scope():
        v, theirs = nd.Variable([1.0]), nd.optimizers.Adam(name="adam")
        theirs.apply_gradients([([1.0], v)])
        ours = nd.optimizers.Adam(name="adam")
        with pytest.raises(ValueError, match=r"call its build\(variables\) before"):
            Checkpoint(v=v, optimizer=ours).save(tmp_path / "run")
        ours.build([v])
        path = Checkpoint(v=v, optimizer=ours).save(tmp_path / "run")
    w, read = nd.Variable([0.0]), nd.optimizers.Adam()
    Checkpoint(v=w, optimizer=read).restore(path)
    assert read.iterations == 1
    assert read.slots[w]["m"].numpy() != 0


def test_weights_leave_the_random_generator_alone(tmp_path):
    model = Sequential([layers.Dense(2, input_shape=(3,))])
    path = model.save_weights(tmp_path / "run")
    nd.set_seed(5)
    seed = nd.context.current_seed()
    model.load_weights(path)
    assert nd.context.current_seed() is seed


def test_a_training_goes_on_with_the_same_callbacks_that_have_a_state(tmp_path):
    def fit(*used: nd.callbacks.Callback, metrics: Any = ()) -> None:
        model = Sequential([layers.Dense(1)])
        model.compile("sgd", "mse", list(metrics))
        backup = nd.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(A, A[:, :1], epochs=1, verbose=0, callbacks=[backup, *used])

    stopping = nd.callbacks.EarlyStopping("loss")
    fit(stopping)
    with pytest.raises(ValueError, match="only the checkpoint has _callbacks/EarlyStopping_0"):
        fit()
    with pytest.raises(ValueError, match="state of _callbacks/ReduceLROnPlateau_1 is missing"):
        fit(stopping, nd.callbacks.ReduceLROnPlateau("loss"))
    with pytest.raises(ValueError, match="different training run: metrics was"):
        fit(stopping, metrics=["mae"])
    fit(stopping)


class Sums(Model):
    """A model of a nest of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = layers.Dense(2), layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        """Return the sum of both layers."""
        one, other = inputs.values() if isinstance(inputs, dict) else inputs
        return self.left(one) + self.right(other)


class Scaled(layers.Layer):
    """A layer of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, one: Any, other: Any) -> Any:
        """Return the output times the other."""
        return self.dense(one) * other


A, B = np.ones((4, 3), np.float32), np.ones((4, 5), np.float32)
UNBUILT = {
    "array": (lambda: Sequential([layers.Dense(2)]), A),
    "tuple": (Sums, (A, B)),
    "list": (Sums, [A, B]),
    "dict": (Sums, {"a": A, "b": B}),
    "plain layer": (lambda: layers.Dense(2), A),
}


@pytest.mark.parametrize("kind", UNBUILT)
def test_what_has_no_variables_is_built_for_the_input_that_the_file_has(kind, tmp_path):
    make, inputs = UNBUILT[kind]
    source = make()
    expected = source(inputs)
    path = Checkpoint(parts=[source]).save(tmp_path / "run")
    for restore in (Checkpoint.restore, lambda one, _: manager(one).restore_or_initialize()):

        def manager(one: Checkpoint) -> CheckpointManager:
            return CheckpointManager(one, tmp_path / "more")

        manager(Checkpoint(parts=[source])).save(1)
        read = make()
        restore(Checkpoint(parts=[read]), path)
        assert np.array_equal(read(inputs), expected)
    if hasattr(source, "load_weights"):
        for saved in (source.save_weights(tmp_path / "w"), source.export(tmp_path / "e")):
            read = make()
            read.load_weights(saved)
            assert np.array_equal(read(inputs), expected)


def test_what_cannot_be_built_for_its_input_is_named(tmp_path):
    source = Scaled()
    source(A, 2.0)
    path = Checkpoint(layer=source).save(tmp_path / "run")
    v = nd.Variable(1.0)
    with pytest.raises(ValueError, match=r"'layer' cannot be built.*call it on an input before"):
        Checkpoint(layer=Scaled(), v=v).restore(path)


def differ_on_one(rank: int, size: int, directory: str, what: str) -> tuple[str, float, float]:
    """Save and restore on two workers, of which one can or does not do what the other does."""
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]):
        v, holder = nd.Variable(3.0), Holder(3.0)
        if what == "a state that no file can have" and rank:
            holder.state["bad"] = {1}
        try:
            path = Checkpoint(holder=holder, v=v).save(f"{directory}/run")
            v.assign(1.0)
            holder.state = Holder(1.0).state
            holder.fails = what == "an object that refuses" and rank == 1
            asked = {"v": v} if what != "fewer variables" or rank == 0 else {}
            Checkpoint(holder=holder, **asked).restore(path)
        except (RuntimeError, ValueError, nd.DistributeError) as error:
            return str(error), float(v), float(holder.state["array"][0])
    return "", 0.0, 0.0


TOLD = "worker 1 and the chief restore different objects: only one of them has v"
BAD = "holder/state/bad is {1}"


@pytest.mark.parametrize(
    ("what", "first", "second", "value"),
    [
        ("an object that refuses", "on worker 1: RuntimeError: the", "the object refuses", 1.0),
        ("fewer variables", TOLD, TOLD, 1.0),
        ("a state that no file can have", f"on worker 1: {BAD}", BAD, 3.0),
    ],
)
def test_all_workers_raise_where_one_cannot_and_nothing_changes(
    what, first, second, value, tmp_path
):
    """The others went on, out of step, or the variable of one kept its value."""
    with Ranks(2) as ranks:
        for said, (text, *values) in zip(
            (first, second), ranks.results(differ_on_one, str(tmp_path), what), strict=True
        ):
            assert said in text
            assert "Nothing has changed" in text or what != "fewer variables"
            assert values == [value, value]
    assert bool(list(tmp_path.iterdir())) == (value == 1.0)


def build_on_workers(rank: int, size: int, directory: str) -> list[Any]:
    """Restore models without variables, where only the chief has a disk."""
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        source, *others = (Sequential([layers.Dense(2)]) for _ in range(3))
        wrong = Sequential([layers.Dense(4)])
        source(A)
        path = source.save_weights(f"{directory if strategy.is_chief else '/nowhere'}/run")
        others[0].load_weights(path)
        Checkpoint(model=others[1]).restore(path)
        told = ""
        try:
            wrong.load_weights(path)
        except ValueError as error:
            told = str(error)
        return [*(one.get_weights()[0] for one in (source, *others)), told]


def test_workers_build_models_alike_and_need_the_chiefs_disk_alone(tmp_path):
    with Ranks(2) as ranks:
        for *weights, told in ranks.results(build_on_workers, str(tmp_path)):
            assert all(np.array_equal(one, weights[0]) for one in weights)
            assert "kernel has shape (3, 2), but the variable has (3, 4)" in told


def test_a_saver_refuses_what_a_dtype_cannot_hold_before_it_changes_anything(tmp_path):
    saved = Checkpoint(a=nd.Variable(1.0), b=nd.Variable(1e300)).save(tmp_path / "run")
    with graph.Graph().as_default(), graph.Session() as session:
        a = graph.Variable(0.0, name="a")
        b = graph.Variable(np.float16(0.0), name="b")
        session.run(graph.global_variables_initializer())
        with pytest.raises(nd.errors.InvalidArgumentError, match="'b' has dtype float64"):
            graph.Saver().restore(session, str(saved.with_suffix("")))
        assert session.run([a, b]) == [0.0, 0.0]


def test_what_is_written_replaces_what_was_and_is_read_by_the_same_path(tmp_path):
    v = nd.Variable(1.0)
    checkpoint = Checkpoint(v=v)
    saved = checkpoint.save(tmp_path / "run")
    for value in (2.0, 3.0):
        v.assign(value)
        written = checkpoint.write(tmp_path / "run")
    assert sorted(tmp_path.glob("run.*")) == [saved, written]
    for path, value in ((tmp_path / "run", 3.0), (written, 3.0), (saved, 1.0)):
        v.assign(0.0)
        checkpoint.read(path)
        assert float(v) == value


def test_a_checkpoint_may_have_others_and_iterators_of_datasets(tmp_path):
    v, dataset = nd.Variable(1.0), nd.Dataset.range(9).shuffle(9).map(lambda x: x)
    iterator = iter(dataset)
    inner = Checkpoint(iterator=iterator)
    outer = Checkpoint(inner=inner, v=v)
    inner.more = w = nd.Variable(2.0)  # It is part of the outer one, too.
    next(iterator), iterator.get_next()
    assert iterator.state_dict()["count"] == iterator.state_dict()["count"] == 2
    path = outer.save(tmp_path / "run")
    left = list(iterator)
    w.assign(0.0)
    outer.restore(path)
    assert (float(w), list(iterator)) == (2.0, left)
    assert outer.inner is inner
    outer.restore(path)
    iterator.close()
    assert list(iterator) == []
    with pytest.raises(ValueError, match=r"pipeline with 1 shuffle, but this one has 0"):
        iter(nd.Dataset.range(3)).load_state_dict({"count": 1, "shuffles": [[1, 2]]})
    loader = iter(nd.Dataset.range(2).concatenate(frozenset([np.int64(2)])))
    with pytest.raises(ValueError, match="whose position cannot be saved"):
        loader.state_dict()


def test_a_manager_saves_when_it_is_due_and_begins_by_a_function(tmp_path):
    v, step, begun = nd.Variable(1.0), nd.Variable(0), []
    options = {"step_counter": step, "checkpoint_interval": 3, "max_to_keep": None}
    with pytest.raises(ValueError, match="needs a step_counter"):
        CheckpointManager(Checkpoint(v=v), tmp_path, checkpoint_interval=3)
    manager = CheckpointManager(
        Checkpoint(v=v, step=step), tmp_path, init_fn=lambda: begun.append(v.assign(5.0)), **options
    )
    assert manager.restore_or_initialize() is None
    assert (len(begun), float(v)) == (1, 5.0)
    saved = []
    for _ in range(7):
        step.assign_add(1)
        if manager.save() is not None:
            saved.append(int(step))
    assert saved == [1, 4, 7]
    step.assign_add(1)
    assert manager.save(check_interval=False) is not None
    again = CheckpointManager(Checkpoint(v=v, step=step), tmp_path, **options)
    assert again.restore_or_initialize() == manager.latest_checkpoint
    assert (again.step, again.save(), len(again.checkpoints)) == (8, None, 4)


def test_a_reader_tells_what_a_checkpoint_has_and_initializers_take_it(tmp_path):
    inner = Checkpoint(w=nd.Variable(3.0))
    path = Checkpoint(a=nd.Variable(np.float32([1, 2])), net=inner).save(tmp_path / "run")
    for place in (path, tmp_path, tmp_path / "run"):
        assert nd.models.list_variables(place) == [("a", [2]), ("net/w", [])]
    reader = nd.models.load_checkpoint(path)
    assert (reader.has_tensor("a"), reader.has_tensor("b")) == (True, False)
    assert reader.get_variable_to_dtype_map()["a"] == np.float32
    assert nd.models.load_variable(path, "a:0").tolist() == [1, 2]
    with pytest.raises(KeyError, match="has no 'b': it has a, net/w"):
        reader.get_tensor("b")
    with graph.Graph().as_default(), graph.Session() as session:
        a, w = graph.Variable([0.0, 0.0], name="a"), graph.Variable(0.0, name="scope/w")
        graph.init_from_checkpoint(tmp_path, {"a": a, "net/": "scope/"})
        session.run(graph.global_variables_initializer())
        assert [value.tolist() for value in session.run([a, w])] == [[1, 2], 3]
        graph.init_from_checkpoint(path, {"net/w": "scope/w"})
        for wrong, message in (
            ({"b": a}, "the checkpoint has no 'b'"),
            ({"a": "b"}, "the graph has no .b"),
            ({"a": "scope/w"}, "the shape is"),
        ):
            with pytest.raises(ValueError, match=message):
                graph.init_from_checkpoint(path, wrong)
