"""Which plan is there for the hosts that are left of a plan's cluster?

The same model and job, by the same predictor and for the same aim; the search ends at a limit of
its own. The plan for all hosts is the one that the user gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.hosts import host_names, host_of_device, part_left
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.predict.predictor import Predictor
from hetplan.runtime.placement import place_ranks
from hetplan.search.result import SearchResult
from hetplan.search.solver import Progress as SearchProgress

DEFAULT_REPLAN_SECONDS = 10.0
"""Hosts wait for it after a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """A plan, and the hosts that it runs on."""

    result: SearchResult
    used_hosts: tuple[str, ...]
    """Hosts that hold a rank."""

    @property
    def step_seconds(self) -> float:
        """Predicted."""
        return self.result.estimate.step_seconds


def host_plan(result: SearchResult, hosts: Sequence[str] | None = None) -> HostPlan:
    """The plan of this result; its hosts are the cluster's unless they are given."""
    if hosts is not None:
        return HostPlan(result=result, used_hosts=tuple(hosts))
    cluster = result.inputs.cluster
    used = {host_of_device(cluster, place.device) for place in place_ranks(result.plan)}
    return HostPlan(
        result=result, used_hosts=tuple(name for name in host_names(cluster) if name in used)
    )


class CancelledError(Exception):
    """A search was told to end, as nobody needs its answer any more."""


class Replanner:
    """Plans for parts of one plan's cluster; answers are kept."""

    def __init__(self, given: SearchResult, predictor: Predictor, *, limit_seconds: float) -> None:
        if not limit_seconds > 0:
            raise InputError(f"replan-seconds is {limit_seconds}; it must be more than 0")
        self._given, self._predictor = host_plan(given), predictor
        own = given.inputs.job.time_limit_seconds
        self._job = replace(
            given.inputs.job,
            time_limit_seconds=limit_seconds if own is None else min(own, limit_seconds),
        )
        self._known: dict[frozenset[str], HostPlan] = {frozenset(self.hosts): self._given}
        self._none: dict[frozenset[str], InfeasibleError | LimitError] = {}

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host that the given plan's cluster lets be used."""
        return host_names(self._given.result.inputs.cluster)

    def plan(
        self,
        hosts: Sequence[str],
        known: HostPlan | None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> HostPlan:
        """A plan for these hosts, not slower than `known`, which uses some of them.

        InfeasibleError or LimitError where none was found; CancelledError soon after `cancelled`
        says so.
        """
        asked = frozenset(hosts)
        if asked in self._none:
            raise self._none[asked]
        if asked not in self._known:
            try:
                self._known[asked] = host_plan(self._searched(asked, known, cancelled))
            except (InfeasibleError, LimitError) as error:
                self._none[asked] = error
                raise
        found = self._known[asked]
        if known is not None and known.step_seconds <= found.step_seconds:
            return known
        return found

    def _searched(
        self, hosts: frozenset[str], known: HostPlan | None, cancelled: Callable[[], bool]
    ) -> SearchResult:
        # They take a second to import, which a run without faults need not wait for.
        from hetplan.search.objectives.answer import by_objective
        from hetplan.search.search import search

        def look(progress: SearchProgress) -> None:
            if cancelled():
                raise CancelledError

        inputs = self._given.result.inputs
        gone = [name for name in self.hosts if name not in hosts]
        try:
            found = search(
                inputs.model,
                part_left(inputs.cluster, gone),
                self._job,
                self._predictor,
                sha256=inputs.sha256,
                progress=look,
                start=() if known is None else (known.result.plan,),
            )
        except InputError as error:
            # The job was right for the whole cluster: its pins are not for what is left of it.
            raise InfeasibleError([str(error)]) from error
        if found.certificate is not None and found.certificate.status == "interrupted":
            raise KeyboardInterrupt
        return by_objective(found, self._predictor, time_limit_seconds=self._job.time_limit_seconds)


def check_predictor(given: SearchResult, digest: str) -> None:
    """An InputError where the plan was made with another predictor than the one of this sha256.

    Predicted steps of one plan and of another could not be compared.
    """
    made = dict(given.inputs.sha256).get("predictor", "")
    if made and made != digest:
        raise InputError(
            f"the plan was made with another predictor (sha256 {made[:12]}) than the one that "
            f"would plan again ({digest[:12]}); name that one with --predictor FILE, or with "
            "--store DIR the samples that it was fitted to, or plan anew"
        )
