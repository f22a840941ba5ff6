"""Time of the search and distance of its proof, from 16 to 131,072 devices.

Every instance and target is searched in a process of its own, so that its peak memory is its own.
There imports are done, kernels are compiled and the predictor (datasheet figures only) is made
before the clock of the search starts; a small search of the same target does that.

A seeded generator makes every instance the same everywhere. Of `Instance(devices, islands,
kinds, regions, model, seed)`:

* kinds: drawn from `KINDS` (the catalogue's figures), each at least once, the others drawn again;
* nodes of 8 devices; every island has at least one, the rest is dealt out one share at a time,
  shares of 1/16 of what one island would have on average;
* regions: every one has an island, the others are drawn;
* links: inside a node the kind's own fabric; between nodes of an island 25 or 50 GB/s per device,
  10 us; between islands of a region 12.5 GB/s, host-staged, 20 us; between regions 1 to 10 ms and
  1.25 GB/s per device, all devices sharing 50, 100 or 400 GB/s;
* model: 128 layers, vocabulary 128,000, sequences of 4,096 tokens, bfloat16, AdamW; hidden size by
  devices (`_HIDDEN`); `moe` has layers of half the hidden size with 16 to 64 experts of which two
  are taken;
* global batch size: 2 sequences per device, rounded to a power of two, at least 128.
"""

from __future__ import annotations

import json
import math
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas

from evaluation.output import WORDS, Section
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Island, Link, RegionLink, Transport
from hetplan.errors import HetplanError, InfeasibleError, InputError, LimitError
from hetplan.job.spec import Job, Optimizer, Precision, TrainerOptions
from hetplan.kernels import count_cpu_seconds
from hetplan.model.layers import Attention, Experts, LayerRun, Mlp, Norm, TransformerLayer
from hetplan.model.spec import ModelSpec
from hetplan.search.result import Inputs
from hetplan.units import format_bytes

KINDS = (
    "nvidia-a100-80gb-sxm",
    "nvidia-h100-80gb-sxm",
    "amd-mi300x",
    "intel-gaudi3",
    "nvidia-h20-96gb-sxm",
    "huawei-ascend-910c-die-64gb",
)
PER_NODE = 8
NUM_LAYERS = 128
SEED = 6
_SEQUENCE = 4096
_HIDDEN = ((64, 2048), (1024, 4096), (16384, 8192), (1 << 20, 12288))
"""(most devices, hidden size)."""
_EXPERTS = ((64, 16), (1024, 32), (1 << 20, 64))
"""(most devices, experts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One question of the scaling table."""

    devices: int
    islands: int
    kinds: int
    regions: int
    model: str = "dense"
    """`dense` or `moe`."""
    seed: int = SEED


INSTANCES = (
    Instance(devices=16, islands=2, kinds=2, regions=1),
    Instance(devices=64, islands=2, kinds=2, regions=1),
    Instance(devices=256, islands=3, kinds=3, regions=2),
    Instance(devices=768, islands=2, kinds=2, regions=1),
    Instance(devices=1024, islands=4, kinds=4, regions=2),
    Instance(devices=1024, islands=4, kinds=4, regions=2, model="moe"),
    Instance(devices=4096, islands=6, kinds=6, regions=3),
    Instance(devices=10240, islands=8, kinds=6, regions=4),
    Instance(devices=10240, islands=8, kinds=6, regions=4, model="moe"),
    Instance(devices=32768, islands=8, kinds=6, regions=4),
    Instance(devices=98304, islands=8, kinds=6, regions=4),
    Instance(devices=131072, islands=8, kinds=6, regions=4),
    Instance(devices=131072, islands=10, kinds=6, regions=4),
    Instance(devices=131072, islands=10, kinds=6, regions=4, model="moe"),
)


def instance_inputs(
    instance: Instance, target: str, gap: float, time_limit_seconds: float
) -> Inputs:
    """Model, cluster and job of an instance."""
    batch = max(128, 1 << round(math.log2(2 * instance.devices)))
    return Inputs(
        model=_model(instance),
        cluster=_cluster(instance),
        job=Job(
            name=f"{instance.devices} devices, {instance.islands} islands",
            global_batch_size=batch,
            sequence_length=_SEQUENCE,
            precision=Precision.BFLOAT16,
            optimizer=Optimizer.ADAMW,
            target=target,
            gap=gap,
            time_limit_seconds=time_limit_seconds,
            # What is measured is the search of mixes, whoever could start them.
            trainer=TrainerOptions(mixed_libraries=True),
        ),
        sha256=(),
    )


def _by_devices(table: tuple[tuple[int, int], ...], devices: int) -> int:
    return next(value for most, value in table if devices <= most)


def _model(instance: Instance) -> ModelSpec:
    hidden = _by_devices(_HIDDEN, instance.devices)
    moe = instance.model == "moe"
    if moe:
        hidden //= 2
    heads = hidden // 128
    attention = Attention(num_heads=heads, num_kv_heads=min(8, heads), head_dim=128)
    mlp = (
        Experts(
            num_experts=_by_devices(_EXPERTS, instance.devices),
            experts_per_token=2,
            expert_ffn_hidden_size=hidden,
        )
        if moe
        else Mlp(ffn_hidden_size=7 * hidden // 2, gated=True)
    )
    layer = TransformerLayer(attention=attention, mlp=mlp, norm=Norm.RMS_NORM)
    return ModelSpec(
        name=f"{instance.model} of {NUM_LAYERS} layers, hidden {hidden}",
        hidden_size=hidden,
        vocab_size=128_000,
        max_sequence_length=_SEQUENCE,
        layer_runs=(LayerRun(count=NUM_LAYERS, layer=layer),),
        final_norm=Norm.RMS_NORM,
    )


def _cluster(instance: Instance) -> Cluster:
    draw = random.Random(f"{instance}")
    catalogue = {kind.kind: kind for kind in load_catalogue()}
    names = draw.sample(KINDS, instance.kinds)
    names += [draw.choice(names) for _ in range(instance.islands - len(names))]
    regions = list(range(instance.regions))
    regions += [draw.randrange(instance.regions) for _ in range(instance.islands - len(regions))]
    regions.sort()
    nodes = _dealt(instance.devices // PER_NODE, instance.islands, draw)
    islands = tuple(
        _island(f"island-{at}", f"region-{regions[at]}", catalogue[names[at]], nodes[at], draw)
        for at in range(instance.islands)
    )
    return Cluster(
        name=f"seed {instance.seed}",
        islands=islands,
        within_region=_link(12.5e9, 20e-6, Transport.HOST_STAGED),
        region_links=tuple(
            RegionLink(between=(f"region-{one}", f"region-{other}"), link=_long_link(draw))
            for one in range(instance.regions)
            for other in range(one + 1, instance.regions)
        ),
    )


def _dealt(nodes: int, islands: int, draw: random.Random) -> list[int]:
    found = [1] * islands
    share = max(1, nodes // (16 * islands))
    left = nodes - islands
    while left:
        more = min(share, left)
        found[draw.randrange(islands)] += more
        left -= more
    return found


def _island(name: str, region: str, device: DeviceKind, nodes: int, draw: random.Random) -> Island:
    fabric = device.scale_up
    inside = _link(
        64e9 if fabric is None else fabric.bandwidth_bytes_per_second, 5e-6, Transport.DEVICE_DIRECT
    )
    between = _link(draw.choice((25e9, 50e9)), 10e-6, Transport.DEVICE_DIRECT)
    return Island(
        name=name,
        region=region,
        device=device,
        nodes=nodes,
        devices_per_node=PER_NODE,
        intra_node=inside,
        inter_node=between if nodes > 1 else inside,
        memory_bytes=device.memory_bytes,
    )


def _long_link(draw: random.Random) -> Link:
    link = _link(1.25e9, draw.uniform(1e-3, 10e-3), Transport.HOST_STAGED)
    return replace(link, shared_bandwidth_bytes_per_second=draw.choice((50e9, 100e9, 400e9)))


def _link(rate: float, latency: float, transport: Transport) -> Link:
    return Link(bandwidth_bytes_per_second=rate, latency_seconds=latency, transport=transport)


TARGETS = ("megatron", "flagscale", "torchtitan", "native")
GAP = 0.005
"""Asked of the searches without a goal of their own."""
MOST_MEMORY_BYTES = 2e9
"""Goal of every search."""
GOALS = {
    (1024, 4, "moe", "megatron"): (0.005, 10.0),
    (10240, 8, "moe", "megatron"): (0.01, 30.0),
    (131072, 10, "moe", "megatron"): (0.02, 60.0),
    (10240, 8, "dense", "megatron"): (0.005, 4.0),
    (10240, 8, "dense", "flagscale"): (0.005, 10.0),
    (98304, 8, "dense", "megatron"): (0.005, 30.0),
    (131072, 10, "dense", "megatron"): (0.01, 60.0),
    (131072, 10, "dense", "flagscale"): (0.02, 60.0),
    (10240, 8, "dense", "native"): (0.05, 120.0),
    **dict.fromkeys(((256, 3, "dense", "native"), (1024, 4, "dense", "native")), (0.02, 60.0)),
    **{
        (devices, islands, "dense", "torchtitan"): (0.01, 60.0)
        for devices, islands in ((64, 2), (256, 3), (10240, 8), (98304, 8))
    },
}
"""(devices, islands, model, target): most gap, CPU seconds. These are asked for so much and no
longer, and are judged within a tenth of the time, as a limit is."""


def goal_of(instance: Instance, target: str) -> tuple[float, float] | None:
    """Most gap and CPU seconds; None: this search has no goal but that of its memory."""
    return GOALS.get((instance.devices, instance.islands, instance.model, target))


_WARM = Instance(devices=16, islands=2, kinds=2, regions=1)
_WARM_SECONDS = 20.0
"""Longest small search that compiles what the measured one needs."""


Row = dict[str, Any]
"""One search.

`status`: of the certificate, or why there is no plan. `seconds`: CPU seconds of the search;
`cold_seconds` of the whole process: imports, kernels and a small search with it. `families`: that
divide and fit. `programs`: subproblems that programs solved. `goal` and `held`: whether it is.
"""


def instances_of(sizes: Sequence[int]) -> tuple[Instance, ...]:
    """Those of the table with these numbers of devices; an InputError for other numbers."""
    known = sorted({each.devices for each in INSTANCES})
    unknown = [size for size in sizes if size not in known]
    if unknown:
        raise InputError(f"there is no instance of {unknown[0]} devices; there are {known}")
    return tuple(each for each in INSTANCES if each.devices in sizes)


def scaling(
    instances: Sequence[Instance],
    targets: Sequence[str],
    *,
    time_limit_seconds: float,
    progress: Callable[[str], None],
) -> list[Row]:
    """A row per instance and target."""
    rows = []
    for instance in instances:
        for target in targets:
            progress(f"{instance.devices:,} devices, {instance.model}, {target}")
            goal = goal_of(instance, target)
            limit = time_limit_seconds if goal is None else min(time_limit_seconds, goal[1])
            row = judged(_apart(instance, target, limit), goal)
            gap = "no gap" if row["gap"] is None else f"gap {row['gap']:.2%}"
            progress(f"  {row['seconds'] or 0.0:.1f} s of CPU, {gap}")
            rows.append(row)
    return rows


def judged(row: Row, goal: tuple[float, float] | None) -> Row:
    """The row with its goal and whether it is held."""
    failed = row["status"].startswith("failed")
    held = not failed and row["peak_memory_bytes"] <= MOST_MEMORY_BYTES
    words = format_bytes(MOST_MEMORY_BYTES)
    if goal is not None:
        gap, seconds = goal
        held &= row["gap"] is not None and row["gap"] <= gap * (1 + 1e-6)
        held &= row["seconds"] <= 1.1 * seconds
        words = f"{gap:.1%}, {seconds:g} s, {words}"
    return row | {"goal": words, "held": "yes" if held else "no"}


def _apart(instance: Instance, target: str, limit_seconds: float) -> Row:
    question = json.dumps({"instance": asdict(instance), "target": target, "limit": limit_seconds})
    done = subprocess.run(
        [sys.executable, "-m", "evaluation.search.scaling", question],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return _row(instance, target, status=f"failed: {last[:200]}")
    found: Row = json.loads(done.stdout)
    return found


def measure(instance: Instance, target: str, limit_seconds: float) -> Row:
    """Search in this process; limits and times are CPU seconds."""
    count_cpu_seconds()
    _search(replace(_WARM, model=instance.model), target, _WARM_SECONDS)
    row = _search(instance, target, limit_seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Kilobytes on Linux.
    return row | {
        "cold_seconds": used.ru_utime + used.ru_stime,
        "peak_memory_bytes": used.ru_maxrss * 1024.0,
    }


def _search(instance: Instance, target: str, limit_seconds: float) -> Row:
    from hetplan.predict.fit import FittedPredictor
    from hetplan.search.search import search

    gap, _ = goal_of(instance, target) or (GAP, limit_seconds)
    inputs = instance_inputs(instance, target, gap, limit_seconds)
    predictor = FittedPredictor.datasheet_only()
    begin = time.process_time()
    try:
        found = search(inputs.model, inputs.cluster, inputs.job, predictor)
    except (InfeasibleError, LimitError) as error:
        row = _row(instance, target, status=str(error).splitlines()[0][:200])
        return row | {"seconds": time.process_time() - begin}
    spent, proof = time.process_time() - begin, found.certificate
    if proof is None:
        return _row(instance, target, status="no proof") | {"seconds": spent}
    return _row(instance, target, status=proof.status) | {
        "seconds": spent,
        "step_seconds": found.estimate.step_seconds,
        "gap": proof.gap,
        "families": proof.candidates,
        "searched": proof.searched,
        "programs": proof.explored,
        "replays": proof.replays,
    }


def _row(instance: Instance, target: str, *, status: str) -> Row:
    shape = {key: value for key, value in asdict(instance).items() if key != "seed"}
    counts = dict.fromkeys(("families", "searched", "programs", "replays"), 0)
    zeros = dict.fromkeys(("seconds", "cold_seconds", "peak_memory_bytes"), 0.0)
    none = {"step_seconds": None, "gap": None}
    return {**shape, "target": target, "status": status, **zeros, **none, **counts}


def scaling_section(rows: Sequence[Row]) -> Section:
    """The table of these searches."""
    return Section(
        name="scaling",
        title="The search by size, each in a process of its own",
        frame=pandas.DataFrame(rows),
        columns={
            "model": ("model", WORDS),
            "target": ("target", WORDS),
            "devices": ("devices", "{:,}"),
            "islands": ("islands", "{:d}"),
            "kinds": ("kinds", "{:d}"),
            "regions": ("regions", "{:d}"),
            "CPU": ("seconds", "{:.2f} s"),
            "whole process": ("cold_seconds", "{:.1f} s"),
            "peak memory": ("peak_memory_bytes", format_bytes),
            "gap": ("gap", "{:.2%}"),
            "goal": ("goal", WORDS),
            "held": ("held", WORDS),
            "status": ("status", WORDS),
            "searched": ("searched", "{:d}"),
        },
    )


if __name__ == "__main__":
    try:
        _question = json.loads(sys.argv[1])
        _measured = measure(
            Instance(**_question["instance"]), _question["target"], _question["limit"]
        )
        sys.stdout.write(json.dumps(_measured))
    except HetplanError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
