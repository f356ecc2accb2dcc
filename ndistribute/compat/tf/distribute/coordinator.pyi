# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.coordinator.coordinator import ClusterCoordinator as _ClusterCoordinator
ClusterCoordinator = _ClusterCoordinator
from ndistribute.coordinator.closures import PerWorkerValue as _PerWorkerValue
PerWorkerValue = _PerWorkerValue
from ndistribute.coordinator.closures import PerWorkerValue as _PerWorkerValues
PerWorkerValues = _PerWorkerValues
from ndistribute.coordinator.closures import RemoteValue as _RemoteValue
RemoteValue = _RemoteValue
