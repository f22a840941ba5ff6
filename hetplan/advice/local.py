"""This machine as a `MeasurementBackend`: fits, searches, and measures with its own devices."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hetplan.advice.candidates import Candidate, PlanNeeds, candidates, first_units
from hetplan.advice.loop import Report, View, measure_for_job
from hetplan.advice.measurement_order import Choice, near_best
from hetplan.advice.plan_sensitivities import PlanSensitivities, plan_sensitivities
from hetplan.cluster.devices import CPU_KIND
from hetplan.errors import InputError, ProfileError
from hetplan.model.layer_units import own_layer_fault
from hetplan.model.spec import TRAINED_KINDS
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedPredictor, fit_populations
from hetplan.predict.layer.values import ALL_LAYERS
from hetplan.predict.populations import choose
from hetplan.profiling.backends import Backend, open_backend
from hetplan.profiling.measure_layers import Unit, unit_shapes, unit_work
from hetplan.profiling.needs import Here, LinkPlace, link_case
from hetplan.profiling.provenance import kind_here, provenance_here
from hetplan.profiling.run import Measuring, measure_missing
from hetplan.profiling.samples import LayerSample, ProfileSet, Provenance
from hetplan.profiling.store import LayerWriter, read_populations
from hetplan.profiling.work import Work
from hetplan.search.result import Inputs
from hetplan.search.space.allowed import tensor_degrees
from hetplan.units import format_about
from hetplan.whatif.ask import ask
from hetplan.whatif.near_best import rivals
from hetplan.whatif.no_plan import with_reasons

MAX_PLANS = 6  # a handful that a person can read
_RIVAL_SECONDS = 30.0  # enough for a dozen rivals of a 140 B model on 768 devices (22 s)
_MAX_DEVICES = 64  # more than any node that is sold has
_GRACE_SECONDS = 30.0  # past the budget, before a link's ranks are stopped; what they kept stays


class LocalBackend:
    """This machine's devices.

    `folders`: stores to read. Samples are added to the store of `measuring`.
    """

    def __init__(self, measuring: Measuring, inputs: Inputs, folders: Sequence[Path]) -> None:
        self.measuring, self.inputs, self.folders = measuring, inputs, tuple(folders)
        backend = open_backend(measuring.device)
        self.devices = _count(backend.name)
        self.here = Here(torch_device=backend.name, kind=measuring.kind or kind_here(backend))
        self._backends = {self.here.kind: backend}
        self._plans: tuple[Plan, ...] = ()

    def look(self) -> View:
        """Fit what is held, search, and price the plans that cannot be told from the best."""
        held = self._populations()
        predictor = fit_populations(held)
        with with_reasons(self.inputs, predictor):
            best = ask(self.inputs, predictor).plan
        if not self._plans:
            self._plans = rivals(best, self.inputs, predictor, seconds=_RIVAL_SECONDS)
        # Rivals of an earlier look stay: what was measured may have made one of them the best.
        self._plans = tuple(dict.fromkeys((best, *self._plans)))
        priced = [
            plan_sensitivities(f"{number}", plan, self.inputs, predictor)
            for number, plan in enumerate(self._plans)
        ]
        plans = near_best(priced, most=MAX_PLANS)
        wanted = self._wanted(predictor, held, plans)
        return View(
            plans=plans,
            log_halfwidth=plans[0].estimate.own_log_halfwidth or 0.0,
            candidates=candidates(wanted, self.here, self.devices),
            notes=self._notes(predictor, held),
        )

    def measure(self, candidate: Candidate, seconds_left: float) -> float:
        """Measure it; every sample is in the store before the next one is begun."""
        started = time.monotonic()
        if candidate.place is not None:
            self._measure_link(candidate, seconds_left)
            return time.monotonic() - started
        (kind,) = candidate.kinds
        for index, unit in enumerate((*self.first(kind), *candidate.units)):
            if index and time.monotonic() - started > seconds_left:
                break  # what is there counts, and the same command goes on from there
            self._measure_unit(kind, unit)
        return time.monotonic() - started

    def first(self, kind: str) -> tuple[Unit, ...]:
        """What must be measured on this kind before anything else, for want of a datasheet.

        A fit takes the newest population of a kind, so one that is begun here must be able to
        answer for the others that there are.
        """
        model, cluster, job = self.inputs.model, self.inputs.cluster, self.inputs.job
        if kind not in self._without_datasheet():
            return ()
        pinned = job.pin.tp
        degrees = tensor_degrees(model, cluster) if pinned is None else (pinned,)
        held = {sample.shape for sample in self._own(self._populations(), kind)}
        return first_units(model, job, degrees, held, unit_shapes)

    def measure_first(self, kinds: Sequence[str], budget_seconds: float) -> float:
        """Measure what these kinds need before anything can be predicted; the seconds it took.

        An InputError where the budget is too small for it: without it nothing can be said.
        """
        work = [(kind, unit) for kind in kinds for unit in self.first(kind)]
        started = time.monotonic()
        for index, (kind, unit) in enumerate(work):
            spent = time.monotonic() - started
            # The units go from cheap to expensive: the next takes no less than they did so far.
            if spent + (spent / index if index else 0.0) > budget_seconds:
                raise InputError(
                    f"--budget is too small: nothing is known of device kind {kind}, which has no "
                    f"datasheet, so {len(work)} layers are measured first; {index} are, in "
                    f"{format_about(spent)}, and the same command goes on from there"
                )
            self.measuring.tell(f"nothing is known of {kind} yet; measuring {unit} first")
            self._measure_unit(kind, unit)
        return time.monotonic() - started

    def measure_unknown_kinds(self, budget_seconds: float, *, only_look: bool = False) -> float:
        """Measure first what a prediction needs on kinds without datasheet; the seconds it took.

        An InputError where this machine has no such device, or `only_look` forbids to measure it.
        """
        unknown = self.unknown_kinds()
        away = [kind for kind in unknown if not self.here.is_kind(kind)]
        if away:
            raise InputError(
                f"nothing is known of device kind {', '.join(away)}: no samples and no datasheet "
                "figures for the job's precision; run this command on a machine that has it, with "
                "a store that this one can read"
            )
        if unknown and only_look:
            raise InputError(
                f"nothing is known of device kind {', '.join(unknown)} yet, so no plan can be "
                "priced; run the command without --dry-run: it measures each kind of layer first"
            )
        return self.measure_first(unknown, budget_seconds)

    def unknown_kinds(self) -> tuple[str, ...]:
        """Kinds of the cluster of which neither samples nor a datasheet say anything."""
        laws = fit_populations(self._populations()).laws.layers
        # A run that was cut short leaves a kind of which only some layers are known.
        needed = {*(layer.value for layer in TRAINED_KINDS), ALL_LAYERS}
        answered: dict[str, set[str]] = {}
        for law in laws:
            if law.precision == self.inputs.job.precision.value:
                answered.setdefault(law.device, set()).add(law.layer)
        known = {kind for kind, layers in answered.items() if needed <= layers}
        return tuple(kind for kind in self._without_datasheet() if kind not in known)

    def _without_datasheet(self) -> tuple[str, ...]:
        """Kinds of the cluster whose datasheet has no rate of the job's precision."""
        precision = self.inputs.job.precision.value
        kinds = {island.device.kind: island.device for island in self.inputs.cluster.islands}
        return tuple(kind for kind, device in kinds.items() if precision not in device.dtypes)

    def _populations(self) -> tuple[ProfileSet, ...]:
        return read_populations(*(folder for folder in self.folders if folder.is_dir()))

    def _wanted(
        self,
        predictor: FittedPredictor,
        held: Sequence[ProfileSet],
        plans: Sequence[PlanSensitivities],
    ) -> PlanNeeds:
        chosen = choose(held)
        kinds = {island.device.kind for island in self.inputs.cluster.islands}
        own = {kind for kind in kinds if self.here.is_kind(kind)}
        layers = [sample for sample in chosen.layers if sample.device not in own]
        for kind in sorted(own):
            layers += self._own(held, kind)
        largest: dict[str, float] = {}
        widths: dict[str, float] = {}
        for each in plans:
            for part in each.parts:
                widths[part.asked] = max(widths.get(part.asked, 0.0), part.log_halfwidth)
            for cause, size in each.largest_messages.items():
                largest[cause] = max(largest.get(cause, 0.0), size)
        return PlanNeeds(
            model=self.inputs.model,
            cluster=self.inputs.cluster,
            job=self.inputs.job,
            predictor=predictor,
            asked=tuple(dict.fromkeys(asked for each in plans for asked in each.asked)),
            largest_messages=largest,
            log_halfwidths=widths,
            layers=tuple(layers),
            links=tuple((sample.link, link_case(sample)) for sample in chosen.links),
        )

    def _notes(self, predictor: FittedPredictor, held: Sequence[ProfileSet]) -> tuple[str, ...]:
        """What a reader must know of what is measured here."""
        fault = own_layer_fault(self.inputs.model)
        if fault:
            return (
                f"no layers are measured: {fault}; `hetplan profile operators` measures what they "
                "are made of",
            )
        known = {law.device for law in predictor.laws.layers}
        kinds = {island.device.kind for island in self.inputs.cluster.islands}
        return tuple(
            f"what is known of {kind} was measured elsewhere, or under other circumstances; what "
            "is measured here is a population of its own, which fits take instead from then on"
            for kind in sorted(kinds & known)
            if self.here.is_kind(kind) and not self._own(held, kind)
        )

    def _own(self, held: Sequence[ProfileSet], kind: str) -> list[LayerSample]:
        """Samples that were measured here, under today's circumstances."""
        mine = self._provenance(kind)
        return [
            sample
            for population in held
            if any(each.circumstances == mine.circumstances for each in population.provenance)
            for sample in population.layers
            if sample.device == kind
        ]

    def _backend(self, kind: str) -> Backend:
        if kind not in self._backends:
            self._backends[kind] = open_backend(CPU_KIND)
        return self._backends[kind]

    def _provenance(self, kind: str) -> Provenance:
        return provenance_here(
            self._backend(kind),
            device=kind,
            threads=self.measuring.threads,
            command=self.measuring.command,
        )

    def _measure_unit(self, kind: str, unit: Unit) -> None:
        def refuse(_: Work, error: Exception) -> None:
            raise ProfileError(f"{kind} refuses it ({str(error).splitlines()[0]})") from error

        writer = LayerWriter(self.measuring.store, self._provenance(kind))
        measure_missing([unit_work(unit, kind, self._backend(kind))], writer, on_failure=refuse)

    def _measure_link(self, candidate: Candidate, seconds_left: float) -> None:
        # What torchrun would set and say a word about; each rank sets its threads itself.
        environment = {"OMP_NUM_THREADS": str(self.measuring.threads), **os.environ}
        command = link_program(self.measuring, candidate)
        ranks = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        try:
            code = ranks.wait(timeout=max(seconds_left, 0.0) + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0  # rows that are there count; the rest is missing, as after any interruption
        finally:
            if ranks.poll() is None:
                ranks.terminate()
                ranks.wait()
        if code:
            raise ProfileError(f"its ranks ended with exit code {code}; what they said is above")


def link_program(measuring: Measuring, candidate: Candidate) -> list[str]:
    """The program that measures a link between devices of this machine."""
    if candidate.place is None:
        raise InputError(f"{candidate.name} is no link")
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(candidate.place.processes_per_node)),
        *("-m", "hetplan", "profile", "links", candidate.place.name),
        *("--sizes", ",".join(map(str, candidate.sizes))),
        *("--store", str(measuring.store), "--threads", str(measuring.threads)),
        *_device(measuring, candidate.place),
    ]


def _device(measuring: Measuring, place: LinkPlace) -> tuple[str, ...]:
    if place.is_host_staged:
        return ("--device", CPU_KIND)
    return () if measuring.device is None else ("--device", measuring.device)


def _count(name: str) -> int:
    """Devices of this machine that ranks can have."""
    if name == CPU_KIND:
        return os.cpu_count() or 1
    count = 0
    try:
        while count < _MAX_DEVICES:
            open_backend(name, index=count)
            count += 1
    except InputError:
        if not count:
            raise
    return count


def measure_for(
    measuring: Measuring,
    inputs: Inputs,
    folders: Sequence[Path],
    *,
    on_begin: Callable[[Choice[Candidate], float], None] | None = None,
) -> Report:
    """Measure on this machine what shrinks the interval of the job's best plans most, first.

    An InputError where the budget is too small for one measurement, or where nothing is known of a
    device kind that this machine does not have.
    """
    budget = measuring.budget_seconds
    backend = LocalBackend(measuring, inputs, folders)
    spent = backend.measure_unknown_kinds(budget)
    report = measure_for_job(backend, budget - spent, on_begin=on_begin)
    if not report.done and not spent and report.least_seconds is not None:
        raise InputError(
            f"--budget of {format_about(budget)} is too small for one measurement: the shortest "
            f"that is worth it, {report.least}, takes about {format_about(report.least_seconds)}"
        )
    return report
