"""How one rank of a plan trains with megatron-core: its groups, its schedule, what is measured.

A step is what Megatron-LM's train_step does (training/training.py): gradients to zero, one call of
megatron-core's schedule, which also reduces the gradients, and one of its optimizer. Forward and
backward passes are told by the timers that the schedule itself starts and stops
(pipeline_parallel/schedules.py, `config.timers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.errors import LaunchError
from hetplan.launchers.megatron_core_model import (
    build_chunks,
    distribute,
    make_optimizer,
    transformer_config,
)
from hetplan.launchers.megatron_core_plan import CorePlace, core_places
from hetplan.model.spec import LayerKind
from hetplan.profiling.backends import Backend
from hetplan.runtime.data import MarkovTokens, sample_numbers
from hetplan.runtime.loop import Memory, OnStep, measured_run
from hetplan.runtime.measured import TrainingReport
from hetplan.runtime.trainer import StepTimes
from hetplan.runtime.training import Training
from hetplan.trainers.megatron.parallel import degrees_of
from hetplan.trainers.megatron.write import optimizer_instances

Samples = tuple[Tensor, Tensor]
"""Tokens and targets [b, s] of one microbatch."""


def train_with_core(
    training: Training, rank: int, backend: Backend, *, on_step: OnStep | None = None
) -> TrainingReport:
    """Train as this rank of the plan; every rank returns the same report.

    The default process group must exist and have exactly the plan's ranks.
    """
    timeout = timedelta(seconds=training.timeout_seconds)
    control = dist.new_group(backend="gloo", timeout=timeout)
    place = core_places(training.plan)[rank]
    _open_groups(training, place, timeout)
    memory = Memory(backend)
    trainer = CoreTrainer(training, place, backend)
    return measured_run(
        training, trainer, core_places(training.plan), control, memory, on_step=on_step
    )


def _open_groups(training: Training, place: CorePlace, timeout: timedelta) -> None:
    """Make megatron-core's groups; a LaunchError unless they place the rank as the plan does."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    degrees = degrees_of(training.plan)
    virtual = degrees.virtual_stages
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        num_distributed_optimizer_instances=optimizer_instances(training.plan, degrees),
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        create_gloo_process_groups=False,
    )
    found = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    wanted = (place.stage, place.dp_index, place.tp_index)
    if found != wanted:
        raise LaunchError(
            f"rank {place.rank}: megatron-core has (stage, dp, tp) {found}, the plan {wanted}"
        )
    if training.backend == "cpu":
        # Nothing draws random numbers in a run: a tracker that keeps no state of an accelerator.
        initialize_rng_tracker(inference_rng_tracker=True)
    else:
        tensor_parallel.model_parallel_cuda_manual_seed(training.job.seed)


class CoreTrainer:
    """One rank's chunks, optimizer and schedule."""

    def __init__(self, training: Training, place: CorePlace, backend: Backend) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._training, self._place, self._backend = training, place, backend
        self._num_microbatches = training.plan.pipelines[0].num_microbatches
        degrees = degrees_of(training.plan)
        self._microbatch_size, self._dp = degrees.microbatch_size, degrees.dp
        self._data = MarkovTokens.of(training.model.vocab_size, training.job.seed)
        self._timers = CoreTimers(backend)
        config = transformer_config(training)
        config.timers = self._timers
        chunks = build_chunks(training, place, config)
        self.chunks: list[Any] = distribute(training, config, chunks)
        self._reduce = config.finalize_model_grads_func
        config.finalize_model_grads_func = self._timed_reduction
        self.optimizer: Any = make_optimizer(training, config, self.chunks)
        self._schedule: Callable[..., list[dict[str, Tensor]]] = get_forward_backward_func()
        # True where a token must not look: above the diagonal. One for all microbatches.
        s = training.job.sequence_length
        self._mask = torch.ones(s, s, dtype=torch.bool, device=backend.device()).triu(1)[None, None]

    def batch(self, step: int) -> list[Samples]:
        """This rank's microbatches of a step; empty where it holds neither end of the model."""
        job, model, place = self._training.job, self._training.model, self._place
        ends = {LayerKind.EMBEDDING, LayerKind.HEAD}
        if not any(
            model.layers[position] in ends
            for layers in place.chunks
            for position in (layers.start, layers.stop - 1)
        ):
            return []
        numbers = sample_numbers(
            step,
            global_batch_size=job.global_batch_size,
            microbatch_size=self._microbatch_size,
            dp=self._dp,
            dp_index=place.dp_index,
        )
        drawn = torch.from_numpy(self._data.samples(numbers, job.sequence_length + 1))
        drawn = drawn.to(self._backend.device())
        return [(part[:, :-1], part[:, 1:]) for part in torch.split(drawn, self._microbatch_size)]

    def step(self, batch: list[Samples]) -> StepTimes:
        """Train one step; returns when the device has finished it."""
        self._timers.clear()
        begin = self._backend.mark()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        samples = [iter(batch) for _ in self.chunks]
        alone = len(self.chunks) == 1
        losses = self._schedule(
            forward_step_func=self._forward,
            data_iterator=samples[0] if alone else samples,
            model=self.chunks,
            num_microbatches=self._num_microbatches,
            seq_length=self._training.job.sequence_length,
            micro_batch_size=self._microbatch_size,
            forward_only=False,
        )
        pipelined = self._backend.mark()
        done, _, _ = self.optimizer.step()
        updated = self._backend.mark()
        self._backend.synchronise()
        if not done:
            raise LaunchError("megatron-core's optimizer left the step out")
        between = self._backend.seconds_between
        reduction = self._timers.seconds(_REDUCTION)
        total = sum(float(each["loss"]) for each in losses)
        return StepTimes(
            pipeline_seconds=between(begin, pipelined) - reduction,
            busy_seconds=sum(self._timers.seconds(name) for name in _PASSES),
            tensor_parallel_seconds=0.0,
            reduction_seconds=reduction,
            optimizer_seconds=between(pipelined, updated),
            loss_share=total / (self._num_microbatches * self._dp),
        )

    def _timed_reduction(self, *args: Any, **kwargs: Any) -> None:
        timer = self._timers(_REDUCTION)
        timer.start()
        self._reduce(*args, **kwargs)
        timer.stop()

    def _forward(self, samples: Iterator[Samples], model: Any) -> tuple[Tensor, Any]:
        """One forward pass of a chunk, and what makes a loss of its output."""
        tokens, targets = next(samples, (None, None))
        places = None
        if tokens is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        output: Tensor = model(tokens, places, self._mask, labels=targets)
        return output, _mean_loss


def _mean_loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    # The schedule divides what it is given, in place.
    return per_token.mean(), {"loss": per_token.detach().mean()}


_PASSES = ("forward-compute", "backward-compute")
_REDUCTION = "reduction"


class CoreTimers:
    """What megatron-core calls as `config.timers(name, log_level=...)`: seconds by name."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._marks: dict[str, list[Any]] = {}

    def __call__(self, name: str, log_level: int | None = None) -> CoreTimer:
        """The timer of this name."""
        return CoreTimer(self._marks.setdefault(name, []), self._backend.mark)

    def clear(self) -> None:
        """Forget everything, at the begin of a step."""
        self._marks.clear()

    def seconds(self, name: str) -> float:
        """Sum between the starts and stops since `clear`; valid after `synchronise`."""
        marks = self._marks.get(name, [])
        pairs = zip(marks[::2], marks[1::2], strict=True)
        return sum(self._backend.seconds_between(start, stop) for start, stop in pairs)


class CoreTimer:
    """One timer."""

    def __init__(self, marks: list[Any], mark: Callable[[], Any]) -> None:
        self._marks, self._mark = marks, mark

    def start(self, barrier: bool = False) -> None:
        """Begin to count. No barrier is made: it would take time of its own."""
        self._marks.append(self._mark())

    def stop(self, barrier: bool = False) -> None:
        """End counting."""
        self._marks.append(self._mark())
