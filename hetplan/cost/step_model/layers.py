"""What one layer of a stage costs per microbatch: compute and the communication inside it.

b sequences of s tokens, hidden size h, e bytes per element, degrees tp, cp, ep, etp. Compute is
the predicted time of the layer on one tensor-parallel rank; cp divides it evenly (sequences are
cut so that every rank has as much of the causal triangle). Communication, per layer:

tp   forward 2 and backward 2 all_reduces of [b, s / cp, h] (arXiv 1909.08053, section 3); with
     sequence parallelism each is a reduce_scatter and an all_gather (arXiv 2205.05198, section
     4.2), and the backward pass gathers the products' inputs once more, because only a rank's
     own part was kept (same section; Megatron-LM, megatron/core/tensor_parallel/layers.py).
     The embedding has one forward; the head one backward and, forward, those of the softmax's
     [b, s] maximum and [2, b, s] sums in float32 (Megatron-LM's over a float32 copy sums the
     two apart: three of [b, s]). Where tp exceeds the key-value heads the native trainer sums
     the gradients of their copies in every backward pass (others are not charged).
cp   ring attention (arXiv 2310.01889): cp - 1 sends of keys and values, [b, s / cp, keys + values
     of one rank], forward, and twice the bytes backward (their gradients travel along); each hides
     behind the attention of one of cp blocks where the trainer overlaps them. Or, where the trainer
     exchanges heads (arXiv 2309.14509, section 3), all_to_alls of queries, keys, values and result
     in either pass, and every rank has the whole sequence for 1 / cp of its heads.
ep   all_to_all of the tokens to their experts and back, forward and backward: b s / cp x experts
     per token x h, divided by tp with sequence parallelism (arXiv 2006.16668, section 3). Where the
     experts are cut (etp > 1) their sums are of all copies that came in. The busiest rank has
     `expert_load_factor` times the mean; transfers and the routed experts' compute grow with it.

Recomputation repeats forward work before the backward pass: all of it, communication included, or
of single modules their part of the layer's operations (elementwise modules: their bytes over the
device's memory bandwidth).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hetplan.cluster.spec import Island, Link
from hetplan.cost.components.layers import attention_widths, expert_load, products_by_columns
from hetplan.cost.components.overlap import exposed_ring, slowdowns
from hetplan.cost.estimate_values import Component
from hetplan.cost.memory.values import FLOAT32_BYTES
from hetplan.cost.step_model.groups import Group, Groups, KnownCollectives
from hetplan.cost.step_model.layer_compute import LayerCompute, kv_width, without_waits
from hetplan.cost.step_model.values import (
    LayerCost,
    Part,
    Shape,
    as_recompute,
    compute_seconds,
    repeated,
    seconds_of_parts,
)
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Attention, Experts, TransformerLayer
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import RecomputeGranularity, RecomputeModule
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.profiling.samples import LinkOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPricer:
    """Prices the layers of replicas of one shape and placement."""

    model: ModelSpec
    """With the padded vocabulary."""
    real_vocab_size: int
    island: Island
    job: Job
    shape: Shape
    groups: Groups
    known: KnownCollectives = field(repr=False, compare=False)
    predictor: Predictor = field(repr=False)

    @property
    def tokens(self) -> float:
        """Of one microbatch on one context-parallel rank."""
        return self.shape.microbatch_size * self.job.sequence_length / self.shape.cp

    @property
    def hidden_bytes(self) -> float:
        """Activations of one microbatch between two layers, on one context-parallel rank."""
        return self.tokens * self.model.hidden_size * self.job.precision.bytes_per_element

    @property
    def _compute(self) -> LayerCompute:
        return LayerCompute(
            model=self.model,
            real_vocab_size=self.real_vocab_size,
            island=self.island,
            job=self.job,
            shape=self.shape,
            predictor=self.predictor,
        )

    def transformer(self, layer: TransformerLayer) -> LayerCost:
        """One transformer layer."""
        forward = self._compute.parts(LayerKind.TRANSFORMER, layer, backward=False)
        backward = self._compute.parts(LayerKind.TRANSFORMER, layer, backward=True)
        sums = tuple(self._layer_sums(layer))
        exchange = tuple(self._exchange(layer))
        copies = tuple(self._copied_heads(layer))
        core = self._compute.core(layer, forward)
        products = 1.0 - core
        beside_forward = (
            *self._beside(sums, forward, products),
            *self._ring(layer, 1.0, forward, core),
            *exchange,
        )
        beside_backward = (
            *self._beside((*sums, *self._gathered_again(layer)), backward, products),
            *copies,
            *self._ring(layer, 2.0, backward, core),
            *exchange,
        )
        forward = without_waits(forward, beside_forward)
        backward = without_waits(backward, beside_backward)
        all_forward = (*forward, *beside_forward)
        return LayerCost(
            forward=all_forward,
            backward=(*backward, *beside_backward),
            again=self._again(layer, forward, all_forward, exchange),
            weight_seconds=compute_seconds(backward) * products / 2.0,
        )

    def embedding(self) -> LayerCost:
        """The embedding; all of its backward pass is the gradient of its weights."""
        forward = self._compute.parts(LayerKind.EMBEDDING, None, backward=False)
        backward = self._compute.parts(LayerKind.EMBEDDING, None, backward=True)
        one = LinkOperation.ALL_REDUCE
        gathered: tuple[Part, ...] = ()
        if self.shape.sequence_parallel:
            one = LinkOperation.REDUCE_SCATTER
            # The gradient of what was scattered (arXiv 2205.05198, section 4.2.2).
            gathered = self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes)
        summed = self._tensor(one, self.hidden_bytes)
        backward = without_waits(backward, gathered)
        return LayerCost(
            forward=(*without_waits(forward, summed), *summed),
            backward=(*backward, *gathered),
            again=(),
            weight_seconds=compute_seconds(backward),
        )

    def head(self) -> LayerCost:
        """Final norm, output projection and loss."""
        forward = self._compute.parts(LayerKind.HEAD, None, backward=False)
        backward = self._compute.parts(LayerKind.HEAD, None, backward=True)
        softmax = self.tokens * FLOAT32_BYTES
        reduce = LinkOperation.ALL_REDUCE
        gathered: tuple[Part, ...] = ()
        summed = reduce
        if self.shape.sequence_parallel:
            gathered = self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes)
            summed = LinkOperation.REDUCE_SCATTER
        # Maximum, sum and the target's logit: the last two in one message or, by Megatron-LM's
        # VocabParallelCrossEntropy over a copy, in two (megatron/core/tensor_parallel).
        habits, options = target(self.job.target), trainer_settings(self.job)
        apart = habits.separate_loss_sums and not options.fused_loss
        rows = (1, 1, 1) if apart else (1, 2)
        before = (
            *gathered,
            *(part for count in rows for part in self._tensor(reduce, count * softmax)),
        )
        # What was gathered is gathered again for the weights' gradient.
        after = (*gathered, *self._tensor(summed, self.hidden_bytes))
        backward = without_waits(backward, after)
        return LayerCost(
            forward=(*without_waits(forward, before), *before),
            backward=(*backward, *after),
            again=(),
            weight_seconds=compute_seconds(backward) / 2.0,
        )

    def multi_token_prediction(self, layer: TransformerLayer) -> LayerCost:
        """Its transformer layer, the merge of state and embedding (by operations), and a head."""
        inside, head = self.transformer(layer), self.head()
        h, tp = self.model.hidden_size, self.shape.tp
        # Merge [h, 2 h], cut by columns (arXiv 2412.19437, section 2.2).
        merge = self._compute.work(layer).of_weights(2 * h * -(-h // tp))

        def merged(parts: tuple[Part, ...]) -> tuple[Part, ...]:
            return repeated((part for part in parts if part.computes), merge)

        return LayerCost(
            forward=(*inside.forward, *merged(inside.forward), *head.forward),
            backward=(*inside.backward, *merged(inside.backward), *head.backward),
            again=inside.again,
            weight_seconds=inside.weight_seconds
            + head.weight_seconds
            + 0.5 * merge * compute_seconds(inside.backward),
        )

    # ---- communication

    def _parts(
        self,
        component: Component,
        what: str,
        group: Group,
        operation: LinkOperation,
        message_bytes: float,
        count: float = 1.0,
    ) -> tuple[Part, ...]:
        terms = self.known.of(group, operation, message_bytes, what)
        return tuple(Part(component=component, term=term.times(count)) for term in terms)

    def _tensor(
        self, operation: LinkOperation, message_bytes: float, count: float = 1.0
    ) -> tuple[Part, ...]:
        what = f"tensor-parallel {operation.value}"
        return self._parts(
            Component.TENSOR_PARALLEL, what, self.groups.tensor, operation, message_bytes, count
        )

    def _sums(self, message_bytes: float, count: float) -> Iterator[Part]:
        if not self.shape.sequence_parallel:
            yield from self._tensor(LinkOperation.ALL_REDUCE, message_bytes, count)
            return
        yield from self._tensor(LinkOperation.ALL_GATHER, message_bytes, count)
        yield from self._tensor(LinkOperation.REDUCE_SCATTER, message_bytes, count)

    def _layer_sums(self, layer: TransformerLayer) -> Iterator[Part]:
        """Of one pass of a transformer layer."""
        separate = isinstance(layer.mlp, Experts) and not self.shape.experts_like_rest
        yield from self._sums(self.hidden_bytes, 1 if separate else 2)
        if separate and isinstance(layer.mlp, Experts):
            if layer.mlp.shared is not None:
                # Shared experts are cut over tp like any MLP.
                yield from self._sums(self.hidden_bytes, 1)
            copies = self._copies_bytes(layer.mlp) * self.shape.etp
            for operation in (LinkOperation.ALL_GATHER, LinkOperation.REDUCE_SCATTER):
                yield from self._parts(
                    Component.TENSOR_PARALLEL,
                    f"expert-tensor-parallel {operation.value}",
                    self.groups.expert_tensor,
                    operation,
                    copies,
                )

    def _gathered_again(self, layer: TransformerLayer) -> tuple[Part, ...]:
        """Inputs of the products that are cut by columns, for their weights' gradients."""
        if not self.shape.sequence_parallel:
            return ()
        count = products_by_columns(layer, self.shape.experts_like_rest)
        return self._tensor(LinkOperation.ALL_GATHER, self.hidden_bytes, count)

    def _copies_bytes(self, experts: Experts) -> float:
        """Copies of tokens that one rank sends to experts."""
        own = self.hidden_bytes / (self.shape.tp if self.shape.sequence_parallel else 1)
        return own * experts.experts_per_token

    def _exchange(self, layer: TransformerLayer) -> Iterator[Part]:
        """Tokens to their experts and back, in one pass."""
        if not isinstance(layer.mlp, Experts) or self.shape.ep == 1:
            return
        message = self._copies_bytes(layer.mlp)
        operation = LinkOperation.ALL_TO_ALL
        mean = self._parts(
            Component.EXPERT_PARALLEL,
            "expert-parallel all_to_all",
            self.groups.expert,
            operation,
            message,
            2.0,
        )
        yield from mean
        over = expert_load(layer, self.job, self.shape.ep).factor - 1.0
        if over:
            for part in repeated(mean, over):
                yield replace(part, component=Component.IMBALANCE)

    def _copied_heads(self, layer: TransformerLayer) -> Iterator[Part]:
        """Sums of the gradients of key and value projections that several ranks hold."""
        attention = layer.attention
        if not isinstance(attention, Attention) or not target(self.job.target).sums_copied_heads:
            return
        if self.shape.tp <= attention.num_kv_heads:
            return
        width = attention.num_kv_heads * attention.head_dim
        biases = float(2 * width * self.job.precision.bytes_per_element)
        sizes = (biases * self.model.hidden_size, biases if attention.qkv_bias else 0.0)
        for message in sizes:
            for part in self._tensor(LinkOperation.ALL_REDUCE, message):
                yield replace(part, component=Component.COPIED_HEADS)

    def _ring(
        self, layer: TransformerLayer, traffic: float, compute: tuple[Part, ...], core_share: float
    ) -> Iterator[Part]:
        """Key-value sends of one pass; the attention's share of the compute can hide them."""
        cp = self.shape.cp
        if cp == 1:
            return
        if trainer_settings(self.job).context_exchange:
            yield from self._exchanged_heads(layer)
            return
        message = traffic * self.tokens * kv_width(layer, self.shape.tp)
        message *= self.job.precision.bytes_per_element
        # A ring's step is every rank's send at once: an all_gather of cp blocks is cp - 1 of them.
        parts = self._parts(
            Component.CONTEXT_PARALLEL,
            "context-parallel send",
            self.groups.context,
            LinkOperation.ALL_GATHER,
            cp * message,
        )
        if self.shape.overlap_context:
            yield from self._hidden(parts, compute, core_share, cp, self.groups.context)
        else:
            yield from parts

    def _exchanged_heads(self, layer: TransformerLayer) -> Iterator[Part]:
        """Queries, keys and values by heads, and the result back: nothing is there to hide them."""
        each = self.tokens * self.job.precision.bytes_per_element
        for width in attention_widths(layer, self.shape.tp):
            yield from self._parts(
                Component.CONTEXT_PARALLEL,
                "context-parallel all_to_all",
                self.groups.context,
                LinkOperation.ALL_TO_ALL,
                each * width,
            )

    def _beside(
        self, sums: tuple[Part, ...], compute: tuple[Part, ...], matrix_share: float
    ) -> tuple[Part, ...]:
        """Tensor-parallel sums, hidden as far as the trainer overlaps them with the products."""
        if not self.shape.overlap_tensor or self.shape.tp == 1:
            return sums  # with tp 1 they can only be the experts', cut otherwise
        return self._hidden(sums, compute, matrix_share, self.shape.tp, self.groups.tensor)

    def _hidden(
        self,
        parts: tuple[Part, ...],
        compute: tuple[Part, ...],
        share: float,
        ranks: int,
        group: Group,
    ) -> tuple[Part, ...]:
        """The parts beside so much of the compute, and what that makes the compute longer."""
        whole, beside = seconds_of_parts(parts), compute_seconds(compute)
        if whole <= 0 or beside <= 0:
            return parts
        slow = slowdowns(self.island.device, self._link(group))
        found = exposed_ring(whole, share * beside, ranks, slow)
        left = found.exposed_seconds / whole
        delay = repeated(compute, found.compute_delay_seconds / beside)
        return (
            *(
                replace(
                    part,
                    term=part.term.times(left),
                    hidden_seconds=part.hidden_seconds + (1.0 - left) * part.seconds,
                )
                for part in parts
            ),
            *(replace(part, component=Component.SLOWED) for part in delay),
        )

    def _link(self, group: Group) -> Link:
        inside = group.shape.num_nodes == 1
        return self.island.intra_node if inside else self.island.inter_node

    # ---- recomputation

    def _again(
        self,
        layer: TransformerLayer,
        compute: tuple[Part, ...],
        forward: tuple[Part, ...],
        exchange: tuple[Part, ...],
    ) -> tuple[Part, ...]:
        recompute = self.shape.recompute
        if recompute.granularity is RecomputeGranularity.NONE:
            return ()
        if recompute.granularity is RecomputeGranularity.FULL:
            return tuple(as_recompute(forward))
        share = sum(
            self._compute.module_share(layer, module, compute) for module in recompute.modules
        )
        found = tuple(as_recompute(repeated(compute, min(1.0, share))))
        return (*found, *exchange) if RecomputeModule.EXPERTS in recompute.modules else found
