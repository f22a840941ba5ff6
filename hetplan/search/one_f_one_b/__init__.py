"""The best plan of one pipeline under 1F1B: programs, bounds, local search."""

from __future__ import annotations
