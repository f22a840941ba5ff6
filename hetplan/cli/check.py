"""`hetplan check`: what is wrong or suspicious in files."""

from __future__ import annotations


def check() -> None:
    """`hetplan check`: what is wrong or suspicious in files."""
    raise NotImplementedError
