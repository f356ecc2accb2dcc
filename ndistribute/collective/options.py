"""How a collective may be carried out, as the caller wishes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CommunicationImplementation(enum.Enum):
    """Choose the wire between workers.

    >>> CommunicationImplementation("ring").name
    'RING'
    """

    AUTO = "auto"
    RING = "ring"
    MPI = "mpi"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Tune the collectives of a call or of a strategy.

    Args:
        bytes_per_pack: how many bytes of gradients travel together; 0 leaves it to the wire.
            Replicas of one process, and processes of one host, share memory and pack nothing.
        timeout_seconds: how long a replica waits for the others; None means 600.
        implementation: `CommunicationImplementation` or its value. Replicas of one process meet in
            memory, or through NCCL on distinct GPUs, whatever it says.
        wire_dtype: ``"float16"`` or ``"bfloat16"`` sends float32 in half the bytes between hosts
            and adds it up in float32; None sends it as it is. All replicas still hold equal bits.

    Raises:
        ValueError: a negative size or time, or an unknown implementation or dtype.

    >>> CommunicationOptions(timeout_seconds=5).timeout
    5.0
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be 0 or more, got {self.bytes_per_pack}.")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be above 0, got {self.timeout_seconds}.")
        if self.wire_dtype not in (None, "float16", "bfloat16"):
            raise ValueError(
                f"wire_dtype must be 'float16', 'bfloat16' or None, got {self.wire_dtype!r}."
            )
        if not isinstance(self.implementation, CommunicationImplementation):
            name = str(self.implementation).lower()
            known = [member.value for member in CommunicationImplementation]
            if name not in known:
                raise ValueError(f"implementation must be one of {known}, got {name!r}.")
            object.__setattr__(self, "implementation", CommunicationImplementation(name))

    @property
    def timeout(self) -> float:
        """Return the time to wait, in seconds."""
        # A replica may load data or compile for minutes before it comes; a lost one is noticed
        # at once by other means, so the deadline only has to end what nothing else would.
        return 600.0 if self.timeout_seconds is None else float(self.timeout_seconds)
