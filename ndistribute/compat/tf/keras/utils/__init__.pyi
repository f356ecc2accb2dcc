# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.keras.utils import experimental as experimental
from ndistribute.models.sidecar import SidecarEvaluator as _SidecarEvaluator
SidecarEvaluator = _SidecarEvaluator
pad_sequences: Any
set_random_seed: Any
to_categorical: Any
