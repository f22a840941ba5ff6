"""`hetplan import ... --draft`: from a topology or a list of hosts to a cluster file.

What no file and no option says is never filled in: the error names the option that says it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.options import emit, say
from hetplan.errors import Fault, InputError

if TYPE_CHECKING:
    from hetplan.cluster.spec import Cluster
    from hetplan.importers.draft import ClusterDraft
    from hetplan.importers.draft_figures import LinkFigures
    from hetplan.importers.records import Imported

# Options that also mean something without --draft, or nothing by themselves.
_NOT_OF_DRAFTS = ("draft", "force", "device", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The options of a draft, as they were given."""

    draft: Path | None
    force: bool
    name: str | None
    region: tuple[str, ...]
    island: str | None
    device: str | None
    types: tuple[str, ...]
    hosts: Path | None
    nodes: int | None
    devices_per_node: int | None
    topology: tuple[str, ...]
    memory: tuple[str, ...]
    store: Path | None
    intra_samples: tuple[str, ...]
    intra_bandwidth: tuple[str, ...]
    intra_latency: tuple[str, ...]
    inter_samples: tuple[str, ...]
    inter_node: tuple[str, ...]
    inter_bandwidth: tuple[str, ...]
    inter_latency: tuple[str, ...]
    nics_per_node: tuple[str, ...]
    nic_bandwidth: tuple[str, ...]
    across: tuple[str, ...]
    across_samples: str | None
    across_bandwidth: str | None
    across_shared: str | None
    across_latency: str | None

    def check_use(self) -> None:
        """An InputError where options of a draft were given without --draft."""
        if self.draft is not None:
            return
        given = [
            f"--{each.name.rstrip('s') if each.name == 'types' else each.name.replace('_', '-')}"
            for each in fields(self)
            if each.name not in _NOT_OF_DRAFTS and getattr(self, each.name)
        ]
        if given:
            raise InputError(f"{', '.join(given)}: only with --draft FILE, the cluster to draft")


def write_draft(
    request: DraftRequest,
    files: Sequence[Path],
    imported: Sequence[Imported],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the cluster file that the records and options describe, and show what it holds."""
    from hetplan.cli.import_file import check_new
    from hetplan.cli.import_islands import read_draft
    from hetplan.files.writing import write_atomically
    from hetplan.importers.draft import draft_text

    target = request.draft
    if target is None:
        return
    check_new(target, force=request.force)
    if len(imported) != 1:
        raise InputError(
            f"--draft takes one FILE, not {len(files)}: put all hosts into one list, with "
            "type=NAME behind each where they are of several kinds; topologies go to --topology"
        )
    draft = read_draft(request, target, imported[0], str(files[0]))
    text = draft_text(draft)
    cluster = _read_back(text, target)
    if as_json:
        from hetplan.cluster.load import CLUSTER_VALUE_SCHEMA
        from hetplan.files.encoding import encode

        emit(encode(cluster, schema=CLUSTER_VALUE_SCHEMA))
    else:
        _show(draft)
        for note in imported[0].notes:
            emit(f"note: {note}")
    if not dry_run:
        write_atomically(target, text)
        say(f"wrote {target}: {cluster.num_devices} devices; read it, then plan with it")


def _read_back(text: str, target: Path) -> Cluster:
    """The cluster that the text describes: a draft that cannot be read is never written."""
    from hetplan.cluster.load import load_cluster

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "draft.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return load_cluster(path)
        except InputError as error:
            raise InputError(
                *(
                    Fault(
                        message=f"the draft of {target} is no cluster yet: {fault.message}"
                        + (" (--memory)" if fault.field.endswith(".memory") else "")
                    )
                    for fault in error.faults
                )
            ) from error


def _show(draft: ClusterDraft) -> None:
    """One row per link, with the figures that the file has for it."""
    from rich import box
    from rich.table import Table

    from hetplan.importers.draft import inter_node
    from hetplan.importers.draft_figures import Figure, LinkFigures
    from hetplan.reports.terminal import print_table

    table = Table(box=box.SIMPLE)
    for name in ("island", "device", "nodes", "devices", "link", "bandwidth", "latency", "samples"):
        right = name in ("nodes", "devices", "bandwidth", "latency")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for island in draft.islands:
        counts = (str(island.nodes), str(island.nodes * island.devices_per_node))
        first = (island.name, island.device.kind, *counts)
        if island.devices_per_node > 1:
            table.add_row(*first, "inside a node", *_cells(island.intra_node))
            first = ("", "", "", "")
        if island.nics is not None:
            nics = f"{island.nics.per_node} NICs of a node, each"
            card = LinkFigures(bandwidth=island.nics.bandwidth)
            table.add_row(*first, nics, *_cells(card))
            first = ("", "", "", "")
        if island.nodes > 1:
            link = inter_node(island)
            if link.bandwidth is None and island.nics is not None:
                share = island.nics.share_bytes_per_second(island.devices_per_node)
                link = replace(link, bandwidth=Figure(value=share, source="share of the NICs"))
            table.add_row(*first, "between nodes", *_cells(link))
    if len(draft.islands) > 1:
        table.add_row("", "", "", "", "between islands", *_cells(draft.across))
    print_table(table)


def _cells(link: LinkFigures) -> tuple[str, str, str]:
    from rich.markup import escape

    from hetplan.units import format_bandwidth, format_seconds

    own = format_bandwidth(link.bandwidth.value) if link.bandwidth else ""
    shared = f"{format_bandwidth(link.shared.value)} shared" if link.shared else ""
    return (
        ", ".join(part for part in (own, shared) if part),
        format_seconds(link.latency.value) if link.latency else "",
        escape(link.samples or ""),
    )
