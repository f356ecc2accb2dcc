# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

fft: Any
fft2d: Any
ifft: Any
ifft2d: Any
irfft: Any
irfft2d: Any
rfft: Any
rfft2d: Any
