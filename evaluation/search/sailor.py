"""Sailor's files, its plans, and the formula of its simulator, written anew.

Files of github.com/eth-easl/sailor in a folder of reference data:

    sailor/layer_profiles/all_models_profiles_tmp.json   what its simulator reads:
        {model: {GPU: {mbs: {tp: {layer: [forward, backward, update]}}}}}
    sailor/memory/llm_info.json                    {model: {tp: {layer: floats by what they are}}}
    sailor/network/multizone_bandwidths_het.json   {zone: {GPU: {GPUs: {zone: {GPU: {GPUs: fit}}}}}}

A fit is `[[a, b, c], most]`: a L^2 + b L + c GB/s with L = log2(bytes / 1e6).

The formula is that of sailor/Planner/simulations/runtime_simulator.py of github.com/eth-easl/sailor
at cf2c8e3, written anew. With N microbatches, c_s the forward and backward time of one microbatch
on the slowest replica of stage s, x_s what its sends take, u_s its update:

    step = (N - 1) max_s (c_s + x_s) + sum_s (c_s + x_s) + max_s u_s + max_s r_s
    N    = ceil(global batch / (microbatch size * dp))
    x_s  = activations to the next stage + gradients to the one before: of the first stage the
           activations once (twice with more than 3 stages), of the last the gradients twice
    r_s  = sum over buckets of at most 500 MB of 2 (dp - 1) t(bucket / dp), t by the slowest path
           between neighbours in the list of replicas, weights of the smallest tp

Memory of a rank: 24 bytes per parameter, 4 per kept activation of (stages - s) microbatches, and
2 GB (tp 1) or 3 GB. A plan is disqualified where the simulator charges nothing: a (microbatch size,
tp) that was not profiled, a tensor-parallel group over several nodes, dp that falls after the first
stage (its microbatches are counted by the first stage's dp).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.plans.chosen import ChosenPlan

FOLDER = Path("sailor")
NETWORK = FOLDER / "network" / "multizone_bandwidths_het.json"
MEMORY = FOLDER / "memory" / "llm_info.json"
PROFILES = FOLDER / "layer_profiles" / "all_models_profiles_tmp.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One model on one GPU under one (microbatch size, tp): seconds by layer."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """One model under one tp: floats of one rank by layer, activations of one sequence."""

    parameters: tuple[float, ...]
    output_activations: tuple[float, ...]
    kept_activations: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bandwidth of a path by message size."""

    a: float
    b: float
    c: float

    def seconds(self, size_bytes: float) -> float:
        """Of one message; an InputError where the parabola is not above zero.

        sailor/providers/gcp/model_networking.py: get_time_on_config.
        """
        exponent = math.log2(size_bytes / 1e6)
        rate = self.a * exponent**2 + self.b * exponent + self.c
        if rate <= 0:
            raise InputError(
                f"Sailor's fit gives {rate:.3g} GB/s for a message of {size_bytes:.0f} bytes: it "
                "charges nothing for that"
            )
        return size_bytes / 1e9 / rate


def path_name(one: tuple[str, str], other: tuple[str, str]) -> str:
    """`Link.samples` of the path between (zone, GPU) and (zone, GPU)."""
    return " ".join((*one, *other))


@dataclass(frozen=True, slots=True, kw_only=True)
class SailorFiles:
    """Everything that one model's plans are scored by."""

    model: str
    num_layers: int
    """With embedding and head."""
    times: dict[tuple[str, int, int], LayerTimes]
    """By (GPU, microbatch size, tp); what is not there was not profiled."""
    sizes: dict[int, LayerSizes]
    """By tp."""
    fits: dict[tuple[str, str, int, str, str, int], Fit]
    """By (zone, GPU, GPUs) of the sender, then of the receiver."""

    def fit(self, sender: tuple[str, str, int], receiver: tuple[str, str, int]) -> Fit:
        """Of one path; an InputError where Sailor's files have none."""
        found = self.fits.get((*sender, *receiver))
        if found is None:
            raise InputError(f"{NETWORK} has no path from {sender} to {receiver}")
        return found


def read_sailor(
    reference: Path, model: str, gpus: tuple[str, ...], zones: tuple[str, ...]
) -> SailorFiles:
    """The files of a model on these GPUs in these zones; an InputError for what is missing."""
    with _json_file(reference / PROFILES) as profiles:
        times = {
            (gpu, int(size), int(tp)): _layer_times(layers)
            for gpu in gpus
            for size, by_tp in profiles[model][gpu].items()
            for tp, layers in by_tp.items()
        }
    counts = {len(each.forward_seconds) for each in times.values()}
    if len(counts) != 1:
        found = ", ".join(str(count) for count in sorted(counts))
        raise InputError(f"the profiles of {model} have {found} layers; they must agree")
    (num_layers,) = counts
    with _json_file(reference / MEMORY) as memory:
        sizes = {
            int(tp): _layer_sizes([layers[str(layer)] for layer in range(num_layers)])
            for tp, layers in memory[model].items()
        }
    with _json_file(reference / NETWORK) as network:
        fits = {
            (zone, gpu, int(count), to_zone, to_gpu, int(to_count)): Fit(
                a=float(fit[0][0]), b=float(fit[0][1]), c=float(fit[0][2])
            )
            for zone in zones
            for gpu in gpus
            for count, to_zones in network.get(zone, {}).get(gpu, {}).items()
            for to_zone in zones
            for to_gpu in gpus
            for to_count, fit in to_zones.get(to_zone, {}).get(to_gpu, {}).items()
        }
    return SailorFiles(model=model, num_layers=num_layers, times=times, sizes=sizes, fits=fits)


@contextmanager
def _json_file(path: Path) -> Iterator[Any]:
    """The file's data; whatever is missing or of another form inside the block names the file."""
    try:
        yield json.loads(path.read_bytes())
    except KeyError as error:
        raise InputError(Fault(file=str(path), message=f"there is no {error}")) from None
    except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise InputError(Fault(file=str(path), message=f"cannot be read: {error}")) from None


def _layer_times(layers: dict[str, list[float]]) -> LayerTimes:
    # In the order of the file, as Sailor reads them.
    forward, backward, update = (
        tuple(float(row[at]) for row in layers.values()) for at in range(3)
    )
    return LayerTimes(forward_seconds=forward, backward_seconds=backward, update_seconds=update)


def _layer_sizes(rows: list[dict[str, float]]) -> LayerSizes:
    return LayerSizes(
        parameters=tuple(float(row["params_floats"]) for row in rows),
        output_activations=tuple(float(row["act_output_floats"]) for row in rows),
        kept_activations=tuple(float(row["act_mem_floats"]) for row in rows),
    )


BUCKET_BYTES = 500_000_000  # sailor_planner/constants.py: MEMORY_BUCKET_DEEPSPEED_SIZE
FLOAT_BYTES = 4
BYTES_PER_PARAMETER = 24  # runtime_simulator.py: check_config_fits, Adam
MEMORY_BYTES = (
    ("V100-16", 16),
    ("A100-40", 40),
    ("A100-80", 80),
    ("GH-96", 96),
    ("Titan-RTX", 24),
    ("RTX-2080", 11),
    ("RTX-3090", 24),
)
"""GiB of a GPU; simulations/constants.py: GPU_MEMORY_GB."""
_GIB = dict(MEMORY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SailorReplicas:
    """Equal data-parallel replicas next to each other in a stage's list."""

    gpu: str
    zone: str
    tp: int
    devices_per_node: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SailorPlan:
    """One pipeline in Sailor's form."""

    layers: tuple[int, ...]
    """Layers of each stage, embedding and head counted."""
    stages: tuple[tuple[SailorReplicas, ...], ...]
    microbatch_size: int

    def dp(self, stage: int) -> int:
        """Replicas of a stage."""
        return sum(each.count for each in self.stages[stage])


@dataclass(frozen=True, slots=True, kw_only=True)
class SailorScore:
    """A plan by Sailor's simulator."""

    step_seconds: float
    num_microbatches: int
    compute_seconds: tuple[float, ...]
    """Per stage, of one microbatch."""
    send_seconds: tuple[float, ...]
    """Per stage, of one microbatch."""
    reduction_seconds: float
    fits: bool


def score(plan: SailorPlan, files: SailorFiles, global_batch_size: int) -> SailorScore:
    """Step time and fit of a plan; an InputError where it is disqualified."""
    _qualify(plan, files)
    stages = range(len(plan.stages))
    starts = [sum(plan.layers[:s]) for s in stages]
    spans = [slice(starts[s], starts[s] + plan.layers[s]) for s in stages]
    compute = tuple(
        max(_compute(each, plan, files, spans[s]) for each in plan.stages[s]) for s in stages
    )
    update = max(
        files.times[each.gpu, plan.microbatch_size, each.tp].update_seconds[starts[s]]
        for s in stages
        for each in plan.stages[s]
    )
    sends = tuple(_sends(plan, files, s, spans[s]) for s in stages)
    count = math.ceil(global_batch_size / (plan.microbatch_size * plan.dp(0)))
    ticks = [one + other for one, other in zip(compute, sends, strict=True)]
    reduction = max(_reduction(plan, files, s, spans[s]) for s in stages)
    return SailorScore(
        step_seconds=(count - 1) * max(ticks) + sum(ticks) + update + reduction,
        num_microbatches=count,
        compute_seconds=compute,
        send_seconds=sends,
        reduction_seconds=reduction,
        fits=all(_fits(each, plan, files, s, spans[s]) for s in stages for each in plan.stages[s]),
    )


def _qualify(plan: SailorPlan, files: SailorFiles) -> None:
    if sum(plan.layers) != files.num_layers or len(plan.layers) != len(plan.stages):
        raise InputError(f"the plan holds {sum(plan.layers)} layers of {files.num_layers}")
    for stage, replicas in enumerate(plan.stages):
        if plan.dp(stage) < plan.dp(0):
            raise InputError(
                f"stage {stage} has dp {plan.dp(stage)}, the first one {plan.dp(0)}: Sailor's "
                "simulator would charge it for a part of its microbatches only"
            )
        for each in replicas:
            if each.tp > each.devices_per_node:
                raise InputError(f"tp {each.tp} on nodes of {each.devices_per_node} devices")
            if each.tp not in files.sizes:
                raise InputError(
                    f"Sailor's files have no sizes of {files.model} under tp {each.tp}"
                )
            if (each.gpu, plan.microbatch_size, each.tp) not in files.times:
                raise InputError(
                    f"{each.gpu} was not profiled with microbatches of {plan.microbatch_size} and "
                    f"tp {each.tp}"
                )


def _compute(replicas: SailorReplicas, plan: SailorPlan, files: SailorFiles, span: slice) -> float:
    times = files.times[replicas.gpu, plan.microbatch_size, replicas.tp]
    return sum(times.forward_seconds[span]) + sum(times.backward_seconds[span])


def _sends(plan: SailorPlan, files: SailorFiles, stage: int, span: slice) -> float:
    sizes = files.sizes[1].output_activations
    each = plan.microbatch_size * FLOAT_BYTES
    last = len(plan.stages) - 1
    forward = backward = 0.0
    if stage < last:
        forward = _slowest(plan, files, stage, stage + 1, sizes[span.stop - 1] * each)
    if stage > 0:
        backward = _slowest(plan, files, stage, stage - 1, sizes[span.start] * each)
    if stage == 0:
        return forward if len(plan.stages) <= 3 else 2 * forward
    return 2 * backward if stage == last else forward + backward


def _slowest(
    plan: SailorPlan, files: SailorFiles, sender: int, receiver: int, size_bytes: float
) -> float:
    """Replica j of the sender meets replica j mod dp of the receiver."""
    one, other = _each(plan.stages[sender]), _each(plan.stages[receiver])
    pairs = dict.fromkeys((each, other[j % len(other)]) for j, each in enumerate(one))
    return max(
        files.fit(_end(left, left.tp), _end(right, right.tp)).seconds(size_bytes)
        for left, right in pairs
    )


def _each(replicas: tuple[SailorReplicas, ...]) -> list[SailorReplicas]:
    return [each for each in replicas for _ in range(each.count)]


def _end(replicas: SailorReplicas, count: int) -> tuple[str, str, int]:
    return replicas.zone, replicas.gpu, min(count, replicas.devices_per_node)


def _reduction(plan: SailorPlan, files: SailorFiles, stage: int, span: slice) -> float:
    replicas = _each(plan.stages[stage])
    least_tp = min(4, *(each.tp for each in plan.stages[stage]))
    left = sum(files.sizes[1].parameters[span]) * FLOAT_BYTES / least_tp
    fits = [
        files.fit(_end(one, 1), _end(other, 1)) for one, other in dict.fromkeys(pairwise(replicas))
    ]
    if not fits:
        return 0.0
    buckets = []
    while left > 0:
        buckets.append(min(left, BUCKET_BYTES))
        left -= buckets[-1]
    dp = len(replicas)
    return max(sum(2 * (dp - 1) * fit.seconds(size / dp) for size in buckets) for fit in fits)


def _fits(
    replicas: SailorReplicas, plan: SailorPlan, files: SailorFiles, stage: int, span: slice
) -> bool:
    sizes = files.sizes[replicas.tp]
    kept = sum(sizes.kept_activations[span]) * plan.microbatch_size * FLOAT_BYTES
    used = (
        sum(sizes.parameters[span]) * BYTES_PER_PARAMETER
        + kept * (len(plan.stages) - stage)
        + (2e9 if replicas.tp == 1 else 3e9)
    )
    return used <= _GIB[replicas.gpu] * 1024**3


NAMES = (
    ("nvidia-a100-40gb-sxm", "A100-40"),
    ("nvidia-a100-80gb-sxm", "A100-80"),
    ("nvidia-v100-16gb-sxm", "V100-16"),
    ("nvidia-gh200-96gb", "GH-96"),
    ("nvidia-rtx-2080-ti-11gb", "RTX-2080"),
    ("nvidia-rtx-3090-24gb", "RTX-3090"),
    ("nvidia-titan-rtx-24gb", "Titan-RTX"),
)
"""(kind of the catalogue, Sailor's name) of the GPUs that Sailor knows the memory of
(sailor/Planner/simulations/constants.py: GPU_MEMORY_GB)."""
NAME_OF_KIND = dict(NAMES)


def sailor_form(chosen: ChosenPlan, cluster: Cluster) -> SailorPlan:
    """A plan of one pipeline with one microbatch size."""
    (pipeline,) = chosen.pipelines
    last = len(pipeline.stages) - 1
    layers, stages = [], []
    for s, stage in enumerate(pipeline.stages):
        layers.append(sum(stage.layers) + (s == 0) + (s == last))
        row = []
        for part in stage.parts:
            island = cluster.island(part.island)
            row.append(
                SailorReplicas(
                    gpu=NAME_OF_KIND.get(island.device.kind, ""),
                    zone=island.region,
                    tp=part.shape.tp,
                    devices_per_node=island.devices_per_node,
                    count=part.shape.dp,
                )
            )
        stages.append(tuple(row))
    size = pipeline.stages[0].parts[0].shape.microbatch_size
    return SailorPlan(layers=tuple(layers), stages=tuple(stages), microbatch_size=size)
