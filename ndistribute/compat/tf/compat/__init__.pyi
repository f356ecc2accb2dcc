# Written by tests/compat/name_stubs.py from the tables of names.

from ndistribute.compat import tf as v2
from ndistribute.compat import tf1 as v1
__all__ = ['v1', 'v2']
