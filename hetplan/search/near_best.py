"""Which plans could be the best one, as far as one can tell by predictions that err?

The search gives the plan that is best if every prediction is right. Others are best if a
prediction is wrong. Here are the best plans of

1. every combination of degrees whose estimate comes near the best step, likeliest first;
2. the cluster without one of the islands that the best plan uses;
3. the worlds in which every prediction of one device kind lies at an end of its interval.

Each is walked as in the search (`explore`), to a coarser gap. `what_to_measure.near_best` says
which of them cannot be told from the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Link
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.build import StageChoice, build_plan
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.predict.calibrated import corrected
from hetplan.predict.predictor import Prediction, Predictor, SendLaw
from hetplan.search.candidates import Candidate, allowed_cluster, enumerate_candidates
from hetplan.search.closing import close_by_model
from hetplan.search.explore import Best, CandidateWalk, OutOfTimeError, few_islands, rough
from hetplan.search.spaces import SpaceMaker

_GAP = 0.02  # of a rival's own search: below what any interval tells apart
_MOST_RIVALS = 10  # combinations of degrees that are walked in the first world
_MOST_ELSEWHERE = 3  # and in each other one
_SEED = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """A `Predictor` of the world in which one device kind lies at an end of its interval."""

    predictor: Predictor
    kind: str
    sign: float
    """-1: faster, 1: slower."""

    def _moved(self, device: DeviceKind, found: Prediction) -> Prediction:
        if device.kind != self.kind:
            return found
        return corrected(found, math.exp(self.sign * found.log_halfwidth))

    def forward(
        self,
        device: DeviceKind,
        model: ModelSpec,
        layer: LayerKind,
        *,
        microbatch_size: int,
        sequence_length: int,
        tp: int,
        precision: Precision,
        kernels: Kernels = DEFAULT_KERNELS,
    ) -> Prediction:
        """As the predictor, moved."""
        found = self.predictor.forward(
            device,
            model,
            layer,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
            tp=tp,
            precision=precision,
            kernels=kernels,
        )
        return self._moved(device, found)

    def backward(
        self,
        device: DeviceKind,
        model: ModelSpec,
        layer: LayerKind,
        *,
        microbatch_size: int,
        sequence_length: int,
        tp: int,
        precision: Precision,
        kernels: Kernels = DEFAULT_KERNELS,
    ) -> Prediction:
        """As the predictor, moved."""
        found = self.predictor.backward(
            device,
            model,
            layer,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
            tp=tp,
            precision=precision,
            kernels=kernels,
        )
        return self._moved(device, found)

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """As the predictor, moved."""
        found = self.predictor.optimizer_update(device, optimizer, parameters, precision)
        return self._moved(device, found)

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        """As the predictor."""
        return self.predictor.send(link, message_bytes, nodes=nodes)

    def collective(
        self,
        link: Link,
        operation: str,
        group_size: int,
        message_bytes: float,
        *,
        nodes: int = 1,
        groups: int = 1,
    ) -> Prediction:
        """As the predictor."""
        return self.predictor.collective(
            link, operation, group_size, message_bytes, nodes=nodes, groups=groups
        )


def rivals(
    plan: Plan,
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    predictor: Predictor,
    *,
    seconds: float,
) -> tuple[Plan, ...]:
    """Plans that could be better than this best one; each once, none of them it.

    No search begins after so many `seconds`; what was found until then is given.
    """
    deadline = time.monotonic() + seconds
    found: dict[Plan, None] = {}
    for other in _every(plan, model, cluster, job, predictor, deadline):
        if other != plan:
            found.setdefault(other)
    return tuple(found)


def _every(
    plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor, deadline: float
) -> Iterator[Plan]:
    yield from _best_of(model, cluster, job, predictor, _MOST_RIVALS, deadline)
    names = _islands(plan, cluster)
    if len(cluster.islands) > 1:
        for name in names:
            forbid = replace(job.forbid, islands=(*job.forbid.islands, name))
            without = replace(job, forbid=forbid)
            yield from _best_of(model, cluster, without, predictor, _MOST_ELSEWHERE, deadline)
    kinds = dict.fromkeys(island.device.kind for island in cluster.islands)
    if len(kinds) > 1:
        for kind in kinds:
            for sign in (-1.0, 1.0):
                moved = Moved(predictor, kind, sign)
                yield from _best_of(model, cluster, job, moved, _MOST_ELSEWHERE, deadline)


def _islands(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Those that the plan uses, in its order."""
    return tuple(
        dict.fromkeys(
            cluster.island_of_device(replica.devices[0].start).name
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            for replica in stage.replicas
        )
    )


def _best_of(
    model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor, most: int, deadline: float
) -> Iterator[Plan]:
    """The best plan of each of the likeliest combinations of degrees."""
    allowed = allowed_cluster(cluster, job)
    maker = SpaceMaker(model=model, cluster=allowed, job=job, predictor=predictor)
    entries: list[tuple[float, Candidate]] = []
    for candidate in enumerate_candidates(model, allowed, job):
        if time.monotonic() > deadline:
            break
        try:
            known = rough(maker.outline(candidate))
        except InputError:
            continue  # a kind without a figure for this precision, which the best plan leaves out
        if known.bound_seconds < math.inf:
            entries.append((known.estimate_seconds, candidate))
    entries.sort(key=lambda each: (each[0], each[1].degrees))
    for _, candidate in entries[:most]:
        if time.monotonic() > deadline:
            return
        found = _walked(maker, candidate, deadline)
        if found is not None:
            yield found


def _walked(maker: SpaceMaker, candidate: Candidate, deadline: float) -> Plan | None:
    """The best plan of these degrees, near enough; None where there is none or no time."""
    space = maker.space(candidate)
    known = rough(space)
    best = Best(
        gap=_GAP,
        bounds=[known.bound_seconds],
        deadline=deadline,
        progress=None,
        started=time.monotonic(),
    )
    try:
        if few_islands(space):
            CandidateWalk(0, space, known, best).run()
        else:
            close_by_model(0, space, best, seed=_SEED)
    except OutOfTimeError:
        pass
    if best.candidate < 0:
        return None
    names = [island.name for island in candidate.islands]
    choices = [
        StageChoice(island=names[island], transformer_layers=layers)
        for island, layers in zip(best.slots, best.layers, strict=True)
    ]
    plan = build_plan(maker.model, maker.cluster, maker.job, choices, candidate.degrees)
    return None if check_plan(plan, maker.model, maker.cluster, maker.job) else plan
