# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

DType: Any
as_dtype: Any
bool: Any
cast: Any
complex128: Any
complex64: Any
double: Any
float16: Any
float32: Any
float64: Any
half: Any
int16: Any
int32: Any
int64: Any
int8: Any
string: Any
uint16: Any
uint32: Any
uint64: Any
uint8: Any
