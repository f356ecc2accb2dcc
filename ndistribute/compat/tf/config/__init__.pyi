# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.config import experimental as experimental
experimental_connect_to_cluster: Any
experimental_run_functions_eagerly: Any
list_logical_devices: Any
list_physical_devices: Any
run_functions_eagerly: Any
set_soft_device_placement: Any
