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
parameters whose state a rank keeps. Parts that are passes over memory, when nobody measured them:

    time = bytes / (memory bandwidth * the prior of streaming passes, hetplan.predict.datasheet)

Optimizer state in host memory (ZeRO-Offload, arXiv 2101.06840, section 4): gradients go down, the
host updates, parameters come up, one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Island, Transport
from hetplan.cost.collectives.values import Asking, LinkUse
from hetplan.cost.estimate_values import Component
from hetplan.cost.memory.device import gradient_bytes_per_parameter
from hetplan.cost.memory.values import FLOAT32_BYTES
from hetplan.cost.step_model.groups import Copies, KnownCollectives
from hetplan.cost.step_model.overlap import Overlap, not_overlapped
from hetplan.cost.terms import Part, Term, asking, seconds_of_parts
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Sharding
from hetplan.plans.targets import target
from hetplan.predict.datasheet import (
    ELEMENTWISE_EFFICIENCY_BACKWARD,
    ELEMENTWISE_LOG_HALFWIDTH,
)
from hetplan.predict.predictor import DATASHEET, Prediction, Predictor, link_cause
from hetplan.profiling.samples import LinkOperation

HOST_UPDATE_BYTES_PER_SECOND = 1.2e11
"""Memory traffic of a whole host's update, all its processors: geometric mean of 36 GB/s (28 bytes
for each of 3.09e9 parameters in a step of 2.38 s on 128 cores, DeepSpeed pull request 7474: at
least that) and of 410 GB/s (2 sockets x 8 channels x 25.6 GB/s of DDR4-3200: at most that)."""
HOST_UPDATE_LOG_HALFWIDTH = 1.2
"""log(410 / 120): both ends of it."""
_UPDATE_BYTES = {Optimizer.ADAMW: 28.0, Optimizer.SGD: 12.0}
"""Least float32 traffic per parameter: gradient read, parameter and moments read and written."""
HOST_INTERFACE_EFFICIENCY = 0.87
"""Geometric mean of .84 and .91: packets of 128 and 256 bytes of payload with 24 of headers, link
CRC and framing (PCI Express Base 5.0, chapters 2 and 3)."""
HOST_INTERFACE_LOG_HALFWIDTH = 0.3
"""Down to .65 where two directions, or devices behind one switch, are in each other's way."""


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
            Part(component=Component.DATA_PARALLEL, term=term)
            for copies, count in ((self.dense, parameters), (self.experts, expert_parameters))
            for group, operation, message_bytes in reduction_calls(
                self.sharding, copies.shard.size, count * size
            )
            for term in self.known.of(
                getattr(copies, group), operation, message_bytes, f"gradient {operation.value}"
            )
        )

    def gathering(self, parameters: float, expert_parameters: float = 0.0) -> tuple[Part, ...]:
        """Updated parameters from the ranks that updated them."""
        if self.sharding not in (Sharding.OPTIMIZER, Sharding.GRADIENTS):
            return ()
        counts = parameters, expert_parameters
        return self.gathered(counts, self.job.precision, Component.GATHERING)

    def gathered(
        self, counts: tuple[float, float], precision: Precision, component: Component
    ) -> tuple[Part, ...]:
        """So many parameters, those of routed experts last, from the ranks that share them."""
        return tuple(
            Part(component=component, term=term)
            for copies, count in zip((self.dense, self.experts), counts, strict=True)
            for term in self.known.of(
                copies.shard,
                LinkOperation.ALL_GATHER,
                count * precision.bytes_per_element,
                "parameter all_gather",
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


def reduction_calls(
    sharding: Sharding, shards: int, message_bytes: float
) -> tuple[tuple[str, LinkOperation, float], ...]:
    """(group of copies, operation, bytes) of the gradients of one rank at the end of the step.

    `shards`: ranks of a sharding group. `cost.traffic` counts the same list.
    """
    scattered = sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS)
    if sharding is Sharding.NONE or (shards == 1 and not scattered):
        return (("whole", LinkOperation.ALL_REDUCE, message_bytes),)
    across = ("across", LinkOperation.ALL_REDUCE, message_bytes / shards)
    if scattered:  # Inside sharding groups every microbatch has been reduced already.
        return (across,)
    return (("shard", LinkOperation.REDUCE_SCATTER, message_bytes), across)


def tied_embedding_parts(
    model: ModelSpec,
    cluster: Cluster,
    first: Island,
    last: Island,
    precision: Precision,
    tp: int,
    senders: int,
    known: KnownCollectives,
) -> tuple[Part, ...]:
    """The all_reduce of the tied matrix's gradient, in this format, between first and last stage.

    Both stages do it after their own reduction; `model` has the padded vocabulary, which `tp` cuts;
    `senders` devices of either stage send at once. Empty where the model does not tie. Only for
    pipelines of at least two stages.
    """
    if not model.tied_embeddings:
        return ()
    # Every device of the one stage sums with its own of the other, all at once.
    alone = cluster.link_between(first.name, last.name)
    message_bytes = float(model.vocabulary_matrix(tp) * precision.bytes_per_element)
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


def _unless_zero(component: Component, term: Term) -> tuple[Part, ...]:
    """Empty where it takes no time."""
    return (Part(component=component, term=term),) if term.seconds else ()


def clips_gradients(job: Job) -> bool:
    """Whether the job's gradients are clipped by their global norm."""
    if job.gradient_clipping is not None:
        return job.gradient_clipping
    return target(job.target).clips_gradients


def gradient_norm(
    device: DeviceKind, job: Job, gradients: float, gradient_bytes: float, update: Prediction
) -> tuple[Part, ...]:
    """This rank's part of the norm of all gradients, and scaling; none where the job does not clip.

    `gradients`: elements that this rank keeps after the reduction; each is read for the norm, and
    read and written where it is scaled. `update`: the optimizer's prediction; from a datasheet in
    16 bit its bytes hold the pass of the norm already. What all ranks sum is
    `hetplan.cost.step_model.step.norm_parts`.
    """
    if not clips_gradients(job):
        return ()
    counted = update.source == DATASHEET and job.precision is not Precision.FLOAT32
    passes = 2.0 if counted else 3.0
    local = streaming(device, passes * gradients * gradient_bytes, update, gradients, job)
    return _unless_zero(
        Component.NORM,
        Term(what="gradient norm and scaling", cause=device.kind, count=1, prediction=local),
    )


def gradient_passes(
    device: DeviceKind,
    job: Job,
    held: float,
    own: float,
    copies: int,
    update: Prediction,
) -> tuple[Part, ...]:
    """What a trainer with gradients in one buffer does to them beside norm and update.

    `held`: gradients of this rank, as they are kept; `own`: those it updates, in float32; `copies`:
    ranks that hold the same. Megatron-LM (megatron/core/distributed/param_and_grad_buffer.py and
    distributed_data_parallel.py, megatron/core/optimizer/optimizer.py) zeroes all of them (written
    once), divides them by the number of copies (read and written) and looks for values that are no
    number (read), in float16 with loss scaling instead while it divides its own by the scale (read
    and written). Nothing for targets that do not say so (`Target.gradient_buffer`). On DeepSpeed's
    pipeline engine (`blocking_sends`) gradients have no buffer: where others hold the same they are
    copied into one, divided and copied back, each read and written (deepspeed/runtime/engine.py,
    `allreduce_bucket` and `allreduce_and_copy`).
    """
    if not target(job.target).gradient_buffer:
        return ()
    scales = job.precision is Precision.FLOAT16
    if trainer_settings(job).blocking_sends:
        passes = 6.0 if copies > 1 else 0.0
    else:
        passes = 1.0 + (2.0 if copies > 1 else 0.0) + (0.0 if scales else 1.0)
    moved = passes * held * gradient_bytes_per_parameter(job)
    moved += (2.0 * own * Precision.FLOAT32.bytes_per_element) if scales else 0.0
    local = streaming(device, moved, update, own, job)
    term = Term(what="passes over the gradients", cause=device.kind, count=1, prediction=local)
    return _unless_zero(Component.OPTIMIZER, term)


def streaming(
    device: DeviceKind, moved: float, update: Prediction, parameters: float, job: Job
) -> Prediction:
    """A pass over so many bytes: by the device's bandwidth, or as fast as its measured update."""
    bandwidth = device.memory_bandwidth_bytes_per_second
    if bandwidth:
        return Prediction(
            seconds=moved / (bandwidth * ELEMENTWISE_EFFICIENCY_BACKWARD),
            log_halfwidth=ELEMENTWISE_LOG_HALFWIDTH,
            source=DATASHEET,
        )
    whole = parameters * _UPDATE_BYTES[job.optimizer]
    return Prediction(
        seconds=update.seconds * moved / whole if whole else 0.0,
        log_halfwidth=math.hypot(update.log_halfwidth, ELEMENTWISE_LOG_HALFWIDTH),
        source=update.source,
        extrapolating=update.extrapolating,
    )


def offloaded_update(
    island: Island, job: Job, parameters: float, offload: float, on_device: Term
) -> tuple[Part, ...]:
    """The update of one rank's parameters of which the part `offload` is kept on the host.

    `on_device`: the prediction for all of them; the device updates the rest, then the host its
    part (Megatron-LM's order). An InputError where the device's host interface is not known.
    """
    kept = _unless_zero(Component.OPTIMIZER, on_device.times(1.0 - offload))
    if not offload * parameters:
        return kept
    down, update, up = host_update_seconds(island, job, offload * parameters)
    total = down + update + up
    wide = HOST_INTERFACE_LOG_HALFWIDTH * (down + up) + HOST_UPDATE_LOG_HALFWIDTH * update
    prediction = Prediction(seconds=total, log_halfwidth=wide / total, source=DATASHEET)
    cause = f"{island.device.kind} host"
    host = Term(what="host update", cause=cause, count=1, prediction=prediction)
    return (*kept, *_unless_zero(Component.OFFLOAD, host))


def host_update_seconds(island: Island, job: Job, parameters: float) -> tuple[float, float, float]:
    """(gradients down, update, parameters up) of so many parameters of each device.

    All devices of a node share its host's memory and update at the same time. Of 16-bit training
    float32 gradients go down and 16-bit parameters come up, as they are kept.
    """
    device, size = island.device, job.precision.bytes_per_element
    if device.host is None:
        raise InputError(
            f"device kind {device.kind} has no host interface, so its transfers to host memory "
            "are not known; add host to its entry, or keep the optimizer on the device"
        )
    rate = device.host.bandwidth_bytes_per_second * HOST_INTERFACE_EFFICIENCY
    # In 16 bit the host also writes the parameter's copy that goes up.
    traffic = _UPDATE_BYTES[job.optimizer]
    traffic += 0.0 if job.precision is Precision.FLOAT32 else size
    return (
        parameters * gradient_bytes_per_parameter(job) / rate,
        parameters * island.devices_per_node * traffic / HOST_UPDATE_BYTES_PER_SECOND,
        parameters * size / rate,
    )
