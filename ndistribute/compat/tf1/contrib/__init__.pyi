# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf1.contrib import framework as framework
from ndistribute.compat.tf1.contrib import layers as layers
from ndistribute.compat.tf1.contrib import training as training
