# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.adapters import Model as _Model
Model = _Model
from ndistribute.compat.adapters import Sequential as _Sequential
Sequential = _Sequential
clone_model: Any
load_model: Any
model_from_json: Any
save_model: Any
