"""Which part of a layer's work is what: attention core, products, experts, modules, weights.

By operations of the forward pass on one tensor-parallel rank (`hetplan.model.work`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hetplan.cost.priced.values import Shape
from hetplan.model.layers import Experts, LatentAttention, LayerRun, TransformerLayer
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.model.work import LayerWork, transformer_work
from hetplan.plans.plan import RecomputeModule


@dataclass(frozen=True, kw_only=True)
class LayerShares:
    """One transformer layer of one microbatch."""

    layer: TransformerLayer
    hidden_size: int
    microbatch_size: int
    sequence_length: int
    tp: int

    @cached_property
    def _work(self) -> LayerWork:
        return transformer_work(
            self.layer, self.hidden_size, self.microbatch_size, self.sequence_length, self.tp
        )

    @property
    def core(self) -> float:
        """The attention core's part: scores and context."""
        return self._work.attention_flops / self._work.flops

    def of_weights(self, elements: float, copies: float = 1.0) -> float:
        """The part, or multiple, that products with so many weights would be, for every token."""
        tokens = self.microbatch_size * self.sequence_length
        return 2.0 * tokens * copies * elements / self._work.flops

    @property
    def routed(self) -> float:
        """The routed experts' part."""
        mlp = self.layer.mlp
        if not isinstance(mlp, Experts):
            return 0.0
        weights = mlp.expert.matrix_parameters(self.hidden_size, self.tp)
        return self.of_weights(weights, mlp.experts_per_token)

    def of(self, module: RecomputeModule) -> float | None:
        """The part of a module that multiplies; None for one that does not."""
        mlp, h = self.layer.mlp, self.hidden_size
        if module is RecomputeModule.CORE_ATTENTION:
            return self.core
        if module is RecomputeModule.MLP:
            if isinstance(mlp, Experts):
                return 0.0
            return self.of_weights(mlp.matrix_parameters(h, self.tp))
        if module is not RecomputeModule.EXPERTS:
            return None
        if not isinstance(mlp, Experts):
            return 0.0
        shared = mlp.shared.matrix_parameters(h, self.tp) if mlp.shared else 0
        return self.routed + self.of_weights(mlp.router_parameters(h) + shared)

    def elementwise_width(self, module: RecomputeModule) -> float:
        """Elements per token that a module which does not multiply makes."""
        mlp = self.layer.mlp
        if module is RecomputeModule.NORMS:
            return float(self.layer.num_norms * self.hidden_size)
        if isinstance(mlp, Experts):
            return mlp.experts_per_token * mlp.expert_ffn_hidden_size / self.tp
        return mlp.ffn_hidden_size / self.tp


def view_of(model: ModelSpec, layer: TransformerLayer) -> ModelSpec:
    """A model of this one transformer layer, for predictors that ask for equal layers."""
    if len(model.layer_runs) == 1 and model.layer_runs[0].layer == layer and not model.mtp_layer:
        return model
    return replace(
        model, layer_runs=(LayerRun(count=1, layer=layer),), num_mtp_layers=0, mtp_layer=None
    )


def kv_width(layer: TransformerLayer, tp: int) -> float:
    """Elements of a token's keys and values on one tensor-parallel rank."""
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        return float(sum(attention.slice_sizes(tp)))
    return 2.0 * attention.slice_sizes(tp)[1]


def matrix_parameters(
    model: ModelSpec, kind: LayerKind, layer: TransformerLayer | None, shape: Shape
) -> float:
    """Weights of one layer's matrices on one rank, the embedding's table included."""
    h = model.hidden_size
    if layer is None:
        return (
            float(model.vocabulary_matrix(shape.tp)) if kind is not LayerKind.TRANSFORMER else 0.0
        )
    mlp, count = layer.mlp, float(layer.attention.matrix_parameters(h, shape.tp))
    if not isinstance(mlp, Experts):
        return count + mlp.matrix_parameters(h, shape.tp)
    degree = shape.tp if shape.experts_like_rest else shape.etp
    count += mlp.router_parameters(h)
    count += mlp.num_experts / shape.ep * mlp.expert.matrix_parameters(h, degree)
    return count + (mlp.shared.matrix_parameters(h, shape.tp) if mlp.shared else 0)


def layer_parameters(
    model: ModelSpec, position: int, *, tp: int, ep: int, etp: int
) -> tuple[float, float]:
    """(parameters, of routed experts apart) that one rank holds of the layer at this position.

    Experts are apart where they are cut or copied otherwise than the other weights.
    """
    total = float(model.parameters_at(position, tp))
    last = model.num_layers + model.num_mtp_layers + 1
    if position in (0, last) or (ep == 1 and etp == tp):
        return total, 0.0
    mlp = model.layer_at(position).mlp
    if not isinstance(mlp, Experts):
        return total, 0.0
    h = model.hidden_size
    routed = mlp.num_experts * mlp.expert.parameters(h, tp)
    apart = mlp.num_experts / ep * mlp.expert.parameters(h, etp)
    return total - routed, apart
