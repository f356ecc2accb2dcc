# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

GLOBAL_STEP: str
GLOBAL_VARIABLES: str
LOCAL_VARIABLES: str
LOSSES: str
METRIC_VARIABLES: str
REGULARIZATION_LOSSES: str
SUMMARIES: str
TRAINABLE_VARIABLES: str
UPDATE_OPS: str
VARIABLES: str
