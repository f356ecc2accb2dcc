"""`function`: a decorator that compiles a function of NumPy code by XLA, under any strategy."""

from __future__ import annotations
