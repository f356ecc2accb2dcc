"""The header that describes a collective call, by which processes compare their calls.

A header is sent with the first message of every call, or lies beside the data in shared memory. If
two headers differ, both processes raise an error that describes both calls.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct

from ndistribute.collective.backend import Call, Signature, mismatch
from ndistribute.errors import CollectiveMismatchError

__all__ = ["HEADER_BYTES", "compare", "encode"]

# Magic, generation, step, number within the step, number within the generation, a digest of the
# call, and its description. Two cache lines.
_HEADER = struct.Struct("<2sHIII8s104s")
_MAGIC = b"ND"
HEADER_BYTES = _HEADER.size


def encode(call: Call, count: int, step: int = 0, generation: int = 0) -> bytes:
    """Return the header of a call.

    Args:
        call: the call.
        count: the number of calls on this wire so far, including this one.
        step: the number of the step, or 0 outside steps, so that a call skipped in one step cannot
            match the same call of the next step.
        generation: how often the group was rebuilt, so that messages of failed calls cannot match.
    """
    place = step & 0xFFFFFFFF, call.sequence, count & 0xFFFFFFFF
    said = _said(call.kind, call.op, call.signature, call.purpose)
    return _HEADER.pack(_MAGIC, generation & 0xFFFF, *place, *said)


def compare(mine: bytes, theirs: bytes, my_rank: int, their_rank: int) -> None:
    """Check that two processes make the same call.

    Raises:
        CollectiveMismatchError: the calls differ; the message describes both.

    >>> two, three = (Call(1, "broadcast", f"root={root}") for root in (2, 3))
    >>> compare(encode(two, 1), encode(two, 1), 0, 1)
    >>> compare(encode(two, 1), encode(three, 1), 0, 1)
    Traceback (most recent call last):
    ndistribute.errors.CollectiveMismatchError: broadcast #1: worker 1 called broadcast(root=3), \
worker 0 called broadcast(root=2). Every replica must make the same calls in the same order.
    """
    if mine == theirs:
        return
    *_, step, sequence, number, _, words = _HEADER.unpack(mine)
    *_, their_step, their_sequence, their_number, _, their_words = _HEADER.unpack(theirs)
    own, other = (text.rstrip(b"\0").decode("ascii", "replace") for text in (words, their_words))
    kind = own.partition("(")[0]
    if theirs[:4] != mine[:4]:  # Other data, or the message of a failed call.
        raise CollectiveMismatchError(
            f"{kind} #{sequence}: worker {their_rank} sent no collective's header to worker "
            f"{my_rank}, which called {own}. Do both run the same version of ndistribute?",
            rank=their_rank,
            op=kind,
            sequence=sequence,
        )
    in_place = (step, sequence, number) == (their_step, their_sequence, their_number)
    difference = ""
    if in_place and own == other:
        difference = " with other shapes, or for something else"
    elif step != their_step:
        difference = f" in its step {(their_step + 1) // 2}, expected step {(step + 1) // 2}"
    elif not in_place:
        difference = (
            f" as its call {their_sequence} ({their_number} since the start, expected {number})"
        )
    what = f"worker {their_rank} called {other}{difference}, worker {my_rank} called {own}."
    # The part before the first comma is kind and op.
    alike = in_place and own.partition(",")[0] == other.partition(",")[0]
    raise mismatch(kind, sequence, their_rank, what, alike=alike)


@functools.lru_cache(maxsize=1024)
def _said(kind: str, op: str | None, signature: Signature, purpose: str) -> tuple[bytes, bytes]:
    """Return a digest of a call for comparison, and a description for error messages."""
    shapes = [(dtype.str, repr(dtype), shape) for dtype, shape in signature]
    digest = hashlib.blake2b(repr((kind, op, shapes, purpose)).encode(), digest_size=8).digest()
    parts = [op] if op else []
    if signature:
        names = {dtype.name for dtype, _ in signature}
        dtype = names.pop() if len(names) == 1 else "mixed"
        elements = sum(math.prod(n for n in shape if isinstance(n, int)) for _, shape in signature)
        parts.append(f"{elements} element(s) of {dtype} in {len(signature)} array(s)")
    return digest, f"{kind}({', '.join(parts)})".encode()
