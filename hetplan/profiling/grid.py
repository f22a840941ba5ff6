"""Which shapes are measured: the points of a profile, cheapest first.

A point is one transformer shape at one sequence length, microbatch size, tensor-parallel slice
and precision. Points come from the shapes that the plans of a job can use, with neighbours in
hidden size so that a fit can be judged by leaving one size out, or from lists (`ShapeOptions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from hetplan.errors import InputError
from hetplan.job.spec import Job, Precision
from hetplan.model.layer_units import own_layer_fault
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.model.work import layer_work

# Degrees inside one node: 8 devices share the fast fabric of the nodes that are sold.
TP_DEGREES = (1, 2, 4, 8)
# Past 8 sequences a layer's time grows with the tokens; one more doubling tells nothing new.
MAX_MICROBATCH = 8
# Hidden sizes beside the model's own: far enough to show the trend, near enough to be as fast.
NEIGHBOUR_SCALES = (0.75, 1.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """One shape to measure."""

    model: ModelSpec
    """Shape; its number of layers does not matter."""
    sequence_length: int
    microbatch_size: int
    tp: int
    precision: Precision

    def flops(self, kind: LayerKind) -> float:
        """Operations of one forward and backward pass, and an operation per byte-bound element.

        Embedding lookups have no matrix product; their elements stand in for their time.
        """
        work = layer_work(self.model, kind, self.microbatch_size, self.sequence_length, self.tp)
        return 3.0 * (work.flops + work.elementwise_elements)


def job_grid(
    model: ModelSpec,
    job: Job,
    *,
    tp_degrees: Sequence[int] = (),
    microbatch_sizes: Sequence[int] = (),
    neighbours: bool = True,
) -> tuple[GridPoint, ...]:
    """Points for the plans that this job can have; degrees and sizes may be given instead.

    `neighbours` adds the hidden sizes next to the model's. An InputError for models that are not
    of hetplan's own layers: those cannot be measured.
    """
    fault = own_layer_fault(model)
    if fault:
        raise InputError(fault)
    if job.pin.tp is not None:
        tp_degrees = tp_degrees or (job.pin.tp,)
    if job.pin.microbatch_size is not None:
        microbatch_sizes = microbatch_sizes or (job.pin.microbatch_size,)
    degrees = tuple(tp for tp in tp_degrees or TP_DEGREES if not model.slicing_faults(tp))
    if not degrees:
        raise InputError(
            f"no tp of {', '.join(map(str, tp_degrees))} divides the heads and the ffn of model "
            f"{model.name}; give others with --tp"
        )
    sizes = microbatch_sizes or tuple(
        size
        for size in (2**power for power in range(int(math.log2(MAX_MICROBATCH)) + 1))
        if job.global_batch_size % size == 0
    )
    models = (model, *neighbour_models(model, max(degrees))) if neighbours else (model,)
    return points(
        models,
        sequence_lengths=(job.sequence_length,),
        microbatch_sizes=sizes,
        tp_degrees=degrees,
        precisions=(job.precision,),
    )


def neighbour_models(model: ModelSpec, tp: int) -> tuple[ModelSpec, ...]:
    """The model with other hidden sizes, which `tp` divides as it divides the model.

    The number of heads changes where a multiple of the group and of tp is near; where heads are
    too few for that, their width does.
    """
    found: dict[int, ModelSpec] = {}
    for scale in NEIGHBOUR_SCALES:
        neighbour = _scaled(model, tp, scale)
        if neighbour.hidden_size != model.hidden_size:
            found.setdefault(neighbour.hidden_size, neighbour)
    return tuple(found.values())


def _scaled(model: ModelSpec, tp: int, scale: float) -> ModelSpec:
    heads, kv, head_dim = model.num_attention_heads, model.num_kv_heads, model.head_dim
    step = math.lcm(tp, kv) if kv < heads else tp
    scaled_heads = _nearest(heads * scale, step)
    if abs(scaled_heads / heads - scale) < 0.2:
        kv = kv if kv < heads else scaled_heads
        heads = scaled_heads
    else:
        # Rotary positions need an even width; kernels like multiples of 8.
        head_dim = _nearest(head_dim * scale, 8 if head_dim >= 32 else 2)
    attention = heads * head_dim
    hidden = max(1, round(model.hidden_size * attention / model.attention_size))
    ffn = _nearest(model.ffn_hidden_size * hidden / model.hidden_size, tp)
    return plain_model(
        name=f"{model.name}-h{hidden}",
        architecture=model.architecture,
        num_layers=model.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        tied_embeddings=model.tied_embeddings,
    )


def _nearest(value: float, step: int) -> int:
    return max(step, step * round(value / step))


def plain_models(
    hidden_sizes: Sequence[int], *, vocab_size: int, sequence_length: int
) -> tuple[ModelSpec, ...]:
    """GPT shapes of these hidden sizes: ffn of 4 h, heads equally wide in all.

    Heads are of 128, 64, 32 or 16, the widest of which every hidden size has four or more.
    """
    head_dim = next(
        (d for d in (128, 64, 32, 16) if all(h % d == 0 and h >= 4 * d for h in hidden_sizes)), 0
    )
    if not head_dim:
        raise InputError(
            f"hidden sizes {', '.join(map(str, hidden_sizes))} have no common head width; give "
            "multiples of 16 from 64 on, or a model file"
        )
    return tuple(
        plain_model(
            name=f"gpt-h{hidden}",
            architecture=Architecture.GPT,
            num_layers=1,
            hidden_size=hidden,
            ffn_hidden_size=4 * hidden,
            num_attention_heads=hidden // head_dim,
            num_kv_heads=hidden // head_dim,
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_sequence_length=sequence_length,
        )
        for hidden in hidden_sizes
    )


def points(
    models: Iterable[ModelSpec],
    *,
    sequence_lengths: Sequence[int],
    microbatch_sizes: Sequence[int],
    tp_degrees: Sequence[int],
    precisions: Sequence[Precision],
) -> tuple[GridPoint, ...]:
    """Every combination in which tp divides the model, cheapest transformer layer first."""
    axes = (("sequence length", sequence_lengths), ("microbatch size", microbatch_sizes))
    for name, values in (*axes, ("tp", tp_degrees)):
        for value in values:
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
    found = {
        GridPoint(
            model=model,
            sequence_length=sequence_length,
            microbatch_size=microbatch_size,
            tp=tp,
            precision=precision,
        ): None
        for model, sequence_length, microbatch_size, tp, precision in product(
            models, sequence_lengths, microbatch_sizes, tp_degrees, precisions
        )
        if not model.slicing_faults(tp)
    }
    if not found:
        raise InputError("no point is left: no tp divides the heads and the ffn of any model")
    return tuple(sorted(found, key=lambda point: point.flops(LayerKind.TRANSFORMER)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    """The shapes that a user wants measured: those of a model and its job, or lists."""

    model: ModelSpec | None = None
    job: Job | None = None
    hidden_sizes: tuple[int, ...] = ()
    sequence_lengths: tuple[int, ...] = ()
    vocab_size: int | None = None
    microbatch_sizes: tuple[int, ...] = ()
    tp_degrees: tuple[int, ...] = ()
    precisions: tuple[Precision, ...] = ()
    neighbours: bool = True
    """Whether the hidden sizes next to the model's are measured too."""

    def __post_init__(self) -> None:
        if (self.model is None) != (self.job is None):
            raise InputError("--model and --job belong together: give both or neither")
        if self.model is not None and (self.hidden_sizes or self.vocab_size is not None):
            raise InputError("--hidden and --vocab come from the model; leave them out")
        if self.job is not None and (self.sequence_lengths or self.precisions):
            raise InputError("--seq and --precision come from the job; leave them out")

    def grid(self, *, is_accelerator: bool) -> tuple[GridPoint, ...]:
        """The points; what neither a job nor a list gives depends on the kind of device."""
        if self.model is not None and self.job is not None:
            return job_grid(
                self.model,
                self.job,
                tp_degrees=self.tp_degrees,
                microbatch_sizes=self.microbatch_sizes,
                neighbours=self.neighbours,
            )
        default = _ACCELERATOR if is_accelerator else _CPU
        lengths = self.sequence_lengths or default.sequence_lengths
        vocab_size = default.vocab_size if self.vocab_size is None else self.vocab_size
        hidden_sizes = self.hidden_sizes or default.hidden_sizes
        return points(
            plain_models(
                hidden_sizes,
                vocab_size=vocab_size,
                sequence_length=max(lengths),
            ),
            sequence_lengths=lengths,
            microbatch_sizes=self.microbatch_sizes or default.microbatch_sizes,
            tp_degrees=self.tp_degrees or default.tp_degrees,
            precisions=self.precisions or default.precisions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """Shapes that are measured where the user names none."""

    hidden_sizes: tuple[int, ...]
    sequence_lengths: tuple[int, ...]
    vocab_size: int
    microbatch_sizes: tuple[int, ...] = (1, 2, 4)
    tp_degrees: tuple[int, ...]
    precisions: tuple[Precision, ...]


# Under a minute on one core; three hidden sizes, so that a fit can leave one out.
_CPU = _Defaults(
    hidden_sizes=(128, 192, 256),
    sequence_lengths=(128,),
    vocab_size=1024,
    tp_degrees=(1, 2),
    precisions=(Precision.FLOAT32,),
)
# From the 3 B to the 70 B class; minutes on a current accelerator.
_ACCELERATOR = _Defaults(
    hidden_sizes=(2048, 4096, 8192),
    sequence_lengths=(2048,),
    vocab_size=32000,
    tp_degrees=TP_DEGREES,
    precisions=(Precision.BFLOAT16,),
)
