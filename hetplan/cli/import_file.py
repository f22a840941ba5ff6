"""`hetplan import`: another tool's output as hetplan's records."""

from __future__ import annotations


def import_() -> None:
    """`hetplan import`: another tool's output as hetplan's records."""
    raise NotImplementedError
