"""README.md of an emitted folder: what runs where, how it is started and what to expect.

It begins with whether the placement of the ranks is good. Tensor-parallel groups belong inside
nodes, data-parallel ones inside islands, neighbours in the pipeline close to each other: what
leaves its home is counted (`placement_remarks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetplan.cost.estimate_values import Component
from hetplan.plans.formats import reshardable
from hetplan.plans.pieces import Devices, Places, data_ranks, device_array, stage_array
from hetplan.plans.plan import Pipeline, Plan, RecomputeGranularity, Stage
from hetplan.schedulers import SCHEDULERS
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.quoting import FOLDER, comment
from hetplan.schedulers.rank_layout import Agent, Host, RankLayout, libraries, listed
from hetplan.search.result import SearchResult
from hetplan.units import format_bytes, format_seconds, format_share
from hetplan.version import __version__

_MAX_ROWS = 40
"""Of a table; the rest is counted."""


def readme_text(
    result: SearchResult, ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions
) -> str:
    """The text."""
    parts = (
        _head(result, ranks, launch),
        ("## What to expect", "", *_expected(result, launch)),
        ("## What runs where", "", *_stages(result, ranks), "", *_agents(ranks)),
        ("## Before the first start", "", *_before(result, ranks, launch, options)),
        ("## Start", "", *_start(ranks, launch, options)),
        ("## After the start", "", *_after()),
        _remarks("## Remarks on the placement", ranks.remarks),
        _remarks(f"## Remarks on {launch.title}", launch.remarks),
    )
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _head(result: SearchResult, ranks: RankLayout, launch: TrainerLaunch) -> tuple[str, ...]:
    inputs = result.inputs
    hosts = "hosts" if len(ranks.hosts) > 1 else "host"
    return (
        f"# {_plain(inputs.model.name)} on {_plain(inputs.cluster.name)}",
        "",
        f"Written by hetplan {__version__} for {launch.title}: {ranks.world_size:,} ranks on "
        f"{len(ranks.hosts):,} {hosts} in {len(ranks.agents):,} calls of torchrun. `launch.sh` "
        "starts the ranks of one host, `check.py` checks it before, `plan.json` is the plan with "
        "all that it was made from. `hetplan emit --force` replaces what hetplan wrote (the last "
        "line of `check.py` lists it) and keeps what you changed as NAME~.",
    )


def _expected(result: SearchResult, launch: TrainerLaunch) -> Iterator[str]:
    estimate = result.estimate
    low, high, what = estimate.p5_seconds, estimate.p95_seconds, "90 %"
    if low is None or high is None:
        low, high, what = estimate.interval.p10_seconds, estimate.interval.p90_seconds, "80 %"
    yield (
        f"A step of {result.inputs.job.global_batch_size:,} sequences is predicted to take "
        f"**{format_seconds(estimate.step_seconds)}** ({what} interval {format_seconds(low)} to "
        f"{format_seconds(high)}), {estimate.tokens_per_second:,.0f} tokens/s; the fullest device "
        f"needs {format_bytes(estimate.peak_memory_bytes)}."
    )
    if result.plan.target != launch.target:
        yield (
            f"The plan was priced for target {result.plan.target}, whose trainer may do otherwise "
            f"what {launch.title} does."
        )


def _stages(result: SearchResult, ranks: RankLayout) -> Iterator[str]:
    plan, cluster = result.plan, result.inputs.cluster
    places = Places(cluster=cluster)
    hosts = {(host.island, host.node): host for host in ranks.hosts}
    yield "| stage | layers | tp x cp x dp | microbatch | recompute | devices | hosts |"
    yield "|---|---|---|---|---|---|---|"
    rows = []
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            devices = stage_array(stage)
            _, at = np.unique(places.nodes(devices), return_index=True)
            on = [
                hosts[cluster.island_of_device(each).name, cluster.node_of_device(each)]
                for each in devices[np.sort(at)].tolist()
            ]
            name = f"{p}.{s}" if len(plan.pipelines) > 1 else str(s)
            rows.append(f"| {name} | {_stage(stage)} | {len(devices):,} {_where(on)} |")
    yield from _cut(rows, "stages")


def _stage(stage: Stage) -> str:
    layers = ", ".join(
        str(chunk.start) if chunk.stop == chunk.start + 1 else f"{chunk.start}-{chunk.stop - 1}"
        for chunk in stage.chunks
        if chunk.stop > chunk.start
    )
    first = stage.replicas[0]
    dp = data_ranks(stage)
    recompute = stage.recompute.granularity
    what = "" if recompute is RecomputeGranularity.NONE else recompute.value
    return f"{layers or 'none'} | {first.tp} x {first.cp} x {dp} | {first.microbatch_size} | {what}"


def _where(hosts: Sequence[Host]) -> str:
    kinds = dict.fromkeys(host.device_kind for host in hosts)
    return f"{', '.join(kinds)} | {_host_names([host.name for host in hosts])}"


def _agents(ranks: RankLayout) -> Iterator[str]:
    yield (
        "Layers count from 0, the embedding, to the head. Calls of torchrun in the order of their "
        "node ranks (`calls` in launch.sh):"
    )
    yield ""
    yield "| node ranks | ranks | hosts | domain | island, region | devices of a host |"
    yield "|---|---|---|---|---|---|"
    rows = [
        _agent_row(list(group))
        for _, group in groupby(
            ranks.agents,
            key=lambda agent: (
                agent.host.domain.name,
                agent.host.island,
                agent.local_devices,
            ),
        )
    ]
    yield from _cut(rows, "rows")
    if ranks.data_outermost:
        yield ""
        yield (
            "Ranks are numbered tensor-parallel first, then through the pipeline, data-parallel "
            "copies last (Megatron-LM: --use-tp-pp-dp-mapping)."
        )


def _agent_row(agents: Sequence[Agent]) -> str:
    first, last = agents[0], agents[-1]
    host = first.host
    return (
        f"| {_range(first.node_rank, last.node_rank)} "
        f"| {_range(first.first_rank, last.first_rank + last.num_ranks - 1)} "
        f"| {_host_names([agent.host.name for agent in agents])} "
        f"| {host.domain.name} ({host.domain.scheduler.value}) "
        f"| {_plain(host.island)}, {_plain(host.region)} "
        f"| {_numbers(first.local_devices)} of {host.devices_per_node} |"
    )


def _before(
    result: SearchResult, ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions
) -> Iterator[str]:
    first = launch.program[0]
    yield "- Put this folder at one path on every host, by a shared file system or a copy."
    if options.trainer_folder:
        yield f"- The trainer is expected in `{_plain(options.trainer_folder)}` on every host."
    elif first == "-m":
        yield (
            f"- `{_plain(options.python)} -m {_plain(launch.program[1])}` must work on every host; "
            "`TRAINER_FOLDER`, where it is set, is the folder in which it is started."
        )
    elif not first.startswith(("/", FOLDER)):
        yield (
            f"- Set `TRAINER_FOLDER` to the folder that holds `{_plain(first)}` on every host, or "
            "emit again with --trainer-folder."
        )
    if not options.data:
        yield "- Without --data the trainer makes up its data: right for a test of speed only."
    if options.save:
        several = len(libraries(ranks.agents)) > 1
        kept = reshardable(launch.target, result.plan, several_libraries=several)
        yield f"- Checkpoints under another plan: {_plain(kept.reason)}."
    else:
        yield "- Without --save no checkpoint is written."
    yield (
        "- Run `python3 check.py` on all hosts at one time, as launch.sh below: devices and their "
        "free memory, interfaces, versions, paths, and whether all reach the rendezvous port. It "
        f"asks $HETPLAN_PYTHON, or else `{_plain(options.python)}`, for torch."
    )


def _start(ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions) -> Iterator[str]:
    master = ranks.master
    yield (
        f"Rank 0 and the rendezvous are on {_plain(master.name)} ({_plain(master.address)}), port "
        f"{ranks.port}."
    )
    yield from SCHEDULERS[options.scheduler].start(ranks, launch)
    if launch.own_runner:
        command = " ".join(word.replace(FOLDER, "FOLDER") for word in launch.own_runner)
        yield ""
        yield (
            "Or use the trainer's own command, from its folder (FOLDER: this one): "
            f"`{_plain(command)}`"
        )


def _after() -> Iterator[str]:
    yield ("One rank alone, mostly the last, writes about steps; compare its log with the plan:")
    yield ""
    yield "    hetplan compare log-*.txt --plan plan.json"


def _remarks(title: str, remarks: Iterable[str]) -> tuple[str, ...]:
    lines = tuple(f"- {_plain(each)}" for each in remarks)
    return (title, "", *lines) if lines else ()


def _cut(rows: Sequence[str], what: str) -> Iterator[str]:
    yield from rows[:_MAX_ROWS]
    if len(rows) > _MAX_ROWS:
        yield ""
        yield f"and {len(rows) - _MAX_ROWS:,} more {what}."


def _host_names(names: Sequence[str]) -> str:
    if len(names) < 3:
        return _plain(", ".join(names))
    return _plain(f"{names[0]} to {names[-1]} ({len(names):,})")


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


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
    areas = _Areas(places)
    return (
        *_inside_stages(plan, areas),
        *(
            line
            for p, pipeline in enumerate(plan.pipelines)
            for line in _neighbours(plan, areas, p, pipeline)
        ),
        *_tied_embedding(result, areas),
    )


class _Areas:
    """Node, island and region of devices as numbers that are equal inside one of them."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.cluster = places.cluster
        names = list(self.cluster.regions)
        self._region = np.array([names.index(each.region) for each in self.cluster.islands])

    def of(self, devices: Devices) -> tuple[tuple[str, Devices], ...]:
        """(what it is, number of every device's), smallest first."""
        islands = self.places.islands(devices)
        return (
            ("node", self.places.nodes(devices)),
            ("island", islands),
            ("region", self._region[islands]),
        )

    def said(self, devices: Devices) -> str:
        """Islands and regions of these devices in words."""
        at = np.unique(self.places.islands(devices))
        islands = [self.cluster.islands[each] for each in at]
        regions = dict.fromkeys(island.region for island in islands)
        return f"{listed([island.name for island in islands])} in {listed(tuple(regions))}"


def _inside_stages(plan: Plan, areas: _Areas) -> Iterator[str]:
    """Groups inside of stages by the largest thing that they leave."""
    rows: dict[tuple[str, int], list[_Rows]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for name, groups in _groups(stage):
                if groups.shape[1] > 1:
                    rows.setdefault((name, groups.shape[1]), []).append(groups)
    homes = {"tp": "node", "cp": "node", "ep": "node", "dp": "island"}
    for (name, size), found in rows.items():
        groups = np.concatenate(found)
        home = homes[name]
        leaving = _leaving(areas, groups)
        count = len(groups)
        if not leaving[home]:
            yield f"{name} {size}: " + (
                f"all {count} groups lie inside {home}s"
                if count > 1
                else f"its one group lies inside its {home}"
            )
            continue
        parts = [f"{leaving[home]} of {count} groups leave their {home}"]
        wider = {"node": ("island", "region"), "island": ("region",)}[home]
        parts += [f"{leaving[each]} their {each}" for each in wider if leaving[each]]
        loud = LOUD if name == "tp" or leaving["region"] else ""
        yield f"{loud}{name} {size}: {', '.join(parts)}"


def _leaving(areas: _Areas, groups: _Rows) -> dict[str, int]:
    """How many rows hold devices of more than one node, island, region."""
    return {
        what: int((numbers != numbers[:, :1]).any(axis=1).sum())
        for what, numbers in areas.of(groups)
    }


def _groups(stage: Stage) -> Iterator[tuple[str, _Rows]]:
    """(kind, groups) of a stage: tp, cp and ep by replica, dp over all replicas of equal shape."""
    for replica in stage.replicas:
        at = device_array(replica.devices)
        ranks = at.reshape(-1, replica.cp, replica.tp)
        yield "tp", ranks.reshape(-1, replica.tp)
        yield "cp", ranks.transpose(0, 2, 1).reshape(-1, replica.cp)
        experts = at.reshape(-1, replica.ep, replica.etp)
        yield "ep", experts.transpose(0, 2, 1).reshape(-1, replica.ep)
    slices = {(each.tp, each.cp) for each in stage.replicas}
    if len(slices) == 1:
        ((tp, cp),) = slices
        yield "dp", stage_array(stage).reshape(-1, cp * tp).T


def _neighbours(plan: Plan, areas: _Areas, p: int, pipeline: Pipeline) -> Iterator[str]:
    """How far apart the stages of a pipeline are."""
    if len(pipeline.stages) < 2:
        return
    stages = list(enumerate(stage_array(stage) for stage in pipeline.stages))
    hops = list(pairwise(stages))
    if pipeline.schedule.virtual_stages > 1:
        # The last stage sends the next chunk's activations to the first.
        hops.append((stages[-1], stages[0]))
    crossing = {"island": 0, "region": 0}
    far: list[str] = []
    for (s, left), (t, right) in hops:
        apart = {what for what in crossing if _apart(areas, left, right, what)}
        for what in apart:
            crossing[what] += 1
        if "region" in apart:
            far.append(f"stage {s} ({areas.said(left)}) to stage {t} ({areas.said(right)})")
    where = f"pipeline {p}" if len(plan.pipelines) > 1 else "pipeline"
    yield (
        f"{where}: of {len(hops)} transfers between stages {crossing['island']} leave their "
        f"island, {crossing['region']} their region" + (f": {listed(far, '; ')}" if far else "")
    )


def _apart(areas: _Areas, left: Devices, right: Devices, what: str) -> bool:
    """Whether anything is sent out of an island or region: rank to rank where stages are alike."""
    one, two = dict(areas.of(left))[what], dict(areas.of(right))[what]
    if len(one) == len(two):
        return bool((one != two).any())
    return len(np.union1d(one, two)) > 1


def _tied_embedding(result: SearchResult, areas: _Areas) -> Iterator[str]:
    """What first and last stage exchange after every step (megatron/core/parallel_state.py, the
    embedding group), with the seconds that the estimate has for it.
    """
    plan, step = result.plan, result.estimate.step_seconds
    stages = plan.pipelines[0].stages
    if not plan.tied_embedding_devices or len(stages) < 2:
        return
    first, last = stage_array(stages[0]), stage_array(stages[-1])
    crosses = _apart(areas, first, last, "region")
    seconds = max(
        (
            each.seconds
            for stage in result.estimate.stages
            for each in stage.components
            if each.component is Component.EMBEDDING
        ),
        default=0.0,
    )
    yield (
        f"{LOUD if crosses else ''}tied embedding: after every step first and last stage sum its "
        f"gradient, between {areas.said(first)} and {areas.said(last)}"
        f"{', ACROSS REGIONS' if crosses else ''}; priced at {format_seconds(seconds)}, "
        f"{format_share(seconds / step)} of the step"
    )
