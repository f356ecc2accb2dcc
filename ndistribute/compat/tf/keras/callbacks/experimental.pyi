# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.callbacks.saving import BackupAndRestore as _BackupAndRestore
BackupAndRestore = _BackupAndRestore
