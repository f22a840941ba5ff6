"""Every sequence of slots of a candidate: which islands, in which order, how many stages each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from hetplan.search.space import Space

FEW_SEQUENCES = 200
"""Up to here each sequence is taken by itself at once: about 1 ms each (measured)."""

MANY_SEQUENCES = 1000
"""Up to here each sequence is taken by itself when nothing else closes the candidate."""


def sequences(space: Space) -> Iterator[tuple[int, ...]]:
    """Islands of the slots, first to last; islands are contiguous and may stay unused."""
    count = len(space.islands)
    for used in range(1, count + 1):
        for order in permutations(range(count), used):
            if not space.may_be_first[order[0]] or not space.may_be_last[order[-1]]:
                continue
            for stages in product(*(range(1, int(space.max_stages[i]) + 1) for i in order)):
                total = sum(stages)
                if total <= space.most_slots and total == (space.stages or total):
                    yield tuple(
                        i for i, held in zip(order, stages, strict=True) for _ in range(held)
                    )


def count_sequences(space: Space, most: int = MANY_SEQUENCES + 1) -> int:
    """How many sequences there are, counted up to `most`."""
    found = 0
    for _ in sequences(space):
        found += 1
        if found >= most:
            break
    return found
