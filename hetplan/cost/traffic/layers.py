"""Which collectives does one layer of a stage make for one microbatch, and how large are they?

b sequences of s tokens, hidden size h, e bytes per element; degrees tp, cp, ep, etp. The same calls
as in `hetplan.cost.step_model.layers`, where their times are:

tp   2 sums of [b, s / cp, h] forward and 2 backward per transformer layer (arXiv 1909.08053,
     section 3), 1 forward in the embedding, 1 backward in the head and two small ones of the
     softmax. With sequence parallelism each sum is an all_gather and a reduce_scatter (arXiv
     2205.05198, section 4.2): as many bytes.
cp   keys and values go around the ring once forward and, with their gradients, twice backward
     (arXiv 2310.01889).
ep   tokens to their experts and back, forward and backward (arXiv 2006.16668, section 3).

Full recomputation repeats the forward calls of the layers that it covers, recomputation of experts
the tokens' way to them and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.cost.components.layers import attention_widths, products_by_columns
from hetplan.cost.network.segments import TrafficClass
from hetplan.cost.traffic.groups import GroupKind
from hetplan.job.spec import Job, Precision
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Attention, Experts, LatentAttention, TransformerLayer
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.pieces import experts_as_the_rest
from hetplan.plans.plan import Recompute, RecomputeGranularity, RecomputeModule, Replica
from hetplan.plans.targets import target
from hetplan.profiling.samples import LinkOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective that every group of one kind makes."""

    groups: GroupKind
    operation: LinkOperation
    message_bytes: float
    """As in `LinkSample.message_bytes`."""
    count: float
    traffic: TrafficClass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCalls:
    """Calls of the layers of one replica, per microbatch."""

    model: ModelSpec
    """With the padded vocabulary."""
    job: Job
    """With the plan's target."""
    replica: Replica

    @property
    def hidden_bytes(self) -> float:
        """[b, s / cp, h] of one rank."""
        tokens = self.replica.microbatch_size * self.job.sequence_length / self.replica.cp
        return tokens * self.model.hidden_size * self.job.precision.bytes_per_element

    def of(self, kind: LayerKind, layer: TransformerLayer | None) -> Iterator[Call]:
        """Forward and backward pass of one layer, recomputation left out."""
        if layer is not None:
            yield from self.forward(layer)
            yield from self._backward(layer)
        if kind is LayerKind.EMBEDDING:
            yield from self._sums(1)
        if kind in (LayerKind.HEAD, LayerKind.MULTI_TOKEN_PREDICTION):
            yield from self._sums(1)
            if self.replica.sequence_parallel:
                yield self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes, 1)
            softmax = self.hidden_bytes / self.model.hidden_size
            softmax *= Precision.FLOAT32.bytes_per_element / self.job.precision.bytes_per_element
            # The largest logit, then the sum of exponentials and the target's logit.
            for message in (softmax, 2 * softmax):
                yield self._tensor(LinkOperation.ALL_REDUCE, message, 1)

    def again(self, layer: TransformerLayer, recompute: Recompute) -> Iterator[Call]:
        """What a layer that recomputes repeats."""
        if recompute.granularity is RecomputeGranularity.FULL:
            yield from self.forward(layer)
        elif RecomputeModule.EXPERTS in recompute.modules:
            yield from self._exchange(layer)

    def forward(self, layer: TransformerLayer) -> Iterator[Call]:
        """One transformer layer."""
        yield from self._layer_sums(layer)
        yield from self._ring(layer, 1)
        yield from self._exchange(layer)

    def _backward(self, layer: TransformerLayer) -> Iterator[Call]:
        yield from self._layer_sums(layer)
        if self.replica.sequence_parallel:
            # Only a rank's own part of the products' inputs was kept.
            count = products_by_columns(layer, experts_as_the_rest(self.replica))
            yield self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes, count)
        yield from self._copied_heads(layer)
        yield from self._ring(layer, 2)
        yield from self._exchange(layer)

    def _tensor(self, operation: LinkOperation, message_bytes: float, count: float) -> Call:
        return Call(
            groups=GroupKind.TENSOR,
            operation=operation,
            message_bytes=message_bytes,
            count=count,
            traffic=TrafficClass.TENSOR_PARALLEL,
        )

    def _sums(self, count: int) -> Iterator[Call]:
        if not self.replica.sequence_parallel:
            yield self._tensor(LinkOperation.ALL_REDUCE, self.hidden_bytes, count)
            return
        yield self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes, count)
        yield self._tensor(LinkOperation.REDUCE_SCATTER, self.hidden_bytes, count)

    def _layer_sums(self, layer: TransformerLayer) -> Iterator[Call]:
        mlp = layer.mlp
        if not isinstance(mlp, Experts) or experts_as_the_rest(self.replica):
            yield from self._sums(2)
            return
        yield from self._sums(2 if mlp.shared is not None else 1)
        # Experts that are cut gather the copies that their ranks received, and sum the results.
        for operation in (LinkOperation.ALL_GATHER, LinkOperation.REDUCE_SCATTER):
            yield replace(
                self._tensor(operation, self._copies_bytes(mlp) * self.replica.etp, 1),
                groups=GroupKind.EXPERT_TENSOR,
            )

    def _copies_bytes(self, experts: Experts) -> float:
        own = self.hidden_bytes / (self.replica.tp if self.replica.sequence_parallel else 1)
        return own * experts.experts_per_token

    def _exchange(self, layer: TransformerLayer) -> Iterator[Call]:
        if isinstance(layer.mlp, Experts):
            yield Call(
                groups=GroupKind.EXPERT,
                operation=LinkOperation.ALL_TO_ALL,
                message_bytes=self._copies_bytes(layer.mlp),
                count=2,
                traffic=TrafficClass.EXPERT_PARALLEL,
            )

    def _ring(self, layer: TransformerLayer, count: int) -> Iterator[Call]:
        attention = layer.attention
        if trainer_settings(self.job).context_exchange:
            # Either way once; the ring's gradients travel with keys and values.
            for each in attention_widths(layer, self.replica.tp):
                yield Call(
                    groups=GroupKind.CONTEXT,
                    operation=LinkOperation.ALL_TO_ALL,
                    message_bytes=self.hidden_bytes / self.model.hidden_size * each,
                    count=1,
                    traffic=TrafficClass.CONTEXT_PARALLEL,
                )
            return
        sizes = attention.slice_sizes(self.replica.tp)
        width = sum(sizes) if isinstance(attention, LatentAttention) else 2 * sizes[1]
        # cp - 1 sends of every rank's block are a ring all_gather of cp blocks.
        yield Call(
            groups=GroupKind.CONTEXT,
            operation=LinkOperation.ALL_GATHER,
            message_bytes=self.replica.cp * self.hidden_bytes / self.model.hidden_size * width,
            count=count,
            traffic=TrafficClass.CONTEXT_PARALLEL,
        )

    def _copied_heads(self, layer: TransformerLayer) -> Iterator[Call]:
        """Gradients of key and value projections that several ranks of the native trainer hold."""
        attention = layer.attention
        if not isinstance(attention, Attention) or not target(self.job.target).sums_copied_heads:
            return
        if self.replica.tp <= attention.num_kv_heads:
            return
        biases = 2.0 * attention.num_kv_heads * attention.head_dim
        biases *= self.job.precision.bytes_per_element
        for message in (biases * self.model.hidden_size, biases if attention.qkv_bias else 0.0):
            yield self._tensor(LinkOperation.ALL_REDUCE, message, 1)
