"""`hetplan profile --campaign` and `--merge`: measuring where hetplan cannot be installed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hetplan.cli.options import emit, say, stores_to_read
from hetplan.cli.profile_needs import cluster_kinds, layer_needs, link_needs
from hetplan.cli.profile_request import ProfileRequest
from hetplan.cli.profile_tables import new_table
from hetplan.cluster.load import load_cluster
from hetplan.files.encoding import encode
from hetplan.profiling.campaign import COMMANDS_FILE, write_campaign
from hetplan.profiling.campaign_commands import layers_command, link_commands
from hetplan.profiling.campaign_values import Campaign
from hetplan.profiling.measure_links import link_key
from hetplan.profiling.merge import MergeReport, merge, result_files
from hetplan.profiling.store_state import store_state
from hetplan.reports.terminal import print_table
from hetplan.units import format_about

_Key = TypeVar("_Key")

CAMPAIGN_SCHEMA = "hetplan.campaign-files/1"
MERGE_SCHEMA = "hetplan.merge/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignFiles:
    """What was written."""

    folder: str
    campaign: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What a campaign asked for and the store does not have."""

    what: str
    """`layers` or `link`."""
    name: str
    samples: int
    of: int
    commands: tuple[str, ...]
    """What makes it, one per node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What a merge did, and what is still missing."""

    report: MergeReport
    missing: tuple[Missing, ...]


def make_campaign(request: ProfileRequest, cluster: Path, out: Path | None) -> None:
    """Write the scripts for a cluster, and say what to do with them."""
    spec = load_cluster(cluster)
    loaded = request.load()
    # Everything is measured again, under the circumstances there; what is known tells how long.
    stores = stores_to_read([request.store] if request.store is not None else None)
    states = store_state(*(store for store in stores if store.is_dir()))
    known = [sample for state in states for sample in state.layers]
    layers = layer_needs(request, cluster_kinds(spec), (), alike=known)
    links = link_needs(request, spec, ())
    name = re.sub(r"[^A-Za-z0-9.-]", "_", spec.name)
    folder = out if out is not None else Path(f"campaign-{name}")
    written = write_campaign(
        folder,
        cluster=spec.name,
        model=loaded[0].name if loaded else "",
        job=loaded[1].name if loaded else "",
        layers=layers,
        links=links,
    )
    campaign = written.campaign
    if request.as_json:
        files = CampaignFiles(
            folder=str(folder),
            campaign=campaign.campaign,
            files=(*written.scripts, COMMANDS_FILE),
        )
        emit(encode(files, schema=CAMPAIGN_SCHEMA))
        return
    _print_campaign(campaign)
    say(f"wrote {folder}: start with {folder / COMMANDS_FILE}")


def _print_campaign(campaign: Campaign) -> None:
    """One row per kind, one per command of a link."""
    table = new_table("what", "name", "samples", "about", "command")
    for kind in campaign.kinds:
        about = "not known" if kind.seconds is None else format_about(kind.seconds)
        samples = str(sum(len(unit) for unit in kind.units))
        table.add_row("layers", kind.kind, samples, about, layers_command(kind))
    for link in campaign.links:
        for index, command in enumerate(link_commands(campaign, link)):
            first = index == 0
            table.add_row(
                "link" if first else "",
                link.name if first else "",
                str(len(link.cases)) if first else "",
                format_about(link.seconds) if first else "",
                command,
            )
    print_table(table)


def merge_results(request: ProfileRequest, paths: Sequence[Path]) -> None:
    """Add what came back to the store, and say what is missing and what makes it."""
    files, campaign = result_files(paths)
    report = merge(files, request.store_folder, campaign)
    missing = _missing(campaign, report, request.store_folder) if campaign is not None else ()
    if request.as_json:
        emit(encode(Merged(report=report, missing=missing), schema=MERGE_SCHEMA))
        return
    held = f", {report.held} were there already" if report.held else ""
    files_read = f"{report.files} file{'s' if report.files != 1 else ''}"
    emit(f"{report.added} samples added to {request.store_folder} from {files_read}{held}")
    for fault in report.refused:
        emit(f"refused: {fault}")
    for note in report.notes:
        emit(f"note: {note}")
    reasons: dict[tuple[str, str], int] = {}
    for failure in report.failures:
        what = f"link {failure.link}" if failure.link else failure.kind
        reason = ": ".join(filter(None, (failure.operation, failure.reason)))
        reasons[what, reason] = reasons.get((what, reason), 0) + 1
    for (what, reason), count in reasons.items():
        times = f"{count} units: " if count > 1 else ""
        emit(f"not measurable: {what}: {times}{reason}")
    if campaign is None:
        say("hetplan: no campaign.json lies with the files, so what is missing is not known")
    elif not missing:
        emit("nothing is missing")
    for each in missing:
        emit(f"missing: {each.what} {each.name}: {each.samples} of {each.of} samples; run again:")
        for command in each.commands:
            emit(f"    {command}")


def _missing(campaign: Campaign, report: MergeReport, store: Path) -> tuple[Missing, ...]:
    """What no single population of the store has; what failed on the device is not missing."""
    states = store_state(store) if store.is_dir() else ()
    failed = {(failure.kind, failure.unit) for failure in report.failures}
    absent = {(failure.link, failure.operation) for failure in report.failures}
    missing = []
    for kind in campaign.kinds:
        shapes = {
            shape
            for number, unit in enumerate(kind.units)
            if (kind.kind, number) not in failed
            for shape in unit
        }
        held = [{row.shape for row in each.layers if row.device == kind.kind} for each in states]
        missing.append(_lacking("layers", kind.kind, shapes, held, (layers_command(kind),)))
    for link in campaign.links:
        cases = {case for case in link.cases if (link.name, case[0]) not in absent}
        keys = [{link_key(row) for row in each.links if row.link == link.name} for each in states]
        commands = link_commands(campaign, link)
        missing.append(_lacking("link", link.name, cases, keys, commands))
    return tuple(each for each in missing if each.samples)


def _lacking(
    what: str,
    name: str,
    wanted: AbstractSet[_Key],
    held: Sequence[AbstractSet[_Key]],
    commands: tuple[str, ...],
) -> Missing:
    """What the population that has most of the wanted samples still lacks."""
    lacking = min((len(wanted - each) for each in held), default=len(wanted))
    return Missing(what=what, name=name, samples=lacking, of=len(wanted), commands=commands)
