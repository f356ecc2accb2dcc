# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

decode_bmp: Any
decode_image: Any
decode_jpeg: Any
decode_png: Any
