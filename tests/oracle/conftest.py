"""Lets the oracle's tests use the random jobs of the search's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
