"""The choices of a plan before devices are numbered: shapes, layers and order of its stages.

Searches, journals and layouts speak in these values; `hetplan.plans.build.plan_of` gives them
devices and groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetplan.plans.plan import NO_RECOMPUTE, Recompute, Replica, Schedule, Sharding


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """Degrees of the devices of a stage that lie on one island."""

    tp: int
    cp: int = 1
    dp: int
    """Data-parallel ranks on this island; those of a stage's other parts come on top."""
    microbatch_size: int
    """Sequences of one microbatch on one data-parallel rank."""
    ep: int = 1
    etp: int = 1
    """As in `hetplan.plans.plan.Replica`: 1 where the model has no experts."""
    sequence_parallel: bool = False

    @classmethod
    def of(cls, replica: Replica) -> Shape:
        """Of a plan's replica entry."""
        return cls(
            tp=replica.tp,
            cp=replica.cp,
            dp=replica.dp,
            microbatch_size=replica.microbatch_size,
            ep=replica.ep,
            etp=replica.etp,
            sequence_parallel=replica.sequence_parallel,
        )

    def with_fewest_copies(self) -> Shape:
        """With the fewest data-parallel ranks that can hold all experts."""
        experts = self.ep * self.etp
        return replace(self, dp=experts // math.gcd(experts, self.tp * self.cp))

    @property
    def num_devices(self) -> int:
        """Product of tp, cp and dp."""
        return self.tp * self.cp * self.dp

    @property
    def samples(self) -> int:
        """Sequences of one microbatch over all data-parallel ranks of this part."""
        return self.dp * self.microbatch_size


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Part:
    """The devices of a stage on one island."""

    island: str
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStage:
    """One stage: where, how many transformer layers, what is recomputed, how deep its warm-up."""

    parts: tuple[Part, ...]
    """One per island; several share every microbatch between them."""
    layers: tuple[int, ...]
    """Transformer layers of each chunk (virtual stage); embedding and head are not counted."""
    recompute: Recompute = NO_RECOMPUTE
    warmup_depth: int
    """Most microbatches in flight (`hetplan.plans.plan.Stage.warmup_depth`)."""

    @staticmethod
    def from_older_form(data: dict[str, object]) -> dict[str, object]:
        """Data of journals before form 2, whose stages have a word."""
        word = data.get("recompute")
        if not isinstance(word, str):
            return data
        modules = ["core_attn"] if word == "selective" else []
        return {**data, "recompute": {"granularity": word, "modules": modules}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPipeline:
    """One copy of the model."""

    stages: tuple[ChosenStage, ...]
    num_microbatches: int
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """All pipelines of a plan."""

    pipelines: tuple[ChosenPipeline, ...]
    sharding: Sharding = Sharding.NONE
    """Over data- and context-parallel ranks of every stage."""
    early_sends: bool = False
    """Sends run beside the passes of other microbatches and do not wait for their receivers
    (`hetplan.plans.plan.OverlapSettings.send`)."""
    optimizer_offload: float = 0.0
    """As in `hetplan.plans.plan.Plan`."""
    sharing_ranks: int = 0
    """Ranks that share what `sharding` says, neighbours; 0: all of a stage."""
