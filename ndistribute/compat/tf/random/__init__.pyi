# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.random import experimental as experimental
from ndistribute.compat.random_numbers import Generator as _Generator
Generator = _Generator
categorical: Any
gamma: Any
get_global_generator: Any
log_uniform_candidate_sampler: Any
normal: Any
set_seed: Any
shuffle: Any
split: Any
stateless_normal: Any
stateless_truncated_normal: Any
stateless_uniform: Any
truncated_normal: Any
uniform: Any
