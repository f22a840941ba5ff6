"""What all tests share: where helper modules are found, and which examples are drawn.

Tests draw the same examples on every machine; HETPLAN_RANDOM=1 draws others.
"""

import os
import sys
from pathlib import Path

from hypothesis import settings

# Helper modules of one room's tests can be imported by the tests of every other one.
sys.path += [str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir()]

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("random" if os.environ.get("HETPLAN_RANDOM") else "same")
