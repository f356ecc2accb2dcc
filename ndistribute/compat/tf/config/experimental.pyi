# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.configuration import LogicalDeviceConfiguration as _VirtualDeviceConfiguration
VirtualDeviceConfiguration = _VirtualDeviceConfiguration
enable_op_determinism: Any
list_logical_devices: Any
list_physical_devices: Any
set_memory_growth: Any
set_virtual_device_configuration: Any
