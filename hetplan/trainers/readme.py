"""README.md of an emitted folder: what runs where, how it is started and what to expect.

It begins with whether the placement of the ranks is good. Tensor-parallel groups belong inside
nodes, data-parallel ones inside islands, neighbours in the pipeline close to each other: what
leaves its home is counted (`placement_remarks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetplan.cost.estimate_values import Component
from hetplan.plans.formats import reshardable
from hetplan.plans.pieces import Devices, Places, data_ranks, device_array, stage_array
from hetplan.plans.plan import Plan, RecomputeGranularity, Stage
from hetplan.plans.v_schedules import is_v
from hetplan.schedulers import SCHEDULERS
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.quoting import FOLDER, comment
from hetplan.schedulers.rank_layout import RankLayout, libraries, listed
from hetplan.search.result import SearchResult
from hetplan.units import format_bytes, format_seconds, format_share
from hetplan.version import __version__

_MAX_ROWS = 40
"""Of a table; the rest is counted."""


def readme_text(
    result: SearchResult, ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions
) -> str:
    """The text."""
    inputs, estimate = result.inputs, result.estimate
    low, high, share = estimate.p5_seconds, estimate.p95_seconds, "90 %"
    if low is None or high is None:
        low, high, share = estimate.interval.p10_seconds, estimate.interval.p90_seconds, "80 %"
    other_target = (
        f"The plan was priced for target {result.plan.target}, whose trainer may do otherwise what "
        f"{launch.title} does.\n"
    )
    numbering = (
        "\nRanks are numbered tensor-parallel first, then through the pipeline, data-parallel "
        "copies last (Megatron-LM: --use-tp-pp-dp-mapping).\n"
    )
    template = Path(__file__).with_name("readme.md.txt").read_text(encoding="utf-8")
    text = template.format(
        model=_plain(inputs.model.name),
        cluster=_plain(inputs.cluster.name),
        version=__version__,
        title=launch.title,
        ranks=ranks.world_size,
        hosts=len(ranks.hosts),
        hosts_word="hosts" if len(ranks.hosts) > 1 else "host",
        calls=len(ranks.agents),
        batch=inputs.job.global_batch_size,
        step=format_seconds(estimate.step_seconds),
        interval=f"{share} interval {format_seconds(low)} to {format_seconds(high)}",
        tokens=estimate.tokens_per_second,
        use="" if estimate.mfu is None else f", MFU {estimate.mfu:.1%}",
        memory=format_bytes(estimate.peak_memory_bytes),
        other_target=other_target if result.plan.target != launch.target else "",
        stages=_table(_stage_rows(result, ranks), "stages"),
        agents=_table(_agent_rows(ranks), "rows"),
        numbering=numbering if ranks.data_outermost else "",
        before="\n".join(f"- {line}" for line in _before(result, ranks, launch, options)),
        python=_plain(options.python),
        master=_plain(ranks.master.name),
        address=_plain(ranks.master.address),
        port=ranks.port,
        start="\n".join(_start(ranks, launch, options)),
    )
    remarks = (
        ("the placement", ranks.remarks),
        (launch.title, launch.remarks),
    )
    for subject, lines in remarks:
        if lines:
            listed_lines = "\n".join(f"- {_plain(line)}" for line in lines)
            text += f"\n## Remarks on {subject}\n\n{listed_lines}\n"
    return text


def _table(rows: Sequence[str], what: str) -> str:
    more = f"\n\nand {len(rows) - _MAX_ROWS:,} more {what}." if len(rows) > _MAX_ROWS else ""
    return "\n".join(rows[:_MAX_ROWS]) + more


def _stage_rows(result: SearchResult, ranks: RankLayout) -> list[str]:
    plan, cluster = result.plan, result.inputs.cluster
    places = Places(cluster=cluster)
    hosts = {(host.island, host.node): host for host in ranks.hosts}
    rows = []
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            devices = stage_array(stage)
            _, first = np.unique(places.nodes(devices), return_index=True)
            on = [
                hosts[
                    places.cluster.island_of_device(device).name,
                    places.cluster.node_of_device(device),
                ]
                for device in devices[np.sort(first)].tolist()
            ]
            kinds = ", ".join(dict.fromkeys(host.device_kind for host in on))
            layers = ", ".join(
                _range(chunk.start, chunk.stop - 1)
                for chunk in stage.chunks
                if chunk.stop > chunk.start
            )
            replica, recompute = stage.replicas[0], stage.recompute.granularity
            rows.append(
                f"| {f'{p}.{s}' if len(plan.pipelines) > 1 else s} | {layers or 'none'} "
                f"| {replica.tp} x {replica.cp} x {data_ranks(stage)} | {replica.microbatch_size} "
                f"| {'' if recompute is RecomputeGranularity.NONE else recompute.value} "
                f"| {len(devices):,} {kinds} | {_host_names([host.name for host in on])} |"
            )
    return rows


def _agent_rows(ranks: RankLayout) -> list[str]:
    rows = []
    for (domain, _, devices), group in groupby(
        ranks.agents, key=lambda agent: (agent.host.domain, agent.host.island, agent.local_devices)
    ):
        agents = list(group)
        host, last = agents[0].host, agents[-1]
        numbers = ",".join(map(str, devices))
        if list(devices) == list(range(devices[0], devices[-1] + 1)):
            numbers = _range(devices[0], devices[-1])
        rows.append(
            f"| {_range(agents[0].node_rank, last.node_rank)} "
            f"| {_range(agents[0].first_rank, last.first_rank + last.num_ranks - 1)} "
            f"| {_host_names([agent.host.name for agent in agents])} "
            f"| {domain.name} ({domain.scheduler.value}) "
            f"| {_plain(host.island)}, {_plain(host.region)} "
            f"| {numbers} of {host.devices_per_node} |"
        )
    return rows


def _before(
    result: SearchResult, ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions
) -> Iterator[str]:
    program = launch.program[0]
    if options.trainer_folder:
        yield f"The trainer is expected in `{_plain(options.trainer_folder)}` on every host."
    elif program == "-m":
        yield (
            f"`{_plain(options.python)} -m {_plain(launch.program[1])}` must work on every host; "
            "`TRAINER_FOLDER`, where it is set, is the folder in which it is started."
        )
    elif not program.startswith(("/", FOLDER)):
        yield (
            f"Set `TRAINER_FOLDER` to the folder that holds `{_plain(program)}` on every host, or "
            "emit again with --trainer-folder."
        )
    if not options.data:
        yield "Without --data the trainer makes up its data: right for a test of speed only."
    if options.save:
        several = len(libraries(ranks.agents)) > 1
        kept = reshardable(launch.target, result.plan, several_libraries=several)
        yield f"Checkpoints under another plan: {_plain(kept.reason)}."
    else:
        yield "Without --save no checkpoint is written."


def _start(ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions) -> Iterator[str]:
    yield from SCHEDULERS[options.scheduler].start(ranks, launch)
    if launch.own_runner:
        command = " ".join(word.replace(FOLDER, "FOLDER") for word in launch.own_runner)
        yield ""
        yield (
            "Or use the trainer's own command, from its folder (FOLDER: this one): "
            f"`{_plain(command)}`"
        )


def _host_names(names: Sequence[str]) -> str:
    if len(names) < 3:
        return _plain(", ".join(names))
    return _plain(f"{names[0]} to {names[-1]} ({len(names):,})")


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _plain(text: str) -> str:
    """Text that ends no cell and no line of a table."""
    return comment(text).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


# ---- which groups leave their node, island or region

_Rows: TypeAlias = NDArray[np.int64]
"""Devices of one group per row."""
LOUD = "ATTENTION: "
"""In front of what costs most and is easily overlooked."""


def placement_remarks(result: SearchResult) -> tuple[str, ...]:
    """What a reader should know about the placement, a line each."""
    plan, places = result.plan, Places(cluster=result.inputs.cluster)
    return (
        *_inside_stages(plan, places),
        *(line for p in range(len(plan.pipelines)) for line in _neighbours(plan, places, p)),
        *_tied_embedding(result, places),
    )


def _areas(places: Places, devices: Devices) -> dict[str, Devices]:
    """Numbers of every device's node, island and region, equal inside one of them."""
    islands = places.islands(devices)
    regions = [places.cluster.regions.index(island.region) for island in places.cluster.islands]
    return {
        "node": places.nodes(devices),
        "island": islands,
        "region": np.array(regions)[islands],
    }


def _names(places: Places, devices: Devices) -> str:
    """Islands and regions of these devices in words."""
    islands = [places.cluster.islands[at] for at in np.unique(places.islands(devices))]
    regions = dict.fromkeys(island.region for island in islands)
    return f"{listed([island.name for island in islands])} in {listed(tuple(regions))}"


def _inside_stages(plan: Plan, places: Places) -> Iterator[str]:
    """Groups inside of stages by the largest thing that they leave."""
    rows: dict[tuple[str, int], list[_Rows]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for name, groups in _groups(stage):
                if groups.shape[1] > 1:
                    rows.setdefault((name, groups.shape[1]), []).append(groups)
    for (name, size), parts in rows.items():
        groups = np.concatenate(parts)
        leaving = {
            area: int((numbers != numbers[:, :1]).any(axis=1).sum())
            for area, numbers in _areas(places, groups).items()
        }
        home, *wider = ("island", "region") if name == "dp" else ("node", "island", "region")
        if leaving[home]:
            text = f"{leaving[home]} of {len(groups)} groups leave their {home}"
            text += "".join(f", {leaving[area]} their {area}" for area in wider if leaving[area])
        elif len(groups) > 1:
            text = f"all {len(groups)} groups lie inside {home}s"
        else:
            text = f"its one group lies inside its {home}"
        loud = leaving[home] and (name == "tp" or leaving["region"])
        yield f"{LOUD if loud else ''}{name} {size}: {text}"


def _groups(stage: Stage) -> Iterator[tuple[str, _Rows]]:
    """(kind, groups) of a stage: tp, cp and ep by replica, dp over all replicas of equal shape."""
    for replica in stage.replicas:
        at = device_array(replica.devices)
        ranks = at.reshape(-1, replica.cp, replica.tp)
        yield "tp", ranks.reshape(-1, replica.tp)
        yield "cp", ranks.transpose(0, 2, 1).reshape(-1, replica.cp)
        experts = at.reshape(-1, replica.ep, replica.etp)
        yield "ep", experts.transpose(0, 2, 1).reshape(-1, replica.ep)
    slices = {(replica.tp, replica.cp) for replica in stage.replicas}
    if len(slices) == 1:
        ((tp, cp),) = slices
        yield "dp", stage_array(stage).reshape(-1, cp * tp).T


def _neighbours(plan: Plan, places: Places, p: int) -> Iterator[str]:
    """How far apart the stages of a pipeline are."""
    pipeline = plan.pipelines[p]
    if len(pipeline.stages) < 2:
        return
    stages = list(enumerate(stage_array(stage) for stage in pipeline.stages))
    hops = list(pairwise(stages))
    if pipeline.schedule.virtual_stages > 1 and not is_v(pipeline.schedule.name):
        # The last stage sends the next chunk's activations to the first.
        hops.append((stages[-1], stages[0]))
    crossing = {
        area: [hop for hop in hops if _apart(places, hop[0][1], hop[1][1], area)]
        for area in ("island", "region")
    }
    far = [
        f"stage {s} ({_names(places, left)}) to stage {t} ({_names(places, right)})"
        for (s, left), (t, right) in crossing["region"]
    ]
    yield (
        f"{f'pipeline {p}' if len(plan.pipelines) > 1 else 'pipeline'}: boundaries between stages: "
        f"{len(hops)}, of which {len(crossing['island'])} cross islands and {len(far)} regions"
        + (f": {listed(far, '; ')}" if far else "")
    )


def _apart(places: Places, left: Devices, right: Devices, area: str) -> bool:
    """Whether anything is sent out of an island or region: rank to rank where stages are alike."""
    senders, receivers = _areas(places, left)[area], _areas(places, right)[area]
    if len(senders) == len(receivers):
        return bool((senders != receivers).any())
    return len(np.union1d(senders, receivers)) > 1


def _tied_embedding(result: SearchResult, places: Places) -> Iterator[str]:
    """What first and last stage exchange after every step (megatron/core/parallel_state.py, the
    embedding group), with the seconds that the estimate has for it.
    """
    plan, step = result.plan, result.estimate.step_seconds
    stages = plan.pipelines[0].stages
    if not plan.tied_embedding_devices or len(stages) < 2:
        return
    first, last = stage_array(stages[0]), stage_array(stages[-1])
    crosses = _apart(places, first, last, "region")
    seconds = max(
        (
            part.seconds
            for stage in result.estimate.stages
            for part in stage.components
            if part.component is Component.EMBEDDING
        ),
        default=0.0,
    )
    yield (
        f"{LOUD if crosses else ''}tied embedding: after every step first and last stage sum its "
        f"gradient, between {_names(places, first)} and {_names(places, last)}"
        f"{', ACROSS REGIONS' if crosses else ''}; priced at {format_seconds(seconds)}, "
        f"{format_share(seconds / step)} of the step"
    )
