"""What one layer of a stage costs per microbatch: compute and the communication inside it.

Compute is the predicted time of the layer on one tensor-parallel rank; cp divides it evenly
(sequences are cut so that every rank has as much of the causal triangle). The collectives are
those of `hetplan.cost.step_model.layer_calls`; a ring's sends hide behind the attention of one of
cp blocks where the trainer overlaps them. The busiest expert-parallel rank has
`expert_load_factor` times the mean; transfers and the routed experts' compute grow with it.

Where the trainer overlaps experts' exchanges (`OverlapSettings.expert_parallel`), a layer's forward
pass of one microbatch runs together with the backward pass of another, in three phases
(Megatron-core, models/common/model_chunk_schedule_plan.py, TransformerLayerSchedulePlan.run):

    exchange    backward's first    forward's first, backward's last    forward's last
    compute     forward attention   experts of both                     backward attention

What of a phase's exchange is longer than its compute is waited for. So it is in the steady phase of
1F1B; passes of its warm-up and cool-down have nothing beside them, which is not counted: of m
microbatches in v chunks on p stages about p (v + 1) of m v passes.

Recomputation repeats forward work before the backward pass: all of it, communication included, or
of single modules their part of the layer's operations (elementwise modules: their bytes over the
device's memory bandwidth).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hetplan.cost.estimate_values import Component
from hetplan.cost.step_model.groups import Group, Groups, KnownCollectives
from hetplan.cost.step_model.layer_calls import Call, LayerCalls
from hetplan.cost.step_model.layer_compute import LayerCompute, without_waits
from hetplan.cost.step_model.overlap import Overlap, beside, exposed_ring, slowdowns
from hetplan.cost.step_model.uneven_work import expert_load
from hetplan.cost.terms import Part, as_recompute, compute_seconds, repeated, seconds_of_parts
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Experts, TransformerLayer
from hetplan.model.spec import LayerKind
from hetplan.plans.plan import OverlapSettings, Recompute, RecomputeGranularity, RecomputeModule
from hetplan.profiling.samples import LinkOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Passes of one layer, one microbatch."""

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    """Without recomputation."""
    again: tuple[Part, ...]
    """Recomputation in the backward pass, where the layer recomputes."""
    weight_seconds: float
    """Of the backward pass, the gradients of the weights: what zero-bubble schedules delay."""

    @property
    def forward_seconds(self) -> float:
        """Forward pass."""
        return seconds_of_parts(self.forward)

    @property
    def backward_seconds(self) -> float:
        """Backward pass without recomputation."""
        return seconds_of_parts(self.backward)

    @property
    def again_seconds(self) -> float:
        """Recomputation."""
        return seconds_of_parts(self.again)


def hidden_beside(
    parts: Sequence[Part], compute: Sequence[Part], found: Overlap
) -> tuple[Part, ...]:
    """What is left of communication that runs beside this compute, and what the compute takes
    longer.
    """
    left = found.exposed_seconds / seconds_of_parts(parts)
    delay = repeated(compute, found.compute_delay_seconds / compute_seconds(compute))
    return (
        *(
            Part(
                component=part.component,
                term=part.term.times(left),
                hidden_seconds=part.hidden_seconds + (1.0 - left) * part.seconds,
                computes=part.computes,
            )
            for part in parts
        ),
        *(replace(part, component=Component.SLOWED) for part in delay),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPricer(LayerCompute):
    """Prices the layers of replicas of one shape and placement, communication included."""

    recompute: Recompute
    overlap: OverlapSettings
    groups: Groups
    known: KnownCollectives = field(repr=False, compare=False)

    @property
    def _calls(self) -> LayerCalls:
        return LayerCalls(model=self.model, job=self.job, shape=self.shape)

    def at(self, position: int) -> LayerCost:
        """The layer at this position of the row."""
        model = self.model
        if position == 0:
            return self.embedding()
        if position > model.num_layers + model.num_mtp_layers:
            return self.head()
        layer = model.layer_at(position).at(self.job.sequence_length)
        if position <= model.num_layers:
            return self.transformer(layer)
        return self.multi_token_prediction(layer)

    def transformer(self, layer: TransformerLayer) -> LayerCost:
        """One transformer layer."""
        return self.transformer_with(layer, (self.recompute,))[0]

    def transformer_with(
        self, layer: TransformerLayer, recomputes: Sequence[Recompute]
    ) -> list[LayerCost]:
        """One transformer layer with each of these recomputations, priced once: only what is
        repeated differs.
        """
        forward = self.parts(LayerKind.TRANSFORMER, layer, backward=False)
        backward = self.parts(LayerKind.TRANSFORMER, layer, backward=True)
        calls = self._calls
        sums = self._communication(calls.sums(layer))
        core = self.core(layer, forward)
        products = 1.0 - core
        exchange = self._exchange(layer)
        there, back = self._hidden_exchanges(layer, exchange, forward, backward)
        beside_forward = (
            *self._beside(sums, forward, products),
            *self._ring(layer, 1.0, forward, core),
            *there,
        )
        beside_backward = (
            *self._sums_backward(calls, layer, backward, products),
            *self._communication(calls.partial_gradients(layer)),
            *self._ring(layer, 2.0, backward, core),
            *back,
        )
        forward = without_waits(forward, beside_forward)
        backward = without_waits(backward, beside_backward)
        all_forward = (*forward, *beside_forward)
        experts = (*self._communication(calls.expert_sums(layer)), *exchange)
        return [
            LayerCost(
                forward=all_forward,
                backward=(*backward, *beside_backward),
                again=self._again(recompute, layer, (forward, all_forward), experts),
                weight_seconds=compute_seconds(backward) * products / 2.0,
            )
            for recompute in recomputes
        ]

    def embedding(self) -> LayerCost:
        """The embedding; all of its backward pass is the gradient of its weights."""
        calls = self._calls.embedding(backward=False), self._calls.embedding(backward=True)
        return self._end_layer(LayerKind.EMBEDDING, calls, for_weights=1.0)

    def head(self) -> LayerCost:
        """Final norm, output projection and loss."""
        calls = self._calls.head(backward=False), self._calls.head(backward=True)
        return self._end_layer(LayerKind.HEAD, calls, for_weights=0.5)

    def _end_layer(
        self, kind: LayerKind, calls: tuple[Iterable[Call], Iterable[Call]], for_weights: float
    ) -> LayerCost:
        """A layer at an end of the row; `for_weights`: part of its backward compute."""
        before, after = map(self._communication, calls)
        forward = without_waits(self.parts(kind, None, backward=False), before)
        backward = without_waits(self.parts(kind, None, backward=True), after)
        return LayerCost(
            forward=(*forward, *before),
            backward=(*backward, *after),
            again=(),
            weight_seconds=compute_seconds(backward) * for_weights,
        )

    def multi_token_prediction(self, layer: TransformerLayer) -> LayerCost:
        """Its transformer layer, the merge of state and embedding (by operations), and a head."""
        inside, head = self.transformer(layer), self.head()
        h, tp = self.model.hidden_size, self.shape.tp
        # Merge [h, 2 h], cut by columns (arXiv 2412.19437, section 2.2).
        merge = self.work(layer).of_weights(2 * h * -(-h // tp))

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

    def _communication(self, calls: Iterable[Call]) -> tuple[Part, ...]:
        return tuple(
            Part(component=call.component, term=term.times(call.count))
            for call in calls
            for term in self.known.of(
                getattr(self.groups, call.groups),
                call.operation,
                call.message_bytes,
                call.what,
                call.routing,
            )
        )

    def _exchange(self, layer: TransformerLayer) -> tuple[Part, ...]:
        """Tokens to their experts and back, in one pass, for the busiest rank."""
        mean = self._communication(self._calls.exchange(layer))
        over = expert_load(layer, self.job, self.shape.ep).factor - 1.0
        if not over:
            return mean
        more = (replace(part, component=Component.IMBALANCE) for part in repeated(mean, over))
        return (*mean, *more)

    def _hidden_exchanges(
        self,
        layer: TransformerLayer,
        exchange: tuple[Part, ...],
        forward: tuple[Part, ...],
        backward: tuple[Part, ...],
    ) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """The exchanges of a forward and of a backward pass beside what the trainer puts there.

        Between microbatches (docstring of the module), or beside the pass's own shared experts.
        """
        group = self.groups.expert
        if self.overlap.expert_parallel:
            experts = self.module_share(layer, RecomputeModule.EXPERTS, forward)
            once, both = repeated(exchange, 0.5), (*forward, *backward)
            middle = repeated(self._hidden(exchange, both, experts, None, group), 0.5)
            return (
                (*middle, *self._hidden(once, backward, 1.0 - experts, None, group)),
                (*middle, *self._hidden(once, forward, 1.0 - experts, None, group)),
            )
        mlp = layer.mlp
        if trainer_settings(self.job).shared_expert_overlap and isinstance(mlp, Experts):
            h, tp = self.model.hidden_size, self.shape.tp
            weights = mlp.shared.matrix_parameters(h, tp) if mlp.shared else 0
            share = self.work(layer).of_weights(weights)
            return (
                self._hidden(exchange, forward, share, None, group),
                self._hidden(exchange, backward, share, None, group),
            )
        return exchange, exchange

    def _ring(
        self, layer: TransformerLayer, traffic: float, compute: tuple[Part, ...], core_share: float
    ) -> tuple[Part, ...]:
        """Key-value sends of one pass; the attention's share of the compute can hide them."""
        parts = self._communication(self._calls.context(layer, traffic))
        exchanged = trainer_settings(self.job).context_exchange
        if exchanged or not self.overlap.context_parallel or self.shape.cp == 1:
            return parts  # nothing is there to hide an exchange of heads
        return self._hidden(parts, compute, core_share, self.shape.cp, self.groups.context)

    def _beside(
        self, sums: tuple[Part, ...], compute: tuple[Part, ...], matrix_share: float
    ) -> tuple[Part, ...]:
        """Tensor-parallel sums, hidden as far as the trainer overlaps them with the products."""
        if not self.overlap.tensor_parallel or self.shape.tp == 1:
            return sums  # with tp 1 they can only be the experts', cut otherwise
        return self._hidden(sums, compute, matrix_share, self.shape.tp, self.groups.tensor)

    def _sums_backward(
        self,
        calls: LayerCalls,
        layer: TransformerLayer,
        compute: tuple[Part, ...],
        matrix_share: float,
    ) -> tuple[Part, ...]:
        """Those of a backward pass, in which sums of several products are scattered.

        PyTorch's asynchronous tensor parallelism joins a scatter to a product and a gathering to
        those that read its rows (torch/_inductor/fx_passes/micro_pipeline_tp.py): not to a sum of
        products, and not to the weights' gradients, which read the input that is gathered again.
        """
        again = self._communication(calls.gathered_again(layer))
        if trainer_settings(self.job).summed_overlap:
            sums = self._communication(calls.sums(layer, backward=True))
            return self._beside((*sums, *again), compute, matrix_share)
        gathering = LinkOperation.ALL_GATHER
        gathers = [call for call in calls.sums(layer, backward=True) if call.operation is gathering]
        others = [
            call for call in calls.sums(layer, backward=True) if call.operation is not gathering
        ]
        return (
            *self._beside(self._communication(gathers), compute, matrix_share),
            *self._communication(others),
            *again,
        )

    def _hidden(
        self,
        parts: tuple[Part, ...],
        compute: tuple[Part, ...],
        share: float,
        ranks: int | None,
        group: Group,
    ) -> tuple[Part, ...]:
        """The parts beside so much of the compute, and what that makes the compute longer.

        In as many pieces as there are ranks, one beside the other; None: independent of it.
        """
        whole, work = seconds_of_parts(parts), share * compute_seconds(compute)
        if whole <= 0 or work <= 0:
            return parts
        inside = group.shape.num_nodes == 1
        link = self.island.intra_node if inside else self.island.inter_node
        slow = slowdowns(self.island.device, link)
        found = (
            beside(whole, work, slow) if ranks is None else exposed_ring(whole, work, ranks, slow)
        )
        return hidden_beside(parts, [part for part in compute if part.computes], found)

    # ---- recomputation

    def _again(
        self,
        recompute: Recompute,
        layer: TransformerLayer,
        passed: tuple[tuple[Part, ...], tuple[Part, ...]],
        experts: tuple[Part, ...],
    ) -> tuple[Part, ...]:
        """passed: compute of a forward pass, all of it; experts: communication of its experts."""
        compute, forward = passed
        if recompute.granularity is RecomputeGranularity.NONE:
            return ()
        if recompute.granularity is RecomputeGranularity.FULL:
            return tuple(as_recompute(forward))
        share = sum(self.module_share(layer, module, compute) for module in recompute.modules)
        found = tuple(as_recompute(repeated(compute, min(1.0, share))))
        return (*found, *experts) if RecomputeModule.EXPERTS in recompute.modules else found
