# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.batches import DatasetCreator as _DatasetCreator
DatasetCreator = _DatasetCreator
