"""Is a plan file what it says it is: legal, in memory, of this price, and as good as it claims?

Nothing here asks the search. Rules come from `hetplan.plans`, prices from `hetplan.cost`, the list
of families (what is a candidate at all) and their stage tables from `hetplan.search.space`; that no
plan is faster is shown again by `closed_form` and `orders`, which are written apart from the
search's own bounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hetplan.cost.estimate import estimate_with
from hetplan.cost.replay.ends import replayed
from hetplan.cost.step_model.draws import straggler_wait
from hetplan.cost.step_model.plan import sends_wait
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.step_model.step import compose
from hetplan.deadline import check_time
from hetplan.errors import Fault, InputError, OutOfTimeError
from hetplan.files.encoding import to_plain
from hetplan.files.reading import read_document
from hetplan.predict.predictor import Predictor
from hetplan.proof import orders
from hetplan.proof.closed_form import ClosedForm, several_pipelines_bound
from hetplan.search.evidence import families_digest, family_words
from hetplan.search.file_rules import SAME
from hetplan.search.files import is_sealed, load_legal_plan, placed_faults
from hetplan.search.result import FamilyBound, Inputs, Proof, SearchResult
from hetplan.search.solver import Grounds
from hetplan.search.solvers import may_have_several
from hetplan.search.space.allowed import searched_cluster
from hetplan.search.space.families import Families
from hetplan.search.space.family import Family, FamilyTable
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_tables import StageTables

VERIFICATION_SCHEMA = "hetplan.verification/1"
_HALVINGS = 8
"""Of the range in which a bound is looked for that can be shown instead of the claimed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshown:
    """A part of the space of which less could be shown than the certificate claims."""

    family: int | None
    """Its number in the list of families; None: plans of several pipelines."""
    plans: str
    """Which plans, in words."""
    shown_seconds: float
    """None of them has a shorter step: what could be shown."""
    grounds: str
    """What the search's own bound rests on; empty where these plans were not looked at in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBound:
    """The lower bound of a certificate, shown again. Times are seconds of a step."""

    claimed_seconds: float
    shown_seconds: float
    """No plan of the families that were looked at has a shorter step: shown without the search."""
    families: int
    looked_at: int
    """Fewer in a sample."""
    without_room: int
    """Families that have no plan, as the model does not fit."""
    by_closed_form: int
    by_orders: int
    """Families that the dynamic program over orders excludes."""
    unshown: tuple[Unshown, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What holds of a plan file; what does not is an InputError."""

    schema: str = VERIFICATION_SCHEMA
    sealed: bool
    """The file is as hetplan wrote it; forms before 9 have no seal, so that nobody knows."""
    step_seconds: float
    """By the replay in Python, as the file says."""
    peak_memory_bytes: float
    """On the fullest device."""
    bound: ShownBound | None
    """None where the file has no proof."""
    not_checked: tuple[str, ...]
    """What could not be checked, in words."""


def verify(
    path: Path,
    predictor: Predictor,
    predictor_sha256: str = "",
    *,
    sample: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check a plan file again from its own inputs; an InputError names the first that fails.

    `predictor_sha256`: of the predictor's profiles, to tell other profiles from a wrong price.
    `sample`: look at so many of the families that the closed form excludes, drawn at random.
    `progress` is told how many families of how many were looked at.
    """
    document = read_document(path)
    result = load_legal_plan(document)
    sealed = is_sealed(document) is True
    form = document.at("schema")
    not_checked = [] if sealed else [f"whether the file was changed: {form} has no seal"]
    recorded = dict(result.inputs.sha256).get("predictor", "")
    other_profiles = bool(recorded and predictor_sha256) and recorded != predictor_sha256
    if other_profiles:
        not_checked.append("the profiles: others than the plan's, with the same price")
    try:
        peak = _check_price(path, result, predictor)
    except InputError as error:
        if not other_profiles:
            raise
        message = f"priced with profiles of digest {recorded[:12]}, these have "
        message += f"{predictor_sha256[:12]} and give another price or none; name the plan's own "
        message += "with --store or --predictor"
        raise _refused(path, "inputs.sha256", message) from error
    if result.restriction or result.alternatives or result.idle or result.prices or result.alone:
        not_checked.append("what the file says of other targets, other plans and other clusters")
    certificate, bound = result.certificate, None
    if certificate is None:
        not_checked.append(f"that no plan is faster: {result.unproven}")
    else:
        if certificate.proof is None:
            not_checked.append("that no plan is faster: the certificate has no proof")
        else:
            claim = _Claim(path, result.inputs, certificate.lower_bound_seconds, certificate.proof)
            bound, late = claim.shown(predictor, sample, progress)
            not_checked += late
    return Verification(
        sealed=sealed,
        step_seconds=result.estimate.step_seconds,
        peak_memory_bytes=peak,
        bound=bound,
        not_checked=tuple(not_checked),
    )


def _refused(path: Path, field: str, message: str) -> InputError:
    return InputError(*placed_faults(path, [Fault(field=field, message=message)]))


def _check_price(path: Path, result: SearchResult, predictor: Predictor) -> float:
    """Most bytes on a device; InputError where step, memory or estimate are not as the file says.

    The step is replayed in Python; the rest of the estimate is made again and compared.
    """
    inputs, plan = result.inputs, result.plan
    pricer = Pricer(inputs.model, inputs.cluster, inputs.job, predictor)
    costs, step = pricer.costs(plan), pricer.step(plan)
    times = [each.times() for each in step.work]
    ends = replayed(times, sends_wait(plan), in_python=True).ends
    seconds = compose(plan, costs, step.work, ends).step_seconds
    seconds += straggler_wait(plan, costs, step)
    if not math.isclose(seconds, result.estimate.step_seconds, rel_tol=SAME):
        message = f"{result.estimate.step_seconds!r} in the file; the replay takes {seconds!r}"
        raise _refused(path, "estimate.step_seconds", message)
    again = estimate_with(pricer, plan)
    for place, old, new in _differences(to_plain(result.estimate), to_plain(again), "estimate"):
        raise _refused(path, place, f"{old!r} in the file; the inputs give {new!r}")
    memory = [use for pipeline in step.memory for use in pipeline]
    for s, use in enumerate(memory):
        if not use.fits and result.certificate is not None:
            message = f"needs {use.total_bytes:.6g} of {use.available_bytes:.6g} bytes"
            raise _refused(path, f"estimate.stages[{s}].memory", message)
    return max(use.total_bytes for use in memory)


def _differences(old: object, new: object, place: str) -> Iterator[tuple[str, object, object]]:
    """(field, in the file, made again) of every number and word that is not the same."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for key in old:
            yield from _differences(old[key], new[key], f"{place}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (one, two) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, two, f"{place}[{at}]")
    elif isinstance(old, float | int) and isinstance(new, float | int):
        if not math.isclose(old, new, rel_tol=SAME, abs_tol=1e-12):
            yield place, old, new
    elif old != new:
        yield place, old, new


@dataclass(frozen=True)
class _Claim:
    """That no plan has a step below `seconds`, and what that rests on."""

    path: Path
    inputs: Inputs
    seconds: float
    proof: Proof

    def shown(
        self,
        predictor: Predictor,
        sample: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[ShownBound, list[str]]:
        """What can be shown of it, and what was not looked at, in words; InputError where the proof
        is not of these inputs, or fails.
        """
        model, job, proof = self.inputs.model, self.inputs.job, self.proof
        cluster = searched_cluster(self.inputs.cluster, job)
        families = Families(model=model, cluster=cluster, job=job).families()
        if (len(families), families_digest(families)) != (proof.families, proof.families_sha256):
            message = f"of {proof.families} families; these inputs have {len(families)}, or others"
            raise _refused(self.path, "certificate.proof", message)
        pricer = StagePricer(model=model, cluster=cluster, job=job, predictor=predictor)
        self._check_named(families)
        named = {each.family for each in proof.raised}
        others = [at for at in range(len(families)) if at not in named]
        if sample is not None and sample < len(others):
            # No seed of the file's: it could choose what is looked at.
            others = random.SystemRandom().sample(others, max(0, sample))
        without_room, looked_at = self._closed_form(pricer, families, others, progress)
        tables, unshown, by_orders = StageTables(pricer), list[Unshown](), 0
        left = len(families) - len(named) - looked_at
        missed = [f"{left:,} families outside the sample"] if left else []
        try:
            for claim in proof.raised:
                check_time()
                unshown += self._orders(tables, families, claim)
                by_orders += 1
            check_time()
            unshown += self._several(pricer)
        except OutOfTimeError:
            left = len(families) - looked_at - by_orders
            plans = [f"{left:,} families"] * bool(left)
            plans += ["plans of several pipelines"] * may_have_several(job)
            missed = [f"{' and '.join(plans)}, for the time limit"]
            unshown.append(Unshown(family=None, plans=missed[0], shown_seconds=0.0, grounds=""))
        shown = ShownBound(
            claimed_seconds=self.seconds,
            shown_seconds=min([self.seconds, *(each.shown_seconds for each in unshown)]),
            families=len(families),
            looked_at=looked_at + by_orders,
            without_room=without_room,
            by_closed_form=looked_at - without_room,
            by_orders=by_orders - sum(each.family is not None for each in unshown),
            unshown=tuple(sorted(unshown, key=lambda each: each.shown_seconds)),
        )
        return shown, missed

    def _check_named(self, families: FamilyTable) -> None:
        """The families that are said to rest on more than the closed form are what they are."""
        seen: set[int] = set()
        for at, claim in enumerate(self.proof.raised):
            field = f"certificate.proof.raised[{at}]"
            if not 0 <= claim.family < len(families) or claim.family in seen:
                raise _refused(self.path, field, f"{claim.family} is no family, or is there twice")
            seen.add(claim.family)
            self._check_grounds(f"{field}.grounds", claim.grounds)
            words = family_words(families[claim.family])
            if claim.plans != words:
                raise _refused(self.path, field, f"{claim.plans!a}; this family is {words}")
            self._check_not_below(f"{field}.bound_seconds", claim.bound_seconds)

    def _check_grounds(self, field: str, grounds: str) -> None:
        if grounds not in tuple(Grounds):
            message = f"{grounds[:40]!a}; grounds are {', '.join(Grounds)}"
            raise _refused(self.path, field, message)

    def _check_not_below(self, field: str, seconds: float | None) -> None:
        if seconds is not None and not seconds >= self.seconds * (1.0 - SAME):
            message = f"{seconds!r} s, below the certificate's bound of {self.seconds!r} s"
            raise _refused(self.path, field, message)

    def _closed_form(
        self,
        pricer: StagePricer,
        families: FamilyTable,
        numbers: Sequence[int],
        progress: Callable[[int, int], None] | None,
    ) -> tuple[int, int]:
        """How many of these families have no room, and how many were looked at in time; InputError
        where one is not excluded.
        """
        without_room = done = 0

        def base(at: int) -> tuple[object, ...]:
            """What families share that differ in their schedule alone."""
            kind = families.kinds[families.kind[at]]
            state = (kind.sharding, kind.offload, kind.sharing_ranks)
            return int(families.block[at]), kind.recompute, *state

        with suppress(OutOfTimeError):
            for _, group in groupby(sorted(numbers, key=base), base):
                check_time()
                alike = [families[at] for at in group]
                form = ClosedForm.of(pricer, alike[0])
                for family in alike:
                    if not form.excludes(family, self.seconds):
                        message = f"{self.seconds!r} s: the proof does not name a family that may "
                        message += f"have a faster plan ({family_words(family)})"
                        raise _refused(self.path, "certificate.lower_bound_seconds", message)
                without_room += 0 if form.has_room else len(alike)
                done += len(alike)
                if progress is not None:
                    progress(done, len(numbers))
        return without_room, done

    def _orders(
        self, tables: StageTables, families: FamilyTable, claim: FamilyBound
    ) -> Iterator[Unshown]:
        """The named family, where it cannot be shown that it has no plan below the bound."""
        family = families[claim.family]
        form = ClosedForm.of(tables.stage_pricer, family)
        if not _excludes(tables, form, family, self.seconds * (1.0 - SAME)):
            # Most are missed by little: the first step down is a small one.
            low, high, middle = 0.0, self.seconds, 0.875 * self.seconds
            for _ in range(_HALVINGS):
                shown = _excludes(tables, form, family, middle)
                low, high = (middle, high) if shown else (low, middle)
                middle = 0.5 * (low + high)
            yield Unshown(
                family=claim.family,
                plans=claim.plans,
                shown_seconds=low,
                grounds=claim.grounds,
            )

    def _several(self, pricer: StagePricer) -> Iterator[Unshown]:
        """Plans of several pipelines, where the same cannot be shown of them."""
        job, field = self.inputs.job, "certificate.proof.several"
        self._check_not_below(f"{field}_bound_seconds", self.proof.several_bound_seconds)
        if may_have_several(job):
            grounds = self.proof.several_grounds or Grounds.ORDER_FREE
            self._check_grounds(f"{field}_grounds", grounds)
            shown = several_pipelines_bound(pricer)
            if not shown >= self.seconds * (1.0 - SAME):
                plans = "several pipelines"
                yield Unshown(family=None, plans=plans, shown_seconds=shown, grounds=grounds)


def _excludes(tables: StageTables, form: ClosedForm, family: Family, seconds: float) -> bool:
    if form.excludes(family, seconds):
        return True
    return not family.splits and bool(orders.excludes(tables, form, family, seconds))
