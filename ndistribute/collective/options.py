"""`CommunicationOptions`: the settings of collectives."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CommunicationImplementation(enum.Enum):
    """The transport between workers.

    >>> CommunicationImplementation("ring").name
    'RING'
    """

    AUTO = "auto"
    RING = "ring"
    MPI = "mpi"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """The settings of the collectives of a call or of a strategy.

    Args:
        bytes_per_pack: the most bytes of a bucket of gradients and of a message; 0: the default of
            the transport. Collectives in shared memory and through NCCL ignore it.
        timeout_seconds: how many seconds a replica waits for the others; None: 600.
        implementation: the transport between workers, a `CommunicationImplementation` or its value.
            Strategies of one process ignore it.
        wire_dtype: ``"float16"`` or ``"bfloat16"`` sends float32 between hosts in half the bytes,
            and adds in float32; None: unchanged. All replicas still get the same bits.

    Raises:
        ValueError: `bytes_per_pack` is negative, `timeout_seconds` is not above 0, or
            another value is unknown.

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
        """The timeout in seconds, with the default applied."""
        # A replica may load data or compile for minutes before a call. The failure detector reports
        # lost processes at once, so the deadline serves only for calls that would never end.
        return 600.0 if self.timeout_seconds is None else float(self.timeout_seconds)
