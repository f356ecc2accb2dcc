"""Plain values with checks: the result of a model function, and the settings of the loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ndistribute.graph.graph import Operation, Tensor
from ndistribute.graph.saver import init_from_checkpoint
from ndistribute.graph.variables import global_variables, trainable_variables


class ModeKeys:
    """The purposes of a graph of a model function: training, evaluation or prediction."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True)
class EstimatorSpec:
    """The parts of a graph that an `Estimator` runs; a model function returns it.

    Args:
        mode: one of `ModeKeys`.
        predictions: a tensor or a dict of tensors, with a row for each example; for PREDICT.
        loss: a scalar tensor; for TRAIN and EVAL.
        train_op: the operation of a step, from an optimizer's ``minimize(loss, global_step=...)``;
            for TRAIN.
        eval_metric_ops: by name, the pairs of `graph.metrics`.
        export_outputs: ignored; accepted for compatibility with TensorFlow.
        training_chief_hooks: hooks of training, on the chief only.
        training_hooks: hooks of training.
        scaffold: the `Scaffold` of training; None: the default scaffold.
        evaluation_hooks: hooks of the evaluation.
        prediction_hooks: hooks of the prediction.

    Raises:
        ValueError: a part that the mode needs is missing.
        TypeError: a part is of another type.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Mapping[str, tuple[Tensor, Any]] | None = None
    export_outputs: Any = None
    training_chief_hooks: Sequence[Any] | None = None
    training_hooks: Sequence[Any] | None = None
    scaffold: Any = None
    evaluation_hooks: Sequence[Any] | None = None
    prediction_hooks: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        needed = _NEEDED.get(self.mode)
        if needed is None:
            raise ValueError(f"mode must be one of {', '.join(_NEEDED)}, got {self.mode!r}.")
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(
                    f"the model function's EstimatorSpec has no {name}, which mode "
                    f"{self.mode!r} needs: pass {name}={_EXAMPLES[name]}."
                )
        if self.loss is not None and not isinstance(self.loss, Tensor):
            raise TypeError(f"loss must be a tensor, got {self.loss!r}.")
        if self.train_op is not None and not isinstance(self.train_op, Tensor | Operation):
            raise TypeError(f"train_op must be an operation, got {self.train_op!r}.")
        for name, pair in (self.eval_metric_ops or {}).items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(
                    f"eval_metric_ops[{name!r}] must be a value and its update, as "
                    f"graph.metrics.mean returns them; got {pair!r}."
                )


_NEEDED = {
    ModeKeys.TRAIN: ("loss", "train_op"),
    ModeKeys.EVAL: ("loss",),
    ModeKeys.PREDICT: ("predictions",),
}
_EXAMPLES = {
    "loss": "np.mean(losses)",
    "train_op": "optimizer.minimize(loss, global_step=get_or_create_global_step())",
    "predictions": '{"classes": classes}',
}


@dataclass(frozen=True)
class WarmStartSettings:
    """A checkpoint with the initial values of variables, for training without a checkpoint yet.

    Args:
        ckpt_to_initialize_from: a checkpoint, or a directory, whose newest checkpoint is used.
        vars_to_warm_start: a regular expression that matches the beginning of the names of
            trainable variables; or a list of expressions, which match names of all global
            variables; or a list of variables.
        var_name_to_vocab_info: must be None: vocabularies are not remapped.
        var_name_to_prev_var_name: a dict from the names of variables to their names in the
            checkpoint, where these differ.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[Any] = ".*"
    var_name_to_vocab_info: None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.var_name_to_vocab_info:
            raise ValueError("WarmStartSettings: the vocabularies of both models must be the same.")

    def initialize(self) -> None:
        """Make the initializers of the default graph's variables assign the values."""
        wanted, pool = self.vars_to_warm_start, global_variables()
        if isinstance(wanted, str):
            wanted, pool = [wanted], trainable_variables()
        names = [variable.op.name for variable in pool]
        chosen = [name for each in wanted for name in _matching(each, names)]
        if not chosen:
            raise ValueError(f"vars_to_warm_start={wanted} matches none of {names}.")
        earlier = self.var_name_to_prev_var_name or {}
        places = {earlier.get(name, name): name for name in chosen}
        init_from_checkpoint(self.ckpt_to_initialize_from, places)


def _matching(wanted: Any, names: Sequence[str]) -> list[str]:
    """Return the names that a regular expression matches, or the name of a variable."""
    if isinstance(wanted, str):
        return [name for name in names if re.match(wanted, name)]
    return [wanted.op.name]


def warm_start(ckpt_to_initialize_from: str, *args: Any, **options: Any) -> None:
    """Make variables of the default graph start with the values of a checkpoint.

    The arguments are those of `WarmStartSettings`.
    """
    WarmStartSettings(ckpt_to_initialize_from, *args, **options).initialize()


WarmStart = str | WarmStartSettings | None


@dataclass(frozen=True)
class TrainSpec:
    """The settings of training in `train_and_evaluate`.

    Args:
        input_fn: the input function, see `Estimator.train`.
        max_steps: the global step at which all training ends; None: at the end of the input.
        hooks: hooks of training.
        saving_listeners: listeners of its checkpoints.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[Any] = ()
    saving_listeners: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("hooks", "saving_listeners"):
            object.__setattr__(self, name, getattr(self, name) or ())
        check_steps(self.max_steps, "TrainSpec: max_steps")
        check_input(self.input_fn, "TrainSpec")


@dataclass(frozen=True)
class EvalSpec:
    """The settings of evaluations in `train_and_evaluate`.

    Args:
        input_fn: the input function, see `Estimator.train`.
        steps: the number of batches of an evaluation; None: all.
        name: the name of the evaluation, if there are several.
        hooks: hooks of the evaluations.
        exporters: must be empty: `nd.Model.export` exports what `model_to_estimator` trains.
        start_delay_secs: how long an evaluator waits before its first evaluation.
        throttle_secs: the least time between the starts of two evaluations, except the last one.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[Any] = ()
    exporters: Any = None
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        check_steps(self.steps, "EvalSpec: steps")
        check_input(self.input_fn, "EvalSpec")
        if self.exporters:
            raise ValueError(
                "EvalSpec: an estimator has no export: use model_to_estimator, and Model.export."
            )
        if self.start_delay_secs < 0 or self.throttle_secs < 0:
            raise ValueError("EvalSpec: start_delay_secs and throttle_secs must be 0 or more.")


def check_steps(steps: int | None, what: str) -> None:
    """Raise ValueError unless a number of steps is None or above 0."""
    if steps is not None and steps <= 0:
        raise ValueError(f"{what} must be above 0, got {steps}.")


def check_input(input_fn: Any, what: str) -> None:
    """Raise TypeError if an input function is not callable."""
    if not callable(input_fn):
        raise TypeError(f"{what}: input_fn must be a function, got {input_fn!r}.")
