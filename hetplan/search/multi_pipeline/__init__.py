"""Plans of several pipelines: their lower bound, and how good ones are found."""

from __future__ import annotations
