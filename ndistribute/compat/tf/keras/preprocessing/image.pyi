# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

array_to_img: Any
img_to_array: Any
load_img: Any
save_img: Any
