"""Fifty mistakes that a first user makes, and what the errors tell him.

Each says what failed, where, what was expected, and what to write instead. To read them as a user
would: ``python -m tests.test_mistakes`` prints the name, the code and the message of each.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import context, rank


@dataclass(frozen=True)
class Mistake:
    code: Callable[..., object]
    error: type[Exception]
    says: tuple[str, ...]


MISTAKES: dict[str, Mistake] = {}


def mistake(error: type[Exception], *says: str):
    """Put a function into the table: the error that it raises, and parts of the message."""

    def note(code: Callable[..., object]) -> Callable[..., object]:
        MISTAKES[code.__name__] = Mistake(code, error, says)
        return code

    return note


# Devices and strategies.


@mistake(ValueError, "devices must be a list such as ['cpu:0', 'cpu:1']", "got 2")
def number_of_devices(_):
    nd.MirroredStrategy(2)


@mistake(ValueError, "'cpu' is not the name of a device", "'cpu:0'")
def device_without_a_number(_):
    nd.OneDeviceStrategy("cpu")


@mistake(ValueError, "gpu:77 does not exist", "visible GPUs", "CUDA_VISIBLE_DEVICES")
def device_that_is_not_there(_):
    nd.MirroredStrategy(["gpu:77"])


@mistake(ValueError, "cpu:0 is named twice", "cpu:1")
def device_named_twice(_):
    nd.MirroredStrategy(["cpu:0", "cpu:0"])


@mistake(ValueError, "devices is empty", "['cpu:0', 'cpu:1']")
def no_device(_):
    nd.MirroredStrategy([])


@mistake(TypeError, "cross_device_ops", "nd.RingAllReduce()", "'nccl'")
def reduction_by_name(_):
    nd.MirroredStrategy(["cpu:0"], cross_device_ops="nccl")


@mistake(RuntimeError, "Mixing different strategies", "OneDeviceStrategy('cpu:0')", "Leave")
def scope_in_the_scope_of_another_strategy(strategy):
    with strategy.scope(), nd.OneDeviceStrategy("cpu:0").scope():
        pass


@mistake(RuntimeError, "set_strategy", "inside a strategy's scope")
def set_strategy_in_a_scope(strategy):
    with strategy.scope():
        nd.set_strategy(strategy)


@mistake(RuntimeError, "closed MirroredStrategy", "make a new strategy")
def run_of_a_closed_strategy(strategy):
    strategy.close()
    strategy.run(lambda: 1.0)


@mistake(TypeError, "MirroredStrategy", "cannot be copied or pickled", "in each process")
def pickled_strategy(strategy):
    pickle.dumps(strategy)


# Steps.


@mistake(TypeError, "fn must be a function, got 1.4142", "run(step, args=(x,))")
def result_of_the_step_instead_of_the_step(strategy):
    strategy.run(np.sqrt(2.0).item())


@mistake(ValueError, "args must be a list or tuple, got ndarray", "args=(x,)")
def argument_that_is_no_tuple(strategy):
    strategy.run(np.sum, args=np.ones(2))


@mistake(ValueError, "3 component(s)", "2 replica(s)")
def argument_with_too_many_components(strategy):
    strategy.run(np.sum, args=(nd.PerReplica([1.0, 2.0, 3.0]),))


@mistake(RuntimeError, "run was called inside a replica", "of 2 (cpu:")
def run_in_a_step(strategy):
    strategy.run(lambda: strategy.run(lambda: 1.0))


@mistake(ValueError, "replica 1", "structure")
def results_of_different_structures(strategy):
    strategy.run(lambda: {"loss": 1.0} if rank() else {"accuracy": 1.0})


@mistake(TypeError, "__add__ on a PerReplica of 2", "local_results", "reduce")
def arithmetic_with_what_run_returns(strategy):
    strategy.run(lambda: 1.0) + 1.0


@mistake(TypeError, "float on a PerReplica of 2", "strategy.reduce")
def one_number_of_what_run_returns(strategy):
    float(strategy.run(lambda: 1.0))


# Values of all replicas.


@mistake(ValueError, "'median'", "SUM, MEAN")
def unknown_reduction(strategy):
    strategy.reduce("median", nd.PerReplica([1.0, 2.0]))


@mistake(ValueError, "reduce SUM", "replica 1", "(3,)", "replica 0", "(2,)", "gather")
def reduce_of_unequal_shapes(strategy):
    strategy.reduce("sum", nd.PerReplica([np.ones(2), np.ones(3)]))


@mistake(ValueError, "reduce MEAN: axis 1", "shape (2,)", "[-1, 1)")
def reduce_along_an_axis_that_is_not_there(strategy):
    strategy.reduce("mean", nd.PerReplica([np.ones(2), np.ones(2)]), axis=1)


@mistake(RuntimeError, "reduce was called inside a replica", "all_reduce", "of 2 (cpu:")
def reduce_in_a_step(strategy):
    strategy.run(lambda: strategy.reduce("sum", 1.0))


@mistake(ValueError, "gather along axis 0", "() of replica 0", "np.reshape(x, (1,))")
def gather_of_numbers(strategy):
    strategy.gather(nd.PerReplica([1.0, 2.0]), axis=0)


@mistake(ValueError, "gather along axis 0", "(2, 3) of replica 0", "(2, 4) of replica 1")
def gather_of_unequal_rows(strategy):
    strategy.gather(nd.PerReplica([np.ones((2, 3)), np.ones((2, 4))]), axis=0)


@mistake(ValueError, "gather along axis None", "integer")
def gather_without_an_axis(strategy):
    strategy.gather(nd.PerReplica([np.ones(2), np.ones(2)]), axis=None)


@mistake(ValueError, "all_reduce #1", "replica 1", "float64[2]", "replica 0", "float64[1]")
def all_reduce_of_unequal_shapes(strategy):
    strategy.run(lambda: context().all_reduce("sum", np.ones(1 + rank())))


@mistake(ValueError, "all_reduce #1", "replica 1 returned", "replica 0 called all_reduce(SUM")
def all_reduce_on_one_replica(strategy):
    strategy.run(lambda: None if rank() else context().all_reduce("sum", 1.0))


@mistake(RuntimeError, "all_reduce", "inside merge_call", "strategy.reduce(op, value)")
def all_reduce_in_a_merge_call(strategy):
    def step():
        replica = context()
        return replica.merge_call(lambda strategy: replica.all_reduce("sum", 1.0))

    strategy.run(step)


@mistake(RuntimeError, "context of replica 0", "outside that replica", "get_replica_context()")
def context_kept_after_the_step(strategy):
    kept = strategy.run(nd.get_replica_context).values[0]
    kept.all_reduce("sum", 1.0)


# Variables.


@mistake(ValueError, "a variable holds numbers", "'text'")
def variable_of_text(_):
    nd.Variable("text")


@mistake(TypeError, "trainable='weights'", "name='w'")
def name_as_the_second_argument(_):
    nd.Variable([1.0, 2.0], "weights")


@mistake(TypeError, "trainable=<class 'numpy.float32'>", "name='w'")
def dtype_as_the_second_argument(_):
    nd.Variable([1.0, 2.0], np.float32)


@mistake(ValueError, "aggregation must be one of", "'mean'", "'median'")
def unknown_aggregation(_):
    nd.Variable(1.0, aggregation="median")


@mistake(ValueError, "synchronization NONE", "ON_WRITE", "ON_READ")
def variable_that_nothing_synchronizes(_):
    nd.Variable(1.0, synchronization="none")


@mistake(ValueError, "MEAN", "int64", "SUM")
def mean_of_integers(_):
    nd.Variable(1, aggregation="mean")


@mistake(ValueError, "'weights'", "aggregation='sum', 'mean' or 'only_first_replica'")
def assign_in_a_step_without_an_aggregation(strategy):
    with strategy.scope():
        weights = nd.Variable([1.0, 2.0], name="weights")
    strategy.run(lambda: weights.assign([3.0, 4.0]))


@mistake(ValueError, "PerReplica", "'Variable'", "strategy.reduce")
def assign_of_what_run_returns(strategy):
    with strategy.scope():
        total = nd.Variable(0.0)
    total.assign(strategy.run(lambda: 1.0))


@mistake(ValueError, "(3,)", "'weights'", "(2,)", "Nothing has changed")
def assign_of_another_shape(_):
    nd.Variable([1.0, 2.0], name="weights").assign(np.ones(3))


@mistake(ValueError, "'steps'", "float64", "int64", "astype", "Nothing has changed")
def assign_of_a_fraction_to_an_integer(_):
    nd.Variable(1, name="steps").assign(1.5)


@mistake(TypeError, "assign_add")
def element_of_a_variable_set(_):
    weights = nd.Variable([1.0, 2.0])
    weights[0] = 3.0


@mistake(TypeError, "assign_add")
def variable_changed_by_an_operator(_):
    weights = nd.Variable([1.0, 2.0])
    weights += 1.0


@mistake(ValueError, "'loss'", "no aggregation", "local_results")
def variable_of_each_replica_read_outside(strategy):
    with strategy.scope():
        loss = nd.Variable(0.0, name="loss", synchronization="on_read")
    float(loss)


@mistake(RuntimeError, "'weights'", "under OneDeviceStrategy('cpu:0')", "inside the scope")
def variable_of_another_strategy(strategy):
    with strategy.scope():
        weights = nd.Variable([1.0, 2.0], name="weights")
    with nd.OneDeviceStrategy("cpu:0") as other:
        other.run(lambda: weights + 1.0)


@mistake(ValueError, "replica 1", "(3,)", "replica 0", "(2,)")
def variables_of_unequal_shapes_in_a_step(strategy):
    strategy.run(lambda: nd.Variable(np.ones(2 + rank())))


@mistake(TypeError, "variable 'weights'", "cannot be copied or pickled", "variable.numpy()")
def copied_variable(_):
    copy.deepcopy({"weights": nd.Variable([1.0, 2.0], name="weights")})


# Optimizers.


@mistake(ValueError, "learning_rate must be a number", "'0.1'")
def learning_rate_as_text(_):
    nd.optimizers.SGD("0.1")


@mistake(ValueError, "learning_rate must be a number, 0 or more", "-0.1")
def negative_learning_rate(_):
    nd.optimizers.SGD(-0.1)


@mistake(ValueError, "at most one of clipnorm, global_clipnorm and clipvalue")
def two_ways_to_clip(_):
    nd.optimizers.SGD(clipnorm=1.0, global_clipnorm=1.0)


@mistake(TypeError, "pairs (gradient, variable)", "['MirroredVariable', 'ndarray']", "zip(")
def pairs_the_wrong_way_round(_):
    weights = nd.Variable([1.0, 2.0], name="weights")
    nd.optimizers.SGD(0.1).apply_gradients([(weights, np.ones(2))])


@mistake(TypeError, "pairs (gradient, variable), got ndarray", "zip(gradients, variables)")
def gradients_without_variables(_):
    nd.optimizers.SGD(0.1).apply_gradients([np.ones(2), np.ones(3)])


@mistake(ValueError, "got no pairs", "list(zip(gradients, variables))")
def zip_that_is_used_up(_):
    weights = nd.Variable([1.0, 2.0])
    pairs = zip([np.ones(2)], [weights], strict=True)
    nd.optimizers.SGD(0.1).apply_gradients(pairs)
    nd.optimizers.SGD(0.1).apply_gradients(pairs)


@mistake(ValueError, "no variable has a gradient", "inside the tape", "'weights'")
def loss_that_does_not_depend_on_the_variables(_):
    weights = nd.Variable([1.0, 2.0], name="weights")
    nd.optimizers.SGD(0.1).apply_gradients([(None, weights)])


@mistake(ValueError, "'weights'", "(3,)", "(2,)", "Nothing has changed")
def gradient_of_another_shape(_):
    weights = nd.Variable([1.0, 2.0], name="weights")
    nd.optimizers.SGD(0.1).apply_gradients([(np.ones(3), weights)])


@mistake(ValueError, "apply_gradients #", "replica 1 returned", "replica 0 called apply_gradients")
def apply_gradients_on_one_replica(strategy):
    with strategy.scope():
        weights = nd.Variable([1.0, 2.0])
        optimizer = nd.optimizers.SGD(0.1)
    optimizer.build([weights])
    strategy.run(lambda: None if rank() else optimizer.apply_gradients([(np.ones(2), weights)]))


@mistake(ValueError, "different optimizers", "outside of run")
def optimizer_made_in_a_step(strategy):
    with strategy.scope():
        weights = nd.Variable([1.0, 2.0])
    strategy.run(lambda: nd.optimizers.SGD(0.1).apply_gradients([(np.ones(2), weights)]))


@mistake(ValueError, "optimizer 'adam", "'weights'", "make an optimizer for each strategy")
def optimizer_of_another_strategy(strategy):
    with strategy.scope():
        optimizer = nd.optimizers.Adam(0.1)
        optimizer.build([nd.Variable([1.0, 2.0])])
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
        weights = nd.Variable([1.0, 2.0], name="weights")
        other.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))


# Input.


@mistake(ValueError, "unbatched", "dataset.batch(global_batch_size)")
def dataset_without_batches(strategy):
    strategy.distribute_dataset(nd.Dataset.range(4))


@mistake(ValueError, "float64[3], float64[4]", "the same leading length")
def arrays_of_unequal_lengths(_):
    nd.Dataset.from_tensor_slices((np.ones(3), np.ones(4)))


@mistake(ValueError, "list_iterator", "only once", "Dataset.from_generator")
def input_that_can_be_read_once(strategy):
    strategy.distribute_dataset(iter([np.ones(2)]))


@mistake(RuntimeError, "inside a replica", "strategy.run(step, args=(batch,))", "of 2 (cpu:")
def batch_taken_in_a_step(strategy):
    batches = strategy.distribute_dataset(nd.Dataset.range(4).batch(2))
    strategy.run(lambda: next(iter(batches)))


# Gradients.


@mistake(RuntimeError, "not persistent", "pass all sources together", "persistent=True")
def two_gradients_of_one_tape(_):
    weights = nd.Variable([1.0, 2.0])
    with nd.GradientTape() as tape:
        loss = np.sum(weights * weights)
    tape.gradient(loss, weights)
    tape.gradient(loss, weights)


@mistake(TypeError, "ndarray", "variables", "tape.watch(array)")
def gradient_of_a_plain_array(_):
    weights = nd.Variable([1.0, 2.0])
    with nd.GradientTape() as tape:
        loss = np.sum(weights * weights)
    tape.gradient(loss, weights.numpy())


@mistake(TypeError, "np.i0", "nd.custom_gradient")
def function_without_a_derivative(_):
    weights = nd.Variable([1.0, 2.0])
    with nd.GradientTape() as tape:
        loss = np.sum(np.i0(weights))
    tape.gradient(loss, weights)


@mistake(TypeError, "x[i] = v", "np.where(mask, v, x)")
def element_of_a_result_set(_):
    weights = nd.Variable([1.0, 2.0])
    with nd.GradientTape():
        doubled = weights * 2.0
        doubled[0] = 5.0


@mistake(TypeError, "var_list", "list of variables", "[variable]")
def variable_that_stands_in_no_list(_):
    weights = nd.Variable([1.0, 2.0])
    with nd.GradientTape() as tape:
        loss = np.sum(weights * weights)
    nd.optimizers.SGD(0.1).minimize(loss, weights, tape)


@mistake(TypeError, "float", "nd.stop_gradient")
def number_of_a_loss_on_the_tape(_):
    weights = nd.Variable([1.0, 2.0])
    with nd.GradientTape():
        print(float(np.sum(weights)))


@mistake(TypeError, "steps", "int64", "floating")
def gradient_of_integers(_):
    steps = nd.Variable(np.arange(3), name="steps")
    with nd.GradientTape() as tape:
        loss = np.sum(steps * 2.0)
    tape.gradient(loss, steps)


@mistake(TypeError, "devices=['cpu:0']", "nd.TFConfigClusterResolver()")
def devices_in_the_place_of_a_resolver(_):
    nd.MultiWorkerMirroredStrategy(["cpu:0"])


@mistake(TypeError, "nd.CommunicationOptions(...)", "'ring'")
def options_by_name(_):
    nd.MultiWorkerMirroredStrategy(communication_options="ring")


@mistake(ValueError, "Dataset.from_tensor_slices((x, y))", "batch")
def arrays_in_the_place_of_a_dataset(strategy):
    strategy.distribute_dataset((np.zeros((4, 2)), np.zeros(4)))


@mistake(ValueError, "table.csv", "line 3")
def word_in_a_table(_):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.csv")
        path.write_text("a,b\n1,2\n3,four\n")
        list(nd.Dataset.from_files(str(path)))


# Models.


def fitted(loss: str, labels: object) -> None:
    model = nd.models.Sequential([nd.models.layers.Dense(3)])
    model.compile("sgd", loss)
    model.fit(np.ones((8, 4), np.float32), labels, verbose=0)


@mistake(AttributeError, "Seen has no add_weight", "super().__init__(name, size=n)")
def weight_of_a_metric(_):
    class Seen(nd.models.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.total = self.add_weight(name="total", initializer="zeros")

    Seen()


@mistake(RuntimeError, "Forgetful.__init__", "super().__init__()")
def layer_without_the_constructor_of_its_base(_):
    class Forgetful(nd.models.layers.Layer):
        def __init__(self):
            self.factor = 2

        def call(self, x):
            return x * self.factor

    Forgetful()(np.ones(2, np.float32))


@mistake(RuntimeError, "ForgetfulModel.__init__", "super().__init__()")
def model_without_the_constructor_of_its_base(_):
    class ForgetfulModel(nd.models.Model):
        def __init__(self):
            self.dense = nd.models.layers.Dense(1)

    ForgetfulModel().compile("sgd", "mse")


@mistake(TypeError, "SGD takes no argument 'lr'", "learning_rate")
def learning_rate_by_its_old_name(_):
    nd.optimizers.SGD(lr=0.1)


@mistake(TypeError, "Adam takes no argument 'decay'", "ExponentialDecay")
def decay_of_an_optimizer(_):
    nd.optimizers.Adam(decay=0.1)


@mistake(TypeError, "Dense takes no argument 'input_dim'", "input_shape=(n,)")
def length_of_the_input_of_a_layer(_):
    nd.models.layers.Dense(3, input_dim=4)


@mistake(TypeError, "EarlyStopping takes no argument 'patence'", "use patience")
def misspelt_argument_of_a_callback(_):
    nd.models.callbacks.EarlyStopping(patence=3)


@mistake(TypeError, "MeanSquaredError takes no argument 'nam'", "use name")
def misspelt_argument_of_a_loss(_):
    nd.models.losses.MeanSquaredError(nam="mse")


@mistake(TypeError, "Mean takes no argument 'nme'", "use name")
def misspelt_argument_of_a_metric(_):
    nd.models.metrics.Mean(nme="loss")


@mistake(ValueError, "loss 'mean_squared_error'", "labels <U1[8]", "np.unique")
def labels_as_text(_):
    fitted("mse", np.array(["a"] * 8))


@mistake(ValueError, "labels object[8]", "np.unique")
def labels_that_are_missing(_):
    fitted("mse", np.array([None] * 8))


@mistake(ValueError, "labels float64[8, 1] and predictions float32[8, 3]", "must have the shape")
def labels_that_would_be_broadcast(_):
    fitted("mse", np.ones((8, 1)))


@mistake(
    ValueError, "loss 'mean_squared_error'", "labels float64[8, 5]", "predictions float32[8, 3]"
)
def labels_of_another_shape(_):
    fitted("mse", np.ones((8, 5)))


@mistake(TypeError, "load_weights of model 'net'", "got a ModelCheckpoint", "path")
def callback_in_the_place_of_a_path(_):
    net = nd.models.Sequential([nd.models.layers.Dense(3, input_shape=(4,))], name="net")
    net.load_weights(nd.models.callbacks.ModelCheckpoint("weights"))


@mistake(ValueError, "read-only", "x = x.copy()", "replica 0 of 2")
def element_changed_in_a_step(strategy):
    def double(x):
        x *= 2

    for x in strategy.distribute_dataset(nd.Dataset.from_tensor_slices(np.ones((4, 2))).batch(4)):
        strategy.run(double, args=(x,))


@mistake(ValueError, "read-only", "x = x.copy()")
def element_changed_in_a_map(_):
    def double(x):
        x *= 2
        return x

    list(nd.Dataset.from_tensor_slices(np.ones((4, 2))).map(double))


def made(one: Mistake) -> Exception:
    """Make a mistake beside a strategy of two replicas, and return the error."""
    strategy = nd.MirroredStrategy(["cpu:0", "cpu:1"])
    try:
        one.code(strategy)
    except Exception as error:
        return error
    finally:
        strategy.close()
    raise AssertionError(f"{one.code.__name__} raised nothing")


def message(error: Exception) -> str:
    """Return what stands below the traceback, the notes included."""
    return "".join(traceback.format_exception_only(error))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_words(name: str):
    error = made(MISTAKES[name])
    said = message(error)
    assert isinstance(error, MISTAKES[name].error), said
    assert [part for part in MISTAKES[name].says if part not in said] == [], said


def test_there_are_fifty():
    assert len(MISTAKES) >= 50


def shown() -> Iterator[str]:
    yield 'Each with strategy = nd.MirroredStrategy(["cpu:0", "cpu:1"]); context() is'
    yield "nd.get_replica_context(), and rank() its replica_id_in_sync_group."
    for number, (name, one) in enumerate(MISTAKES.items(), 1):
        code = inspect.getsource(one.code).partition("\ndef ")[2].partition(":\n")[2]
        yield f"\n{number}. {name.replace('_', ' ')}\n\n{textwrap.dedent(code)}"
        yield textwrap.indent(message(made(one)), "    ").rstrip()


if __name__ == "__main__":
    print("\n".join(shown()))
