"""The order of a shuffle: seeds alone determine which element of a buffer comes next.

For rows of arrays, a shuffle exchanges only indices, many at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from ndistribute.context import current_seed
from ndistribute.data.elements import Chunk, Rows, join, pick
from ndistribute.data.options import integer
from ndistribute.data.pipeline import SeedCounter

# The random indices drawn at once: enough to spread NumPy's call overhead, but few enough that the
# first batch of an epoch waits less than a millisecond.
_DRAWN = 8192


def seeded(what: str, seed: int | None) -> SeedCounter:
    """Return the seeds of a random node; without a seed, the next one derived from `set_seed`."""
    if seed is not None:
        return SeedCounter(integer(seed, f"{what}: seed") & (1 << 64) - 1, chosen=True)
    # A grandchild, because replicas derive their generators from children of the same seed.
    sequence = current_seed().spawn(1)[0].spawn(1)[0]
    return SeedCounter(int(sequence.generate_state(1, np.uint64)[0]))


def through_buffer(
    chunks: Iterator[Chunk], rng: np.random.Generator, buffer_size: int
) -> Iterator[Chunk]:
    """Yield elements in the order of a shuffle buffer.

    The buffer contains `buffer_size` elements. Each step yields a random one, and the next input
    element takes its slot. So element i is yielded at position i - buffer_size + 1 or later.
    """
    filling: list[Chunk] = []
    room = buffer_size
    more: Iterator[Chunk] = iter(())
    for chunk in chunks:
        filling.append(chunk[:room])
        room -= len(chunk)
        if room < 0:
            more = chain((chunk[room:],), chunks)
            break
    buffer = join(filling)
    picks = _endless_picks(rng, buffer_size)
    drawn = max(_DRAWN, buffer_size // 4)
    for chunk in _joined_like(buffer, more, drawn) if isinstance(buffer, Rows) else more:
        if isinstance(buffer, Rows) and buffer.same_columns(chunk):
            for first in range(0, len(chunk), drawn):
                out, buffer = _exchanged(buffer, chunk[first : first + drawn], rng)
                yield out
            continue
        if not isinstance(buffer, list):
            buffer = list(buffer)
        for element in chunk:
            slot = next(picks)
            yield (buffer[slot],)
            buffer[slot] = element
    yield pick(buffer, rng.permutation(len(buffer)))


def _joined_like(buffer: Rows, chunks: Iterator[Chunk], size: int) -> Iterator[Chunk]:
    """Join successive rows to at least `size`, because each exchange copies the whole buffer."""
    held: list[Chunk] = []
    rows = 0
    for chunk in chunks:
        if alike := buffer.same_columns(chunk):
            held.append(chunk)
            rows += len(chunk)
        if held and (rows >= size or not alike):
            yield join(held)
            held, rows = [], 0
        if not alike:
            yield chunk
    if held:
        yield join(held)


def _exchanged(buffer: Chunk, entering: Chunk, rng: np.random.Generator) -> tuple[Chunk, Chunk]:
    """Return the rows that a buffer yields while other rows enter it, and the buffer afterwards.

    A draw yields the row that entered at the previous draw of the same slot, so sorting the draws
    by slot replaces a loop.
    """
    size = len(buffer)
    out = rng.integers(size, size=len(entering))
    # NumPy uses a radix sort for 16-bit keys: 0.7 ms instead of 6 ms for 60,000 draws.
    by_slot = np.argsort(out.astype(np.uint16 if size <= 1 << 16 else np.int64), kind="stable")
    slot = out[by_slot]
    same_as_next = slot[:-1] == slot[1:]
    out[by_slot[1:][same_as_next]] = size + by_slot[:-1][same_as_next]
    last = np.append(~same_as_next, True)
    slots = np.arange(size)
    slots[slot[last]] = size + by_slot[last]
    both = join([buffer, entering])
    return pick(both, out), pick(both, slots)


def _endless_picks(rng: np.random.Generator, buffer_size: int) -> Iterator[int]:
    while True:
        yield from rng.integers(buffer_size, size=1024).tolist()
