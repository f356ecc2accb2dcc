# Written by tests/compat/name_stubs.py from the tables of names.
from ndistribute.compat.tf1 import *
