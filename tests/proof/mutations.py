"""Seeded changes of a plan file: one number, word, truth value, entry or key at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

Place = tuple[str | int, ...]


def leaves(data: Any, place: Place = ()) -> Iterator[Place]:
    """Where every number, word, truth value, empty list and null of a JSON value stands."""
    if isinstance(data, dict) and data:
        for key in sorted(data):
            yield from leaves(data[key], (*place, key))
    elif isinstance(data, list) and data:
        for at, each in enumerate(data):
            yield from leaves(each, (*place, at))
    else:
        yield place


def changed(data: Any, place: Place, random: np.random.Generator) -> Any:
    """The value with another one at this place."""
    new = copy.deepcopy(data)
    holder = new
    for step in place[:-1]:
        holder = holder[step]
    old, last = holder[place[-1]], place[-1]
    if random.random() < 0.15 and isinstance(last, str):
        del holder[last]
    elif random.random() < 0.15 and isinstance(last, int):
        holder.append(copy.deepcopy(old)) if random.random() < 0.5 else holder.pop(last)
    elif isinstance(old, bool):
        holder[last] = not old
    elif isinstance(old, int):
        holder[last] = old + int(random.choice([-1, 1, 7]))
    elif isinstance(old, float):
        holder[last] = old * float(random.choice([0.5, 0.999, 1.001, 2.0])) + 1e-6
    elif isinstance(old, str):
        holder[last] = old + "x" if random.random() < 0.5 else "other"
    else:
        holder[last] = 1
    return new
