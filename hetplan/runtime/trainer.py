"""How one rank trains its part of a plan: 1F1B over the stages, reduction, update.

The gradient is that of the mean loss over the global batch: every microbatch's mean loss is divided
by the number of microbatches of all data-parallel ranks, and gradients are summed. A step is

  1. the pipeline: torch.distributed.pipelining's Schedule1F1B, or microbatch by microbatch where
     there is one stage;
  2. reduction: one all_reduce of all gradients over the data-parallel group, then, where the first
     and the last stage share a tied matrix, one of its gradient between the two;
  3. the update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from hetplan.errors import InputError
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan, RecomputeGranularity
from hetplan.profiling.backends import Backend
from hetplan.profiling.pacing import Pacer
from hetplan.profiling.updating import FlatParameters
from hetplan.runtime.data import MarkovTokens, sample_numbers
from hetplan.runtime.groups import Groups
from hetplan.runtime.model_stage import StageModule, StageShape
from hetplan.runtime.placement import RankPlace

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
    reduction_seconds: float
    optimizer_seconds: float
    loss_share: float
    """Sum of the rank's microbatch losses over the microbatches of all data-parallel ranks; 0
    where the stage has no head."""


class Trainer:
    """One rank's layers, optimizer state and schedule."""

    def __init__(
        self,
        model: ModelSpec,
        job: Job,
        plan: Plan,
        place: RankPlace,
        groups: Groups,
        backend: Backend,
        *,
        pacer: Pacer | None = None,
    ) -> None:
        if job.precision not in DTYPES:
            have = ", ".join(DTYPES)
            raise InputError(f"precision is {job.precision}; the trainer has {have}")
        pipeline = plan.pipelines[0]
        stage = pipeline.stages[place.stage]
        replica = stage.replicas[0]
        self._job, self._model, self._place, self._groups = job, model, place, groups
        self._backend, self._dp = backend, replica.dp
        self._microbatch_size = replica.microbatch_size
        self._num_microbatches = pipeline.num_microbatches
        self._share = 1.0 / (pipeline.num_microbatches * replica.dp)
        self.module = StageModule(
            model,
            StageShape(
                layers=place.layers,
                tp=replica.tp,
                tp_index=place.tp_index,
                microbatch_size=replica.microbatch_size,
                full_recompute=stage.recompute.granularity is RecomputeGranularity.FULL,
                seed=job.seed,
                dtype=DTYPES[job.precision],
                device=backend.device(),
            ),
            group=groups.tensor,
            pacer=pacer,
        )
        self.parameters = FlatParameters(self.module, job.optimizer)
        self._data = MarkovTokens.of(model.vocab_size, job.seed)
        self._marks: list[Any] = []
        self._run: Callable[[Batch], list[Tensor]] = (
            self._run_alone if groups.pipeline is None else self._pipeline(groups.pipeline)
        )

    def batch(self, step: int) -> Batch:
        """This rank's samples of a step, on its device."""
        first = self._place.layers.start == 0
        if not first and not self.module.holds_loss:
            return Batch(tokens=None, targets=None)
        numbers = sample_numbers(
            step,
            global_batch_size=self._job.global_batch_size,
            microbatch_size=self._microbatch_size,
            dp=self._dp,
            dp_index=self._place.dp_index,
        )
        drawn = torch.from_numpy(self._data.samples(numbers, self._job.sequence_length + 1))
        device = self._backend.device()
        return Batch(
            tokens=drawn[:, :-1].contiguous().to(device) if first else None,
            targets=drawn[:, 1:].contiguous().to(device) if self.module.holds_loss else None,
        )

    def step(self, batch: Batch) -> StepTimes:
        """Train one step; returns when the device has finished it."""
        self._marks.clear()
        talked = self.module.tensor_parallel_seconds()
        begin = self._backend.mark()
        self.parameters.clear()
        losses = self._run(batch)
        pipelined = self._backend.mark()
        self._reduce()
        reduced = self._backend.mark()
        self.parameters.update()
        updated = self._backend.mark()
        self._backend.synchronise()
        between = self._backend.seconds_between
        loss_share = float(torch.stack(losses).sum()) if losses else 0.0
        return StepTimes(
            pipeline_seconds=between(begin, pipelined),
            busy_seconds=sum(
                between(start, end)
                for start, end in zip(self._marks[::2], self._marks[1::2], strict=True)
            ),
            tensor_parallel_seconds=self.module.tensor_parallel_seconds() - talked,
            reduction_seconds=between(pipelined, reduced),
            optimizer_seconds=between(reduced, updated),
            loss_share=loss_share,
        )

    def _reduce(self) -> None:
        if self._groups.data is not None:
            dist.all_reduce(self.parameters.gradients, group=self._groups.data)
        matrix = self.module.matrix
        if self._groups.tied is not None and matrix is not None:
            dist.all_reduce(matrix.grad, group=self._groups.tied)

    def _mark(self) -> None:
        self._marks.append(self._backend.mark())

    def _run_alone(self, batch: Batch) -> list[Tensor]:
        if batch.tokens is None or batch.targets is None:
            raise InputError("the only stage of a pipeline holds the embedding and the head")
        losses = []
        size = self._microbatch_size
        for tokens, targets in zip(
            torch.split(batch.tokens, size), torch.split(batch.targets, size), strict=True
        ):
            self._mark()
            loss = self._scaled(self.module(tokens, targets), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self._mark()
            losses.append(loss.detach())
        return losses

    def _scaled(self, loss: Tensor, targets: Tensor) -> Tensor:
        """The loss's part in the mean over the global batch."""
        return loss * self._share

    def _pipeline(self, group: dist.ProcessGroup) -> Callable[[Batch], list[Tensor]]:
        """A function that runs one step of this stage's 1F1B and gives its losses."""
        stage = self._pipeline_stage(group)
        schedule = Schedule1F1B(
            stage,
            n_microbatches=self._num_microbatches,
            loss_fn=self._scaled,
            scale_grads=False,
        )

        def run(batch: Batch) -> list[Tensor]:
            losses: list[Tensor] = []
            if batch.tokens is not None:
                schedule.step(batch.tokens, return_outputs=False)
            elif batch.targets is not None:
                # Once as the head's input and once because the schedule asks for a target before
                # it takes a loss.
                schedule.step(
                    target=batch.targets,
                    targets=batch.targets,
                    losses=losses,
                    return_outputs=False,
                )
            else:
                schedule.step(return_outputs=False)
            return [loss.detach() for loss in losses]

        return run

    def _pipeline_stage(self, group: dist.ProcessGroup) -> PipelineStage:
        place, num_stages = self._place, len(self._place.pp_ranks)
        b, s = self._microbatch_size, self._job.sequence_length
        dtype = DTYPES[self._job.precision]
        # Shapes without memory: the schedule need not find them out by running a microbatch.
        stream = torch.empty(
            (b, s, self._model.hidden_size), dtype=dtype, device="meta", requires_grad=True
        )
        tokens = torch.empty((b, s), dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return _MarkedStage(
            self.module,
            place.stage,
            num_stages,
            self._backend.device(),
            input_args=(tokens if place.stage == 0 else stream,),
            output_args=(loss if self.module.holds_loss else stream,),
            group=group,
        ).marking(self._mark)


class _MarkedStage(PipelineStage):
    """A stage that marks the begin and the end of each of its passes.

    The arguments of the two methods differ between versions of torch, so they are passed on.
    """

    _mark: Callable[[], None]

    def marking(self, mark: Callable[[], None]) -> _MarkedStage:
        """This stage, which calls `mark` from now on."""
        self._mark = mark
        return self

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass."""
        self._mark()
        output = super().forward_one_chunk(*args, **kwargs)
        self._mark()
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One backward pass."""
        self._mark()
        result = super().backward_one_chunk(*args, **kwargs)
        self._mark()
        return result
