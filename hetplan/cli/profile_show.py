"""What `hetplan profile` prints: samples, the content of a store, what a job still needs."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from hetplan.cli.options import emit, emit_lines, say
from hetplan.cluster.devices import CPU_KIND, DeviceKind
from hetplan.cluster.load import load_cluster
from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.predict.populations import choose
from hetplan.profiling.grid import TP_DEGREES, ShapeOptions
from hetplan.profiling.measure_layers import unit_shapes
from hetplan.profiling.needs import (
    Here,
    LayerNeed,
    LinkNeed,
    LinkPlace,
    cluster_kinds,
    device_here,
    layer_needs,
    link_needs,
)
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, ProfileSet
from hetplan.profiling.store import PopulationState, store_state
from hetplan.reports.terminal import print_small, small_table
from hetplan.units import counted, format_about, format_brief, format_bytes

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandInputs:
    """Files that commands for a person name."""

    model: Path | None = None
    job: Path | None = None
    cluster: Path | None = None
    store: Path | None = None
    """None: the user's own store."""

    def words(self, *names: str) -> list[str]:
        """The options of these names, quoted for a shell."""
        given = ((name, getattr(self, name)) for name in names)
        return [f"--{name} {shlex.quote(str(path))}" for name, path in given if path is not None]


def list_store(store: Path, shapes: ShapeOptions, files: CommandInputs, *, as_json: bool) -> None:
    """Print what the store holds and, with a model and a job, what they need beside it."""
    wanted = shapes.model is not None
    if files.cluster is not None and not wanted:
        raise InputError("--cluster says where; add --model and --job, which say what is needed")
    # Whoever asks what a job needs may have measured nothing yet.
    states = store_state(store) if store.is_dir() or not wanted else ()
    needs = _needs(shapes, files, states) if wanted else ()
    listed = StoreList(populations=tuple(_listed(state, store) for state in states), needs=needs)
    if as_json:
        emit(encode(listed, schema=SCHEMA))
        return
    _print_populations(listed.populations)
    if wanted:
        _print_needs(needs)


def _listed(state: PopulationState, store: Path) -> ListedPopulation:
    provenance, profiles = state.provenance, state.profiles
    return ListedPopulation(
        folder=str(state.folder.relative_to(store)),
        device=provenance.device if provenance else "",
        device_name=provenance.device_name if provenance else "",
        links=tuple(dict.fromkeys(sample.link for sample in profiles.links)),
        layer_rows=len(profiles.layers),
        link_rows=len(profiles.links),
        operator_rows=len(profiles.operators),
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
    table = small_table("of | >layers | >operators | >links | measured | damage")
    for each in populations:
        table.add_row(
            escape(", ".join(each.links) or each.device or "?"),
            f"{each.layer_rows:,}",
            f"{each.operator_rows:,}",
            f"{each.link_rows:,}",
            _dates(each),
            counted(len(each.damage), "fault") if each.damage else "",
        )
    print_small(table)
    for fault in (fault for each in populations for fault in each.damage):
        emit(f"damage: {fault}")
    if torn := sum(each.torn_rows for each in populations):
        say(f"{counted(torn, 'half row')} at the ends of files left out; a kill left them")


def _dates(each: ListedPopulation) -> str:
    """The day on which it was measured, or the first and the last."""
    if not each.measured_on:
        return ""
    first, last = each.measured_on[0], each.measured_on[-1]
    return first if first == last else f"{first} to {last}"


def _needs(
    shapes: ShapeOptions, files: CommandInputs, states: Sequence[PopulationState]
) -> tuple[ListedNeed, ...]:
    """Everything that is needed, cheapest first."""
    held, here = _fitted(states), device_here()
    kinds: tuple[tuple[str, DeviceKind | None, int], ...]
    links: tuple[LinkNeed, ...] = ()
    elsewhere = None
    if files.cluster is None:
        names = dict.fromkeys((here.kind, *(sample.device for sample in held.layers)))
        kinds = tuple((name, None, max(TP_DEGREES)) for name in names)
    else:
        cluster = load_cluster(files.cluster)
        kinds, links = cluster_kinds(cluster), link_needs(shapes, cluster, held.links)
        elsewhere = " ".join(["hetplan profile script", *files.words("cluster", "model", "job")])
    listed = []
    for need in layer_needs(shapes, kinds, held.layers):
        is_here = here.is_kind(need.kind)
        command = elsewhere if elsewhere and not is_here else layers_command(files, need.kind, here)
        listed.append(_layer_need(need, is_here, command))
    for link in links:
        is_here = link.place.nodes == 1 and all(map(here.is_kind, link.place.kinds))
        command = elsewhere if elsewhere and not is_here else link_command(files, link.place)
        listed.append(_link_need(link, is_here, command))
    return tuple(
        sorted(listed, key=lambda each: float("inf") if each.seconds is None else each.seconds)
    )


def layers_command(files: CommandInputs, kind: str, here: Here) -> str:
    """The command that measures the layers of a kind on this machine."""
    words = ["hetplan profile layers", *files.words("model", "job", "store")]
    if kind == CPU_KIND and here.torch_device != CPU_KIND:
        words.append("--device cpu")
    elif kind not in (here.kind, CPU_KIND):
        words.append(f"--kind {shlex.quote(kind)}")
    return " ".join(words)


def link_command(files: CommandInputs, place: LinkPlace) -> str:
    """The command that measures a link inside this machine."""
    words = [
        f"torchrun --standalone --nproc-per-node {place.processes_per_node} -m hetplan profile",
        f"links {shlex.quote(place.name)}",
        *files.words("model", "job", "store"),
        *(["--device cpu"] if place.is_host_staged else []),
    ]
    return " ".join(words)


def _fitted(states: Sequence[PopulationState]) -> ProfileSet:
    """The samples that a fit would use: those of the newest populations."""
    chosen = choose([state.profiles for state in states if state.provenance is not None])
    return ProfileSet(layers=chosen.layers, links=chosen.links, provenance=())


def _layer_need(need: LayerNeed, here: bool, command: str) -> ListedNeed:
    return ListedNeed(
        what="layers",
        name=need.kind,
        where="",
        needed_samples=sum(len(unit_shapes(unit)) for unit in need.units),
        missing_samples=need.missing_samples,
        shapes=tuple(map(str, need.missing)),
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
    table = small_table("what | name | >missing | >of | about | here")
    for need in missing:
        table.add_row(
            need.what,
            escape(need.name),
            str(need.missing_samples),
            str(need.needed_samples),
            "not known" if need.seconds is None else format_about(need.seconds),
            "yes" if need.here else "no",
        )
    print_small(table)
    for command in dict.fromkeys(need.command for need in missing if need.here):
        emit(f"here: {command}")
    for command in dict.fromkeys(need.command for need in missing if not need.here):
        names = ", ".join(need.name for need in missing if need.command == command)
        emit(f"elsewhere ({names}): {command}")


PROFILES_SCHEMA = "hetplan.profiles/1"


def show_samples(result: ProfileSet, *, as_json: bool) -> None:
    """One row for all samples of a name: how many, shortest and longest, and their spread."""
    if as_json:
        emit(encode(result, schema=PROFILES_SCHEMA))
        return
    groups: dict[str, list[LayerSample | OperatorSample | LinkSample]] = {}
    for layer in sorted(result.layers, key=lambda each: (each.layer, each.phase)):
        groups.setdefault(f"{layer.layer} {layer.phase}", []).append(layer)
    for operator in sorted(result.operators, key=lambda each: each.operator):
        groups.setdefault(operator.operator, []).append(operator)
    for link in sorted(result.links, key=lambda each: each.operation):
        groups.setdefault(link.operation, []).append(link)
    table = small_table("measured | >samples | >shortest | >longest | >p90 over p10")
    for name, members in groups.items():
        times = [each.median_seconds for each in members]
        spreads = [each.p90_seconds / each.p10_seconds for each in members if each.p10_seconds]
        table.add_row(
            escape(name),
            str(len(members)),
            format_brief(min(times)),
            format_brief(max(times)),
            f"{statistics.median(spreads):.2f}" if spreads else "",
        )
    print_small(table)
    unsteady = sum(not each.steady for each in result.layers)
    if unsteady:
        emit_lines([f"{unsteady} did not reach a steady time: measure again on an idle machine"])
