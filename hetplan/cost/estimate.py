"""What one step of a plan costs: time with interval and break-down, memory, and what to doubt.

    step = max over stages of (end of the stage's pipeline work + reduction + optimizer)

with the ends from the replay of the schedule (`hetplan.cost.replay`), rendezvous sends where the
plan's target has them. The interval draws one common log-factor per device kind and per link
(normal, the predictor's 90 % interval) and replays every draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetplan.cluster.spec import Cluster
from hetplan.cost.end_of_step import tied_embedding_terms
from hetplan.cost.estimate_values import Estimate, Interval, MemoryUse, StageEstimate
from hetplan.cost.replay_kernel import replay_seconds
from hetplan.cost.stage_costs import (
    BoundaryCosts,
    StageCosts,
    boundary_costs_over,
    padded,
    stage_costs,
)
from hetplan.cost.terms import Draws, Term, notes, seconds_of
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import Degrees, check_model, neighbour_link, stage_devices
from hetplan.plans.plan import Pipeline, Plan, RecomputeGranularity, Stage
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.units import format_bytes

# 200 draws put the 10 % quantile within about 0.02 of its rank (sqrt(0.1 * 0.9 / 200)).
DRAWS = 200

_Floats = NDArray[np.float64]


def estimate(
    plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> Estimate:
    """Cost of one step of a legal plan (`hetplan.plans.check`).

    InputError for models and plans that cannot be priced yet: unlike layers, several pipelines,
    virtual stages, context, expert or sequence parallelism, degrees or microbatch sizes that
    differ between stages.
    """
    check_model(model, replace(job, target=plan.target))
    faults = [Fault(field=field, message=message) for field, message in _unpriced(plan)]
    if faults:
        raise InputError(*faults)
    # The plan decides both, whatever the job says.
    job = replace(job, target=plan.target)
    model = replace(model, vocab_size=plan.padded_vocab_size)
    priced = _Priced(plan, model, cluster, job, predictor)
    step, pipeline = priced.step_seconds(), priced.pipeline_seconds()
    if math.isinf(step):
        depths = [stage.warmup_depth for stage in priced.pipeline.stages]
        raise InputError(
            Fault(
                field="pipelines[0]",
                message=f"warm-up depths {depths} cannot be priced with the rendezvous sends of "
                f"target {plan.target}; let neighbouring stages differ by at most 1",
            )
        )
    stages = tuple(priced.stage(s, pipeline) for s in range(len(priced.parts)))
    return Estimate(
        step_seconds=step,
        interval=priced.interval(),
        pipeline_seconds=pipeline,
        num_microbatches=priced.pipeline.num_microbatches,
        tokens_per_second=job.global_batch_size * job.sequence_length / step,
        stages=stages,
        peak_memory_bytes=max(stage.memory.total_bytes for stage in stages),
        sources=tuple(sorted(priced.sources())),
        warnings=tuple(dict.fromkeys(priced.warnings())),
    )


def misfits(estimate: Estimate) -> tuple[str, ...]:
    """Which stages need more memory than there is, one line each; empty where all fit."""
    return tuple(
        f"stage {s} needs {format_bytes(stage.memory.total_bytes)} on each {stage.device} of "
        f"island {stage.island}, which leaves a job {format_bytes(stage.memory.available_bytes)}"
        for s, stage in enumerate(estimate.stages)
        if not stage.memory.fits
    )


def _unpriced(plan: Plan) -> Iterator[tuple[str, str]]:
    if len(plan.pipelines) != 1:
        yield "pipelines", f"{len(plan.pipelines)} pipelines: only one can be priced yet"
        return
    pipeline = plan.pipelines[0]
    if pipeline.schedule.name != "1f1b" or pipeline.schedule.virtual_stages != 1:
        yield (
            "pipelines[0].schedule",
            f"{pipeline.schedule.name} with {pipeline.schedule.virtual_stages} virtual stages: "
            "only 1f1b with one can be priced yet",
        )
    shapes = set()
    for s, stage in enumerate(pipeline.stages):
        field = f"pipelines[0].stages[{s}]"
        if len(stage.chunks) != 1 or len(stage.replicas) != 1:
            yield (
                field,
                f"{len(stage.chunks)} layer ranges and {len(stage.replicas)} replica entries: "
                "only one of each can be priced yet",
            )
            continue
        replica = stage.replicas[0]
        for name, degree in (("cp", replica.cp), ("ep", replica.ep), ("etp", replica.etp)):
            if degree != 1:
                yield f"{field}.replicas[0].{name}", f"{degree}: only 1 can be priced yet"
        if replica.sequence_parallel:
            yield f"{field}.replicas[0].sequence_parallel", "cannot be priced yet"
        shapes.add((replica.tp, replica.dp, replica.microbatch_size))
    if len(shapes) > 1:
        yield (
            "pipelines[0].stages",
            f"(tp, dp, microbatch size) differ between stages: {sorted(shapes)}; only equal ones "
            "can be priced yet",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One stage with its costs."""

    costs: StageCosts
    layers: tuple[int, bool, bool]
    """(transformer layers, embedding, head)."""
    in_flight: int
    tied: tuple[Term, ...]

    @property
    def forward(self) -> tuple[Term, ...]:
        return self.costs.forward.of(*self.layers)

    @property
    def backward(self) -> tuple[Term, ...]:
        return self.costs.backward.of(*self.layers)

    @property
    def reduction(self) -> tuple[Term, ...]:
        return (*self.costs.end.reduction_terms(*self.layers), *self.tied)

    @property
    def optimizer(self) -> tuple[Term, ...]:
        return self.costs.end.optimizer_terms(*self.layers)

    @property
    def memory(self) -> MemoryUse:
        return self.costs.memory(*self.layers, self.in_flight)


class _Priced:
    """A plan's stages and boundaries with their costs."""

    def __init__(
        self, plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
    ) -> None:
        self.pipeline: Pipeline = plan.pipelines[0]
        self.job = job
        self.rendezvous = target(plan.target).rendezvous_sends
        self.parts = _stage_parts(plan, model, cluster, job, predictor)
        groups = [stage_devices(stage) for stage in self.pipeline.stages]
        degrees = self.parts[0].costs.degrees
        links = [neighbour_link(cluster, left, right)[0] for left, right in pairwise(groups)]
        # A deep pipeline has few kinds of links.
        priced = {
            link: boundary_costs_over(link, model, job, degrees, predictor) for link in set(links)
        }
        self.boundaries: tuple[BoundaryCosts, ...] = tuple(priced[link] for link in links)
        self._divided = [link.shared_bandwidth_bytes_per_second is not None for link in links]

    def step_seconds(self) -> float:
        """With every prediction at its central value."""
        after = [seconds_of((*part.reduction, *part.optimizer)) for part in self.parts]
        return self._replay(np.array(after))

    def pipeline_seconds(self) -> float:
        """The same without reduction and optimizer."""
        return self._replay(np.zeros(len(self.parts)))

    def _replay(self, after: _Floats) -> float:
        return self._replay_of(
            np.array([seconds_of(part.forward) for part in self.parts]),
            np.array([seconds_of(part.backward) for part in self.parts]),
            self._boundary_seconds(),
            after,
        )

    def _replay_of(
        self, forward: _Floats, backward: _Floats, boundaries: _Floats, after: _Floats
    ) -> float:
        seconds: float = replay_seconds(
            forward,
            backward,
            boundaries[0],
            boundaries[1],
            boundaries[2],
            boundaries[3],
            np.array([stage.warmup_depth for stage in self.pipeline.stages], dtype=np.int64),
            self.pipeline.num_microbatches,
            after,
            self.rendezvous,
        )
        return seconds

    def _boundary_seconds(self) -> _Floats:
        """[4, boundaries]: both sends, latency, rendezvous."""
        rows = [
            (
                boundary.send_forward_seconds,
                boundary.send_backward_seconds,
                boundary.wire_latency_seconds,
                boundary.rendezvous_extra_seconds,
            )
            for boundary in self.boundaries
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, 4).T.copy()

    def stage(self, s: int, pipeline_seconds: float) -> StageEstimate:
        """Break-down of one stage."""
        part = self.parts[s]
        forward, backward = seconds_of(part.forward), seconds_of(part.backward)
        busy = self.pipeline.num_microbatches * (forward + backward)
        wait = pipeline_seconds - busy
        return StageEstimate(
            island=part.costs.island,
            device=part.costs.device,
            transformer_layers=part.layers[0],
            forward_seconds=forward,
            backward_seconds=backward,
            tensor_parallel_seconds=part.costs.communication_seconds(*part.layers),
            busy_seconds=busy,
            # What a sum in another order leaves is no wait, least of all one below zero.
            wait_seconds=wait if wait > 1e-12 * pipeline_seconds else 0.0,
            reduction_seconds=seconds_of(part.reduction),
            optimizer_seconds=seconds_of(part.optimizer),
            memory=part.memory,
        )

    def _terms(self) -> Iterator[Term]:
        for part in self.parts:
            yield from (*part.forward, *part.backward, *part.reduction, *part.optimizer)

    def interval(self) -> Interval:
        """By replaying `DRAWS` draws of the predictor's errors."""
        causes = dict.fromkeys(
            (
                *(term.cause for term in self._terms()),
                *(boundary.link for boundary in self.boundaries),
            )
        )
        draws = Draws(tuple(causes), DRAWS, self.job.seed)

        def stages(terms_of_each: Iterable[Sequence[Term]]) -> _Floats:
            return np.stack([draws.sample(terms) for terms in terms_of_each], axis=1)

        forward = stages(part.forward for part in self.parts)
        backward = stages(part.backward for part in self.parts)
        after = stages((*part.reduction, *part.optimizer) for part in self.parts)
        factors = np.ones((draws.count, len(self.boundaries)))
        for k, boundary in enumerate(self.boundaries):
            factors[:, k] = draws.factor(boundary.link, boundary.law.log_halfwidth)
        central = self._boundary_seconds()
        steps = [
            self._replay_of(forward[d], backward[d], central * factors[d], after[d])
            for d in range(draws.count)
        ]
        p10, p90 = np.quantile(steps, (0.1, 0.9))
        return Interval(
            p10_seconds=float(p10), mean_seconds=float(np.mean(steps)), p90_seconds=float(p90)
        )

    def sources(self) -> set[str]:
        """Where the predictions came from."""
        return {term.prediction.source for term in self._terms()} | {
            boundary.law.source for boundary in self.boundaries
        }

    def warnings(self) -> Iterator[str]:
        """What to doubt, in the order of the pipeline; repeats included."""
        for term in self._terms():
            yield from notes(term.what, term.cause, term.prediction)
        for boundary in self.boundaries:
            yield from notes("send", boundary.link, boundary.law)
        for (left, right), divided in zip(pairwise(self.parts), self._divided, strict=True):
            degrees = left.costs.degrees
            senders = degrees.tp * degrees.dp
            if left.costs.island != right.costs.island and senders > 1 and not divided:
                yield (
                    f"{left.costs.island} to {right.costs.island}: {senders} senders at once, each "
                    "priced at the link's full bandwidth; it must be one sender's share"
                )


def _stage_parts(
    plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> tuple[_Part, ...]:
    pipeline = plan.pipelines[0]
    known: dict[tuple[str, Degrees], StageCosts] = {}
    islands = []
    costs = []
    for stage in pipeline.stages:
        island = cluster.island_of_device(stage_devices(stage)[0])
        key = (island.name, _degrees(stage))
        if key not in known:
            known[key] = stage_costs(
                model,
                island,
                job,
                key[1],
                predictor,
                optimizer_shards=plan.optimizer_shards,
            )
        islands.append(island)
        costs.append(known[key])
    last = len(pipeline.stages) - 1
    tied: tuple[Term, ...] = ()
    if last > 0:
        degrees = _degrees(pipeline.stages[0])
        tied = tied_embedding_terms(
            padded(model, job, degrees.tp),
            cluster,
            islands[0],
            islands[last],
            job,
            degrees,
            predictor,
        )
    return tuple(
        _Part(
            costs=costs[s],
            layers=_layers(stage, model),
            in_flight=min(stage.warmup_depth, pipeline.num_microbatches),
            tied=tied if s in (0, last) else (),
        )
        for s, stage in enumerate(pipeline.stages)
    )


def _degrees(stage: Stage) -> Degrees:
    replica = stage.replicas[0]
    return Degrees(
        tp=replica.tp,
        dp=replica.dp,
        microbatch_size=replica.microbatch_size,
        full_recompute=stage.recompute.granularity is RecomputeGranularity.FULL,
    )


def _layers(stage: Stage, model: ModelSpec) -> tuple[int, bool, bool]:
    """(transformer layers, embedding, head) of a stage."""
    chunk = stage.chunks[0]
    embedding, head = chunk.start == 0, chunk.stop == len(model.layers)
    return chunk.stop - chunk.start - embedding - head, embedding, head
