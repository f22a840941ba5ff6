"""The rules that every plan must obey, by name, and what a check of one works on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TypeAlias

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.layers import Experts
from hetplan.model.spec import ModelSpec
from hetplan.plans.pieces import Places
from hetplan.plans.plan import Pipeline, Plan, Replica, Stage
from hetplan.plans.targets import TARGETS, Target


class Rule(StrEnum):
    """What each fault of a plan ends with."""

    JOB = "a plan is for its job"
    DEVICES_EXIST = "devices exist"
    LAYERS_ONCE = "a pipeline holds every layer once"
    LAYERS_IN_ORDER = "layers follow the pipeline"
    CHUNKS = "one layer range per virtual stage"
    TRANSFORMER_LAYER = "every stage has a transformer layer"
    DEVICES_ONCE = "a device is in one stage"
    DEVICES_COUNTED = "every device is used or listed as unused"
    ONE_ISLAND = "an entry of replicas lies in one island"
    NODES_USABLE = "nodes that are out stay unused"
    DEGREES = "dp x cp x tp is the number of devices"
    EXPERT_DEGREES = "ep x etp divides dp x cp x tp"
    TP_IN_NODE = "a tensor-parallel group lies in one node"
    SLICES = "degrees divide what they slice"
    SEQUENCE = "degrees divide the sequence"
    SEQUENCE_PARALLEL = "sequence parallelism needs tp above 1"
    BATCH = "the microbatches make up the global batch"
    SCHEDULE = "the schedule is known and fits its chunks"
    WARMUP = "warm-up depths suit the schedule"
    RECOMPUTE = "recomputation names what it recomputes"
    BOUNDARIES = "one boundary between neighbouring stages, as their link is"
    VOCABULARY = "the vocabulary is padded as tp needs it"
    OFFLOAD = "the offloaded part is a fraction"
    OUTER = "sites that train by themselves are averaged as the job says"
    OVERLAP = "what is overlapped exists"
    SHARDING = "shards divide the copies"
    REDUCTION = "copies of a weight are reduced once, over all of its devices"
    TIED = "copies of a tied matrix are kept equal"
    TARGET = "the target can express it"
    KERNELS = "its devices have the kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlan:
    """A plan and what it is for."""

    plan: Plan
    model: ModelSpec
    cluster: Cluster
    job: Job
    places: Places

    @property
    def trainer(self) -> Target | None:
        """The plan's target; None where there is no such target."""
        return TARGETS.get(self.plan.target)

    def stages(self) -> Iterator[tuple[str, Pipeline, Stage]]:
        """Every stage with its place in the file."""
        return self.plan.named_stages()

    def replicas(self) -> Iterator[tuple[str, Replica]]:
        """Every replica entry with its place in the file."""
        for field, _, stage in self.stages():
            for r, replica in enumerate(stage.replicas):
                yield f"{field}.replicas[{r}]", replica

    @property
    def experts(self) -> tuple[Experts, ...]:
        """The different sets of routed experts in the model."""
        return experts_of(self.model, 0, len(self.model.layers))

    def experts_in(self, stage: Stage) -> tuple[Experts, ...]:
        """The different sets of routed experts in a stage."""
        chunks = (experts_of(self.model, chunk.start, chunk.stop) for chunk in stage.chunks)
        return tuple(dict.fromkeys(chain.from_iterable(chunks)))


def experts_of(model: ModelSpec, start: int, stop: int) -> tuple[Experts, ...]:
    """The different sets of routed experts in layers `start` up to but not including `stop`."""
    found = []
    at = 1  # the embedding is layer 0
    for run in model.layer_runs:
        if at < stop and at + run.count > start:
            found.append(run.layer)
        at += run.count
    if model.mtp_layer is not None and at < stop and at + model.num_mtp_layers > start:
        found.append(model.mtp_layer)
    return tuple(dict.fromkeys(layer.mlp for layer in found if isinstance(layer.mlp, Experts)))


Found: TypeAlias = Iterator[tuple[str, str]]
"""(field, what is wrong with it) of every place that breaks one rule."""


def some(values: Iterable[object], most: int = 6) -> str:
    """The first few of these names or numbers, and how many more there are."""
    listed = [str(value) for value in values]
    shown = ", ".join(listed[:most])
    return shown + (f" and {len(listed) - most} more" if len(listed) > most else "")
