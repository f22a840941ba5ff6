"""The collectives of one layer of a stage for one microbatch, with their sizes.

One list, which `hetplan.cost.step_model.layers` prices and `hetplan.cost.traffic` counts.

b sequences of s tokens, hidden size h, e bytes per element, degrees tp, cp, ep, etp. Compute is
the predicted time of the layer on one tensor-parallel rank; cp divides it evenly (sequences are
cut so that every rank has as much of the causal triangle). Communication, per layer:

tp   forward 2 and backward 2 all_reduces of [b, s / cp, h] (arXiv 1909.08053, section 3); with
     sequence parallelism each is a reduce_scatter and an all_gather (arXiv 2205.05198, section
     4.2), and the backward pass gathers the products' inputs once more, because only a rank's
     own part was kept (same section; Megatron-LM, megatron/core/tensor_parallel/layers.py).
     The embedding has one forward; the head one backward and, forward, those of the softmax's
     [b, s] maximum and [2, b, s] sums in float32 (Megatron-LM's over a float32 copy sums the
     two apart: three of [b, s]). In every backward pass the native trainer sums the gradients of
     copied key-value heads, of the scales of their norms and of the router's weights of tokens
     (others are not charged).
cp   ring attention (arXiv 2310.01889): cp - 1 sends of keys and values, [b, s / cp, keys + values
     of one rank], forward, and twice the bytes backward (their gradients travel along); each hides
     behind the attention of one of cp blocks where the trainer overlaps them. Or, where the trainer
     exchanges heads (arXiv 2309.14509, section 3), all_to_alls of queries, keys, values and result
     in either pass, and every rank has the whole sequence for 1 / cp of its heads.
ep   all_to_all of the tokens to their experts and back, forward and backward: b s / cp x experts
     per token x h, divided by tp with sequence parallelism (arXiv 2006.16668, section 3), less what
     the trainer's dispatcher sends once (`hetplan.cost.collectives.pairwise`). Where experts are
     cut (etp > 1) their ranks gather all copies that came in, and the results are sums of as many;
     with alltoall and sequence parallelism that is so without expert parallelism too, where others
     gather tokens (Megatron-core, moe/token_dispatcher.py). The busiest rank has
     `expert_load_factor` times the mean; transfers and the routed experts' compute grow with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hetplan.cost.collectives.values import Routing
from hetplan.cost.estimate_values import Component
from hetplan.cost.memory.values import FLOAT32_BYTES
from hetplan.job.spec import ExpertDispatcher, Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Attention, Experts, LatentAttention, TransformerLayer
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.pieces import experts_as_the_rest
from hetplan.plans.plan import Recompute, RecomputeGranularity, RecomputeModule
from hetplan.plans.targets import target
from hetplan.profiling.samples import LinkOperation


class GroupKind(StrEnum):
    """What the ranks of a group have in common; a field of `groups.Groups`."""

    TENSOR = "tensor"
    CONTEXT = "context"
    EXPERT = "expert"
    EXPERT_TENSOR = "expert_tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective that every group of one kind makes."""

    groups: GroupKind
    operation: LinkOperation
    message_bytes: float
    """As in `LinkSample.message_bytes`."""
    count: float = 1.0
    component: Component
    what: str
    routing: Routing | None = None
    """Of tokens that go once to each place that has experts of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCalls:
    """Calls of the layers of replicas of one shape, per microbatch."""

    model: ModelSpec
    """With the padded vocabulary."""
    job: Job
    """With the plan's target."""
    shape: Shape

    @property
    def tokens(self) -> float:
        """Of one microbatch on one context-parallel rank."""
        return self.shape.microbatch_size * self.job.sequence_length / self.shape.cp

    @property
    def hidden_bytes(self) -> float:
        """Activations of one microbatch between two layers, on one context-parallel rank."""
        return self.tokens * self.model.hidden_size * self.job.precision.bytes_per_element

    def of(self, kind: LayerKind, layer: TransformerLayer | None) -> Iterator[Call]:
        """Forward and backward pass of one layer, recomputation left out."""
        if layer is not None:
            yield from self.forward(layer)
            yield from (*self.sums(layer, backward=True), *self.gathered_again(layer))
            yield from (*self.partial_gradients(layer), *self.context(layer, 2.0))
            yield from self.exchange(layer)
        if kind is LayerKind.EMBEDDING:
            yield from (*self.embedding(backward=False), *self.embedding(backward=True))
        if kind in (LayerKind.HEAD, LayerKind.MULTI_TOKEN_PREDICTION):
            yield from (*self.head(backward=False), *self.head(backward=True))

    def again(self, layer: TransformerLayer, recompute: Recompute) -> Iterator[Call]:
        """What a layer that recomputes repeats."""
        if recompute.granularity is RecomputeGranularity.FULL:
            yield from self.forward(layer)
        elif RecomputeModule.EXPERTS in recompute.modules:
            yield from (*self.expert_sums(layer), *self.exchange(layer))

    def forward(self, layer: TransformerLayer) -> Iterator[Call]:
        """One transformer layer."""
        yield from self.sums(layer)
        yield from self.context(layer, 1.0)
        yield from self.exchange(layer)

    def embedding(self, *, backward: bool) -> Iterator[Call]:
        """One pass of the embedding."""
        if not self.shape.sequence_parallel:
            if not backward:
                yield self._tensor(LinkOperation.ALL_REDUCE, self.hidden_bytes)
        elif backward:
            # The gradient of what was scattered (arXiv 2205.05198, section 4.2.2).
            yield self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes)
        else:
            yield self._tensor(LinkOperation.REDUCE_SCATTER, self.hidden_bytes)

    def head(self, *, backward: bool) -> Iterator[Call]:
        """One pass of final norm, output projection and loss."""
        summed = LinkOperation.ALL_REDUCE
        if self.shape.sequence_parallel:
            # What was gathered is gathered again for the weights' gradient.
            yield self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes)
            summed = LinkOperation.REDUCE_SCATTER
        if backward:
            yield self._tensor(summed, self.hidden_bytes)
            return
        # Maximum, sum and the target's logit: the last two in one message or, by Megatron-LM's
        # VocabParallelCrossEntropy over a copy, in two (megatron/core/tensor_parallel).
        habits, options = target(self.job.target), trainer_settings(self.job)
        apart = habits.separate_loss_sums and not options.fused_loss
        softmax = self.tokens * FLOAT32_BYTES
        for count in (1, 1, 1) if apart else (1, 2):
            yield self._tensor(LinkOperation.ALL_REDUCE, count * softmax)

    def sums(self, layer: TransformerLayer, *, backward: bool = False) -> Iterator[Call]:
        """Tensor-parallel sums of one pass of a transformer layer."""
        mlp, read = layer.mlp, attention_input(layer, self.model.hidden_size)
        yield from self._sums(read, read if backward else 1.0)
        if not isinstance(mlp, Experts) or (mlp.shared is not None and self._gathers_copies):
            # Shared experts are cut over tp like any MLP.
            yield from self._sums()
        yield from self.expert_sums(layer)

    def expert_sums(self, layer: TransformerLayer) -> Iterator[Call]:
        """Experts that are cut gather what their ranks received, and sum the results."""
        mlp = layer.mlp
        if not isinstance(mlp, Experts):
            return
        if not self._gathers_copies:
            yield from self._sums()
            return
        for operation in (LinkOperation.ALL_GATHER, LinkOperation.REDUCE_SCATTER):
            yield Call(
                groups=GroupKind.EXPERT_TENSOR,
                operation=operation,
                message_bytes=self._copies_bytes(mlp) * self.shape.etp,
                component=Component.TENSOR_PARALLEL,
                what=f"expert-tensor-parallel {operation.value}",
            )

    def gathered_again(self, layer: TransformerLayer) -> Iterator[Call]:
        """Inputs of the products that are cut by columns, for their weights' gradients."""
        if not self.shape.sequence_parallel:
            return
        share = attention_input(layer, self.model.hidden_size)
        yield self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes * share)
        mlp = layer.mlp
        # Copies that came to routed experts were kept.
        if not isinstance(mlp, Experts) or mlp.shared is not None or not self._gathers_copies:
            yield self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes)

    @property
    def _gathers_copies(self) -> bool:
        """Whether ranks that cut experts gather copies of tokens; otherwise the tokens, once, or
        nothing: without sequence parallelism all of them have the same.
        """
        if self.shape.etp == self.shape.tp and not self.shape.sequence_parallel:
            return False
        if not experts_as_the_rest(self.shape):
            return True
        dispatcher = trainer_settings(self.job).expert_dispatcher
        return dispatcher is ExpertDispatcher.ALLTOALL and self.shape.sequence_parallel

    def exchange(self, layer: TransformerLayer) -> Iterator[Call]:
        """Tokens to their experts and back, in one pass."""
        mlp, ep = layer.mlp, self.shape.ep
        if not isinstance(mlp, Experts) or ep == 1:
            return
        copies, routing = self._copies_bytes(mlp), None
        once = copies / mlp.experts_per_token
        calls = [(LinkOperation.ALL_TO_ALL, copies, 2.0)]
        dispatcher = trainer_settings(self.job).expert_dispatcher
        if dispatcher is ExpertDispatcher.DEEPEP:
            routing = Routing(experts=mlp.num_experts, per_token=mlp.experts_per_token)
            calls = [(LinkOperation.ALL_TO_ALL, once, 2.0)]
        elif dispatcher is ExpertDispatcher.ALLGATHER:
            both = (LinkOperation.ALL_GATHER, LinkOperation.REDUCE_SCATTER)
            calls = [(operation, once * ep, 1.0) for operation in both]
        for operation, message, count in calls:
            yield Call(
                groups=GroupKind.EXPERT,
                operation=operation,
                message_bytes=message,
                count=count,
                component=Component.EXPERT_PARALLEL,
                what=f"expert-parallel {operation.value}",
                routing=routing,
            )

    def context(self, layer: TransformerLayer, traffic: float) -> Iterator[Call]:
        """Keys and values of one pass, `traffic` times, or the exchange of heads."""
        if self.shape.cp == 1:
            return
        per_element = self.tokens * self.job.precision.bytes_per_element
        if trainer_settings(self.job).context_exchange:
            for width in attention_widths(layer, self.shape.tp):
                yield Call(
                    groups=GroupKind.CONTEXT,
                    operation=LinkOperation.ALL_TO_ALL,
                    message_bytes=per_element * width,
                    component=Component.CONTEXT_PARALLEL,
                    what="context-parallel all_to_all",
                )
            return
        message = traffic * self.tokens * kv_width(layer, self.shape.tp)
        message *= self.job.precision.bytes_per_element
        # A ring's step is every rank's send at once: an all_gather of cp blocks is cp - 1 of them.
        yield Call(
            groups=GroupKind.CONTEXT,
            operation=LinkOperation.ALL_GATHER,
            message_bytes=self.shape.cp * message,
            component=Component.CONTEXT_PARALLEL,
            what="context-parallel send",
        )

    def partial_gradients(self, layer: TransformerLayer) -> Iterator[Call]:
        """Sums of the gradients of what several ranks hold or compute alike: key and value
        projections, norms of heads, and the weights of a token's experts.
        """
        attention, mlp = layer.attention, layer.mlp
        if not target(self.job.target).own_layers_only:
            return
        elements = list[float]()
        if isinstance(attention, Attention):
            if self.shape.tp > attention.num_kv_heads:
                heads = 2 * attention.num_kv_heads * attention.head_dim
                elements += [heads * self.model.hidden_size, heads if attention.qkv_bias else 0]
            elements += [2 * attention.head_dim] if attention.qk_norm else []
        if isinstance(mlp, Experts):
            elements.append(self.tokens * mlp.experts_per_token)
        size = self.job.precision.bytes_per_element
        for count in elements:
            yield self._tensor(
                LinkOperation.ALL_REDUCE, count * size, component=Component.COPIED_HEADS
            )

    def _sums(self, gathered: float = 1.0, summed: float = 1.0) -> Iterator[Call]:
        """One sum, over the activations of a layer; with sequence parallelism of all of them, and
        `gathered`: what is gathered before it.
        """
        if not self.shape.sequence_parallel:
            yield self._tensor(LinkOperation.ALL_REDUCE, self.hidden_bytes * summed)
            return
        yield self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes * gathered)
        yield self._tensor(LinkOperation.REDUCE_SCATTER, self.hidden_bytes)

    def _tensor(
        self,
        operation: LinkOperation,
        message_bytes: float,
        component: Component = Component.TENSOR_PARALLEL,
    ) -> Call:
        return Call(
            groups=GroupKind.TENSOR,
            operation=operation,
            message_bytes=message_bytes,
            count=1.0,
            component=component,
            what=f"tensor-parallel {operation.value}",
        )

    def _copies_bytes(self, experts: Experts) -> float:
        """Copies of tokens that one rank sends to experts."""
        own = self.hidden_bytes / (self.shape.tp if self.shape.sequence_parallel else 1)
        return own * experts.experts_per_token


def kv_width(layer: TransformerLayer, tp: int) -> float:
    """Elements of a token's keys and values on one tensor-parallel rank."""
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        return float(sum(attention.slice_sizes(tp)))
    return 2.0 * attention.slice_sizes(tp)[1]


def attention_widths(layer: TransformerLayer, tp: int) -> tuple[float, float, float, float]:
    """Elements of a token's queries, keys, values and result on one tensor-parallel rank."""
    attention = layer.attention
    one, two = map(float, attention.slice_sizes(tp))
    if isinstance(attention, LatentAttention):
        return one, one, two, two
    return one, two, two, one


def attention_input(layer: TransformerLayer, hidden: int) -> float:
    """Elements of a token that ranks gather for attention, over its hidden size.

    Latents are computed before they are gathered (Megatron-core, multi_latent_attention.py). A
    backward pass gathers and scatters the same two sizes, the other way about.
    """
    attention = layer.attention
    if not isinstance(attention, LatentAttention):
        return 1.0
    return (attention.latent_size + (attention.query_rank or hidden)) / hidden
