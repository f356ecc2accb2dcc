# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.graph.device_functions import GreedyLoadBalancingStrategy as _GreedyLoadBalancingStrategy
GreedyLoadBalancingStrategy = _GreedyLoadBalancingStrategy
byte_size_load_fn: Any
