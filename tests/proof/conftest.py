"""Verification is tried on the small jobs of the search's tests."""

import sys
from pathlib import Path

for folder in ("search", "oracle"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
