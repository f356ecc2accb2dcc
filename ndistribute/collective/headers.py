"""The comparison of calls: among the replicas of a process, and among processes by headers.

A header is sent with the first message of a call, or lies beside the data in shared memory. A
mismatch raises an error that describes both calls.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Sequence

from ndistribute.collective.backend import Call, Signature
from ndistribute.errors import CollectiveMismatchError
from ndistribute.mistakes import count_of

# Magic, generation, step, number within the step, number within the generation, a digest of the
# call, and its description. Two cache lines.
_HEADER = struct.Struct("<2sHIII8s104s")
_MAGIC = b"ND"
HEADER_BYTES = _HEADER.size


def check_calls(calls: Sequence[Call]) -> None:
    """Check that the calls of all replicas are equal.

    Raises:
        CollectiveMismatchError: two of the calls differ.

    >>> check_calls([Call(1, "all_reduce", "SUM"), Call(1, "all_reduce", "MAX")])
    Traceback (most recent call last):
    ndistribute.errors.CollectiveMismatchError: all_reduce #1: replica 1 called all_reduce(MAX), ...
    """
    first = calls[0]
    for rank, call in enumerate(calls):
        if call.agreed != first.agreed:
            number = "" if call.sequence == first.sequence else f" as its call {call.sequence}"
            what = f"replica {rank} called {call}{number}, replica 0 called {first}."
            alike = call._replace(signature=first.signature).agreed == first.agreed
            raise _mismatch(first, rank, what, alike=alike)


def _mismatch(call: Call, rank: int, what: str, *, alike: bool) -> CollectiveMismatchError:
    """Return the error for calls that differ; if `alike`, they differ only in shapes and dtypes."""
    advice = "make the same calls in the same order."
    if alike:
        hint = "; pad the batch, or use all_gather" if call.kind == "all_reduce" else ""
        advice = f"pass the same shapes and dtypes{hint}."
    return call.error(CollectiveMismatchError, f"{what} Every replica must {advice}", rank)


def encode_header(call: Call, count: int, step: int = 0, generation: int = 0) -> bytes:
    """Return the header of a call, which is the call number `count` on its wire.

    The header contains the number of the step, so a call that is skipped in one step cannot match a
    call of the next step. It contains the generation, so messages of failed calls cannot match.
    """
    place = step & 0xFFFFFFFF, call.sequence, count & 0xFFFFFFFF
    said = _said(call.kind, call.op, call.signature, call.purpose)
    return _HEADER.pack(_MAGIC, generation & 0xFFFF, *place, *said)


def compare_headers(mine: bytes, theirs: bytes, my_rank: int, their_rank: int) -> None:
    """Check that two processes make the same call.

    Raises:
        CollectiveMismatchError: the calls differ; the message describes both.

    >>> two, three = (Call(1, "broadcast", f"root={root}") for root in (2, 3))
    >>> one, other = encode_header(two, 1), encode_header(three, 1)
    >>> compare_headers(one, one, 0, 1)
    >>> compare_headers(one, other, 0, 1)
    Traceback (most recent call last):
    ndistribute.errors.CollectiveMismatchError: broadcast #1: worker 1 called broadcast(root=3), \
worker 0 called broadcast(root=2). Every replica must make the same calls in the same order.
    """
    if mine == theirs:
        return
    *_, step, sequence, number, _, words = _HEADER.unpack(mine)
    *_, their_step, their_sequence, their_number, _, their_words = _HEADER.unpack(theirs)
    shown, other = (text.rstrip(b"\0").decode("ascii", "replace") for text in (words, their_words))
    call = Call(sequence, shown.partition("(")[0])
    if theirs[:4] != mine[:4]:  # These are other data, or the message of a failed call.
        about = f"worker {their_rank} sent no header of a collective to worker {my_rank},"
        text = f"{about} which called {shown}. Check that both run the same version of ndistribute."
        raise call.error(CollectiveMismatchError, text, their_rank)
    in_place = (step, sequence, number) == (their_step, their_sequence, their_number)
    difference = ""
    if in_place and shown == other:
        difference = " with other shapes, or for something else"
    elif step != their_step:
        difference = f" in its step {(their_step + 1) // 2}, expected step {(step + 1) // 2}"
    elif not in_place:
        difference = (
            f" as its call {their_sequence} ({their_number} since the start, expected {number})"
        )
    what = f"worker {their_rank} called {other}{difference}, worker {my_rank} called {shown}."
    # The part before the first comma is kind and op.
    alike = in_place and shown.partition(",")[0] == other.partition(",")[0]
    raise _mismatch(call, their_rank, what, alike=alike)


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
        arrays = count_of(len(signature), "array")
        parts.append(f"{count_of(elements, 'element')} of {dtype} in {arrays}")
    about = f" for {purpose}" if purpose else ""
    return digest, f"{kind}({', '.join(parts)}){about}".encode()
