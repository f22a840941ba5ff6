"""`hetplan profile --list`: what a store holds, its damage, and what a job still needs measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from hetplan.cli.options import emit, say
from hetplan.cli.profile_request import ProfileRequest
from hetplan.cli.profile_tables import new_table
from hetplan.cluster.devices import DeviceKind
from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.predict.populations import choose
from hetplan.profiling.missing import LayerNeed, LinkNeed
from hetplan.profiling.samples import ProfileSet
from hetplan.profiling.store_state import PopulationState, store_state
from hetplan.reports.terminal import print_table
from hetplan.units import format_about, format_bytes

SCHEMA = "hetplan.store/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPopulation:
    """One population, as it is listed."""

    folder: str
    """Below the store."""
    device: str
    """Empty where the provenance cannot be read."""
    device_name: str
    links: tuple[str, ...]
    layer_rows: int
    link_rows: int
    measured_on: tuple[str, ...]
    tool: str
    clocks: str
    driver: str
    torch_version: str
    threads: int
    together: int
    paced: str
    torn_rows: int
    damage: tuple[Fault, ...]
    """What cannot be read."""
    operator_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedNeed:
    """Layers of a kind, or a link, that still have to be measured."""

    what: str
    """`layers` or `link`."""
    name: str
    """Device kind, or the link's name."""
    where: str
    """Where a link is."""
    needed_samples: int
    missing_samples: int
    shapes: tuple[str, ...]
    """What is missing, in words, cheapest first."""
    seconds: float | None
    basis: str
    here: bool
    """Whether this machine can measure it."""
    command: str
    """What measures it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreList:
    """Everything that is listed."""

    populations: tuple[ListedPopulation, ...]
    needs: tuple[ListedNeed, ...]
    """Cheapest first; empty without a model and a job."""


def list_store(request: ProfileRequest, cluster: Path | None) -> None:
    """Print what the store holds and, with a model and a job, what they need beside it."""
    wanted = request.model is not None
    if cluster is not None and not wanted:
        raise InputError("--cluster says where; add --model and --job, which say what is needed")
    folder = request.store_folder
    # Whoever asks what a job needs may have measured nothing yet.
    states = store_state(folder) if folder.is_dir() or not wanted else ()
    needs = _needs(request, cluster, states) if wanted else ()
    listed = StoreList(populations=tuple(_listed(state, folder) for state in states), needs=needs)
    if request.as_json:
        emit(encode(listed, schema=SCHEMA))
        return
    _print_populations(listed.populations)
    if wanted:
        _print_needs(needs)


def _listed(state: PopulationState, store: Path) -> ListedPopulation:
    provenance = state.provenance
    return ListedPopulation(
        folder=str(state.folder.relative_to(store)),
        device=provenance.device if provenance else "",
        device_name=provenance.device_name if provenance else "",
        links=tuple(dict.fromkeys(sample.link for sample in state.links)),
        layer_rows=len(state.layers),
        link_rows=len(state.links),
        operator_rows=len(state.operators),
        measured_on=state.dates,
        tool=provenance.tool if provenance else "",
        clocks=provenance.clocks if provenance else "",
        driver=provenance.driver if provenance else "",
        torch_version=provenance.torch_version if provenance else "",
        threads=provenance.threads if provenance else 0,
        together=provenance.together if provenance else 0,
        paced=provenance.paced if provenance else "",
        torn_rows=len(state.torn),
        damage=state.damage,
    )


def _print_populations(populations: Sequence[ListedPopulation]) -> None:
    table = new_table(
        "device", "link", "layers", "operators", "links", "measured on", "tool", "clocks", "torch",
        "threads", "paced", "name", "damage",
    )  # fmt: skip
    for each in populations:
        first, last = (each.measured_on[0], each.measured_on[-1]) if each.measured_on else ("", "")
        cells = (
            each.device or "?",
            ", ".join(each.links),
            str(each.layer_rows),
            str(each.operator_rows),
            str(each.link_rows),
            first if first == last else f"{first} to {last}",
            each.tool,
            each.clocks,
            each.torch_version,
            str(each.threads) if each.together < 2 else f"{each.threads} x {each.together}",
            each.paced,
            each.device_name,
            f"{len(each.damage)} faults" if each.damage else "",
        )
        table.add_row(*map(escape, cells))
    print_table(table)
    for fault in (fault for each in populations for fault in each.damage):
        emit(f"damage: {fault}")
    if torn := sum(each.torn_rows for each in populations):
        say(f"hetplan: {torn} half rows at the ends of files are left out; a kill left them")


def _needs(
    request: ProfileRequest, cluster: Path | None, states: Sequence[PopulationState]
) -> tuple[ListedNeed, ...]:
    """Everything that is needed, cheapest first."""
    from hetplan.cli import profile_needs as needs
    from hetplan.cluster.load import load_cluster
    from hetplan.profiling.grid import TP_DEGREES

    held = _fitted(states)
    here = needs.device_here()
    spec = load_cluster(cluster) if cluster is not None else None
    if spec is None:
        names = dict.fromkeys((here.kind, *(sample.device for sample in held.layers)))
        kinds: tuple[tuple[str, DeviceKind | None, int], ...] = tuple(
            (name, None, max(TP_DEGREES)) for name in names
        )
        links: tuple[LinkNeed, ...] = ()
    else:
        kinds = needs.cluster_kinds(spec)
        links = needs.link_needs(request, spec, held.links)
    listed = []
    for need in needs.layer_needs(request, kinds, held.layers):
        is_here = here.is_kind(need.kind)
        command = needs.layers_command(request, need.kind, here)
        if not is_here and cluster is not None:
            command = needs.campaign_command(request, cluster)
        listed.append(_layer_need(need, is_here, command))
    for link in links:
        place = link.place
        same = all(map(here.is_kind, place.kinds))
        is_here = place.nodes == 1 and same
        command = needs.link_command(request, place)
        if not is_here and cluster is not None:
            command = needs.campaign_command(request, cluster)
        listed.append(_link_need(link, is_here, command))
    return tuple(
        sorted(listed, key=lambda each: float("inf") if each.seconds is None else each.seconds)
    )


def _fitted(states: Sequence[PopulationState]) -> ProfileSet:
    """The samples that a fit would use: those of the newest populations."""
    chosen = choose([state.profiles for state in states if state.provenance is not None])
    return ProfileSet(layers=chosen.layers, links=chosen.links, provenance=())


def _layer_need(need: LayerNeed, here: bool, command: str) -> ListedNeed:
    from hetplan.profiling.campaign_runner import describe
    from hetplan.profiling.missing import unit_shapes

    return ListedNeed(
        what="layers",
        name=need.kind,
        where="",
        needed_samples=sum(len(shapes) for shapes in unit_shapes(need.units)),
        missing_samples=need.missing_samples,
        shapes=tuple(describe(unit) for unit in need.missing),
        seconds=need.seconds,
        basis=need.basis,
        here=here,
        command=command if need.missing else "",
    )


def _link_need(need: LinkNeed, here: bool, command: str) -> ListedNeed:
    return ListedNeed(
        what="link",
        name=need.place.name,
        where=need.place.words,
        needed_samples=len(need.cases),
        missing_samples=len(need.missing),
        shapes=tuple(
            f"{case.operation} {format_bytes(case.message_bytes)} among {case.group_size}"
            for case in need.missing
        ),
        seconds=need.seconds,
        basis="cluster file",
        here=here,
        command=command if need.missing else "",
    )


def _print_needs(needs: Sequence[ListedNeed]) -> None:
    missing = [need for need in needs if need.missing_samples]
    if not missing:
        emit("Nothing is missing: every sample that this job needs is there.")
        return
    emit("Still to measure, cheapest first:")
    table = new_table("what", "name", "missing", "of", "about", "by", "here", "which")
    for need in missing:
        table.add_row(
            need.what,
            need.name,
            str(need.missing_samples),
            str(need.needed_samples),
            "not known" if need.seconds is None else format_about(need.seconds),
            need.basis,
            "yes" if need.here else "no",
            _summary(need),
        )
    print_table(table)
    for command in dict.fromkeys(need.command for need in missing if need.here):
        emit(f"here: {command}")
    for command in dict.fromkeys(need.command for need in missing if not need.here):
        names = ", ".join(need.name for need in missing if need.command == command)
        emit(f"elsewhere ({names}): {command}")


def _summary(need: ListedNeed) -> str:
    """What is missing, short: first and last of the list, or where a link is."""
    ends = list(_ends(need.shapes))
    return f"{need.where}: {' ... '.join(ends)}" if need.where else " ... ".join(ends)


def _ends(shapes: Sequence[str]) -> Iterable[str]:
    return shapes if len(shapes) < 3 else (shapes[0], shapes[-1])
