"""What a process says about a collective call before it sends a byte of it.

Sixty-four bytes travel with the first message of every call, or lie beside the data in shared
memory: enough for the others to see that they are doing the same, and to say so when they are not.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from typing import NamedTuple

from ndistribute.collective.backend import Call, Signature
from ndistribute.errors import CollectiveMismatchError

__all__ = ["HEADER_BYTES", "Header", "compare", "decode", "encode"]

HEADER_BYTES = 64

_MAGIC = b"ND"
# magic, generation, step, number within the step, number since the start of the generation
_NUMBERS = struct.Struct("<2sHIII")
_DETAILS = struct.Struct("<Q13s8s8sI")  # elements, kind, op, dtype, leaves; then a digest of all
_DIGEST_BYTES = HEADER_BYTES - _NUMBERS.size - _DETAILS.size


class Header(NamedTuple):
    """Describe a call as another process made it."""

    step: int
    sequence: int
    number: int
    elements: int
    kind: str
    op: str
    dtype: str
    leaves: int

    def __str__(self) -> str:
        what = f"{self.elements} element(s) of {self.dtype} in {self.leaves} array(s)"
        return f"{self.kind}({', '.join(filter(None, [self.op, what if self.leaves else '']))})"


def encode(call: Call, count: int, step: int = 0, generation: int = 0) -> bytes:
    """Return the header of a call.

    Args:
        call: what the process is doing.
        count: how many calls it has made on this wire, this one included.
        step: in which step the process is, or 0 outside steps. A call that was left out in one
            step must not be made up for by the same call in the next.
        generation: how often the group was made whole again; a call that failed may leave messages.

    >>> header = encode(Call(3, "all_reduce", "SUM"), count=12)
    >>> len(header), str(decode(header))
    (64, 'all_reduce(SUM)')
    """
    place = step & 0xFFFFFFFF, call.sequence, count & 0xFFFFFFFF
    numbers = _NUMBERS.pack(_MAGIC, generation & 0xFFFF, *place)
    return numbers + _details(call.kind, call.op, call.signature, call.purpose)


def decode(header: bytes) -> Header:
    """Read a header.

    Raises:
        ValueError: these bytes are none.
    """
    if len(header) != HEADER_BYTES or header[:2] != _MAGIC:
        raise ValueError(f"not a collective's header: {header[:16]!r}")
    _, _, step, sequence, number = _NUMBERS.unpack_from(header)
    elements, kind, op, dtype, leaves = _DETAILS.unpack_from(header, _NUMBERS.size)
    shown = _text(kind), _text(op), _text(dtype)
    return Header(step, sequence, number, elements, *shown, leaves)


def compare(mine: bytes, theirs: bytes, my_rank: int, their_rank: int) -> None:
    """Check that two processes make the same call.

    Raises:
        CollectiveMismatchError: they do not; it says what each of them does.

    >>> same = encode(Call(1, "broadcast", "root=0"), 1)
    >>> compare(same, same, 0, 1)
    """
    if mine == theirs:
        return
    own = decode(mine)
    if theirs[:4] != mine[:4]:  # Other bytes, or what a failed call has left.
        raise CollectiveMismatchError(
            f"{own.kind} #{own.sequence}: worker {their_rank} sent no collective's header to "
            f"worker {my_rank}, which called {own}. Do both run the same version of ndistribute?",
            rank=their_rank,
            op=own.kind,
            sequence=own.sequence,
        )
    other = decode(theirs)
    raise CollectiveMismatchError(
        f"{own.kind} #{own.sequence}: worker {their_rank} called {other}{_number(own, other)}, "
        f"worker {my_rank} called {own}. {_advice(own, other)}",
        rank=their_rank,
        op=own.kind,
        sequence=own.sequence,
    )


def _number(own: Header, other: Header) -> str:
    if own[:3] == other[:3]:
        return "" if own != other else " with other shapes, or for something else"
    if own.step != other.step:
        return f" in its step {(other.step + 1) // 2}, expected step {(own.step + 1) // 2}"
    return f" as its call {other.sequence} ({other.number} since the start, expected {own.number})"


def _advice(own: Header, other: Header) -> str:
    if own[:3] == other[:3] and (own.kind, own.op) == (other.kind, other.op):
        return (
            "Every replica must pass the same shapes and dtypes; pad the batch, or use all_gather."
        )
    return "Every replica must make the same calls in the same order."


@functools.lru_cache(maxsize=1024)
def _details(kind: str, op: str | None, signature: Signature, purpose: str) -> bytes:
    dtypes = {dtype.name for dtype, _ in signature}
    elements = sum(math.prod(n for n in shape if isinstance(n, int)) for _, shape in signature)
    shapes = [(dtype.str, repr(dtype), shape) for dtype, shape in signature]
    text = repr((kind, op, shapes, purpose))
    fields = _DETAILS.pack(
        elements,
        kind.encode(),
        (op or "").encode(),
        (dtypes.pop() if len(dtypes) == 1 else "mixed" if dtypes else "").encode(),
        len(signature),
    )
    # The fields are for people; that all of kind, op, dtypes and shapes agree, the digest says.
    return fields + hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")
