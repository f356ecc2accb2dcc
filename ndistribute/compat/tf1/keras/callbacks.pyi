# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.keras.callbacks import *
