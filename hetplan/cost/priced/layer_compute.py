"""How long a layer of a stage computes per microbatch, without its communication.

The predicted time of the layer with the trainer's kernels, on one tensor-parallel rank; packed
sequences attend to themselves only, cp divides it evenly, the island's clock and the slowest rank
make it longer. Of it, and apart: the padding of the vocabulary, copied key-value heads, and the
tokens that the busiest expert-parallel rank has beyond the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hetplan.cluster.spec import Island
from hetplan.cost.components.layers import accumulation_bytes, copied_heads, expert_load
from hetplan.cost.components.sequences import length_factors
from hetplan.cost.components.step import clock_factor
from hetplan.cost.components.stragglers import straggler_factors
from hetplan.cost.estimate_values import Component
from hetplan.cost.priced.asked import asking
from hetplan.cost.priced.layer_shares import LayerShares, matrix_parameters, view_of
from hetplan.cost.priced.values import Part, Shape, compute_seconds
from hetplan.cost.terms import Term
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import TransformerLayer
from hetplan.model.operators import OperatorClass
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import RecomputeModule
from hetplan.predict.datasheet import ELEMENTWISE_EFFICIENCY_BACKWARD, ELEMENTWISE_LOG_HALFWIDTH
from hetplan.predict.predictor import Prediction, Predictor

_CORE = frozenset(
    {
        OperatorClass.ATTENTION_SCORE.value,
        OperatorClass.SOFTMAX.value,
        OperatorClass.ATTENTION_DROPOUT.value,
        OperatorClass.ATTENTION_CONTEXT.value,
        OperatorClass.FUSED_ATTENTION.value,
    }
)
"""Parts of a prediction that selective recomputation repeats (arXiv 2205.05198, section 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCompute:
    """Compute of the layers of replicas of one shape and placement."""

    model: ModelSpec
    """With the padded vocabulary."""
    real_vocab_size: int
    island: Island
    job: Job
    shape: Shape
    predictor: Predictor = field(repr=False)

    @property
    def tokens(self) -> float:
        """Of one microbatch on one context-parallel rank."""
        return self.shape.microbatch_size * self.job.sequence_length / self.shape.cp

    def parts(
        self, kind: LayerKind, layer: TransformerLayer | None, *, backward: bool
    ) -> tuple[Part, ...]:
        """One pass of a layer, what is there only because of how it is cut apart."""
        ask = self.predictor.backward if backward else self.predictor.forward
        what = f"{kind.value} {'backward' if backward else 'forward'}"
        with asking(f"{what} in {self.job.precision} on {self.island.device.kind}"):
            found = ask(
                self.island.device,
                self.model if layer is None else view_of(self.model, layer),
                kind,
                microbatch_size=self.shape.microbatch_size,
                sequence_length=self.job.sequence_length,
                tp=self.shape.tp,
                precision=self.job.precision,
                kernels=replace(
                    trainer_settings(self.job).kernels(kind),
                    sequence_parallel=self.shape.sequence_parallel,
                    expert_parallel=self.shape.ep,
                ),
            )

        def part(component: Component, count: float) -> Part:
            term = Term(what=what, cause=self.island.device.kind, count=count, prediction=found)
            return Part(component=component, term=term, computes=True)

        share = self._length_factor(layer) / self.shape.cp
        accumulated = self._accumulated(kind, layer, found) if backward and found.parts else ()
        extra = dict(self._extras(kind, layer))
        # These are in the predicted time, the others come on top of it.
        inside = sum(extra.get(each, 0.0) for each in (Component.PADDING, Component.COPIED_HEADS))
        parts = [part(Component.COMPUTE, share * (1.0 - inside))]
        parts += [part(component, share * count) for component, count in extra.items() if count]
        for component, factor in (
            (Component.CLOCKS, clock_factor(self.island)),
            (Component.STRAGGLERS, self._straggler_factor()),
        ):
            if factor != 1.0:
                whole = sum(each.term.count for each in parts)
                parts.append(part(component, whole * (factor - 1.0)))
        return (*parts, *accumulated)

    def _accumulated(
        self, kind: LayerKind, layer: TransformerLayer | None, found: Prediction
    ) -> tuple[Part, ...]:
        """Adding the gradients of the weights to those of the microbatches before.

        The product writes them once, which is in its time; layers that were measured, or priced, as
        a whole have all of it.
        """
        settings = trainer_settings(self.job)
        bandwidth = self.island.device.memory_bandwidth_bytes_per_second
        count = matrix_parameters(self.model, kind, layer, self.shape)
        # A table's gradient comes from no product.
        fused = settings.fused_accumulation and kind is not LayerKind.EMBEDDING
        each = accumulation_bytes(
            self.job.precision.bytes_per_element,
            settings.gradient_precision.bytes_per_element,
            fused=fused,
            float32_sums=found.float32_sums,
        )
        if not bandwidth or not count or not each:
            return ()
        # What a product moves beside its operations is at the memory's full rate.
        rate = bandwidth * (1.0 if fused else ELEMENTWISE_EFFICIENCY_BACKWARD)
        term = Term(
            what=f"{kind.value} gradient accumulation",
            cause=self.island.device.kind,
            count=1,
            prediction=Prediction(
                seconds=count * each / rate,
                log_halfwidth=ELEMENTWISE_LOG_HALFWIDTH,
                source=found.source,
            ),
        )
        return (Part(component=Component.COMPUTE, term=term, computes=True),)

    def _length_factor(self, layer: TransformerLayer | None) -> float:
        """Of sequences that are packed: attention to themselves only."""
        if layer is None or not self.job.packing:
            return 1.0
        return length_factors(self.job, layer.window).layer_factor(self.work(layer).core)

    def _straggler_factor(self) -> float:
        """The slowest of the stage's ranks over a typical one, in the mean."""
        spread = self.island.speed_spread
        if not spread:
            return 1.0
        return straggler_factors(spread, self.shape.ranks).mean_seconds

    def _extras(
        self, kind: LayerKind, layer: TransformerLayer | None
    ) -> Iterator[tuple[Component, float]]:
        """Parts of the predicted time that are there only because of how the model is cut."""
        if kind is LayerKind.HEAD:
            padded = self.model.vocab_size
            yield Component.PADDING, max(0.0, 1.0 - self.real_vocab_size / padded)
        if layer is not None:
            copied = copied_heads(
                layer, self.model.hidden_size, self.job.sequence_length, self.shape.tp
            )
            yield Component.COPIED_HEADS, copied.time_fraction
            over = expert_load(layer, self.job, self.shape.ep).factor - 1.0
            if over:
                yield Component.IMBALANCE, over * self.work(layer).routed

    def core(self, layer: TransformerLayer, compute: tuple[Part, ...]) -> float:
        """The attention core's part of the layer's compute: as predicted, else by operations.

        A fused kernel does half of the square that scores in memory are.
        """
        prediction = compute[0].term.prediction
        inside = sum(part.seconds for part in prediction.parts if part.name in _CORE)
        if inside and prediction.seconds:
            return inside / prediction.seconds
        core = self.work(layer).core
        fused = trainer_settings(self.job).fused_attention
        return core if fused else 2.0 * core / (1.0 + core)

    def work(self, layer: TransformerLayer) -> LayerShares:
        """Which part of the layer's work is what."""
        return LayerShares(
            layer=layer,
            hidden_size=self.model.hidden_size,
            microbatch_size=self.shape.microbatch_size,
            sequence_length=self.job.sequence_length,
            tp=self.shape.tp,
        )

    def module_share(
        self, layer: TransformerLayer, module: RecomputeModule, compute: tuple[Part, ...]
    ) -> float:
        """Part of the layer's forward compute that the module is."""
        work = self.work(layer)
        if module is RecomputeModule.CORE_ATTENTION:
            return self.core(layer, compute)
        found = work.of(module)
        if found is not None:
            return found
        # Elementwise work: read and written once, at the device's memory bandwidth.
        moved = 2.0 * self.tokens * work.elementwise_width(module)
        moved *= self.job.precision.bytes_per_element
        bandwidth = self.island.device.memory_bandwidth_bytes_per_second
        whole = compute_seconds(compute)
        return moved / bandwidth / whole if bandwidth > 0 and whole > 0 else 0.0
