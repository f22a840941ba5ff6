"""Which plans a job can have, in families, and what their stages and boundaries cost."""

from __future__ import annotations
