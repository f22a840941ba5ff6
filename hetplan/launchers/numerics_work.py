"""What every device kind of a plan computes for the numerics check, and how far it may deviate.

Every kind runs the three layers of the model, forward and backward, and one update of a
transformer layer, on equal inputs. The layers are those that hetplan trains
(`hetplan.profiling.layers`), as rank 0's tensor-parallel slice without its group: what a group
would add up stays a partial sum on every device. They start from the trainer's first weights,
rounded to the job's format; embedding and loss get the trainer's own tokens. The reference is the
same work in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetplan.cluster.devices import CPU_KIND
from hetplan.errors import InputError
from hetplan.job.trainer import trainer_settings
from hetplan.launchers.local import free_memory_bytes, same_kind
from hetplan.launchers.numerics import (
    PROBES,
    KindNumerics,
    Numerics,
    NumericsResult,
    NumericsSetup,
    Refused,
    Roundings,
    allowed,
    backward_roundings,
    forward_roundings,
    load_numerics,
    merge_numerics,
    numerics_faults,
    rotary_error,
    token_sum,
)
from hetplan.model.operators import (
    WITH_WEIGHTS,
    Operator,
    OperatorClass,
    layer_operators,
    operator_flops,
)
from hetplan.model.spec import TRAINED_KINDS, Architecture, LayerKind, ModelSpec
from hetplan.plans.pieces import Places, stage_array
from hetplan.profiling.backends import PLUGINS, AcceleratorBackend, Backend, CpuBackend
from hetplan.profiling.bodies import DTYPES
from hetplan.profiling.layers import Head, HeadWithLoss, build_layer
from hetplan.profiling.weights import FlatParameters, make_rule, rule_state, set_updates
from hetplan.runtime.data import MarkovTokens, sample_numbers
from hetplan.search.result import SearchResult
from hetplan.version import __version__

REFERENCE_FLOPS = 3e12
"""Of the references, above which fewer tokens are taken: two or three minutes of two cores. A
constant, because every machine must take as many tokens."""
_WEIGHT_BYTES, _ACTIVATION_BYTES = 8 * 8, 4 * 8
"""Bytes that are held at once per weight and per activation. Measured: 6.5 GiB for a quarter of a
layer of llama-2-7b and 2048 tokens; this gives 7.0 GiB."""
_UPDATES = 10
"""Updates before the one that is compared: neither correction of AdamW's moments is 1 any more."""
WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsCheck:
    """A check of a plan's device kinds."""

    own: Numerics
    """Results of this machine."""
    all: Numerics
    """With those of the other machines."""
    faults: tuple[str, ...]
    """Why the kinds must not be mixed, one line each."""
    missing_kinds: tuple[str, ...]
    """Kinds of the plan without results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindBackend:
    """A device kind of the plan and the device of this machine that computes for it."""

    kind: str
    backend: Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One tensor that a device computed, on the CPU in float64."""

    tensor: str
    """As in `forward` or `gradient of input`."""
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Something that every kind computes."""

    operator: str
    what: str
    tp: int
    compute: Callable[[torch.device, torch.dtype], tuple[Outcome, ...]]
    roundings: Callable[[Outcome], Roundings]
    """Of one result, given its reference."""


def check_plan_numerics(
    result: SearchResult,
    *,
    tokens: int | None = None,
    paced: Sequence[str] = (),
    others: Sequence[Path] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> NumericsCheck:
    """Compute for the kinds that this machine has and compare with the files of `others`.

    `paced` kinds are played by this machine's cores. An InputError where this machine has none of
    the kinds that the files lack.
    """
    if tokens is not None and tokens < 1:
        raise InputError(f"--tokens {tokens}: it must be at least 1")
    setup = numerics_setup(result, tokens)
    read = tuple((path, load_numerics(path, setup)) for path in others)
    answered = {kind.kind for _, numerics in read for kind in numerics.kinds}
    kinds = kinds_of_plan(result)
    here = kinds_here([kind for kind in kinds if kind not in answered], paced)
    if not here and not read:
        raise InputError(
            f"this machine has none of the plan's device kinds ({', '.join(kinds)}); run this "
            "where one of them is"
        )
    if here:
        _check_memory(result, setup)
    own = compute_numerics(result, setup, here, on_unit=tell)
    every = merge_numerics(own, read)
    known = {kind.kind for kind in every.kinds}
    return NumericsCheck(
        own=own,
        all=every,
        faults=numerics_faults(every, work_of(setup)),
        missing_kinds=tuple(kind for kind in kinds if kind not in known),
    )


def kinds_of_plan(result: SearchResult) -> tuple[str, ...]:
    """Device kinds that the plan uses, in the order of its stages."""
    cluster = result.inputs.cluster
    places = Places(cluster=cluster)
    kinds: dict[str, None] = {}
    for pipeline in result.plan.pipelines:
        for stage in pipeline.stages:
            for island in dict.fromkeys(places.islands(stage_array(stage)).tolist()):
                kinds[cluster.islands[island].device.kind] = None
    return tuple(kinds)


def kinds_here(kinds: Sequence[str], paced: Sequence[str] = ()) -> tuple[KindBackend, ...]:
    """Those of these kinds that this machine has or plays, each with its first device."""
    accelerators = tuple(_accelerators())
    present = []
    for kind in kinds:
        backend: Backend | None = None
        if kind == CPU_KIND or kind in paced:
            backend = CpuBackend()
        else:
            backend = next(
                (
                    accelerator
                    for accelerator in accelerators
                    if same_kind(kind, accelerator.kind())
                ),
                None,
            )
        if backend is not None:
            present.append(KindBackend(kind=kind, backend=backend))
    return tuple(present)


def _accelerators() -> Iterator[Backend]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield AcceleratorBackend("cuda", index)
    for plugin in PLUGINS:
        with suppress(InputError):
            yield AcceleratorBackend(plugin.name)


def numerics_setup(result: SearchResult, tokens: int | None = None) -> NumericsSetup:
    """The work of a check of this plan: slices of its tp degrees, and `tokens`, or as many as the
    references allow.
    """
    model, job, plan = result.inputs.model, result.inputs.job, result.plan
    setup = NumericsSetup(
        model=model.name,
        precision=job.precision,
        optimizer=job.optimizer,
        seed=job.seed,
        tensor_parallel=tuple(sorted({replica.tp for replica in plan.replicas})),
        microbatch_size=min(replica.microbatch_size for replica in plan.replicas),
        sequence_length=job.sequence_length,
    )
    if tokens is not None:
        length = min(setup.sequence_length, tokens)
        return replace(setup, sequence_length=length, microbatch_size=max(1, tokens // length))
    while setup.microbatch_size * setup.sequence_length > 1:
        flops = sum(
            operator_flops(op, phase)
            for _, _, operators in _layers(result, setup)
            for op in operators
            for phase in ("forward", "backward")
        )
        if flops <= REFERENCE_FLOPS:
            break
        if setup.microbatch_size > 1:
            setup = replace(setup, microbatch_size=setup.microbatch_size // 2)
        else:
            setup = replace(setup, sequence_length=setup.sequence_length // 2)
    return setup


def work_of(setup: NumericsSetup) -> tuple[tuple[str, str, int], ...]:
    """(operator, what, tp) of everything that a whole check has."""
    return tuple(
        work
        for tp in setup.tensor_parallel
        for work in (
            *((_layer_name(kind), WHOLE, tp) for kind in TRAINED_KINDS),
            (OperatorClass.OPTIMIZER.value, f"{setup.optimizer.value} step", tp),
        )
    )


def _layer_name(kind: LayerKind) -> str:
    return f"{kind.value} layer"


def _layers(
    result: SearchResult, setup: NumericsSetup
) -> Iterator[tuple[LayerKind, int, tuple[Operator, ...]]]:
    """(kind, tp, operators) of every layer that is computed."""
    trainer = trainer_settings(result.inputs.job)
    for tp in setup.tensor_parallel:
        for kind in TRAINED_KINDS:
            operators = layer_operators(
                result.inputs.model,
                kind,
                microbatch_size=setup.microbatch_size,
                sequence_length=setup.sequence_length,
                tp=tp,
                kernels=replace(trainer.kernels(kind), product_format=""),
            )
            yield kind, tp, tuple(operators)


def _check_memory(result: SearchResult, setup: NumericsSetup) -> None:
    """An InputError where the references need more memory than this machine has free."""
    needed = least = 0.0
    for _, _, operators in _layers(result, setup):
        weights = activations = 0.0
        for op in operators:
            matrix = op.operator in WITH_WEIGHTS or op.operator is OperatorClass.EMBEDDING
            # A fused kernel does not write its scores.
            written = 0 if op.operator is OperatorClass.FUSED_ATTENTION else op.m * op.n
            read = op.m if matrix else op.m + op.n
            weights += _WEIGHT_BYTES * op.n * op.k if matrix else 0
            activations += _ACTIVATION_BYTES * op.count * op.batch * (written + read * op.k)
        least, needed = max(least, weights), max(needed, weights + activations)
    free = free_memory_bytes()
    if free is None or needed <= free:
        return
    mend = (
        "give fewer --tokens, the same number on every machine"
        if least <= free / 2
        else f"{least / 2**30:.1f} GiB of it for weights; run this where more is free"
    )
    raise InputError(
        f"the references of {setup.microbatch_size * setup.sequence_length} tokens need about "
        f"{needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; {mend}"
    )


@dataclass(slots=True)
class _Collected:
    results: list[NumericsResult] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def compute_numerics(
    result: SearchResult,
    setup: NumericsSetup,
    kinds: Sequence[KindBackend],
    on_unit: Callable[[str], None] = lambda line: None,
) -> Numerics:
    """The results of these kinds; what a device refuses is in its `refused`."""
    collected = [_Collected() for _ in kinds]
    for unit in _units(result, setup) if kinds else ():
        on_unit(f"{unit.operator}: {unit.what}, tp {unit.tp}")
        reference = unit.compute(torch.device("cpu"), torch.float64)
        for each, mine in zip(kinds, collected, strict=True):
            try:
                outcomes = compute_on(each.backend, DTYPES[setup.precision], unit.compute)
            except (RuntimeError, NotImplementedError, MemoryError) as error:
                message = (str(error).strip().splitlines() or [type(error).__name__])[0]
                mine.refused.append(
                    Refused(operator=unit.operator, what=unit.what, message=message)
                )
            else:
                _compare(unit, reference, outcomes, setup, mine)
    return Numerics(
        hetplan_version=__version__,
        setup=setup,
        kinds=tuple(
            KindNumerics(
                kind=each.kind,
                device_name=each.backend.device_name(),
                driver=each.backend.driver(),
                torch_version=torch.__version__,
                results=tuple(mine.results),
                refused=tuple(mine.refused),
            )
            for each, mine in zip(kinds, collected, strict=True)
        ),
    )


def compute_on(
    backend: Backend,
    dtype: torch.dtype,
    compute: Callable[[torch.device, torch.dtype], tuple[Outcome, ...]],
) -> tuple[Outcome, ...]:
    """What this device computes; the device's own errors pass through."""
    outcomes = compute(backend.device(), dtype)
    backend.synchronise()
    return outcomes


def _compare(
    unit: _Unit,
    reference: tuple[Outcome, ...],
    outcomes: tuple[Outcome, ...],
    setup: NumericsSetup,
    collected: _Collected,
) -> None:
    for exact, own in zip(reference, outcomes, strict=True):
        if not bool(torch.isfinite(own.value).all()):
            message = f"{own.tensor} has values that are no finite numbers"
            collected.refused.append(
                Refused(operator=unit.operator, what=unit.what, message=message)
            )
            continue
        rms = float(exact.value.square().mean().sqrt())
        scale = rms or 1.0  # of a reference of zeros deviations are absolute
        difference = (own.value - exact.value).abs_()
        collected.results.append(
            NumericsResult(
                operator=unit.operator,
                what=unit.what,
                tp=unit.tp,
                tensor=own.tensor,
                shape=tuple(exact.value.shape),
                reference_rms=rms,
                largest_deviation=float(difference.max()) / scale,
                rms_deviation=float(difference.square().mean().sqrt()) / scale,
                allowed=allowed(
                    unit.roundings(exact),
                    setup.precision,
                    elements=exact.value.numel(),
                    peak=float(exact.value.abs().max()) / scale,
                    rms=scale,
                ),
                probes=_probes(own.value),
            )
        )


def _probes(value: Tensor) -> tuple[float, ...]:
    """Values at places that a multiplicative hash (Knuth, volume 3, section 6.4) spreads, so that
    no row or column is preferred.
    """
    flat = value.flatten()
    count = min(PROBES, len(flat))
    return tuple(float(flat[at * 2654435761 % len(flat)]) for at in range(count))


# ---- what a device computes


class _Exact(TorchFunctionMode):
    """Inside, a float64 computation has no float32 by name: a copy, a table of angles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call, in float64."""
        kwargs = dict(kwargs or {})
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func is torch.arange and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerSlice:
    """One layer as a tensor-parallel slice, and its inputs."""

    model: ModelSpec
    kind: LayerKind
    tp: int
    setup: NumericsSetup

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the first microbatch that the trainer would see."""
        batch = self.setup.microbatch_size
        numbers = sample_numbers(
            0, global_batch_size=batch, microbatch_size=batch, dp=1, dp_index=0
        )
        data = MarkovTokens.of(self.model.vocab_size, self.setup.seed)
        drawn = torch.from_numpy(data.samples(numbers, self.setup.sequence_length + 1))
        return drawn[:, :-1], drawn[:, 1:]

    def module(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """With the weights that every device starts from."""
        layer: nn.Module = build_layer(
            self.model,
            self.model.layers.index(self.kind),
            tp=self.tp,
            tp_rank=0,
            group=None,
            seed=self.setup.seed,
            dtype=DTYPES[self.setup.precision],
            device=device,
        )
        layer = layer.to(dtype)
        return HeadWithLoss(layer) if isinstance(layer, Head) else layer

    def compute(self, device: torch.device, dtype: torch.dtype) -> tuple[Outcome, ...]:
        """Result, gradient of the input, and gradients of all weights."""
        if dtype == torch.float64:
            with _Exact():
                return tuple(self._compute(device, dtype))
        return tuple(self._compute(device, dtype))

    def _compute(self, device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
        module = self.module(device, dtype)
        generator = torch.Generator().manual_seed(self.setup.seed)

        def draw(shape: Sequence[int]) -> Tensor:
            value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
            return value.to(DTYPES[self.setup.precision]).to(device=device, dtype=dtype)

        x, targets = (each.to(device) for each in self.tokens())
        if self.kind is not LayerKind.EMBEDDING:
            x = draw((*x.shape, self.model.hidden_size)).requires_grad_()
        result = module(x, targets) if self.kind is LayerKind.HEAD else module(x)
        torch.autograd.backward(result, draw(result.shape) if result.dim() else None)
        yield Outcome(tensor="forward", value=_exact_copy(result))
        if x.grad is not None:
            yield Outcome(tensor="gradient of input", value=_exact_copy(x.grad))
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield Outcome(
                    tensor=f"gradient of {name.rpartition('.')[2]}",
                    value=_exact_copy(parameter.grad),
                )

    def update(
        self, gradients: tuple[Outcome, ...], device: torch.device, dtype: torch.dtype
    ) -> tuple[Outcome, ...]:
        """Weights after one update, and their change before it is rounded.

        The first update of AdamW is the sign of the gradient, and would turn the rounding of a
        small gradient into a whole step. So every device updates with `gradients`, the reference's
        of `compute`, and from the same moments, as after `_UPDATES` updates.
        """
        by_name = {each.tensor.removeprefix("gradient of "): each.value for each in gradients}
        module = self.module(device, dtype)
        named = [(name.rpartition(".")[2], weight) for name, weight in module.named_parameters()]
        exact_gradients = torch.cat([by_name[name].flatten() for name, _ in named])
        rounded = exact_gradients.to(DTYPES[self.setup.precision])
        before = torch.cat([weight.detach().flatten() for _, weight in named])
        flat = FlatParameters(module, self.setup.optimizer)
        # `FlatParameters` works on float32 where the weights are narrower or wider than that.
        exact = dtype == torch.float64
        weights = before.clone() if exact else before.float().clone()
        alone = nn.Parameter(weights)
        alone.grad = rounded.to(device=device, dtype=weights.dtype)
        rule = make_rule(self.setup.optimizer, [alone])
        _set_moments(rule_state(rule, alone), exact_gradients)
        set_updates(rule, alone, _UPDATES)
        rule.step()
        change = _exact_copy(alone) - _exact_copy(before)
        after = _exact_copy(alone)
        if not exact:
            _set_moments(flat.state(), exact_gradients)
            flat.resume(_UPDATES)
            flat.gradients.copy_(rounded)
            flat.update()
            after = _exact_copy(flat.weights)
        return (
            Outcome(tensor="change of weights", value=change),
            Outcome(tensor="weights after a step", value=after),
        )


def _set_moments(state: dict[str, Tensor], gradients: Tensor) -> None:
    """Fill the rule's moments as if two gradients had come in turn: these, and their neighbours.

    So the first moment never exceeds the root of the second. In float32 everywhere: the reference
    starts from what the devices can hold.
    """
    other = gradients.roll(1)
    moments = {
        "exp_avg": (gradients + other) / 2.0,
        "exp_avg_sq": (gradients.square() + other.square()) / 2.0,
    }
    for name, kept in state.items():
        kept.copy_(moments[name].float())


def _exact_copy(value: Tensor) -> Tensor:
    return value.detach().to(device="cpu", dtype=torch.float64, copy=True)


def _units(result: SearchResult, setup: NumericsSetup) -> Iterator[_Unit]:
    for kind, tp, operators in _layers(result, setup):
        part = _LayerSlice(model=result.inputs.model, kind=kind, tp=tp, setup=setup)
        yield _layer_unit(part, operators)
        if kind is LayerKind.TRANSFORMER:
            yield _update_unit(part)


def _layer_unit(part: _LayerSlice, operators: Sequence[Operator]) -> _Unit:
    setup = part.setup
    equal_tokens = int(torch.bincount(part.tokens()[0].flatten()).max())
    forward, backward = Roundings(), Roundings()
    if part.model.architecture is Architecture.LLAMA and part.kind is LayerKind.TRANSFORMER:
        forward = rotary_error(setup.sequence_length)
    for op in operators:
        for _ in range(op.count):
            forward += forward_roundings(op)
            backward += backward_roundings(op, equal_tokens=equal_tokens)
    backward += forward  # the forward values enter every gradient
    of_norms = backward + token_sum(setup.microbatch_size * setup.sequence_length)

    def roundings(outcome: Outcome) -> Roundings:
        if outcome.tensor == "forward":
            return forward
        return of_norms if "norm_" in outcome.tensor else backward

    return _Unit(
        operator=_layer_name(part.kind),
        what=WHOLE,
        tp=part.tp,
        compute=part.compute,
        roundings=roundings,
    )


def _update_unit(part: _LayerSlice) -> _Unit:
    reference = torch.device("cpu"), torch.float64
    gradients = part.compute(*reference)
    weights = torch.cat([each.detach().flatten() for each in part.module(*reference).parameters()])
    weights_rms = float(weights.square().mean().sqrt())
    peak = float(weights.abs().max()) / weights_rms

    def roundings(outcome: Outcome) -> Roundings:
        if outcome.tensor != "change of weights":
            return Roundings(stored=1.0, inner=14.0)
        # About a dozen operations of the rule, and two roundings of the weights themselves, which
        # are relative to the weights and not to the change.
        change_rms = float(outcome.value.square().mean().sqrt())
        return Roundings(inner=12.0 + 2.0 * weights_rms / change_rms, peak=peak)

    return _Unit(
        operator=OperatorClass.OPTIMIZER.value,
        what=f"{part.setup.optimizer.value} step",
        tp=part.tp,
        compute=lambda device, dtype: part.update(gradients, device, dtype),
        roundings=roundings,
    )
