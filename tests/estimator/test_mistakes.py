"""Mistakes in programs with estimators and feature columns, and what the errors tell."""

import builtins
import re
from typing import Any

import pytest

from ndistribute import errors, estimator
from ndistribute.estimator import Estimator, EstimatorSpec
from tests.estimator import test_canned, test_estimator, test_feature_column
from tests.estimator.test_estimator import X, Y

# The code, and behind an arrow the error and a pattern of its message.
MISTAKES = r"""
train(linear, max_steps=1)
-> ValueError: both steps and max_steps
train(linear, steps=0)
-> ValueError: above 0
train(of(ModeKeys.TRAIN, loss=np.sum))
-> ValueError: no train_op.*minimize\(loss, global_step
Estimator(of(ModeKeys.EVAL)).evaluate(lambda: (X, Y))
-> ValueError: no loss
train(of(ModeKeys.EVAL, loss=lambda features: 1.0))
-> TypeError: loss must be a tensor
train(of(ModeKeys.EVAL, loss=np.sum))
-> ValueError: for mode 'eval', expected 'train'
train(lambda features, labels: 1)
-> TypeError: EstimatorSpec, got 1
Estimator(lambda features, x: 1)
-> ValueError: unknown.*'x'
Estimator(lambda labels: 1)
-> ValueError: argument features
Estimator(lambda features: 1, params={"a": 1})
-> ValueError: no argument params
train(lambda features: 1)
-> ValueError: model_fn has no argument labels
train(linear, lambda: nd.Dataset.range(0))
-> ValueError: an empty dataset
train(linear, lambda: (X, Y, Y))
-> ValueError: 3 parts
train(linear, lambda: ({"x": g.random_normal((4, 3), dtype=np.float64)}, Y[:4]))
-> ValueError: dataset\.map
train(linear, lambda: {"x": 1 * g.DatasetIterator(inputs(4)()).get_next()[0]["x"]})
-> ValueError: dataset\.map
train(linear, X)
-> TypeError: input_fn must be a function
Estimator(linear, "a", RunConfig(model_dir="b"))
-> ValueError: pass one of them
RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1)
-> ValueError: save_checkpoints_secs, not both
RunConfig(save_checkpoints_steps=0)
-> ValueError: save_checkpoints_steps must be above 0, got 0
Estimator(linear, params={}).get_variable_names()
-> ValueError: train first
train_and_evaluate(Estimator(linear), None, None)
-> TypeError: needs a TrainSpec
LinearClassifier([COLUMN], n_classes=3).train(lambda: ({"x": X[:1]}, np.array([3])), steps=1)
-> InvalidArgumentError: label 3 is not a class: expected 0 to 2
LinearClassifier([COLUMN], label_vocabulary="ab").train(lambda: ({"x": X[:1]}, ["c"]), steps=1)
-> InvalidArgumentError: label 'c' is not a class: expected one of \['a', 'b'\]
LinearClassifier([COLUMN], n_classes=3, label_vocabulary=["a"])
-> ValueError: length of label_vocabulary
LinearRegressor([COLUMN]).train(lambda: {"x": X}, steps=1)
-> ValueError: needs labels
LinearRegressor([COLUMN], weight_column="w").train(lambda: ({"x": X}, Y), steps=1)
-> KeyError: weight_column
LinearRegressor([COLUMN]).train(lambda: ({"y": X}, Y), steps=1)
-> KeyError: needs the feature 'x'
LinearRegressor([COLUMN], optimizer="Lion")
-> ValueError: one of Adagrad, Adam, Ftrl, RMSProp, SGD, got 'Lion'
DNNLinearCombinedEstimator(binary_class_head(), dnn_feature_columns=[COLUMN])
-> ValueError: dnn_feature_columns with dnn_hidden_units
LinearEstimator("binary", [COLUMN])
-> TypeError: head must be a head of
add_metrics(model_to_estimator(compiled()), dict)
-> ValueError: needs an estimator with a model_fn
early_stopping.make_early_stopping_hook(model_to_estimator(compiled()), bool)
-> ValueError: needs an estimator with a model_fn
DNNLinearCombinedRegressor(**CLIPPING).train(lambda: (FEATURES, np.ones(64)), steps=1)
-> ValueError: cannot clip
LinearRegressor([COLUMN], warm_start_from=WarmStartSettings("x", "y")).train(inputs(4))
-> ValueError: matches none
DNNRegressor([1], [COLUMN], dropout=1.0)
-> ValueError: below 1
model_to_estimator(nd.Sequential([nd.layers.Dense(1)]))
-> ValueError: compiled
model_to_estimator(compiled(), config=RunConfig(train_distribute=nd.OneDeviceStrategy("cpu:0")))
-> ValueError: inside `with strategy.scope
computed(lambda: fc.input_layer({"size": AGES}, AGE))
-> KeyError: 'age'.*returned 'size'
computed(lambda: fc.input_layer(AGES, AGE))
-> KeyError: one array
computed(lambda: fc.input_layer(FEATURES, WORD))
-> ValueError: indicator_column
computed(lambda: fc.input_layer(FEATURES, [AGE, AGE]))
-> ValueError: named 'age'
computed(lambda: fc.input_layer(FEATURES, []))
-> ValueError: at least one feature column
computed(lambda: fc.linear_model(FEATURES, ["age"]))
-> ValueError: not a feature column
fc.bucketized_column(AGE, [2, 1])
-> ValueError: ascend
fc.bucketized_column(WORD, [1])
-> ValueError: numeric_column
fc.indicator_column(AGE)
-> ValueError: categorical
fc.crossed_column(["word"], 10)
-> ValueError: two keys or more
fc.crossed_column(["word", AGE], 10)
-> ValueError: crossed_column needs a categorical column
Estimator(linear, params={}).export_saved_model("path", print)
-> NotImplementedError: call export of the model
fc.embedding_column(ID, 2, "max")
-> ValueError: combiner
fc.categorical_column_with_identity("id", 0)
-> ValueError: 1 or more
fc.categorical_column_with_vocabulary_list("w", ["a", "a"])
-> ValueError: each word once
computed(lambda: ID.ids({"id": np.array([3])}))
-> InvalidArgumentError: id 3 is not in \[0, 3\), which num_buckets sets
computed(lambda: ID.ids({"id": np.array([0.0])}))
-> InvalidArgumentError: must be integers, got float64
computed(lambda: fc.input_layer({"pair": np.ones((1, 4))}, fc.numeric_column("pair", 2)))
-> InvalidArgumentError: 'pair' has shape \(1, 4\).*expects \('batch', 2\)
"""
ROWS = re.findall(r"^(.+)\n-> (\w+): (.+)$", MISTAKES, re.MULTILINE)


def of(mode: str, **parts: Any) -> Any:
    """Return a model function whose EstimatorSpec has these parts, made of the features."""

    def model_fn(features: Any, labels: Any) -> EstimatorSpec:
        return EstimatorSpec(mode, **{name: make(features) for name, make in parts.items()})

    return model_fn


def train(model_fn: Any, data: Any = lambda: (X, Y), **arguments: Any) -> Any:
    return Estimator(model_fn).train(data, **({"steps": 1} | arguments))


MODULES = (test_feature_column, test_canned, test_estimator, estimator)
NAMES = {name: value for module in MODULES for name, value in vars(module).items()}
NAMES |= {"of": of, "train": train}


@pytest.mark.parametrize(("code", "error", "message"), ROWS, ids=[code for code, _, _ in ROWS])
def test_mistakes_say_what_to_do(code: str, error: str, message: str) -> None:
    kind = vars(errors)[error] if error in vars(errors) else vars(builtins)[error]
    with pytest.raises(kind, match=message):
        eval(code, NAMES)
