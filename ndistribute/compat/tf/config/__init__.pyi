# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.config import experimental as experimental
from ndistribute.compat.tf.config import optimizer as optimizer
from ndistribute.compat.tf.config import threading as threading
from ndistribute.compat.configuration import LogicalDevice as _LogicalDevice
LogicalDevice = _LogicalDevice
from ndistribute.compat.configuration import LogicalDeviceConfiguration as _LogicalDeviceConfiguration
LogicalDeviceConfiguration = _LogicalDeviceConfiguration
experimental_connect_to_cluster: Any
experimental_run_functions_eagerly: Any
get_visible_devices: Any
list_logical_devices: Any
list_physical_devices: Any
run_functions_eagerly: Any
set_logical_device_configuration: Any
set_soft_device_placement: Any
