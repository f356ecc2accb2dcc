# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.initializers import Constant as _Constant
Constant = _Constant
from ndistribute.models.initializers import GlorotNormal as _GlorotNormal
GlorotNormal = _GlorotNormal
from ndistribute.models.initializers import GlorotUniform as _GlorotUniform
GlorotUniform = _GlorotUniform
from ndistribute.models.initializers import HeNormal as _HeNormal
HeNormal = _HeNormal
from ndistribute.models.initializers import HeUniform as _HeUniform
HeUniform = _HeUniform
from ndistribute.models.initializers import Initializer as _Initializer
Initializer = _Initializer
from ndistribute.models.initializers import LecunNormal as _LecunNormal
LecunNormal = _LecunNormal
from ndistribute.models.initializers import LecunUniform as _LecunUniform
LecunUniform = _LecunUniform
from ndistribute.models.initializers import Ones as _Ones
Ones = _Ones
from ndistribute.models.initializers import Orthogonal as _Orthogonal
Orthogonal = _Orthogonal
from ndistribute.models.initializers import RandomNormal as _RandomNormal
RandomNormal = _RandomNormal
from ndistribute.models.initializers import RandomUniform as _RandomUniform
RandomUniform = _RandomUniform
from ndistribute.models.initializers import TruncatedNormal as _TruncatedNormal
TruncatedNormal = _TruncatedNormal
from ndistribute.models.initializers import Zeros as _Zeros
Zeros = _Zeros
from ndistribute.models.initializers import Constant as _constant
constant = _constant
get: Any
from ndistribute.models.initializers import GlorotNormal as _glorot_normal
glorot_normal = _glorot_normal
from ndistribute.models.initializers import GlorotUniform as _glorot_uniform
glorot_uniform = _glorot_uniform
from ndistribute.models.initializers import HeNormal as _he_normal
he_normal = _he_normal
from ndistribute.models.initializers import HeUniform as _he_uniform
he_uniform = _he_uniform
from ndistribute.models.initializers import Ones as _ones
ones = _ones
truncated: Any
from ndistribute.models.initializers import Zeros as _zeros
zeros = _zeros
