"""Tests draw the same examples on every machine; HETPLAN_RANDOM=1 draws others."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("random" if os.environ.get("HETPLAN_RANDOM") else "same")
