# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

do_not_convert: Any
set_loop_options: Any
