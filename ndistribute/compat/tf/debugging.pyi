# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

Assert: Any
assert_all_finite: Any
assert_equal: Any
assert_greater: Any
assert_greater_equal: Any
assert_less: Any
assert_less_equal: Any
assert_near: Any
assert_non_negative: Any
assert_none_equal: Any
assert_positive: Any
check_numerics: Any
enable_check_numerics: Any
set_log_device_placement: Any
