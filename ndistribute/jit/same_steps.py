"""`SameSteps`: programs of several processes check that all processes run the same programs.

XLA's collectives match in order. If a process left out a program or ran another one, collectives of
different programs would match, and give wrong values.
"""

from __future__ import annotations

import zlib
from typing import Any

from ndistribute.devices import Array, jax_module
from ndistribute.errors import CollectiveMismatchError
from ndistribute.jit.box import Box
from ndistribute.jit.trace import StepTrace
from ndistribute.jit.traced_backend import AXIS


class SameSteps:
    """A comparison, in order, of the programs that the processes of some JAX devices have run."""

    def __init__(self, devices: list[Any]) -> None:
        self._devices, self._mine = devices, jax_module().process_index()
        # The number of programs that were traced, and a checksum of the programs that ran.
        self._programs = self._ran = 0

    def new_program(self) -> None:
        """Begin a new program, which all processes trace together."""
        self._programs += 1

    def compare(self, trace: StepTrace) -> None:
        """Let the traced program raise an error, after it has run, unless all processes run it."""
        program = str(self._programs).encode()
        ran = trace.input(lambda: zlib.crc32(program, self._ran))
        everyone = Box(jax_module().lax.all_gather(ran.value, AXIS))
        trace.after.append((self._check, (everyone,)))

    def _check(self, everyone: Array) -> None:
        for device, ran in zip(self._devices, everyone, strict=True):
            if device.process_index == self._mine:
                self._ran = int(ran)
            if ran != everyone[0]:
                raise CollectiveMismatchError(
                    f"worker {device.process_index} has run different compiled steps from worker "
                    "0, so the variables are wrong. Every worker must run the same steps in the "
                    "same order: start the job again from its last checkpoint.",
                    rank=device.process_index,
                    op="step",
                )
