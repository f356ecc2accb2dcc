"""`TrainingSteps`: how a model is compiled, and the step of `fit`, `evaluate` and `predict`.

Each step runs on every replica with its part of a batch. If a model defines `train_step`,
`test_step`, `predict_step`, `compute_loss` or `compute_metrics`, the loops call that method instead
of the method here. This file knows nothing about epochs, datasets and callbacks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ndistribute import optimizers as _optimizers
from ndistribute import tree
from ndistribute.autodiff import GradientTape, untrack
from ndistribute.context import (
    current_frame,
    current_trace,
    get_replica_context,
    get_strategy,
    told_apart,
)
from ndistribute.devices import as_array, to_host
from ndistribute.errors import TracingError
from ndistribute.jit.function import Function
from ndistribute.jit.identity import Identities
from ndistribute.mistakes import accepting
from ndistribute.models import batches as _batches
from ndistribute.models import loss_forms
from ndistribute.models import losses as _losses
from ndistribute.models import metrics as _metrics
from ndistribute.models.compiled_losses import Objective, names_of
from ndistribute.models.layers.layer import Layer, build_for
from ndistribute.models.memory import keep_freed_memory
from ndistribute.models.position import TrainingPosition
from ndistribute.variables import Variable

_STEPS = "compute_loss compute_metrics get_metrics_result predict_step test_step train_step".split()
_OF_KERAS = "make_predict_function make_test_function make_train_function".split()


class TrainingSteps(Layer):
    """A layer that can be compiled, and the steps of its training on a replica."""

    _uncalled = Layer._uncalled | dict.fromkeys(_OF_KERAS, "define train_step, or write a loop")
    del _uncalled["trainable_variables"]  # Only the attribute of a model has an effect.

    output_names: Sequence[str] | None = None
    """The names of the outputs, once known."""

    def __init__(self, *, name: str | None = None, **options: Any) -> None:
        super().__init__(name=name, **options)
        keep_freed_memory()
        self.strategy: Any = get_strategy()
        self.stop_training = False
        self.optimizer: Any = None
        self.history: Any = None  # The result of the last `fit`.
        self.loss: Any = None
        self.compiled: dict[str, Any] | None = None
        """The losses, metrics and their weights that `compile` got."""
        self._objective: Any = None
        self.position = TrainingPosition(0)
        self._jit_compile = False
        self._steps: dict[str, Any] = {}  # By the name of the method.
        self._parts_of_steps: tuple[Any, ...] = ()

    @accepting("run_eagerly", "steps_per_execution")
    def compile(
        self,
        optimizer: str | _optimizers.Optimizer = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
        jit_compile: bool = False,
    ) -> None:
        """Set the optimizer, the losses and the metrics.

        If layers compute in float16, the optimizer is wrapped in a `LossScale`. The keywords
        ``run_eagerly`` and ``steps_per_execution`` are accepted, but have no effect.

        Args:
            optimizer: an optimizer, or its name.
            loss: a `Loss`, its name, or a function of labels and predictions. For several outputs:
                one loss for all, or a list or dict of losses by output. None: no loss.
            metrics: metrics, their names, or functions of labels and predictions. For several
                outputs, a list that each output gets, or a list or a dict of lists by output.
            loss_weights: the factor of each output's loss, in a list or a dict.
            weighted_metrics: like `metrics`, but these use the sample weights.
            jit_compile: whether XLA compiles the steps of `fit`, `evaluate` and `predict`. With
                several replicas, the compiled step of `fit` does not include the update.
                `TPUStrategy` always compiles.

        Raises:
            TypeError: a class is passed, or metrics are not a list or dict.
            ValueError: a name is unknown, or a step cannot be compiled: its variables are on
                parameter servers, or the model defines it and there are several replicas.
            RuntimeError: called in the scope of a strategy other than the model's.
        """
        for _, part in tree.leaves("", (optimizer, loss, metrics, weighted_metrics)):
            if isinstance(part, type):
                name = part.__name__
                raise TypeError(f"compile got the class {name}: pass an object of it, {name}(...).")
        self._check_jit(jit_compile)
        self._jit_compile, self._parts_of_steps = bool(jit_compile), ()
        with self._scope("compile"):
            self.optimizer = _optimizers.get(optimizer)
            halves = any(layer.compute_dtype == np.float16 for layer in self.walk())
            if halves and not isinstance(self.optimizer, _optimizers.LossScale):
                self.optimizer = _optimizers.LossScale(self.optimizer)
            self.loss = tree.map_leaves(lambda x: None if x is None else _losses.get(x), loss)
            for each in tree.flatten(self.loss):
                plain = each is None or each.reduction == "sum_over_batch_size"
                if not plain and not self._defines("train_step"):
                    raise ValueError(
                        f"compile: the loss has reduction={each.reduction!r}, but fit divides the "
                        "sum by the number of examples: leave out reduction, or define train_step."
                    )
            self.compiled = {"loss": loss, "loss_weights": loss_weights}
            self.compiled |= {"metrics": metrics, "weighted_metrics": weighted_metrics}
            self._objective = None
            named = [nest for nest in (loss, metrics) if isinstance(nest, Mapping)]
            like = named[0] if named else self.loss
            self._name_outputs(self.output_names or names_of(like))

    def get_compile_config(self) -> dict[str, Any]:
        """Return the arguments of `compile` to save; define it if your `compile` has others."""
        how = {"optimizer": self.optimizer, "jit_compile": self._jit_compile}
        return {**(self.compiled or {}), **how}

    def compile_from_config(self, config: Mapping[str, Any]) -> None:
        """Compile a loaded model with the result of `get_compile_config`.

        A model that defines `compile` but not this method is not compiled; a warning says so.
        """
        owner = next(kind for kind in type(self).__mro__ if "compile" in vars(kind))
        if owner.__module__.partition(".")[0] == __name__.partition(".")[0]:
            return self.compile(**config)
        text = f"{self._called} is not compiled: it defines compile, but not compile_from_config."
        warnings.warn(text, stacklevel=4)
        return None

    def _scope(self, method: str) -> Any:
        """Return the scope of the model's strategy, for a method that the user called."""
        frame = current_frame()
        if frame.replica is None and frame.strategy not in (None, self.strategy):
            made = told_apart(self.strategy, frame.strategy)
            raise RuntimeError(
                f"Mixing different strategies: {self._called} was created for {made}, but {method} "
                f"was called in the scope of {frame.strategy!r}. Create or load the model in that "
                f"scope, or leave the scope before {method}."
            )
        return self.strategy.scope()

    def _check_jit(self, jit_compile: bool) -> None:
        kind = type(self.strategy)
        if jit_compile and hasattr(kind, "servers"):
            raise ValueError(
                "compile: jit_compile=True, but a compiled step cannot use variables on parameter "
                "servers: leave out jit_compile, or use another strategy."
            )
        defines = self._defines("train_step") or self._defines("test_step")
        alone = self.strategy.num_replicas_in_sync == 1 and self.strategy.session is None
        meets = not alone and self.strategy.devices[0].kind != "tpu"
        if jit_compile and defines and meets:
            raise ValueError(
                "compile: jit_compile=True, but the train_step or test_step that the model defines "
                "communicates with other replicas: leave out jit_compile, use TPUStrategy instead "
                f"of {kind.__name__}, or put nd.function around the part that computes gradients."
            )

    def _name_outputs(self, names: Sequence[str]) -> None:
        """Create the metrics for outputs of some names, if these names are new."""
        if self._objective is None or self._objective.names != list(names):
            parts: dict[str, Any] = self.compiled or {}
            self._objective = Objective(names, **parts | {"loss": self.loss})

    @property
    def metrics(self) -> list[_metrics.Metric]:
        """The means of losses, the metrics passed to `compile`, and the metrics of layers."""
        compiled = [] if self._objective is None else self._objective.named.values()
        return list({id(each): each for each in (*compiled, *self._held_metrics())}.values())

    @property
    def metrics_names(self) -> list[str]:
        """The names of the metrics in logs."""
        return list(self._named_metrics())

    def _named_metrics(self) -> dict[str, _metrics.Metric]:
        """Return the metrics by their names in logs."""
        known = {} if self._objective is None else self._objective.named
        names = {id(metric): name for name, metric in known.items()}
        return {names.get(id(metric), metric.name): metric for metric in self.metrics}

    # Methods that a subclass may define.

    def train_step(self, data: Any) -> dict[str, Any]:
        """Make a training step on this replica, and return its logs, by name.

        A subclass may define it. In it, a loss object and `compute_loss` return the mean over the
        examples of this replica. The gradient of this mean is that of the replica's share of the
        mean over the batch, because replicas add up the gradients that they apply. The logs contain
        the mean over the replicas of a number that it returns. For the `result()` of a metric they
        contain the value over all replicas.

        Args:
            data: this replica's part of a batch: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
        """
        logs = self._compiled_train_step(data, None)
        return self.get_metrics_result() if logs is None else logs

    def test_step(self, data: Any) -> dict[str, Any]:
        """Add this replica's part of a batch to the metrics, and return the logs, by name."""
        logs = self._compiled_test_step(data, None)
        return self.get_metrics_result() if logs is None else logs

    def predict_step(self, data: Any) -> Any:
        """Return the predictions for this replica's part of a batch."""
        return self(_batches.unpacked(data)[0], training=False)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Return the sum of the losses of all outputs and of `losses`; see `train_step`.

        A subclass may define it to return a mean over the examples of this replica. In your own
        loop it returns this replica's share, as a `Loss` does.

        Args:
            x: the inputs; only overrides use them.
            y: the labels.
            y_pred: the predictions.
            sample_weight: the weight of each example.
            training: whether the model is being trained; only overrides use it.
        """
        return self.compiled_loss(y, y_pred, sample_weight, self.losses)

    def compiled_loss(
        self,
        y: Any,
        y_pred: Any,
        sample_weight: Any = None,
        regularization_losses: Sequence[Any] = (),
    ) -> Any:
        """Return the sum of the losses of all outputs and of others; Keras 2 uses this name."""
        compared = self._objective.compared(y, y_pred, sample_weight, self._called)
        rows = _batches.rows_of(y_pred)
        count = _losses.global_count(rows)
        share = self._share(compared, count, _replicas(), regularization_losses)
        loss_forms.form.untold = share, count, rows
        return loss_forms.in_form(share)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Add a batch to the metrics passed to `compile`, and return `get_metrics_result`."""
        self._objective.count(self._objective.compared(y, y_pred, sample_weight, self._called))
        return self.get_metrics_result()

    @property
    def compiled_metrics(self) -> Any:
        """An object whose `update_state` adds labels and predictions to the compiled metrics."""
        return SimpleNamespace(update_state=functools.partial(self.compute_metrics, None))

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the values of all metrics, by name."""
        values = {name: metric.result() for name, metric in self._named_metrics().items()}
        parts = [v if isinstance(v, Mapping) else {name: v} for name, v in values.items()]
        return {name: value for part in parts for name, value in part.items()}

    def reset_metrics(self) -> None:
        """Reset all metrics; called before each epoch and each evaluation."""
        known = [*self._objective.named.values(), *self.metrics]

        def reset() -> None:
            for metric in {id(metric): metric for metric in known}.values():
                metric.reset_state()

        self.strategy.attempt(reset)

    # The steps on a replica, of which a strategy or XLA runs those in `_steps`.

    def _train_step(self, data: Any, rows: int | None) -> Any:
        """Make a step on this replica, and return its logs; None: those of the metrics.

        Args:
            data: this replica's part of the batch.
            rows: the number of examples on all replicas; None: not known in this process.
        """
        if not self._defines("train_step"):
            return self._compiled_train_step(data, rows)
        with loss_forms.as_means("share"):
            return self._logs_of("train_step", data)

    def _compiled_train_step(self, data: Any, rows: int | None) -> Any:
        count = _losses.global_count(_batches.rows_of(data)) if rows is None else rows
        gradients_of = self._steps.get("_gradients", self._gradients)
        gradients, logs = gradients_of(data, count, _replicas())
        if gradients:  # Not if the model trains nothing but statistics.
            self.optimizer.apply_gradients(zip(gradients, self._trained(), strict=True))
        return logs

    def _gradients(self, data: Any, rows: float, replicas: int) -> tuple[list[Any], Any]:
        """Return the gradients of this replica and its logs, and count its part of the batch."""
        batch = _batches.unpacked(data)
        with GradientTape() as tape:
            predicted = self(batch[0], training=True)
            compared, share = self._compared(batch, predicted, rows, replicas)
            loss = self.optimizer.scale_loss(share)
        gradients: list[Any] = tape.gradient(loss, self._trained())
        return gradients, self._counted(compared, share, rows, batch, predicted)

    def _test_step(self, data: Any, rows: int | None, is_counted: Any = None) -> Any:
        """Add this replica's part of a batch to the metrics, and return its logs.

        Args:
            data: see `_train_step`.
            rows: see `_train_step`.
            is_counted: whether this replica has rows of the batch at all, in a compiled step; None:
                every replica has.
        """
        if is_counted is None:
            return self._tested(data, rows)
        trace = current_trace()
        with trace.only_if(is_counted):
            logs = self._tested(data, rows)
        problem = ""
        if any(group.axis is None for group in trace.written):
            problem = "its test_step writes a variable that is equal on all replicas"
        elif any(not hasattr(value, "metric") for value in (logs or {}).values()):
            problem = "its test_step returns numbers instead of results of metrics"
        if problem:
            raise TracingError(
                f"evaluate of {self._called}: {problem}, but the last batch has no rows for some "
                "replicas: use a dataset with batch(n, drop_remainder=True)."
            )
        return logs

    def _tested(self, data: Any, rows: int | None) -> Any:
        if not self._defines("test_step"):
            return self._compiled_test_step(data, rows)
        with loss_forms.as_means("mean"):
            return self._logs_of("test_step", data)

    def _compiled_test_step(self, data: Any, rows: int | None) -> Any:
        batch = _batches.unpacked(data)
        predicted = self(batch[0], training=False)
        count, replicas = _batches.rows_of(data), 1  # No replica has to know of the others.
        if self._defines("compute_loss"):
            count, replicas = rows or int(_losses.global_count(count)), _replicas()
        compared, share = self._compared(batch, predicted, count, replicas)
        return self._counted(compared, share, count, batch, predicted)

    def _compared(self, batch: Any, predicted: Any, rows: float, replicas: int) -> tuple[Any, Any]:
        """Return the labels and predictions of a batch, and this replica's share of the loss."""
        x, y, weight = batch
        compared = self._objective.compared(y, predicted, weight, self._called)
        if not self._defines("compute_loss"):
            return compared, self._share(compared, rows, replicas, self._penalties())
        with loss_forms.as_means("mean"):
            return compared, self.compute_loss(x, y, predicted, weight) / replicas

    def _share(self, compared: Any, rows: float, replicas: int, penalties: Any) -> Any:
        """Return this replica's share of the loss.

        Args:
            compared: see `Objective.compared`.
            rows: the number of examples on all replicas.
            replicas: their number; each computes the penalties.
            penalties: what is added to the losses.
        """
        total = self._objective.share(compared, rows)
        if penalties:
            return sum(penalties) / replicas + (0.0 if total is None else total)
        if total is None:
            raise ValueError(
                f"{self._called} has no loss: call compile(optimizer, loss), or add_loss in call, "
                "or define train_step and test_step."
            )
        return total

    def _penalties(self) -> list[Any]:
        """Return `losses`, without a search for the layers in each step."""
        layers = self.position.penalized
        if layers is None:
            return self.losses
        return [each for layer in layers for each in layer.penalties()] + self._added_losses()

    def _counted(self, compared: Any, share: Any, rows: float, batch: Any, predicted: Any) -> Any:
        """Add a batch to the metrics, and return the logs that the model defines, if any."""
        x, y, weight = batch
        self._objective.loss.count(share, rows, _batches.rows_of(batch))
        if not self._defines("compute_metrics") and not self._defines("get_metrics_result"):
            self._objective.count(compared)
            return None
        with loss_forms.as_means("mean"):
            return self._logs_of("compute_metrics", x, y, untrack(predicted), weight)

    def _logs_of(self, method: str, *args: Any) -> Any:
        """Return the logs that a method of the model returns, and count the loss it computed."""
        loss_forms.form.untold = None
        logs = getattr(self, method)(*args)
        if loss_forms.form.untold is not None:
            self._objective.loss.count(*loss_forms.form.untold)
        arrays = logs is not None and not isinstance(logs, Mapping)
        if arrays or any(getattr(value, "ndim", 0) for value in (logs or {}).values()):
            raise TypeError(
                f"{method} of {self._called} returned {logs!r}: return a dict of numbers by name, "
                "such as {'loss': loss}, or self.get_metrics_result()."
            )
        return untrack(None if logs is None else dict(logs))

    def _trained(self) -> Sequence[Variable]:
        return self.position.trained or self.trainable_variables

    def _defines(self, method: str) -> bool:
        """Return True if a subclass defines a method of a step."""
        return getattr(type(self), method) is not getattr(TrainingSteps, method)

    @property
    def _called(self) -> str:
        return f"model {self.name!r}"

    def _renew_steps(self) -> None:
        """Make new steps if the model has other parts; compiled steps would keep the old parts."""
        self.position.shown = None
        methods = [getattr(self, name) for name in _STEPS if self._defines(name)]
        around = Identities().of(self, (self.loss, self.metrics, methods))
        parts = around, frozenset(self.trainable_variables)
        if parts == self._parts_of_steps:
            return
        alone = self.strategy.num_replicas_in_sync == 1 and self.strategy.session is None
        compiled = Function if self._jit_compile else functools.partial
        self._steps = {
            "_train_step": (compiled if alone else functools.partial)(self._train_step),
            "_gradients": compiled(self._gradients),
            "_test_step": compiled(self._test_step),
            "_predict_step": compiled(self.predict_step),
        }
        self._parts_of_steps = parts

    # Logs.

    def _run(self, step: str, batch: Any) -> None:
        """Run a step of training or testing on all replicas, and keep its logs."""
        function = self._steps.get(step) or getattr(self, step)  # A worker has none.
        parts: Any = [(batch, None)]
        if step == "_test_step":
            parts = _batches.equal_parts(self.strategy, batch)
        for part, counting in parts:
            options = {} if counting is None else {"is_counted": counting}
            logs = self.strategy.run(function, (part, self._rows_of_step(part)), options)
            if logs is not None:
                firsts = {name: self.strategy.local_results(logs[name])[0] for name in logs}
                logs = {name: getattr(firsts[name], "metric", logs[name]) for name in logs}
            self.position.logs = logs

    def _local_logs(self) -> dict[str, Any]:
        """Return the logs of the last step, of the replicas of this process."""
        if self.position.logs is None and self.position.shown is None:
            self.position.shown = self._named_metrics()
        logs = self.position.shown if self.position.logs is None else self.position.logs
        return self._numbers(logs, "local_result")

    def _results(self) -> dict[str, Any]:
        """Return the logs of an epoch or an evaluation, of all replicas."""

        def read() -> dict[str, Any]:
            logs = self._named_metrics() if self.position.logs is None else self.position.logs
            return self._numbers(logs, "result")

        return self.strategy.attempt(read, "the results")  # type: ignore[no-any-return]

    def _numbers(self, logs: Mapping[str, Any], of_metric: str) -> dict[str, Any]:
        """Return the values of metrics, or the mean of a number over replicas, by name."""
        numbers: dict[str, Any] = {}
        for name, each in logs.items():
            if isinstance(each, _metrics.Metric):
                value = getattr(each, of_metric)()
            elif of_metric == "result":
                value = self.strategy.reduce("mean", each)
            else:
                value = np.mean([float(value) for value in self.strategy.local_results(each)])
            parts = value if isinstance(value, Mapping) else {name: value}
            for key, part in parts.items():
                number = to_host(as_array(part))
                numbers[key] = number if number.ndim else float(number)
        return numbers

    def _rows_of_step(self, batch: Any) -> int | None:
        """Return the number of examples of all replicas, if all are in this process and stay so."""
        strategy = self.strategy
        if strategy.session or strategy.num_replicas_in_sync > len(strategy.devices):
            return None
        first = tree.flatten(batch)[0]
        return sum(map(_batches.rows_of, strategy.local_results(first)))

    def build_for(self, batch: Any) -> None:
        """Create the variables of all layers for inputs of the shapes and dtypes of a batch."""
        outputs = build_for(self, batch, self.strategy)
        if self.output_names is None:
            self.output_names = names_of(outputs)

    _build_with = build_for


def _replicas() -> int:
    replica = get_replica_context()
    return 1 if replica is None else replica.num_replicas_in_sync
