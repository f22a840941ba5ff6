"""Compute of a stage's layers for one microbatch, without communication.

A layer takes its predicted time with the trainer's kernels, on one tensor-parallel rank. Packed
sequences attend to themselves only, cp divides the time evenly, the island's clock and the slowest
rank make it longer. Told apart are the padding of the vocabulary, copied key-value heads, and the
tokens that the busiest expert-parallel rank has beyond the mean. Parts of a layer's work go by
operations of the forward pass on one tensor-parallel rank (`hetplan.model.work`).

Waits for the host. The host launches a pass's kernels in a row and runs ahead while the device is
busy, with collectives as with anything else. A predicted layer knows nothing of collectives and has

    wait = max(0, host - device)        of which a pass keeps        max(0, host - device - c)

where c is the communication that runs beside no compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hetplan.cluster.spec import Island
from hetplan.cost.estimate_values import Component
from hetplan.cost.memory.device import weights_at
from hetplan.cost.step_model.uneven_work import clock, expert_load, length_factors, straggler_factor
from hetplan.cost.terms import Part, Term, asking, compute_seconds, seconds_of_parts
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Attention, Experts, LayerRun, TransformerLayer
from hetplan.model.operators import OperatorClass
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.model.work import LayerWork, transformer_work
from hetplan.plans.chosen import Shape
from hetplan.plans.pieces import experts_as_the_rest
from hetplan.plans.plan import RecomputeModule
from hetplan.predict.datasheet import ELEMENTWISE_EFFICIENCY_BACKWARD, ELEMENTWISE_LOG_HALFWIDTH
from hetplan.predict.layer.composed import WAIT_PART
from hetplan.predict.predictor import LayerQuery, Prediction, Predictor


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
        """The part of a module of products, the attention core left out; None for others."""
        mlp, h = self.layer.mlp, self.hidden_size
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
    degree = shape.tp if experts_as_the_rest(shape) else shape.etp
    count += mlp.router_parameters(h)
    count += mlp.num_experts / shape.ep * mlp.expert.matrix_parameters(h, degree)
    return count + (mlp.shared.matrix_parameters(h, shape.tp) if mlp.shared else 0)


def layer_parameters(model: ModelSpec, position: int, shape: Shape) -> tuple[float, float]:
    """(parameters, of routed experts apart) that one rank holds of the layer at this position.

    Experts are apart where they are cut or copied otherwise than the other weights.
    """
    if experts_as_the_rest(shape):
        return float(model.parameters_at(position, shape.tp)), 0.0
    held = weights_at(model, position, shape.tp, shape.ep, shape.etp)
    return held.dense, held.routed


def without_waits(compute: Sequence[Part], others: Iterable[Part]) -> tuple[Part, ...]:
    """A pass's compute, as it is with these others of the pass between its kernels."""
    whole = compute[0].term.prediction if compute else None
    wait = 0.0 if whole is None else _wait(whole)
    if whole is None or wait <= 0:
        return tuple(compute)
    own = [part for part in compute if part.term.prediction is whole]
    rest = [part for part in compute if part.term.prediction is not whole]
    count = sum(part.term.count for part in own)
    busy = seconds_of_parts((*rest, *others))
    if count <= 0 or busy <= 0:
        return tuple(compute)
    left = _waiting(whole, max(0.0, wait - busy / count))
    return tuple(
        replace(part, term=replace(part.term, prediction=left))
        if part.term.prediction is whole
        else part
        for part in compute
    )


def _wait(prediction: Prediction) -> float:
    return sum(part.seconds for part in prediction.parts if part.name == WAIT_PART)


def _waiting(prediction: Prediction, wait: float) -> Prediction:
    """The prediction with so much of a wait."""
    parts = tuple(
        replace(part, seconds=wait) if part.name == WAIT_PART else part
        for part in prediction.parts
        if part.name != WAIT_PART or wait > 0
    )
    seconds = sum(part.seconds for part in parts)
    spread = math.hypot(*(part.seconds * part.log_halfwidth for part in parts))
    return replace(
        prediction,
        seconds=seconds,
        log_halfwidth=spread / seconds if seconds else 0.0,
        parts=parts,
    )


def accumulation_bytes(
    weight_bytes: int, gradient_bytes: int, *, fused: bool, float32_sums: bool = False
) -> int:
    """Memory traffic per weight and microbatch of adding up gradients, beyond that of the product.

    Fused: the product reads and writes the sum (2 gradient bytes). Its own time has that of float32
    sums if it was measured with them, otherwise that of a sum as wide as the weights. Products of
    equal shape on B200 with float32 and with bfloat16 sums: 3.9 B per weight at the memory's full
    rate apart, median of 82 (SimuMax's tables); by the traffic it is 4. Not fused: a pass of its
    own reads both and writes the sum (Megatron-LM, `--no-gradient-accumulation-fusion`:
    megatron/core/distributed/distributed_data_parallel.py; autograd's own sum likewise).
    """
    if fused:
        return max(0, 2 * gradient_bytes - (8 if float32_sums else 2 * weight_bytes))
    return weight_bytes + 2 * gradient_bytes


def copied_heads_share(
    layer: TransformerLayer, hidden: int, sequence_length: int, tp: int
) -> float:
    """Part of a layer's operations on one rank that even shares of key-value heads would not have.

    With k heads on t > k ranks each is held by t / k of them (arXiv 2305.13245); a rank has one
    head where an even split would give it k / t of one. 0 for latent attention.
    """
    attention = layer.attention
    if not isinstance(attention, Attention) or tp <= attention.num_kv_heads:
        return 0.0
    # Keys and values: of one head each, where the share would be k / t of one.
    beyond = 2.0 * attention.head_dim * (1.0 - attention.num_kv_heads / tp)
    work = transformer_work(layer, hidden, 1, sequence_length, tp)
    return 2.0 * sequence_length * hidden * beyond / work.flops


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
        what = f"{kind.value} {'backward' if backward else 'forward'}"
        experts = layer is not None and isinstance(layer.mlp, Experts)
        with asking(f"{what} in {self.job.precision} on {self.island.device.kind}"):
            query = LayerQuery(
                model=self.model if layer is None else view_of(self.model, layer),
                layer=kind,
                microbatch_size=self.shape.microbatch_size,
                sequence_length=self.job.sequence_length,
                tp=self.shape.tp,
                precision=self.job.precision,
                kernels=replace(
                    trainer_settings(self.job).kernels(kind),
                    sequence_parallel=self.shape.sequence_parallel,
                    expert_parallel=self.shape.ep,
                    host_launch_seconds=self.island.host_launch_seconds,
                    expert_tensor_parallel=self.shape.etp if experts else None,
                ),
                is_backward=backward,
            )
            found = self.predictor.layer(self.island.device, query)

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
        slowest = straggler_factor(self.island.speed_spread, self.shape.num_devices)
        for component, factor in (
            (Component.CLOCKS, 1.0 / clock(self.island).ratio),
            (Component.STRAGGLERS, slowest),
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

    def _extras(
        self, kind: LayerKind, layer: TransformerLayer | None
    ) -> Iterator[tuple[Component, float]]:
        """Parts of the predicted time that are there only because of how the model is cut."""
        if kind is LayerKind.HEAD:
            padded = self.model.vocab_size
            yield Component.PADDING, max(0.0, 1.0 - self.real_vocab_size / padded)
        if layer is not None:
            yield (
                Component.COPIED_HEADS,
                copied_heads_share(
                    layer, self.model.hidden_size, self.job.sequence_length, self.shape.tp
                ),
            )
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
