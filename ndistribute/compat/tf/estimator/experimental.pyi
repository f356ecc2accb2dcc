# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

make_early_stopping_hook: Any
stop_if_higher_hook: Any
stop_if_lower_hook: Any
stop_if_no_decrease_hook: Any
stop_if_no_increase_hook: Any
