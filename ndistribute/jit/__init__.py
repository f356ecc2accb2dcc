"""Compiled steps: XLA compiles NumPy code; see `ndistribute.function` and `TPUStrategy`."""
