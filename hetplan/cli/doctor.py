"""`hetplan doctor`: what this machine has and what hetplan can measure here."""

from __future__ import annotations


def doctor() -> None:
    """`hetplan doctor`: what this machine has and what hetplan can measure here."""
    raise NotImplementedError
