"""From choices to a plan: which devices each stage gets, and every group that follows from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Degrees:
    """The choices that all stages of a one-pipeline plan share."""

    tp: int
    dp: int
    microbatch_size: int
    full_recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """One stage: the island it runs on and how many transformer layers it holds."""

    island: str
    transformer_layers: int
