"""Names of TensorFlow 1 that `ndistribute.graph` lacks: flags, `app.run`, sessions and losses."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ndistribute import graph, tree
from ndistribute.compat.programs import Program
from ndistribute.data import Dataset
from ndistribute.graph.graph import Symbolic
from ndistribute.graph.scopes import REGULARIZATION_LOSSES, glorot_uniform
from ndistribute.graph.shapes import narrowed
from ndistribute.mistakes import accepting
from ndistribute.models import nn

_log = logging.getLogger("ndistribute")
debug, info, warning, error = _log.debug, _log.info, _log.warning, _log.error


def get_logger() -> logging.Logger:
    """Return the logger of this package."""
    return _log


class BytesSession(graph.Session):
    """A session that returns text as bytes, and also fetches arrays, such as early constants."""

    def run(self, fetches: Any, *args: Any, **options: Any) -> Any:
        """Return the values of fetches; see `ndistribute.graph.Session`."""
        with self.graph.as_default():
            known = tree.map_leaves(_as_fetch, fetches)
        return tree.map_leaves(_as_bytes, super().run(known, *args, **options))


class MonitoredBytesSession(graph.MonitoredTrainingSession):
    """A session with hooks that returns text as bytes."""

    _session_type = BytesSession


def device(program: Program, name: Any) -> Any:
    """Return a context manager that places operations of graphs; arrays stay where they are."""
    return graph.device(name) if program.uses_graphs() else contextlib.nullcontext()


def name_scope(
    program: Program, name: str | None, default_name: str | None = None, values: Any = None
) -> Any:
    """Return a context manager that puts a name before the names of operations."""
    if not program.uses_graphs():
        return contextlib.nullcontext(name)
    return graph.get_default_graph().name_scope(name or default_name)


def _of_default_graph(method: str) -> Callable[..., Any]:
    """Return a function that calls a method of the default graph."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(graph.get_default_graph(), method)(*args, **kwargs)

    return call


add_to_collection = _of_default_graph("add_to_collection")
control_dependencies = _of_default_graph("control_dependencies")
get_collection = _of_default_graph("get_collection")


_NUMBERED = "float32 float64 int32 uint8 int16 int8 str complex64 int64 bool".split()


def dtype_of(kind: Any) -> np.dtype[Any]:
    """Return a dtype; TensorFlow's ``"float"`` has 32 bits, and its dtypes also have numbers."""
    if type(kind) is int and 0 < kind <= len(_NUMBERED):
        return np.dtype(_NUMBERED[kind - 1])
    is_float = kind is float or (isinstance(kind, str) and kind == "float")
    return np.dtype(np.float32 if is_float else kind)


def placeholder(dtype: Any, shape: Any = None, name: str = "placeholder") -> Any:
    """Return a tensor whose value each run must feed; see `ndistribute.graph.placeholder`."""
    return graph.placeholder(dtype_of(dtype), [shape] if isinstance(shape, int) else shape, name)


def no_op(name: str = "no_op") -> Any:
    """Return an operation that does nothing."""
    return graph.group(name=name)


def set_random_seed(seed: int) -> None:
    """Set the seed of the random operations of the default graph."""
    graph.get_default_graph().seed = seed


def global_step(sess: Any, global_step_tensor: Any) -> int:
    """Return the number of steps that were made."""
    return int(sess.run(global_step_tensor))


def local_variables_initializer() -> Any:
    """Return the operation that gives the local variables their initial values."""
    return graph.variables_initializer(graph.local_variables(), "local_init")


def check_layout(data_format: Any, dilations: Any = 1, known: str = "NHWC") -> None:
    """Raise ValueError for a layout that only other libraries support."""
    if data_format not in (None, known) or windows(dilations or 1) != (1, 1):
        wrong = f"{data_format!r} and {dilations!r}"
        raise ValueError(f"data_format must be {known!r} and dilations 1, got {wrong}.")


@accepting("use_cudnn_on_gpu")
def conv2d(
    input: Any,  # noqa: A002
    filter: Any = None,  # noqa: A002
    strides: Any = 1,
    padding: str = "SAME",
    data_format: str | None = "NHWC",
    dilations: Any = 1,
    filters: Any = None,
) -> Any:
    """Return the convolution of images, ``(batch, height, width, channels)``."""
    check_layout(data_format, dilations)
    kernel = filters if filter is None else filter
    return nn.conv2d(input, kernel, strides=windows(strides), padding=padding.lower())


def _pool(of_windows: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pooling function with TensorFlow's arguments for windows."""

    def pool(value: Any, ksize: Any, strides: Any, padding: str, data_format: Any = "NHWC") -> Any:
        check_layout(data_format)
        return of_windows(value, windows(ksize), windows(strides), padding.lower())

    pool.__doc__ = (of_windows.__doc__ or "").partition("\n")[0]
    return pool


max_pool, avg_pool = map(_pool, (nn.max_pool2d, nn.average_pool2d))


@accepting("back_prop", "parallel_iterations", "shape_invariants", "swap_memory")
def while_loop(
    program: Program,
    cond: Any,
    body: Any,
    loop_vars: Any,
    *,
    maximum_iterations: Any = None,
    name: Any = None,
) -> Any:
    """Return the values of a loop; in a graph, the loop is an operation."""
    if program.uses_graphs():
        return graph.while_loop(cond, body, loop_vars, maximum_iterations, name or "while")
    values = list(loop_vars)
    rounds = itertools.count() if maximum_iterations is None else range(maximum_iterations)
    for _ in rounds:
        if not cond(*values):
            break
        results = body(*values)
        values = list(results) if isinstance(results, list | tuple) else [results]
    return values


def py_func(func: Any, inp: Any, Tout: Any, stateful: bool = True, name: Any = None) -> Any:  # noqa: N803
    """Return the results of a Python function, one for each dtype."""
    listed = isinstance(Tout, list | tuple)
    results = len(Tout) if listed else 1
    if not listed or results != 1:
        return graph.py_function(func, inp, results, name or "py_func")

    def only(*args: Any) -> Any:
        value = func(*args)
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value

    return [graph.py_function(only, inp, 1, name or "py_func")]


def _method(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of a variable."""
    takes = accepting("name", "use_locking", "validate_shape")
    return takes(lambda ref, value: getattr(ref, name)(value))


assign, assign_add, assign_sub = map(_method, ("assign", "assign_add", "assign_sub"))


def _cast_to(dtype: type) -> Callable[..., Any]:
    return lambda x: (x if isinstance(x, Symbolic) else np.asarray(x)).astype(dtype)


to_float, to_int32, to_int64 = map(_cast_to, (np.float32, np.int32, np.int64))


def _initializer(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes initializers that draw random numbers in the graph."""

    def make(*args: Any, seed: int | None = None, dtype: Any = None, **options: Any) -> Any:
        @accepting("partition_info")
        def draw_in(shape: Any, dtype: Any = dtype or np.float32) -> Any:
            return draw(tuple(shape), *args, dtype=dtype, seed=seed, **options)

        return draw_in

    return make


glorot_uniform_initializer = _initializer(glorot_uniform)
random_normal_initializer = _initializer(graph.random_normal)
random_uniform_initializer = _initializer(graph.random_uniform)
truncated_normal_initializer = _initializer(graph.truncated_normal)


def dropout(
    x: Any, keep_prob: Any = None, noise_shape: Any = None, seed: Any = None, rate: Any = None
) -> Any:
    """Return the tensor with some elements set to zero, and others divided by the kept part."""
    kept = keep_prob if rate is None else 1.0 - rate
    drawn = graph.random_uniform(np.shape(x) if noise_shape is None else noise_shape, seed=seed)
    return np.where(np.less(drawn, kept), x / kept, 0.0)


def in_top_k(predictions: Any, targets: Any, k: int) -> Any:
    """Return for each row whether fewer than `k` predictions exceed that of its target."""
    targets = targets if isinstance(targets, Symbolic) else np.asarray(targets)
    classes = np.shape(predictions)[1]
    known = np.logical_and(np.greater_equal(targets, 0), np.less(targets, classes))
    known = np.logical_and(known, np.all(np.isfinite(predictions), axis=1))
    of_target = np.take_along_axis(predictions, np.where(known, targets, 0)[:, None], 1)
    first = np.less(np.sum(np.greater(predictions, of_target).astype(np.int32), 1), k)
    return np.logical_and(known, first)


def zero_fraction(value: Any) -> Any:
    """Return the fraction of the elements that are zero."""
    return np.mean(np.equal(value, 0).astype(np.float32))


def _tensor(value: Any) -> Any:
    return value if isinstance(value, Symbolic) else narrowed(value)


def _check_ranks(labels: Any, predictions: Any) -> None:
    """Raise ValueError if labels have another number of axes, because they would be broadcast."""
    shapes = [_tensor(values).shape for values in (labels, predictions)]
    if None not in shapes and len({len(shape or ()) for shape in shapes}) > 1:
        raise ValueError(
            f"labels of shape {shapes[0]} and predictions of shape {shapes[1]} would be broadcast: "
            "reshape one of them."
        )


def _mean_of(of_each: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mean of the losses whose weight is not 0, and add it to a collection."""

    @functools.wraps(of_each)
    def mean_loss(
        *args: Any, scope: str | None = None, loss_collection: str | None = "losses", **options: Any
    ) -> Any:
        weights = args[2] if len(args) > 2 else options.pop("weights", 1.0)
        losses = of_each(*args[:2], *args[3:], **options)
        if isinstance(weights, int | float) and weights == 1:
            loss = np.mean(losses)
        else:
            weights = _tensor(weights).astype(losses.dtype or np.float32)
            spread = np.broadcast_to(weights, np.shape(losses))
            count = np.sum(np.not_equal(spread, 0)).astype(losses.dtype or np.float32)
            loss = np.sum(losses * spread) / np.maximum(count, 1)
        if loss_collection and isinstance(loss, Symbolic):
            graph.get_default_graph().add_to_collection(loss_collection, loss)
        return loss

    return mean_loss


def _error(labels: Any, predictions: Any) -> Any:
    _check_ranks(labels, predictions)
    predictions = _tensor(predictions)
    return predictions - _tensor(labels).astype(predictions.dtype or np.float32)


@_mean_of
def absolute_difference(labels: Any, predictions: Any) -> Any:
    """Return the mean of the absolute differences."""
    return np.abs(_error(labels, predictions))


@_mean_of
def huber_loss(labels: Any, predictions: Any, delta: float = 1.0) -> Any:
    """Return the mean Huber loss: half the squared difference up to `delta`, linear beyond it."""
    error = np.abs(_error(labels, predictions))
    below = np.minimum(error, delta)
    return np.square(below) / 2 + delta * (error - below)


@_mean_of
def mean_squared_error(labels: Any, predictions: Any) -> Any:
    """Return the mean of the squared differences."""
    return np.square(_error(labels, predictions))


@_mean_of
def softmax_cross_entropy(onehot_labels: Any, logits: Any, label_smoothing: float = 0) -> Any:
    """Return the mean cross entropy of rows of probabilities."""
    if label_smoothing:
        labels = _tensor(onehot_labels).astype(_tensor(logits).dtype or np.float32)
        spread = label_smoothing / np.shape(labels)[-1].astype(labels.dtype)
        onehot_labels = labels * (1 - label_smoothing) + spread
    return nn.softmax_cross_entropy(logits, onehot_labels)


@_mean_of
def sparse_softmax_cross_entropy(labels: Any, logits: Any) -> Any:
    """Return the mean cross entropy of class numbers."""
    numbers = np.reshape(_tensor(labels), np.shape(logits)[:-1])
    return nn.softmax_cross_entropy(logits, numbers)


@_mean_of
def sigmoid_cross_entropy(multi_class_labels: Any, logits: Any, label_smoothing: float = 0) -> Any:
    """Return the mean cross entropy of independent probabilities."""
    _check_ranks(multi_class_labels, logits)
    labels = _tensor(multi_class_labels).astype(_tensor(logits).dtype or np.float32)
    if label_smoothing:
        labels = labels * (1 - label_smoothing) + 0.5 * label_smoothing
    return nn.sigmoid_cross_entropy(logits, labels)


def get_regularization_loss(scope: str | None = None) -> Any:
    """Return the sum of the losses from regularizers of variables."""
    losses = get_collection(REGULARIZATION_LOSSES, scope)
    return sum(losses) if losses else graph.constant(0.0)


def get_total_loss(add_regularization_losses: bool = True) -> Any:
    """Return the sum of the losses in the collection ``"losses"`` and from regularizers."""
    losses = sum(get_collection("losses"), start=0.0)
    return losses + get_regularization_loss() if add_regularization_losses else losses


def l2_regularizer(scale: float) -> Callable[[Any], Any]:
    """Return a function of a variable that returns half the sum of its squares, times a number."""
    return lambda variable: scale * np.sum(np.square(variable)) / 2


@accepting("num_threads", "queue_capacity")
def numpy_input_fn(
    x: Any, y: Any = None, batch_size: int = 128, num_epochs: int | None = 1, shuffle: Any = None
) -> Callable[[], Dataset]:
    """Return an input function that yields batches of arrays, forever if the epochs are None."""
    if shuffle is None:
        raise ValueError("numpy_input_fn: shuffle must be True or False.")

    def input_fn() -> Dataset:
        examples = Dataset.from_tensor_slices(x if y is None else (x, y))
        examples = examples.shuffle(len(tree.flatten(x)[0])) if shuffle else examples
        return examples.repeat(num_epochs).batch(batch_size)

    return input_fn


def windows(values: Any) -> tuple[int, int]:
    """Return the height and width of strides or windows from one to four numbers."""
    numbers = [values, values] if isinstance(values, int) else list(values)
    height, width = numbers[1:3] if len(numbers) == 4 else (numbers * 2)[:2]
    return int(height), int(width)


class _Flags:
    """The values of the command line's flags, parsed at their first use."""

    _parser = argparse.ArgumentParser(allow_abbrev=False)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self(sys.argv)
        if name not in vars(self):
            known = ", ".join(sorted(vars(self)))
            raise AttributeError(f"there is no flag {name!r}; the program defines {known}.")
        return vars(self)[name]

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(self, name)  # The flag must be defined.
        vars(self)[name] = value

    def __call__(self, argv: list[str]) -> list[str]:
        """Parse a command line; return the remaining arguments."""
        values, rest = self._parser.parse_known_args(argv[1:])
        vars(self).update(vars(values))
        return [argv[0], *rest]

    def define(self, name: str, default: Any, help: Any, **how: Any) -> None:  # noqa: A002
        """Add a flag."""
        text = (help or "").replace("%", "%%")
        self._parser.add_argument(f"--{name}", default=default, help=text, **how)


FLAGS = _Flags()


def _defines(kind: Callable[[str], Any]) -> Callable[..., None]:
    def define(flag_name: str, default_value: Any, docstring: Any = None) -> None:
        FLAGS.define(flag_name, default_value, docstring, type=kind)

    return define


def _truth(text: str) -> bool:
    if text.lower() not in ("1", "0", "t", "f", "true", "false", "yes", "no"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() in ("1", "t", "true", "yes")


DEFINE_string = _defines(str)
DEFINE_integer = _defines(int)
DEFINE_float = _defines(float)


def DEFINE_boolean(flag_name: str, default_value: Any, docstring: Any = None) -> None:  # noqa: N802
    """Define a flag that is true or false; ``--name`` sets it to true, ``--noname`` to false."""
    FLAGS.define(flag_name, default_value, docstring, type=_truth, nargs="?", const=True)
    no: Any = {"dest": flag_name, "action": "store_const", "const": False}
    FLAGS.define(f"no{flag_name}", argparse.SUPPRESS, None, **no)


def run(main: Callable[..., Any] | None = None, argv: list[str] | None = None) -> NoReturn:
    """Parse the flags, call the program's ``main(argv)``, and exit with its result."""
    rest = FLAGS(sys.argv if argv is None else argv)
    sys.exit((main or sys.modules["__main__"].main)(rest))


def set_verbosity(level: int) -> None:
    """Set the lowest level of messages that are shown."""
    logging.basicConfig(format="%(levelname)s:%(message)s")
    _log.setLevel(level)


def _as_fetch(value: Any) -> Any:
    return graph.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def _as_bytes(value: Any) -> Any:
    """Return text as bytes, and other values unchanged."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        encoded = np.char.encode(value, "utf-8")
        return encoded.item() if not encoded.ndim else encoded.astype(object)
    # A number, as NumPy's functions return it.
    if isinstance(value, np.ndarray) and not value.ndim:
        return value[()]
    return value
