"""What a stage does after its last backward pass: reduce its gradients, update its weights.

Gradients are reduced as they are kept over the stage's data-parallel ranks, all at once and after
the last backward pass (nothing is hidden behind it): one all_reduce of all gradients of a rank, or,
where the target shares the optimizer state, a reduce_scatter of the gradients and an all_gather
of the updated parameters. The collective of the gradient norm and clipping are not priced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Island, Link
from hetplan.cost.memory import StageMemory, gradient_bytes_per_parameter
from hetplan.cost.terms import Term, link_cause, seconds_of
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import Degrees
from hetplan.predict.predictor import Predictor
from hetplan.profiling.samples import LinkOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfStep:
    """Reduction and optimizer of a stage as functions of the stage's layers.

    Neither is linear in the layers, so the predictor is asked for each number of layers; answers
    are kept.
    """

    device: DeviceKind
    link: Link
    """Among the devices of one stage."""
    job: Job
    dp: int
    optimizer_shards: int
    memory: StageMemory
    predictor: Predictor = field(repr=False, compare=False)
    _known: dict[tuple[int, bool, bool], tuple[float, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def parameters(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Parameters on one device; a tied matrix that the stage holds twice counts once."""
        count = self.memory.parameters.of(transformer_layers, embedding, head)
        return count - self.memory.shared_parameters if embedding and head else count

    def reduction_terms(
        self, transformer_layers: int, embedding: bool, head: bool
    ) -> tuple[Term, ...]:
        """The collectives of the reduction; none where dp is 1."""
        if self.dp == 1:
            return ()
        count = self.parameters(transformer_layers, embedding, head)
        gradients = count * self.memory.gradient_bytes
        if self.optimizer_shards == 1:
            return (self._collective(LinkOperation.ALL_REDUCE, gradients),)
        return (
            self._collective(LinkOperation.REDUCE_SCATTER, gradients),
            self._collective(LinkOperation.ALL_GATHER, count * self.memory.parameter_bytes),
        )

    def optimizer_terms(
        self, transformer_layers: int, embedding: bool, head: bool
    ) -> tuple[Term, ...]:
        """The update of the parameters whose state this rank keeps."""
        count = self.parameters(transformer_layers, embedding, head) / self.optimizer_shards
        return (
            Term(
                what=f"{self.job.optimizer.value} update",
                cause=self.device.kind,
                count=1,
                prediction=self.predictor.optimizer_update(
                    self.device, self.job.optimizer, count, self.job.precision
                ),
            ),
        )

    def seconds(self, transformer_layers: int, embedding: bool, head: bool) -> tuple[float, float]:
        """(reduction, optimizer)."""
        key = (transformer_layers, embedding, head)
        if key not in self._known:
            self._known[key] = (
                seconds_of(self.reduction_terms(*key)),
                seconds_of(self.optimizer_terms(*key)),
            )
        return self._known[key]

    def _collective(self, operation: LinkOperation, message_bytes: float) -> Term:
        return Term(
            what=f"gradient {operation.value}",
            cause=link_cause(self.link),
            count=1,
            prediction=self.predictor.collective(
                self.link, operation.value, self.dp, message_bytes
            ),
        )


def tied_embedding_terms(
    model: ModelSpec,
    cluster: Cluster,
    first: Island,
    last: Island,
    job: Job,
    degrees: Degrees,
    predictor: Predictor,
) -> tuple[Term, ...]:
    """The all_reduce of the tied matrix's gradient between the first and the last stage.

    Both stages do it after their own reduction; `model` has the padded vocabulary. Empty where
    the model does not tie. Only for pipelines of at least two stages.
    """
    if not model.tied_embeddings:
        return ()
    # Every device of the one stage sums with its own of the other, all at once.
    link = cluster.link_between(first.name, last.name).among(degrees.tp * degrees.dp)
    matrix = model.vocabulary_matrix(degrees.tp)
    return (
        Term(
            what="tied embedding all_reduce",
            cause=link_cause(link),
            count=1,
            prediction=predictor.collective(
                link,
                LinkOperation.ALL_REDUCE.value,
                2,
                float(matrix * gradient_bytes_per_parameter(job)),
            ),
        ),
    )
