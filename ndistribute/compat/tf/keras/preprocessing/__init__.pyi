# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.keras.preprocessing import image as image
from ndistribute.compat.tf.keras.preprocessing import sequence as sequence
image_dataset_from_directory: Any
text_dataset_from_directory: Any
timeseries_dataset_from_array: Any
