"""How one rank trains its part of a plan: the passes of its stage, reduction, update.

The gradient is that of the mean loss over the global batch: every microbatch's mean loss counts as
its share of the batch's samples, and gradients are summed. So it does not matter how unequally
ranks, stages and pipelines share the samples. A step is

  1. the pipeline: the passes and messages of `hetplan.runtime.passes`, or pass by pass where there
     is one stage;
  2. reduction: gradients are summed over their copies (`hetplan.runtime.gradient_groups`), then
     between the first and the last stage where they share a tied matrix;
  3. clipping by the norm of all gradients, where the job asks for it;
  4. the update; where the ranks of a stage share the optimizer, each of its part
     (`hetplan.runtime.gradients`);
  5. of local steps, whose sites do all this by themselves: what is due of their averaging
     (`hetplan.runtime.averaging`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.cost.network.segments import TrafficClass
from hetplan.cost.step_model.end_of_step import clips_gradients
from hetplan.cost.step_model.plan import sends_wait
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import RecomputeGranularity
from hetplan.profiling.backends import Backend
from hetplan.profiling.pacing import Pacer
from hetplan.profiling.weights import FlatParameters
from hetplan.runtime.activity import Activity
from hetplan.runtime.averaging import Averaging
from hetplan.runtime.communicator.channels import Channel, Groups
from hetplan.runtime.data import MarkovTokens, block_numbers
from hetplan.runtime.gradient_groups import (
    Exchange,
    Reduction,
    exchanged_parts,
    reduction_of,
    shard_groups,
    shard_size,
)
from hetplan.runtime.gradients import (
    Part,
    Shard,
    Sums,
    clip,
    counted_parts,
    named_parameters,
    parts_of,
    parts_of_copies,
)
from hetplan.runtime.messages import Messages
from hetplan.runtime.model_stage import StageModule, StageShape
from hetplan.runtime.passes import Passes, program_of
from hetplan.runtime.placement import RankPlace, first_samples, samples_of, site_batches
from hetplan.runtime.training import Training
from hetplan.runtime.training_state import TrainingState
from hetplan.runtime.weight_slices import ALL_WEIGHTS

DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}
"""Precisions that the trainer has; float16 would need its loss scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's samples of one step; None on stages that need neither."""

    tokens: Tensor | None
    """[num_microbatches * b, s], for the stage that holds the embedding."""
    targets: Tensor | None
    """The same samples, one token later, for the stage that holds the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the time of one step of one rank went, and its share of the loss."""

    pipeline_seconds: float
    busy_seconds: float
    tensor_parallel_seconds: float
    """The exchange of experts' tokens included."""
    reduction_seconds: float
    """Waiting for the others included, clipping where the job clips, and the averaging of sites."""
    optimizer_seconds: float
    """With a sharded optimizer the gathering of the updated weights included."""
    loss_share: float
    """Sum of the rank's microbatch losses, each times its share of the global batch; 0 where the
    stage has no head."""


def _others(rank: int, groups: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Ranks that are in one of the groups with this one."""
    return tuple(sorted({other for ranks in groups if rank in ranks for other in ranks} - {rank}))


class Trainer:
    """One rank's layers, optimizer state and schedule."""

    def __init__(
        self,
        training: Training,
        places: Sequence[RankPlace],
        rank: int,
        groups: Groups,
        backend: Backend,
        *,
        pacer: Pacer | None = None,
        activity: Activity | None = None,
    ) -> None:
        """`groups` was opened for the groups of the plan's reduction. `activity` is told what a
        step does.
        """
        model, job, plan = training.model, training.job, training.plan
        reduction = reduction_of(plan, places)
        if job.precision not in DTYPES:
            have = ", ".join(DTYPES)
            raise InputError(f"precision is {job.precision}; the trainer has {have}")
        place = places[rank]
        self._job, self._plan, self._place, self._backend = job, plan, place, backend
        self._activity = activity or Activity()
        self._copies = _others(
            rank, [exchange.ranks for exchange in (*reduction.sums, *reduction.tied)]
        )
        self._all = tuple(other.rank for other in places if other.rank != rank)
        self._pipeline = plan.pipelines[place.pipeline]
        self._modules = self._build(model, groups, pacer)
        own: nn.Module = (
            self._modules[0] if len(self._modules) == 1 else nn.ModuleList(self._modules)
        )
        self.module = own
        self.parameters = FlatParameters(own, job.optimizer)
        self._named = named_parameters(self._modules, place.chunks)
        self._shards = self._make_shards(reduction, groups)
        # Of a sharded sum no rank has all: a tied matrix is summed over its ends before. What the
        # shards sum needs no second message, which would be as large as all gradients.
        copies = () if self._shards else reduction.sums
        self._sums = (
            self._joined(model, copies, groups, TrafficClass.DATA_PARALLEL),
            self._joined(model, reduction.tied, groups, TrafficClass.EMBEDDING),
        )
        self._clips, self._everyone = clips_gradients(job), groups.everyone
        # Of the site's batch in the global one.
        self._site_share = site_batches(plan)[place.site] / job.global_batch_size
        self.averaging = self._make_averaging(training, places, groups)
        if self.averaging is not None:
            self._everyone = groups.channel(reduction.sites[place.site])
        self._counted = self._counted_views(model, place)
        self.state = TrainingState(
            model, place, self._named, self.parameters, self._shards, self.averaging
        )
        self._data = MarkovTokens.of(model.vocab_size, job.seed)
        self._marks: list[Any] = []
        self._passes = self._make_passes(model, places, groups)

    def _make_averaging(
        self, training: Training, places: Sequence[RankPlace], groups: Groups
    ) -> Averaging | None:
        outer, place = training.plan.outer, self._place
        if outer is None:
            return None
        held = self.parameters, self._shards
        return Averaging(training, outer, places, place, groups, self._named, held)

    def _build(
        self, model: ModelSpec, groups: Groups, pacer: Pacer | None
    ) -> tuple[StageModule, ...]:
        place = self._place
        recompute = self._pipeline.stages[place.position].recompute
        return tuple(
            StageModule(
                model,
                StageShape(
                    layers=chunk,
                    cut=place.cut,
                    microbatch_size=place.microbatch_size,
                    full_recompute=recompute.granularity is RecomputeGranularity.FULL,
                    seed=self._job.seed,
                    dtype=DTYPES[self._job.precision],
                    device=self._backend.device(),
                    expert_shares=place.expert_shares,
                ),
                group=groups.tensor,
                expert_group=groups.expert,
                pacer=pacer,
                activity=self._activity,
                peers=_others(place.rank, [place.tp_ranks]),
            )
            for chunk in place.chunks
        )

    def _joined(
        self, model: ModelSpec, exchanges: Sequence[Exchange], groups: Groups, traffic: TrafficClass
    ) -> Sums:
        """Those of the exchanges that this rank has a part in."""
        place = self._place
        parts = []
        for exchange in exchanges:
            channel = groups.channel(exchange.ranks)
            if channel is not None:
                mine = exchanged_parts(model, exchange, place)
                parts.append(Part(channel=channel, views=parts_of(self._named, mine)))
        return Sums(parts, traffic)

    def _make_shards(self, reduction: Reduction, groups: Groups) -> tuple[Shard, ...]:
        """Of all weights, or of those of no expert and then of the experts; none where the ranks
        share no optimizer.
        """
        mine = [each for each in reduction.sums if self._place.rank in each.ranks]
        dense = next((each for each in mine if each.weights.dense), None)
        if dense is None or shard_size(reduction.shards, dense) == 1:
            return ()
        total, apart = self.parameters.weights.numel(), self.parameters.num_dense
        if dense.weights == ALL_WEIGHTS or apart == total:
            return (self._shard(reduction.shards, dense, slice(0, total), groups),)
        experts = next((each for each in mine if not each.weights.dense), None)
        return (
            self._shard(reduction.shards, dense, slice(0, apart), groups),
            self._shard(reduction.shards, experts, slice(apart, total), groups),
        )

    def _shard(
        self, shards: int, exchange: Exchange | None, elements: slice, groups: Groups
    ) -> Shard:
        """`exchange`: of these elements; None: nobody else holds them."""
        inside, across = list[Channel](), list[Channel]()
        if exchange is not None:
            size = shard_size(shards, exchange)
            for at, ranks in enumerate(shard_groups(exchange, size)):
                channel = groups.channel(ranks)
                if channel is not None:
                    (inside if at * size < len(exchange.ranks) else across).append(channel)
        return Shard(
            self.parameters,
            elements,
            self._job.optimizer,
            inside=inside[0] if inside else None,
            across=across[0] if across else None,
        )

    def _counted_views(self, model: ModelSpec, place: RankPlace) -> Sequence[Tensor]:
        """What this rank adds to the norm."""
        parts = counted_parts(model, place, parts_of_copies(self._shards))
        views = parts_of(self._named, parts)
        return (
            tuple(view for shard in self._shards for view in shard.counted(views))
            if self._shards
            else views
        )

    def _make_passes(self, model: ModelSpec, places: Sequence[RankPlace], groups: Groups) -> Passes:
        place, pipeline, job = self._place, self._pipeline, self._job
        messages = None
        if groups.boundaries:
            like = torch.empty(
                (place.microbatch_size, job.sequence_length, model.hidden_size),
                dtype=DTYPES[job.precision],
                device=self._backend.device(),
            )
            messages = Messages(
                groups.boundaries,
                place,
                places,
                num_microbatches=pipeline.num_microbatches,
                like=like,
            )
        return Passes(
            program_of(pipeline, place.position, sends_wait=sends_wait(self._plan)),
            self._modules,
            messages,
            position=place.position,
            num_stages=len(pipeline.stages),
            microbatch_size=place.microbatch_size,
            share=place.microbatch_size / job.global_batch_size / self._site_share,
            mark=self._mark,
            activity=self._activity,
        )

    def batch(self, step: int) -> Batch:
        """This rank's samples of a step, on its device."""
        first = self._modules[0].holds_tokens
        last = self._modules[-1].holds_loss
        if not first and not last:
            return Batch(tokens=None, targets=None)
        place = self._place
        numbers = block_numbers(
            step * self._job.global_batch_size
            + first_samples(self._plan)[place.pipeline]
            + place.first_sample,
            count=self._pipeline.num_microbatches,
            apart=samples_of(self._pipeline),
            size=place.microbatch_size,
        )
        drawn = torch.from_numpy(self._data.samples(numbers, self._job.sequence_length + 1))
        device = self._backend.device()
        return Batch(
            tokens=drawn[:, :-1].contiguous().to(device) if first else None,
            targets=drawn[:, 1:].contiguous().to(device) if last else None,
        )

    def step(self, batch: Batch) -> StepTimes:
        """Train one step; returns when the device has finished it."""
        self._marks.clear()
        talked = self._talked_seconds()
        begin = self._backend.mark()
        self.parameters.clear()
        for sums in self._sums:
            sums.expect()
        for shard in self._shards:
            shard.expect()
        losses = self._passes.run(batch.tokens, batch.targets)
        pipelined = self._backend.mark()
        activity = self._activity
        activity.begin("sum of the gradients", self._copies)
        for sums in self._sums:
            sums.run()
        for shard in self._shards:
            shard.reduce()
        held = self._shards or (self.parameters,)
        if self._clips:
            activity.begin("norm of the gradients", self._all)
            clip([each.gradients for each in held], self._counted, self._everyone)
        reduced = self._backend.mark()
        activity.begin("update of the weights", self._copies if self._shards else ())
        for each in held:
            each.update()
        updated = self._backend.mark()
        if self.averaging is not None:
            activity.begin("averaging of the sites", self._all)
            self.averaging.after_step()
        averaged = self._backend.mark()
        self._backend.synchronise()
        activity.end()
        between = self._backend.seconds_between
        loss_share = float(torch.stack(losses).sum()) * self._site_share if losses else 0.0
        return StepTimes(
            pipeline_seconds=between(begin, pipelined),
            busy_seconds=sum(
                between(start, end)
                for start, end in zip(self._marks[::2], self._marks[1::2], strict=True)
            ),
            tensor_parallel_seconds=self._talked_seconds() - talked,
            reduction_seconds=between(pipelined, reduced) + between(updated, averaged),
            optimizer_seconds=between(reduced, updated),
            loss_share=loss_share,
        )

    def _talked_seconds(self) -> float:
        return sum(module.tensor_parallel_seconds() for module in self._modules)

    def _mark(self) -> None:
        self._marks.append(self._backend.mark())
