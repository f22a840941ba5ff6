"""Do the device kinds of a plan compute the same?

Every kind runs the operators of the plan's layers alone and the layers whole, forward and
backward, and one optimizer step, on equal inputs. Each result is compared with the same work in
float64 on the CPU, and with what the other kinds gave at the same places. What is allowed follows
from the number format and the length of the sums (`hetplan.launchers.numerics_tolerance`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hetplan.errors import InputError
from hetplan.launchers.machine import free_memory_bytes
from hetplan.launchers.numerics_bodies import (
    Outcome,
    operator_outcomes,
    reference_place,
)
from hetplan.launchers.numerics_layers import (
    LayerSlice,
    layer_outcomes,
    layer_weights,
    trained_tokens,
    update_outcomes,
)
from hetplan.launchers.numerics_tolerance import (
    Roundings,
    allowed,
    backward_roundings,
    forward_roundings,
    rotary_error,
    token_sum,
    update_roundings,
)
from hetplan.launchers.numerics_values import (
    PROBES,
    KindNumerics,
    Numerics,
    NumericsResult,
    NumericsSetup,
    Refused,
)
from hetplan.launchers.numerics_work import (
    WHOLE,
    checked_operators,
    different_operators,
    layer_name,
    step_name,
)
from hetplan.model.operators import (
    WITH_WEIGHTS,
    Operator,
    OperatorClass,
    operator_flops,
)
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.profiling.backends import Backend
from hetplan.profiling.layer_slices import DTYPES
from hetplan.profiling.layers import ROTARY_BASE
from hetplan.profiling.operator_bodies import Place
from hetplan.search.result import SearchResult
from hetplan.version import __version__

# Operations of the float64 references, above which fewer tokens are taken: two or three minutes of
# two cores. A constant, because every machine must take as many tokens.
REFERENCE_FLOPS = 3e12
# Numbers in float64 that are held at once of a layer's weights (values, gradients and copies of the
# reference and of one kind, the optimizer's state) and of what its operators read and write.
# Measured: 6.5 GiB for a quarter of a layer of llama-2-7b and 2048 tokens; this gives 7.0 GiB.
_WEIGHT_BYTES, _ACTIVATION_BYTES = 8 * 8, 4 * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KindBackend:
    """A device kind of the job and the device of this machine that computes for it."""

    kind: str
    backend: Backend


@dataclass(slots=True)
class _Answer:
    """Of one kind, while it is collected."""

    results: list[NumericsResult] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Something that every kind computes."""

    operator: str
    what: str
    tp: int
    compute: Callable[[Place], tuple[Outcome, ...]]
    roundings: Callable[[Outcome], Roundings]
    """Of one result, given its reference."""


def numerics_setup(result: SearchResult, tokens: int | None = None) -> NumericsSetup:
    """What a check of this plan computes: the slices of its tp degrees, and as many tokens as the
    references allow, or `tokens`.
    """
    model, job, plan = result.inputs.model, result.inputs.job, result.plan
    degrees = tuple(sorted({replica.tp for replica in plan.replicas}))
    setup = NumericsSetup(
        model=model.name,
        precision=job.precision,
        optimizer=job.optimizer,
        seed=job.seed,
        tensor_parallel=degrees,
        microbatch_size=min(replica.microbatch_size for replica in plan.replicas),
        sequence_length=job.sequence_length,
    )
    if tokens is not None:
        length = min(setup.sequence_length, tokens)
        return replace(setup, sequence_length=length, microbatch_size=max(1, tokens // length))
    while setup.microbatch_size * setup.sequence_length > 1:
        if _reference_flops(result, setup) <= REFERENCE_FLOPS:
            break
        if setup.microbatch_size > 1:
            setup = replace(setup, microbatch_size=setup.microbatch_size // 2)
        else:
            setup = replace(setup, sequence_length=setup.sequence_length // 2)
    return setup


def check_memory(result: SearchResult, setup: NumericsSetup) -> None:
    """An InputError where the references need more memory than this machine has free."""
    weights: Counter[tuple[LayerKind, int]] = Counter()
    activations: Counter[tuple[LayerKind, int]] = Counter()
    for kind, tp, op in checked_operators(result, setup):
        matrix = op.operator in WITH_WEIGHTS or op.operator is OperatorClass.EMBEDDING
        # A fused kernel does not write its scores.
        written = 0 if op.operator is OperatorClass.FUSED_ATTENTION else op.m * op.n
        read = op.m if matrix else op.m + op.n
        weights[kind, tp] += _WEIGHT_BYTES * op.n * op.k if matrix else 0
        of_tokens = op.count * op.batch * (written + read * op.k)
        activations[kind, tp] += _ACTIVATION_BYTES * of_tokens
    least = max(weights.values())
    needed = max(weights[layer] + activations[layer] for layer in activations)
    free = free_memory_bytes()
    if free is None or needed <= free:
        return
    mend = (
        "give fewer --numerics-tokens, the same number on every machine"
        if least <= free / 2
        else f"{least / 2**30:.1f} GiB of it for weights; run this where more is free"
    )
    raise InputError(
        f"the references of {setup.microbatch_size * setup.sequence_length} tokens need about "
        f"{needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; {mend}"
    )


def compute_numerics(
    result: SearchResult,
    setup: NumericsSetup,
    kinds: Sequence[KindBackend],
    on_unit: Callable[[str], None] | None = None,
) -> Numerics:
    """The answers of these kinds; what a device refuses is in its `refused`."""
    answers = [_Answer() for _ in kinds]
    model = result.inputs.model
    for unit in _units(result, setup) if kinds else ():
        if on_unit is not None:
            on_unit(f"{unit.operator}: {unit.what}, tp {unit.tp}")
        reference = unit.compute(reference_place(model.architecture))
        for each, answer in zip(kinds, answers, strict=True):
            place = Place(
                device=each.backend.device(),
                dtype=DTYPES[setup.precision],
                architecture=model.architecture,
            )
            try:
                found = compute_on(each.backend, place, unit.compute)
            except (RuntimeError, NotImplementedError, MemoryError) as error:
                answer.refused.append(_refused(unit, error))
            else:
                _compare(unit, reference, found, setup, answer)
    return Numerics(
        hetplan_version=__version__,
        setup=setup,
        kinds=tuple(
            KindNumerics(
                kind=each.kind,
                device_name=each.backend.device_name(),
                driver=each.backend.driver(),
                torch_version=torch.__version__,
                results=tuple(answer.results),
                refused=tuple(answer.refused),
            )
            for each, answer in zip(kinds, answers, strict=True)
        ),
    )


def compute_on(
    backend: Backend, place: Place, compute: Callable[[Place], tuple[Outcome, ...]]
) -> tuple[Outcome, ...]:
    """What this device computes; the device's own errors pass through."""
    found = compute(place)
    backend.synchronise()
    return found


def _refused(unit: _Unit, error: Exception) -> Refused:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return Refused(operator=unit.operator, what=unit.what, message=lines[0])


def _compare(
    unit: _Unit,
    reference: tuple[Outcome, ...],
    found: tuple[Outcome, ...],
    setup: NumericsSetup,
    answer: _Answer,
) -> None:
    for exact, own in zip(reference, found, strict=True):
        if bool(torch.isfinite(own.value).all()):
            answer.results.append(_result(unit, exact, own, setup))
        else:
            message = f"{own.tensor} has values that are no finite numbers"
            answer.refused.append(Refused(operator=unit.operator, what=unit.what, message=message))


def _result(unit: _Unit, exact: Outcome, own: Outcome, setup: NumericsSetup) -> NumericsResult:
    rms = float(exact.value.square().mean().sqrt())
    # A reference of zeros: deviations are told as they are.
    scale = rms or 1.0
    difference = (own.value - exact.value).abs_()
    bound = allowed(
        unit.roundings(exact),
        setup.precision,
        elements=exact.value.numel(),
        peak=float(exact.value.abs().max()) / scale,
        rms=scale,
    )
    return NumericsResult(
        operator=unit.operator,
        what=unit.what,
        tp=unit.tp,
        tensor=own.tensor,
        shape=tuple(exact.value.shape),
        reference_rms=rms,
        largest_deviation=float(difference.max()) / scale,
        rms_deviation=float(difference.square().mean().sqrt()) / scale,
        allowed=bound,
        probes=_probes(own.value),
    )


def _probes(value: Tensor) -> tuple[float, ...]:
    """Values at places that are spread by a multiplicative hash (Knuth, volume 3, section 6.4), so
    that no row or column is preferred.
    """
    flat = value.flatten()
    count = min(PROBES, len(flat))
    return tuple(float(flat[at * 2654435761 % len(flat)]) for at in range(count))


def _reference_flops(result: SearchResult, setup: NumericsSetup) -> float:
    """Of all operators, each once alone and once in its layer."""
    return 2.0 * sum(
        operator_flops(op, "forward") + operator_flops(op, "backward")
        for _, _, op in checked_operators(result, setup)
    )


def _units(result: SearchResult, setup: NumericsSetup) -> Iterator[_Unit]:
    rows: dict[tuple[LayerKind, int], list[Operator]] = {}
    for kind, tp, op in checked_operators(result, setup):
        rows.setdefault((kind, tp), []).append(op)
    for tp, op in different_operators(result, setup):
        yield _operator_unit(op, tp, setup)
    for (kind, tp), operators in rows.items():
        yield from _layer_units(result.inputs.model, kind, tp, operators, setup)


def _operator_unit(op: Operator, tp: int, setup: NumericsSetup) -> _Unit:
    most_equal = [1]

    def compute(place: Place) -> tuple[Outcome, ...]:
        outcomes, most_equal[0] = operator_outcomes(
            op, place, seed=setup.seed, precision=DTYPES[setup.precision]
        )
        return outcomes

    def roundings(outcome: Outcome) -> Roundings:
        if outcome.tensor == "forward":
            return forward_roundings(op)
        found = backward_roundings(op, equal_tokens=most_equal[0])
        of_weights = outcome.tensor in ("gradient of weight", "gradient of bias")
        return found + token_sum(op.m) if of_weights else found

    return _Unit(
        operator=op.operator.value, what=op.what, tp=tp, compute=compute, roundings=roundings
    )


def _layer_units(
    model: ModelSpec, kind: LayerKind, tp: int, operators: list[Operator], setup: NumericsSetup
) -> Iterator[_Unit]:
    part = LayerSlice(
        model=model,
        kind=kind,
        tp=tp,
        microbatch_size=setup.microbatch_size,
        sequence_length=setup.sequence_length,
        seed=setup.seed,
        precision=DTYPES[setup.precision],
    )
    forward, backward = _layer_roundings(part, operators)
    tokens = setup.microbatch_size * setup.sequence_length

    def of_layer(outcome: Outcome) -> Roundings:
        if outcome.tensor == "forward":
            return forward
        return backward + token_sum(tokens) if "norm_" in outcome.tensor else backward

    yield _Unit(
        operator=layer_name(kind),
        what=WHOLE,
        tp=tp,
        compute=lambda place: layer_outcomes(part, place),
        roundings=of_layer,
    )
    if kind is not LayerKind.TRANSFORMER:
        return
    exact = reference_place(model.architecture)
    gradients = layer_outcomes(part, exact)
    weights = layer_weights(part, exact)
    before = float(weights.square().mean().sqrt())
    peak = float(weights.abs().max()) / before

    def of_update(outcome: Outcome) -> Roundings:
        if outcome.tensor != "change of weights":
            return Roundings(stored=1.0, inner=14.0)
        return update_roundings(before / float(outcome.value.square().mean().sqrt()), peak)

    yield _Unit(
        operator=OperatorClass.OPTIMIZER.value,
        what=step_name(setup),
        tp=tp,
        compute=lambda place: update_outcomes(part, place, gradients, setup.optimizer),
        roundings=of_update,
    )


def _layer_roundings(part: LayerSlice, operators: list[Operator]) -> tuple[Roundings, Roundings]:
    """Forward, and of every gradient, which the forward values enter."""
    tokens, _ = trained_tokens(part)
    most_equal = int(torch.bincount(tokens.flatten()).max())
    forward = Roundings()
    if part.model.architecture is Architecture.LLAMA and part.kind is LayerKind.TRANSFORMER:
        forward = rotary_error(part.sequence_length, ROTARY_BASE)
    backward = Roundings()
    for op in operators:
        forward = forward + forward_roundings(op).times(op.count)
        backward = backward + backward_roundings(op, equal_tokens=most_equal).times(op.count)
    return forward, forward + backward
