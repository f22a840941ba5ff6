"""What a stage does after its last backward pass: reduce gradients, update weights, gather them.

Gradients are reduced, in the number format that the plan names, over the ranks that hold the same
weights (routed experts over those that hold the same experts), S of which may share the optimizer
state (arXiv 1910.02054):

    S = 1                 all_reduce of the gradients
    S = all of them       reduce_scatter of the gradients, all_gather of the updated parameters
    between (MiCS-style   the same inside a sharding group, and between them an all_reduce of each
    groups, 2205.00119)   rank's shard

Where gradients (ZeRO-2) or parameters (ZeRO-3) are sharded too, they move in every microbatch: that
is part of the passes (`hetplan.cost.step_model.units`), not of the end. The update is that of the
parameters whose state a rank keeps; `hetplan.cost.components.step` says what else goes over the
gradients, and what the part in host memory adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hetplan.cluster.spec import Cluster, Island, Transport
from hetplan.cost.collectives.values import Asking, LinkUse
from hetplan.cost.components.overlap import Overlap, not_overlapped
from hetplan.cost.components.step import (
    gradient_norm,
    gradient_passes,
    offloaded_update,
)
from hetplan.cost.estimate_values import Component
from hetplan.cost.memory.values import FLOAT32_BYTES
from hetplan.cost.step_model.groups import Copies, Group, KnownCollectives
from hetplan.cost.step_model.values import asking, seconds_of_parts
from hetplan.cost.terms import Part, Term
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import Sharding
from hetplan.predict.predictor import Predictor, link_cause
from hetplan.profiling.samples import LinkOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSeconds:
    """Times of one rank's end of the step, nothing hidden."""

    reduction: float
    update: float
    """Optimizer, and this rank's part of norm and scaling where gradients are clipped."""
    gathering: float
    own: float
    """Parameters whose state the rank keeps."""
    alone: tuple[Overlap, Overlap]
    """Reduction and gathering, nothing hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfStep:
    """End of a stage as a function of its parameters; answers are kept per number of them."""

    known: KnownCollectives = field(repr=False, compare=False)
    island: Island
    job: Job
    reduction_precision: Precision
    """Number format in which gradients are summed."""
    dense: Copies
    experts: Copies
    sharding: Sharding
    offload: float
    """Part of the optimizer state in host memory."""
    predictor: Predictor = field(repr=False, compare=False)
    _seconds: dict[tuple[float, float], EndSeconds] = field(
        default_factory=dict, repr=False, compare=False
    )
    _updates: dict[tuple[float, float], tuple[Part, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def seconds(self, parameters: float, expert_parameters: float = 0.0) -> EndSeconds:
        """Times of a rank with this many parameters, those of routed experts counted apart."""
        key = (parameters, expert_parameters)
        found = self._seconds.get(key)
        if found is None:
            reduction = seconds_of_parts(self.reduction(*key))
            gathering = seconds_of_parts(self.gathering(*key))
            found = self._seconds[key] = EndSeconds(
                reduction=reduction,
                update=seconds_of_parts(self.update(*key)),
                gathering=gathering,
                own=self.own(*key),
                alone=(not_overlapped(reduction), not_overlapped(gathering)),
            )
        return found

    def reduction(self, parameters: float, expert_parameters: float = 0.0) -> tuple[Part, ...]:
        """The collectives of the gradients; none where no weight has a copy."""
        size = self.reduction_precision.bytes_per_element
        return tuple(
            part
            for copies, count in ((self.dense, parameters), (self.experts, expert_parameters))
            for part in self._reduced(copies, count * size)
        )

    def _reduced(self, copies: Copies, message_bytes: float) -> Iterable[Part]:
        scattered = self.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS)
        if self.sharding is Sharding.NONE or (copies.shard.size == 1 and not scattered):
            return self._parts(copies.whole, LinkOperation.ALL_REDUCE, message_bytes)
        shard = message_bytes / copies.shard.size
        across = self._parts(copies.across, LinkOperation.ALL_REDUCE, shard)
        if scattered:  # Inside sharding groups every microbatch has been reduced already.
            return across
        inside = self._parts(copies.shard, LinkOperation.REDUCE_SCATTER, message_bytes)
        return (*inside, *across)

    def _parts(
        self, group: Group, operation: LinkOperation, message_bytes: float
    ) -> tuple[Part, ...]:
        terms = self.known.of(group, operation, message_bytes, f"gradient {operation.value}")
        return tuple(Part(component=Component.DATA_PARALLEL, term=term) for term in terms)

    def gathering(self, parameters: float, expert_parameters: float = 0.0) -> tuple[Part, ...]:
        """Updated parameters from the ranks that updated them."""
        if self.sharding not in (Sharding.OPTIMIZER, Sharding.GRADIENTS):
            return ()
        size = self.job.precision.bytes_per_element
        return tuple(
            Part(component=Component.GATHERING, term=term)
            for copies, count in ((self.dense, parameters), (self.experts, expert_parameters))
            for term in self.known.of(
                copies.shard, LinkOperation.ALL_GATHER, count * size, "parameter all_gather"
            )
        )

    def update(self, parameters: float, expert_parameters: float = 0.0) -> tuple[Part, ...]:
        """Norm, scaling and update of what this rank keeps of the state."""
        held = parameters + expert_parameters
        return self.update_of(self.own(parameters, expert_parameters), held)

    def own(self, parameters: float, expert_parameters: float = 0.0) -> float:
        """Parameters whose state this rank keeps."""
        if self.sharding is Sharding.NONE:
            return parameters + expert_parameters
        return parameters / self.dense.shard.size + expert_parameters / self.experts.shard.size

    def update_of(self, own: float, held: float) -> tuple[Part, ...]:
        """Norm, scaling and update of `own` parameters on a rank that holds `held`."""
        found = self._updates.get((own, held))
        if found is None:
            found = self._updates[own, held] = self._update_of(own, held)
        return found

    def _update_of(self, own: float, held: float) -> tuple[Part, ...]:
        device = self.island.device
        asked = f"{self.job.optimizer} update in {self.job.precision} on {device.kind}"
        with asking(f"{asked} (measured with the layers, not by `hetplan profile operators`)"):
            predicted = self.predictor.optimizer_update(
                device, self.job.optimizer, own, self.job.precision
            )
        on_device = Term(
            what=f"{self.job.optimizer.value} update",
            cause=device.kind,
            count=1,
            prediction=predicted,
        )
        # Of narrower gradients a float32 copy is what the update reads.
        norm = gradient_norm(device, self.job, own, FLOAT32_BYTES, predicted)
        copies = max(self.dense.whole.size, self.experts.whole.size)
        passes = gradient_passes(device, self.job, held, own, copies, predicted)
        if not self.offload:
            return (*norm, *passes, Part(component=Component.OPTIMIZER, term=on_device))
        offloaded = offloaded_update(self.island, self.job, own, self.offload, on_device)
        return (*norm, *passes, *offloaded)


def tied_embedding_parts(
    model: ModelSpec,
    cluster: Cluster,
    first: Island,
    last: Island,
    precision: Precision,
    degrees: Shape,
    known: KnownCollectives,
) -> tuple[Part, ...]:
    """The all_reduce of the tied matrix's gradient, in this format, between first and last stage.

    Both stages do it after their own reduction; `model` has the padded vocabulary. Empty where
    the model does not tie. Only for pipelines of at least two stages.
    """
    if not model.tied_embeddings:
        return ()
    # Every device of the one stage sums with its own of the other, all at once.
    alone, senders = cluster.link_between(first.name, last.name), degrees.tp * degrees.dp
    message_bytes = float(model.vocabulary_matrix(degrees.tp) * precision.bytes_per_element)
    staged = alone.transport is Transport.HOST_STAGED
    if known.by_levels and staged and first.name != last.name:
        use = LinkUse(link=alone, senders=senders, nodes=2)
        asking = Asking(predictor=known.predictor, share=1.0)
        term = asking.send(use, message_bytes, "tied embedding exchange")
    else:
        link = alone.among(senders)
        term = Term(
            what="tied embedding all_reduce",
            cause=link_cause(link),
            count=1,
            prediction=known.predictor.collective(
                link, LinkOperation.ALL_REDUCE.value, 2, message_bytes, nodes=2
            ),
        )
    return (Part(component=Component.EMBEDDING, term=term),)
