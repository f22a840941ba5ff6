"""How many random cases a test tries: a third of them on every commit, the others when slow."""

from __future__ import annotations

import pytest


def seeds(count: int) -> list[object]:
    """The seeds 0 .. count - 1 for `parametrize`; two of three are marked slow."""
    return [
        seed if seed < (count + 2) // 3 else pytest.param(seed, marks=pytest.mark.slow)
        for seed in range(count)
    ]
