# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.regularizers import L1 as _L1
L1 = _L1
from ndistribute.models.regularizers import L2 as _L2
L2 = _L2
from ndistribute.models.regularizers import Regularizer as _Regularizer
Regularizer = _Regularizer
get: Any
from ndistribute.models.regularizers import L1 as _l1
l1 = _l1
from ndistribute.models.regularizers import L2 as _l2
l2 = _l2
