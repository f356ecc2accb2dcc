"""The fingerprint of a training run: texts that must agree before `fit` may continue it.

It describes how the data, the model, the loss and the optimizer were made. It does not contain
their state, which changes during training. It also leaves out replicas, workers, seeds, epochs and
callbacks.
"""

from __future__ import annotations

import re
import zlib
from types import CodeType
from typing import Any

from ndistribute.data.pipeline import Node, describe, facts
from ndistribute.models.layers.layer import Layer
from ndistribute.models.losses import Loss
from ndistribute.optimizers import Optimizer

# The attributes of optimizers that do not change during training.
_OF_OPTIMIZER = {"rule", "_first_rate", "_bound", "inner", "steps"}
# In a text: addresses, and the names of layers, which are numbered in each program.
_OWN_NAMES = r" at 0x[0-9a-f]+|(?<!class) '[^']*'(?=>)"


def fingerprint(model: Any, more: dict[str, Any], data: Node | None = None) -> dict[str, str]:
    """Return the text of each part of a training run.

    Args:
        model: the compiled model.
        more: other arguments of the training run.
        data: the pipeline of the global batches; None: leave it out.
    """
    parts: dict[str, Any] = {} if data is None else {"dataset": describe(data), **facts(data)}
    parts |= more | {f"layer {number}": _text(layer) for number, layer in enumerate(model.walk())}
    parts |= {"loss": _text(model.loss), "optimizer": _text(model.optimizer)}
    parts["metrics"] = [metric.name for metric in model.metrics]
    return {part: str(fact) for part, fact in parts.items()}


def _text(value: Any) -> str:
    """Return a text of an object's parts, without names and addresses; of a function, its code."""
    if isinstance(value, Layer):
        config = value.get_config() | {"computing in": value.compute_dtype.name}
    elif isinstance(value, Loss | Optimizer):
        kept = vars(value) if isinstance(value, Loss) else _OF_OPTIMIZER
        config = {name: argument for name, argument in vars(value).items() if name in kept}
        config.pop("_arguments", None)
    else:
        text, code = re.sub(_OWN_NAMES, "", repr(value)), getattr(value, "__code__", None)
        return f"{text} of code {_checksum(code)}" if isinstance(code, CodeType) else text
    config.pop("name", None)
    texts = [f"{name.lstrip('_')}={_text(argument)}" for name, argument in config.items()]
    return f"{type(value).__name__}({', '.join(texts)})"


def _checksum(code: CodeType) -> int:
    """Return a checksum of a function's code, wherever it stands."""
    # The order of a set in a text differs between processes.
    constants = [constant for constant in code.co_consts if not isinstance(constant, frozenset)]
    inner = [_checksum(each) if isinstance(each, CodeType) else each for each in constants]
    return zlib.crc32(repr((code.co_code, code.co_names, inner)).encode())
