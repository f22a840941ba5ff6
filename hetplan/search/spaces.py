"""From a candidate to its numbers: the costs of its islands and boundaries as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hetplan.cluster.spec import Cluster, Island, Link
from hetplan.cost.components.step import clips_gradients
from hetplan.cost.priced.end_of_step import tied_embedding_terms
from hetplan.cost.priced.step import norm_rounds, scalar_term
from hetplan.cost.stage_costs import (
    BoundaryCosts,
    KnownUnits,
    StageCosts,
    boundary_costs,
    boundary_costs_over,
    boundary_link,
    padded,
    stage_costs,
)
from hetplan.cost.terms import seconds_of
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import Degrees
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.search.candidates import Candidate, matches, stage_limit
from hetplan.search.space import BOTH, FIRST, LAST, Floats, Ints, Links, NormSums, Space

_ROLES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceMaker:
    """Turns candidates of one job into spaces."""

    model: ModelSpec
    cluster: Cluster
    """With the forbidden nodes out."""
    job: Job
    predictor: Predictor
    known: KnownUnits = field(default_factory=KnownUnits, repr=False, compare=False)
    _boundaries: dict[tuple[str, str, int, int, int], BoundaryCosts] = field(
        default_factory=dict, repr=False, compare=False
    )

    def costs(self, island: Island, degrees: Degrees) -> StageCosts:
        """Costs of stages on an island."""
        return stage_costs(self.model, island, self.job, degrees, self.predictor, known=self.known)

    def outline(self, candidate: Candidate) -> Space:
        """The space with memory as if one microbatch were in flight and no time at the end.

        Both only make plans look better, so its bounds hold for the candidate; it is made faster.
        """
        costs = [self.costs(island, candidate.degrees) for island in candidate.islands]
        slots = min(self.model.num_layers, sum(candidate.max_stages))
        most = np.zeros((_ROLES, len(costs), slots + 1), dtype=np.int64)
        for role in range(_ROLES):
            for i, cost in enumerate(costs):
                most[role, i, 1:] = cost.max_transformer_layers(*ends(role), 1)
        after = np.zeros((_ROLES, len(costs), self.model.num_layers + 1))
        return self._space(candidate, costs, most, after)

    def space(self, candidate: Candidate) -> Space:
        """The candidate's costs, whole."""
        costs = [self.costs(island, candidate.degrees) for island in candidate.islands]
        most = self._memory(candidate, costs)
        after = np.zeros((_ROLES, len(costs), self.model.num_layers + 1))
        leaving = np.zeros_like(after)
        for role in range(_ROLES):
            for i, cost in enumerate(costs):
                for n in range(1, int(most[role, i].max()) + 1):
                    after[role, i, n] = cost.after_seconds(n, *ends(role))
                    leaving[role, i, n] = cost.leaving_seconds(n, *ends(role))
        return self._space(candidate, costs, most, after, leaving)

    def _memory(self, candidate: Candidate, costs: list[StageCosts]) -> Ints:
        """[4, I, P + 1] layers that fit; an entry never read (0 in flight) is 0."""
        slots = min(self.model.num_layers, sum(candidate.max_stages))
        most = np.zeros((_ROLES, len(costs), slots + 1), dtype=np.int64)
        distinct = min(slots, candidate.num_microbatches)
        for role in range(_ROLES):
            for i, cost in enumerate(costs):
                # Only a last stage has one microbatch in flight, and only one of several stages
                # has more; entries that no pipeline can use stay 0.
                flights = range(1, distinct + 1) if role < LAST else (1,)
                for flight in flights:
                    fits = cost.max_transformer_layers(*ends(role), flight)
                    if fits == 0:
                        break
                    most[role, i, flight] = fits
        return most

    def _space(
        self,
        candidate: Candidate,
        costs: list[StageCosts],
        most: Ints,
        after: Floats,
        leaving: Floats | None = None,
    ) -> Space:
        islands = candidate.islands
        # An outline leaves out what comes at the end.
        norm = None if leaving is None else self._norm(candidate, costs)
        after += self.job.data_loading_seconds + (0.0 if norm is None else norm.inside.min())
        extra_forward, extra_backward = (np.zeros((_ROLES, len(costs))) for _ in range(2))
        for i, cost in enumerate(costs):
            extra_forward[[FIRST, BOTH], i] += cost.embedding_forward_seconds
            extra_backward[[FIRST, BOTH], i] += cost.embedding_backward_seconds
            extra_forward[[LAST, BOTH], i] += cost.head_forward_seconds
            extra_backward[[LAST, BOTH], i] += cost.head_backward_seconds
        size = candidate.degrees.tp * candidate.degrees.dp
        pin = self.job.pin
        return Space(
            degrees=candidate.degrees,
            num_layers=self.model.num_layers,
            num_microbatches=candidate.num_microbatches,
            stages=pin.pp or 0,
            stage_limit=stage_limit(self.job, self.model, candidate.num_microbatches),
            rendezvous=target(self.job.target).rendezvous_sends,
            islands=tuple(island.name for island in islands),
            max_stages=np.array(candidate.max_stages, dtype=np.int64),
            forward=np.array([cost.layer_forward_seconds for cost in costs]),
            backward=np.array([cost.layer_backward_seconds for cost in costs]),
            extra_forward=extra_forward,
            extra_backward=extra_backward,
            links=self._links(candidate),
            node_links=self._node_links(candidate),
            stages_per_node=np.array(
                [max(1, island.devices_per_node // size) for island in islands], dtype=np.int64
            ),
            tied=self._tied(candidate),
            most_layers=most,
            after=after,
            leaving=None if norm is None else leaving,
            norm=norm,
            may_be_first=np.array([matches(island, pin.embedding_on) for island in islands]),
            may_be_last=np.array([matches(island, pin.head_on) for island in islands]),
        )

    def _norm(self, candidate: Candidate, costs: list[StageCosts]) -> NormSums | None:
        if not clips_gradients(self.job):
            return None
        senders = candidate.degrees.tp * candidate.degrees.dp
        rounds = norm_rounds(self.job)

        def seconds(link: Link) -> float:
            return rounds * scalar_term(link.among(senders), self.predictor).seconds

        return NormSums(
            inside=np.array([cost.norm_seconds for cost in costs]),
            links=np.array(
                [
                    [
                        seconds(boundary_link(self.cluster, left, right, candidate.degrees))
                        for right in candidate.islands
                    ]
                    for left in candidate.islands
                ]
            ),
            node_links=np.array([seconds(island.inter_node) for island in candidate.islands]),
        )

    def _links(self, candidate: Candidate) -> Links:
        count = len(candidate.islands)
        boundaries = [
            self._boundary(left, right, candidate.degrees)
            for left in candidate.islands
            for right in candidate.islands
        ]
        return _as_links(boundaries, (count, count))

    def _boundary(self, left: Island, right: Island, degrees: Degrees) -> BoundaryCosts:
        key = (left.name, right.name, degrees.tp, degrees.dp, degrees.microbatch_size)
        found = self._boundaries.get(key)
        if found is None:
            found = self._boundaries[key] = boundary_costs(
                self.model, self.cluster, left, right, self.job, degrees, self.predictor
            )
        return found

    def _node_links(self, candidate: Candidate) -> Links:
        boundaries = [
            boundary_costs_over(
                island.inter_node,
                self.model,
                self.job,
                candidate.degrees,
                self.predictor,
                (island, island),
            )
            for island in candidate.islands
        ]
        return _as_links(boundaries, (len(boundaries),))

    def _tied(self, candidate: Candidate) -> Floats:
        count = len(candidate.islands)
        tied = np.zeros((count, count))
        if self.model.tied_embeddings:
            model = padded(self.model, self.job, candidate.degrees.tp)
            for i, first in enumerate(candidate.islands):
                for j, last in enumerate(candidate.islands):
                    terms = tied_embedding_terms(
                        model, self.cluster, first, last, self.job, candidate.degrees,
                        self.predictor,
                    )  # fmt: skip
                    tied[i, j] = seconds_of(terms)
        return tied


def ends(role: int) -> tuple[bool, bool]:
    """(embedding, head) of a role."""
    return bool(role & FIRST), bool(role & LAST)


def _as_links(boundaries: list[BoundaryCosts], shape: tuple[int, ...]) -> Links:
    def collected(name: str) -> Floats:
        return np.array([getattr(boundary, name) for boundary in boundaries]).reshape(shape)

    return Links(
        send_forward=collected("send_forward_seconds"),
        send_backward=collected("send_backward_seconds"),
        wire_latency=collected("wire_latency_seconds"),
        rendezvous_extra=collected("rendezvous_extra_seconds"),
    )
