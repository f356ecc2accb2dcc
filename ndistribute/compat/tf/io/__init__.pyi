# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.io import gfile as gfile
decode_bmp: Any
decode_image: Any
decode_jpeg: Any
decode_png: Any
read_file: Any
