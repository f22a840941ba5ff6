"""The place of every rank: one rank per device of a plan, its layers and its samples.

Ranks are numbered in the order in which the plan names its devices: pipeline by pipeline, stage by
stage, in each stage replica by replica, in each replica data-parallel index by index,
tensor-parallel index fastest.

A microbatch of a pipeline has as many samples as the data-parallel ranks of any of its stages hold
together. In every stage they hold its samples in the order of their ranks, so which samples cross
a boundary to whom follows from the two sides alone (`hetplan.runtime.messages`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise

from hetplan.errors import Fault, InputError
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange, Pipeline, Plan, Stage, expand
from hetplan.plans.ranks import launch_faults
from hetplan.profiling.weights import Cut, ExpertShare


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """What one rank holds, and which samples of a microbatch it computes."""

    rank: int
    device: int
    """Device number of the cluster."""
    pipeline: int
    stage: int
    """Counted through the stages of all pipelines, in their order."""
    position: int
    """Of the stage in its own pipeline."""
    dp_index: int
    """Among all data-parallel ranks of the stage, replica by replica."""
    tp_index: int
    chunks: tuple[LayerRange, ...]
    """Positions in `ModelSpec.layers`, one range per virtual stage."""
    first_sample: int
    """Of a pipeline's microbatch; this rank computes the `microbatch_size` samples from here."""
    microbatch_size: int
    tp_ranks: tuple[int, ...]
    """Ranks that hold the other slices of the same layers for the same samples."""
    experts: ExpertShare
    """Routed experts of every layer that it holds."""
    expert_shares: tuple[ExpertShare, ...]
    """Those of the ranks that hold the other experts, itself included."""
    expert_ranks: tuple[int, ...]
    """These ranks, which exchange tokens, in the order of their experts."""
    expert_copy: int
    """Of these experts among all copies in the stage."""
    site: int = 0
    """Of the pipelines that update together (`Plan.outer`)."""
    first_pipeline: int = 0
    """The first one of the site."""

    @property
    def tp(self) -> int:
        """Slices that the rank's layers are cut into."""
        return len(self.tp_ranks)

    @property
    def cut(self) -> Cut:
        """What it holds of every layer of `chunks`."""
        return Cut(tp=self.tp, tp_rank=self.tp_index, experts=self.experts)

    @property
    def last_sample(self) -> int:
        """The sample behind those that this rank computes."""
        return self.first_sample + self.microbatch_size

    @property
    def layers(self) -> LayerRange:
        """The only layer range; an InputError where the stage has several."""
        if len(self.chunks) != 1:
            raise InputError(f"rank {self.rank} holds {len(self.chunks)} layer ranges, not one")
        return self.chunks[0]


def place_ranks(plan: Plan) -> tuple[RankPlace, ...]:
    """The place of every rank; an InputError where hetplan's trainer cannot run the plan.

    `hetplan.plans.ranks` has what it can run; the plan must also be legal (`check_plan`).
    """
    faults = tuple(launch_faults(plan))
    if faults:
        raise InputError(*faults)
    places: list[RankPlace] = []
    number, sites = 0, plan.site_of_pipeline
    for at, pipeline in enumerate(plan.pipelines):
        site = sites[at]
        for position, stage in enumerate(pipeline.stages):
            found = _stage_places(stage, at, position, number, first_rank=len(places))
            places += (replace(each, site=site, first_pipeline=sites.index(site)) for each in found)
            number += 1
    return tuple(places)


def _stage_places(
    stage: Stage, pipeline: int, position: int, number: int, *, first_rank: int
) -> Iterator[RankPlace]:
    first, dp_before, copies_before, sample = first_rank, 0, 0, 0
    for replica in stage.replicas:
        tp, dp = replica.tp, replica.dp
        parts = [Fraction(at, replica.ep) for at in range(replica.ep + 1)]
        shares = tuple(ExpertShare(*ends) for ends in pairwise(parts))
        for at, device in enumerate(expand(replica.devices)):
            dp_index, tp_index = divmod(at, tp)
            copy, own = divmod(dp_index, replica.ep)
            peers = range(copy * replica.ep, (copy + 1) * replica.ep)
            yield RankPlace(
                rank=first + at,
                device=device,
                pipeline=pipeline,
                stage=number,
                position=position,
                dp_index=dp_before + dp_index,
                tp_index=tp_index,
                chunks=stage.chunks,
                first_sample=sample + dp_index * replica.microbatch_size,
                microbatch_size=replica.microbatch_size,
                tp_ranks=tuple(first + dp_index * tp + other for other in range(tp)),
                experts=shares[own],
                expert_shares=shares,
                expert_ranks=tuple(first + other * tp + tp_index for other in peers),
                expert_copy=copies_before + copy,
            )
        first += tp * dp
        copies_before += dp // replica.ep
        dp_before += dp
        sample += dp * replica.microbatch_size


def samples_of(pipeline: Pipeline) -> int:
    """Samples of one microbatch of a pipeline, over all data-parallel ranks of a stage."""
    return sum(replica.dp * replica.microbatch_size for replica in pipeline.stages[0].replicas)


def site_batches(plan: Plan) -> tuple[int, ...]:
    """Samples of one step of each site."""
    found = [0] * (max(plan.site_of_pipeline) + 1)
    for site, pipeline in zip(plan.site_of_pipeline, plan.pipelines, strict=True):
        found[site] += pipeline.num_microbatches * samples_of(pipeline)
    return tuple(found)


def first_samples(plan: Plan) -> tuple[int, ...]:
    """Where in a step's samples each pipeline's own begin: pipeline by pipeline, in order."""
    samples = [pipeline.num_microbatches * samples_of(pipeline) for pipeline in plan.pipelines]
    return tuple(accumulate(samples[:-1], initial=0))


def vocabulary_faults(plan: Plan, model: ModelSpec) -> Iterator[Fault]:
    """Whether the plan pads the vocabulary as the trainer's layers do: to a multiple of tp."""
    ends = {
        replica.tp
        for pipeline in plan.pipelines
        for stage in (pipeline.stages[0], pipeline.stages[-1])
        for replica in stage.replicas
    }
    for tp in sorted(ends):
        padded = -(-model.vocab_size // tp) * tp
        if plan.padded_vocab_size != padded:
            yield Fault(
                field="padded_vocab_size",
                message=f"{plan.padded_vocab_size}; with tp {tp} the trainer pads "
                f"{model.vocab_size} to {padded}",
            )
