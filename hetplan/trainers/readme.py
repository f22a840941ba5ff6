"""README.md of an emitted folder: what runs where, how it is started and what to expect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from hetplan.plans.formats import reshardable
from hetplan.plans.pieces import Places, data_ranks, stage_array
from hetplan.plans.plan import RecomputeGranularity, Stage
from hetplan.schedulers import SCHEDULERS
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.quoting import FOLDER, comment
from hetplan.schedulers.rank_layout import Agent, Host, RankLayout, libraries
from hetplan.search.result import SearchResult
from hetplan.units import format_bytes, format_seconds
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
