"""Compiled steps: NumPy code that XLA compiles, see `ndistribute.function` and `TPUStrategy`."""
