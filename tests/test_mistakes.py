"""Mistakes that a first user makes, and what the errors tell him.

Each says what failed, where, what was expected, and what to write instead. To read them as a user
would: ``python -m tests.test_mistakes`` prints the code and the message of each.
"""

import copy
import linecache
import pickle
import re
import textwrap
import traceback
from collections.abc import Iterator

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import context, rank

# The code, and behind an arrow the error and parts of its message. `strategy` has two replicas.
MISTAKES = r"""
# Devices and strategies.
nd.MirroredStrategy(2)
-> ValueError: devices must be a list such as ['cpu:0', 'cpu:1'] | got 2
nd.OneDeviceStrategy("cpu")
-> ValueError: 'cpu' is not the name of a device | 'cpu:0'
nd.MirroredStrategy(["gpu:77"])
-> ValueError: gpu:77 does not exist | visible GPUs | CUDA_VISIBLE_DEVICES
nd.MirroredStrategy(["cpu:0", "/device:GPU:4096"])
-> ValueError: gpu:4096 does not exist
nd.CentralStorageStrategy(["cpu:0"], parameter_device="gpu:4096")
-> ValueError: gpu:4096 does not exist
nd.OneDeviceStrategy("gpu:4096")
-> ValueError: gpu:4096 does not exist
nd.CentralStorageStrategy(["cpu:1", "cpu:0", "/device:CPU:1"])
-> ValueError: cpu:1 is named twice
nd.CentralStorageStrategy([])
-> ValueError: devices is empty
nd.MirroredStrategy(["cpu:0", "cpu:0"])
-> ValueError: cpu:0 is named twice | cpu:1
nd.MirroredStrategy(["cpu:0"], cross_device_ops="nccl")
-> TypeError: cross_device_ops | nd.RingAllReduce() | 'nccl'
with strategy.scope(), nd.OneDeviceStrategy("cpu:0").scope():
    pass
-> RuntimeError: Mixing different strategies | OneDeviceStrategy('cpu:0') | Leave
with strategy.scope():
    nd.set_strategy(strategy)
-> RuntimeError: set_strategy | inside a strategy's scope
strategy.close()
strategy.run(lambda: 1.0)
-> RuntimeError: closed MirroredStrategy | make a new strategy | load models in its scope
with strategy.scope():
    model = nd.Sequential([nd.layers.Dense(1)])
    model.compile("sgd", "mse")
strategy.close()
model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
-> RuntimeError: closed MirroredStrategy | make a new strategy | load models in its scope
model = nd.Sequential([nd.layers.Dense(1)], name="net")
with strategy.scope():
    model.compile("sgd", "mse")
-> RuntimeError: model 'net' was created for DefaultStrategy | compile | Create or load the model
model = nd.Sequential([nd.layers.Dense(1)], name="net")
model.compile("sgd", "mse")
with strategy.scope():
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
-> RuntimeError: model 'net' was created for DefaultStrategy | fit was called in the scope of Mirr
with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as earlier, earlier.scope():
    model = nd.Sequential([nd.layers.Dense(1, input_shape=(2,))], name="net")
with strategy.scope():
    model.predict(np.ones((4, 2)))
-> RuntimeError: model 'net' was created for | predict was called in the scope of Mirr
pickle.dumps(strategy)
-> TypeError: MirroredStrategy | cannot be copied or pickled | in each process
# Steps.
strategy.run(np.sqrt(2.0).item())
-> TypeError: fn must be a function, got 1.4142 | run(step, args=(x,))
strategy.run(np.sum, args=np.ones(2))
-> ValueError: args must be a list or tuple, got ndarray | args=(x,)
strategy.run(np.sum, args=(nd.PerReplica([1.0, 2.0, 3.0]),))
-> ValueError: 3 components | 2 replicas
strategy.run(lambda: strategy.run(lambda: 1.0))
-> RuntimeError: run was called inside a replica | of 2 (cpu:
strategy.run(lambda: {"loss": 1.0} if rank() else {"accuracy": 1.0})
-> ValueError: replica 1 | structure
# Values of all replicas.
strategy.reduce("median", nd.PerReplica([1.0, 2.0]))
-> ValueError: 'median' | SUM, MEAN
strategy.reduce("sum", nd.PerReplica([np.ones(2), np.ones(3)]))
-> ValueError: reduce SUM | replica 1 | (3,) | replica 0 | (2,) | gather
strategy.reduce("mean", nd.PerReplica([np.ones(2), np.ones(2)]), axis=1)
-> ValueError: reduce MEAN: axis 1 | shape (2,) | [-1, 1)
strategy.run(lambda: strategy.reduce("sum", 1.0))
-> RuntimeError: reduce was called inside a replica | all_reduce | of 2 (cpu:
strategy.gather(nd.PerReplica([1.0, 2.0]), axis=0)
-> ValueError: gather along axis 0 | () of replica 0 | np.reshape(x, (1,))
strategy.gather(nd.PerReplica([np.ones((2, 3)), np.ones((2, 4))]), axis=0)
-> ValueError: gather along axis 0 | (2, 3) of replica 0 | (2, 4) of replica 1
strategy.gather(nd.PerReplica([np.ones(2), np.ones(2)]), axis=None)
-> ValueError: gather along axis None | integer
strategy.run(lambda: context().all_reduce("sum", np.ones(1 + rank())))
-> ValueError: all_reduce #1 | replica 1 | float64[2] | replica 0 | float64[1]
strategy.run(lambda: None if rank() else context().all_reduce("sum", 1.0))
-> ValueError: all_reduce #1 | replica 1 returned | replica 0 called all_reduce(SUM
def step():
    replica = context()
    return replica.merge_call(lambda strategy: replica.all_reduce("sum", 1.0))
strategy.run(step)
-> RuntimeError: all_reduce | inside merge_call | strategy.reduce(op, value)
kept = strategy.run(nd.get_replica_context).values[0]
kept.all_reduce("sum", 1.0)
-> RuntimeError: context of replica 0 | outside that replica | get_replica_context()
# Variables.
nd.Variable("text")
-> ValueError: a variable holds numbers | 'text'
nd.Variable([1.0, 2.0], "weights")
-> TypeError: trainable='weights' | name='w'
nd.Variable([1.0, 2.0], np.float32)
-> TypeError: trainable=<class 'numpy.float32'> | name='w'
nd.Variable(1.0, aggregation="median")
-> ValueError: aggregation must be one of | 'mean' | 'median'
nd.Variable(1.0, synchronization="none")
-> ValueError: synchronization NONE | ON_WRITE | ON_READ
nd.Variable(1, aggregation="mean")
-> ValueError: MEAN | int64 | SUM
with strategy.scope():
    weights = nd.Variable([1.0, 2.0], name="weights")
strategy.run(lambda: weights.assign([3.0, 4.0]))
-> ValueError: 'weights' | aggregation='sum', 'mean' or 'only_first_replica'
with strategy.scope():
    total = nd.Variable(0.0)
total.assign(strategy.run(lambda: 1.0))
-> ValueError: PerReplica | 'Variable' | strategy.reduce
nd.Variable([1.0, 2.0], name="weights").assign(np.ones(3))
-> ValueError: (3,) | 'weights' | (2,) | Nothing has changed
nd.Variable(1, name="steps").assign(1.5)
-> ValueError: 'steps' | float64 | int64 | astype | Nothing has changed
with strategy.scope():
    loss = nd.Variable(0.0, name="loss", synchronization="on_read")
float(loss)
-> ValueError: 'loss' | no aggregation | local_results
with strategy.scope():
    weights = nd.Variable([1.0, 2.0], name="weights")
with nd.OneDeviceStrategy("cpu:0") as other:
    other.run(lambda: weights + 1.0)
-> RuntimeError: 'weights' | under OneDeviceStrategy('cpu:0') | inside the scope
strategy.run(lambda: nd.Variable(np.ones(2 + rank())))
-> ValueError: replica 1 | (3,) | replica 0 | (2,)
copy.deepcopy({"weights": nd.Variable([1.0, 2.0], name="weights")})
-> TypeError: variable 'weights' | cannot be copied or pickled | variable.numpy()
# Optimizers.
nd.optimizers.SGD("0.1")
-> ValueError: learning_rate must be a number | '0.1'
nd.optimizers.SGD(-0.1)
-> ValueError: learning_rate must be a number, 0 or more | -0.1
nd.optimizers.SGD(clipnorm=1.0, global_clipnorm=1.0)
-> ValueError: at most one of clipnorm, global_clipnorm and clipvalue
weights = nd.Variable([1.0, 2.0], name="weights")
nd.optimizers.SGD(0.1).apply_gradients([(weights, np.ones(2))])
-> TypeError: pairs (gradient, variable) | ['MirroredVariable', 'ndarray'] | zip(
nd.optimizers.SGD(0.1).apply_gradients([np.ones(2), np.ones(3)])
-> TypeError: pairs (gradient, variable), got ndarray | zip(gradients, variables)
weights = nd.Variable([1.0, 2.0])
pairs = zip([np.ones(2)], [weights], strict=True)
nd.optimizers.SGD(0.1).apply_gradients(pairs)
nd.optimizers.SGD(0.1).apply_gradients(pairs)
-> ValueError: got no pairs | list(zip(gradients, variables))
weights = nd.Variable([1.0, 2.0], name="weights")
nd.optimizers.SGD(0.1).apply_gradients([(None, weights)])
-> ValueError: no variable has a gradient | inside the tape | 'weights'
weights = nd.Variable([1.0, 2.0], name="weights")
nd.optimizers.SGD(0.1).apply_gradients([(np.ones(3), weights)])
-> ValueError: 'weights' | (3,) | (2,) | Nothing has changed
with strategy.scope():
    weights = nd.Variable([1.0, 2.0])
    optimizer = nd.optimizers.SGD(0.1)
optimizer.build([weights])
strategy.run(lambda: None if rank() else optimizer.apply_gradients([(np.ones(2), weights)]))
-> ValueError: apply_gradients # | replica 1 returned | replica 0 called apply_gradients
with strategy.scope():
    weights = nd.Variable([1.0, 2.0])
strategy.run(lambda: nd.optimizers.SGD(0.1).apply_gradients([(np.ones(2), weights)]))
-> ValueError: different optimizers | outside of run
with strategy.scope():
    optimizer = nd.optimizers.Adam(0.1)
    optimizer.build([nd.Variable([1.0, 2.0])])
with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
    weights = nd.Variable([1.0, 2.0], name="weights")
    other.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))
-> ValueError: optimizer 'adam | 'weights' | make an optimizer for each strategy
# Input.
nd.Dataset.from_tensor_slices((np.ones(3), np.ones(4)))
-> ValueError: float64[3], float64[4] | the same leading length
strategy.distribute_dataset(iter([np.ones(2)]))
-> ValueError: list_iterator | only once | Dataset.from_generator
batches = strategy.distribute_dataset(nd.Dataset.range(4).batch(2))
strategy.run(lambda: next(iter(batches)))
-> RuntimeError: inside a replica | strategy.run(step, args=(batch,)) | of 2 (cpu:
# Gradients.
weights = nd.Variable([1.0, 2.0])
with nd.GradientTape() as tape:
    loss = np.sum(weights * weights)
nd.optimizers.SGD(0.1).minimize(loss, weights, tape)
-> TypeError: var_list | list of variables | [variable]
nd.MultiWorkerMirroredStrategy(["cpu:0"])
-> TypeError: devices=['cpu:0'] | nd.TFConfigClusterResolver()
nd.MultiWorkerMirroredStrategy(communication_options="ring")
-> TypeError: nd.CommunicationOptions(...) | 'ring'
strategy.distribute_dataset((np.zeros((4, 2)), np.zeros(4)))
-> ValueError: Dataset.from_tensor_slices((x, y)) | batch
class Seen(nd.models.metrics.Metric):
    def __init__(self):
        super().__init__()
        self.total = self.add_weight((2,), "zeros")
Seen()
-> TypeError: add_weight | pass shape=(2,) by keyword
class Forgetful(nd.models.layers.Layer):
    def __init__(self):
        self.factor = 2
    def call(self, x):
        return x * self.factor
Forgetful()(np.ones(2, np.float32))
-> RuntimeError: Forgetful.__init__ | super().__init__()
class ForgetfulModel(nd.models.Model):
    def __init__(self):
        self.dense = nd.models.layers.Dense(1)
ForgetfulModel().compile("sgd", "mse")
-> RuntimeError: ForgetfulModel.__init__ | super().__init__()
nd.optimizers.SGD(lr=0.1)
-> TypeError: SGD takes no argument 'lr' | learning_rate
nd.optimizers.Adam(decay=0.1)
-> TypeError: Adam takes no argument 'decay' | ExponentialDecay
nd.models.callbacks.EarlyStopping(patence=3)
-> TypeError: EarlyStopping takes no argument 'patence' | use patience
nd.models.callbacks.TerminateOnNaN(patience=3)
-> TypeError: TerminateOnNaN takes no argument 'patience' | see help(TerminateOnNaN)
nd.models.losses.MeanSquaredError(nam="mse")
-> TypeError: MeanSquaredError takes no argument 'nam' | use name
nd.models.metrics.Mean(nme="loss")
-> TypeError: Mean takes no argument 'nme' | use name
fitted("mse", np.array(["a"] * 8))
-> ValueError: loss 'mean_squared_error' | labels <U1[8] | np.unique
fitted("mse", np.array([None] * 8))
-> ValueError: labels object[8] | np.unique
fitted("mse", np.ones((8, 1)))
-> ValueError: labels float64[8, 1] and predictions float32[8, 3] | must have the shape
fitted("mse", np.ones((8, 5)))
-> ValueError: loss 'mean_squared_error' | labels float64[8, 5] | predictions float32[8, 3]
net = nd.models.Sequential([nd.models.layers.Dense(3, input_shape=(4,))], name="net")
net.load_weights(nd.models.callbacks.ModelCheckpoint("weights"))
-> TypeError: load_weights of model 'net' | got a ModelCheckpoint | path
def double(x):
    x *= 2
for x in strategy.distribute_dataset(nd.Dataset.from_tensor_slices(np.ones((4, 2))).batch(4)):
    strategy.run(double, args=(x,))
-> ValueError: read-only | x = x.copy() | replica 0 of 2
def double(x):
    x *= 2
    return x
list(nd.Dataset.from_tensor_slices(np.ones((4, 2))).map(double))
-> ValueError: read-only | x = x.copy()
"""
TOOLS = {"copy": copy, "pickle": pickle}
TOLD = re.compile(r"^-> (\w+): (.*)$", re.MULTILINE)


def table() -> dict[str, tuple[str, list[str]]]:
    """Return by its code the error of each mistake, and parts of the message."""
    lines = re.sub(r"^# .*\n", "", MISTAKES.strip(), flags=re.MULTILINE)
    code, *rest = TOLD.split(lines)
    mistakes = {}
    for error, says, following in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        mistakes[code.strip("\n")] = error, says.split(" | ")
        code = following
    return mistakes


def fitted(loss: str, labels: object) -> None:
    model = nd.Sequential([nd.layers.Dense(3)])
    model.compile("sgd", loss)
    model.fit(np.ones((8, 4), np.float32), labels, verbose=0)


def made(code: str) -> Exception:
    """Make a mistake beside a strategy of two replicas, and return the error."""
    linecache.cache["mistake.py"] = (len(code), None, code.splitlines(keepends=True), "mistake.py")
    strategy = nd.MirroredStrategy(["cpu:0", "cpu:1"])
    names = {"nd": nd, "np": np, "strategy": strategy, "context": context, "rank": rank} | TOOLS
    try:
        exec(compile(code, "mistake.py", "exec"), names | {"fitted": fitted, "__name__": "mistake"})
    except Exception as error:
        return error
    finally:
        strategy.close()
    raise AssertionError(f"{code} raised nothing")


def message(error: Exception) -> str:
    """Return what stands below the traceback, the notes included."""
    return "".join(traceback.format_exception_only(error))


@pytest.mark.parametrize("code", table())
def test_a_mistake_is_told_in_words(code: str):
    expected, says = table()[code]
    error = made(code)
    said = message(error)
    assert expected in [kind.__name__ for kind in type(error).__mro__], said
    assert [part for part in says if part not in said] == [], said


def test_the_table_has_at_least_fifty_mistakes():
    assert len(table()) >= 50


def shown() -> Iterator[str]:
    yield 'Each with strategy = nd.MirroredStrategy(["cpu:0", "cpu:1"]); context() is'
    yield "nd.get_replica_context(), and rank() its replica_id_in_sync_group."
    for number, code in enumerate(table(), 1):
        yield f"\n{number}.\n\n{code}\n"
        yield textwrap.indent(message(made(code)), "    ").rstrip()


if __name__ == "__main__":
    print("\n".join(shown()))
