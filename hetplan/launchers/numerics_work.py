"""What every device kind of a plan computes for the numerics check.

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
from dataclasses import dataclass, replace
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
    layer_roundings,
    load_numerics,
    merge_numerics,
    numerics_faults,
)
from hetplan.model.layer_units import own_layer_fault
from hetplan.model.operators import (
    WITH_WEIGHTS,
    Operator,
    OperatorClass,
    layer_operators,
    operator_flops,
)
from hetplan.model.spec import TRAINED_KINDS, Architecture, LayerKind, ModelSpec
from hetplan.plans.plan import expand
from hetplan.profiling.backends import PLUGINS, AcceleratorBackend, Backend, CpuBackend
from hetplan.profiling.bodies import DTYPES
from hetplan.profiling.layers import Head, HeadWithLoss, build_layer
from hetplan.profiling.weights import Cut, make_rule, rule_state, set_updates
from hetplan.runtime.data import MarkovTokens, sample_numbers
from hetplan.search.result import SearchResult
from hetplan.units import format_bytes
from hetplan.version import __version__

REFERENCE_FLOPS = 3e12
"""Of the references, above which fewer tokens are taken: two or three minutes of two cores. A
constant, because every machine must take as many tokens."""
_WEIGHT_BYTES, _ACTIVATION_BYTES = 8 * 8, 4 * 8
"""Per weight and per activation at once. Measured: 6.5 GiB for a quarter of a layer of llama-2-7b
and 2048 tokens; this gives 7.0 GiB."""
_UPDATES = 10
"""Updates before the one that is compared: neither correction of AdamW's moments is 1 any more."""

Outcomes = dict[str, Tensor]
"""What a device computed, by name, as in `forward` or `gradient of input`."""
Compute = Callable[[torch.device, torch.dtype], Outcomes]


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
    own = compute_numerics(result, setup, here, tell)
    merged = merge_numerics(own, read)
    known = {kind.kind for kind in merged.kinds}
    return NumericsCheck(
        own=own,
        all=merged,
        faults=numerics_faults(merged, work_of(setup)),
        missing_kinds=tuple(kind for kind in kinds if kind not in known),
    )


def kinds_of_plan(result: SearchResult) -> tuple[str, ...]:
    """Device kinds that the plan uses, in the order of its stages."""
    island_of = result.inputs.cluster.island_of_device
    devices = (at for replica in result.plan.replicas for at in expand(replica.devices))
    return tuple(dict.fromkeys(island_of(device).device.kind for device in devices))


def kinds_here(kinds: Sequence[str], paced: Sequence[str] = ()) -> dict[str, Backend]:
    """Those of these kinds that this machine has or plays, each with its first device."""
    accelerators = list(_accelerators())
    present: dict[str, Backend] = {}
    for kind in kinds:
        if kind == CPU_KIND or kind in paced:
            present[kind] = CpuBackend()
        for accelerator in accelerators:
            if same_kind(kind, accelerator.kind()):
                present.setdefault(kind, accelerator)
    return present


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
    fault = own_layer_fault(model)
    if fault:
        raise InputError(fault)
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
            for layer in _layers(result, setup)
            for op in layer.operators
            for phase in ("forward", "backward")
        )
        if flops <= REFERENCE_FLOPS:
            break
        halved = "microbatch_size" if setup.microbatch_size > 1 else "sequence_length"
        setup = replace(setup, **{halved: getattr(setup, halved) // 2})
    return setup


def work_of(setup: NumericsSetup) -> tuple[tuple[str, str, int], ...]:
    """(operator, what, tp) of everything that a whole check has."""
    names = [(f"{kind.value} layer", "whole") for kind in TRAINED_KINDS]
    names.append((OperatorClass.OPTIMIZER.value, f"{setup.optimizer.value} step"))
    return tuple((*name, tp) for tp in setup.tensor_parallel for name in names)


def _check_memory(result: SearchResult, setup: NumericsSetup) -> None:
    """An InputError where the references need more memory than this machine has free."""
    needed = 0.0
    for layer in _layers(result, setup):
        size = 0.0
        for op in layer.operators:
            matrix = op.operator in WITH_WEIGHTS or op.operator is OperatorClass.EMBEDDING
            # A fused kernel does not write its scores.
            written = 0 if op.operator is OperatorClass.FUSED_ATTENTION else op.m * op.n
            read = op.m if matrix else op.m + op.n
            size += _WEIGHT_BYTES * op.n * op.k if matrix else 0
            size += _ACTIVATION_BYTES * op.count * op.batch * (written + read * op.k)
        needed = max(needed, size)
    free = free_memory_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"the references of {setup.microbatch_size * setup.sequence_length} tokens need about "
            f"{format_bytes(needed)}, {format_bytes(free)} are free; give fewer --tokens, the same "
            "number on every machine, or run this where more is free"
        )


def compute_numerics(
    result: SearchResult,
    setup: NumericsSetup,
    backends: dict[str, Backend],
    tell: Callable[[str], None] = lambda line: None,
) -> Numerics:
    """The results of these kinds; what a device refuses is in its `refused`."""
    results: dict[str, list[NumericsResult]] = {kind: [] for kind in backends}
    refused: dict[str, list[Refused]] = {kind: [] for kind in backends}
    for unit in _units(result, setup) if backends else ():
        tell(f"{unit.operator}: {unit.what}, tp {unit.tp}")
        reference = unit.compute(torch.device("cpu"), torch.float64)
        for kind, backend in backends.items():
            try:
                outcomes = compute_on(backend, DTYPES[setup.precision], unit.compute)
            except (RuntimeError, NotImplementedError, MemoryError) as error:
                message = (str(error).strip().splitlines() or [type(error).__name__])[0]
                outcomes = {}
                refused[kind].append(
                    Refused(operator=unit.operator, what=unit.what, message=message)
                )
            for tensor, value in outcomes.items():
                if bool(torch.isfinite(value).all()):
                    results[kind].append(_compare(unit, tensor, reference[tensor], value, setup))
                    continue
                message = f"{tensor} has values that are no finite numbers"
                refused[kind].append(
                    Refused(operator=unit.operator, what=unit.what, message=message)
                )
    return Numerics(
        hetplan_version=__version__,
        setup=setup,
        kinds=tuple(
            KindNumerics(
                kind=kind,
                device_name=backend.device_name(),
                driver=backend.driver(),
                torch_version=torch.__version__,
                results=tuple(results[kind]),
                refused=tuple(refused[kind]),
            )
            for kind, backend in backends.items()
        ),
    )


def compute_on(backend: Backend, dtype: torch.dtype, compute: Compute) -> Outcomes:
    """What this device computes; the device's own errors pass through."""
    outcomes = compute(backend.device(), dtype)
    backend.synchronise()
    return outcomes


def _compare(
    unit: _Unit, tensor: str, reference: Tensor, value: Tensor, setup: NumericsSetup
) -> NumericsResult:
    rms = _rms(reference)
    scale = rms or 1.0  # of a reference of zeros deviations are absolute
    difference = (value - reference).abs_()
    # Places that a multiplicative hash (Knuth, volume 3, section 6.4) spreads, so that no row or
    # column is preferred.
    flat = value.flatten()
    places = [at * 2654435761 % len(flat) for at in range(min(PROBES, len(flat)))]
    return NumericsResult(
        operator=unit.operator,
        what=unit.what,
        tp=unit.tp,
        tensor=tensor,
        shape=tuple(reference.shape),
        reference_rms=rms,
        largest_deviation=float(difference.max()) / scale,
        rms_deviation=_rms(difference) / scale,
        allowed=unit.roundings(tensor, reference).allowed(
            setup.precision,
            elements=reference.numel(),
            peak=float(reference.abs().max()) / scale,
            rms=scale,
        ),
        probes=tuple(float(flat[place]) for place in places),
    )


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())


# ---- what a device computes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Something that every kind computes."""

    operator: str
    what: str
    tp: int
    compute: Compute
    roundings: Callable[[str, Tensor], Roundings]
    """Of one result, given its name and its reference."""


def _units(result: SearchResult, setup: NumericsSetup) -> Iterator[_Unit]:
    for layer in _layers(result, setup):
        yield _Unit(
            operator=f"{layer.kind.value} layer",
            what="whole",
            tp=layer.tp,
            compute=layer.compute,
            roundings=layer.roundings,
        )
        if layer.kind is LayerKind.TRANSFORMER:
            yield _update_unit(layer)


def _layers(result: SearchResult, setup: NumericsSetup) -> Iterator[_Layer]:
    """Every layer that is computed."""
    model, trainer = result.inputs.model, trainer_settings(result.inputs.job)
    for tp in setup.tensor_parallel:
        for kind in TRAINED_KINDS:
            operators = layer_operators(
                model,
                kind,
                microbatch_size=setup.microbatch_size,
                sequence_length=setup.sequence_length,
                tp=tp,
                kernels=replace(trainer.kernels(kind), product_format=""),
            )
            # A router's small passes are no single computation.
            kept = tuple(op for op in operators if op.operator is not OperatorClass.ROUTER)
            yield _Layer(model=model, kind=kind, tp=tp, setup=setup, operators=kept)


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
class _Layer:
    """One layer as a tensor-parallel slice, and its inputs."""

    model: ModelSpec
    kind: LayerKind
    tp: int
    setup: NumericsSetup
    operators: tuple[Operator, ...]

    def module(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """With the weights that every device starts from."""
        layer: nn.Module = build_layer(
            self.model,
            self.model.layers.index(self.kind),
            cut=Cut(tp=self.tp),
            group=None,
            seed=self.setup.seed,
            dtype=DTYPES[self.setup.precision],
            device=device,
        )
        layer = layer.to(dtype)
        return HeadWithLoss(layer) if isinstance(layer, Head) else layer

    def compute(self, device: torch.device, dtype: torch.dtype) -> Outcomes:
        """Result, gradient of the input, and gradients of all weights."""
        if dtype == torch.float64:
            with _Exact():
                return self._compute(device, dtype)
        return self._compute(device, dtype)

    def _compute(self, device: torch.device, dtype: torch.dtype) -> Outcomes:
        module, batch = self.module(device, dtype), self.setup.microbatch_size
        generator = torch.Generator().manual_seed(self.setup.seed)

        def draw(shape: Sequence[int]) -> Tensor:
            value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
            return value.to(DTYPES[self.setup.precision]).to(device=device, dtype=dtype)

        # The first microbatch that the trainer would see.
        numbers = sample_numbers(
            0, global_batch_size=batch, microbatch_size=batch, dp=1, dp_index=0
        )
        data = MarkovTokens.of(self.model.vocab_size, self.setup.seed)
        drawn = torch.from_numpy(data.samples(numbers, self.setup.sequence_length + 1)).to(device)
        x, targets = drawn[:, :-1], drawn[:, 1:]
        if self.kind is not LayerKind.EMBEDDING:
            x = draw((*x.shape, self.model.hidden_size)).requires_grad_()
        output = module(x, targets) if self.kind is LayerKind.HEAD else module(x)
        torch.autograd.backward(output, draw(output.shape) if output.dim() else None)
        outcomes = {"forward": _exact_copy(output)}
        named = {name.rpartition(".")[2]: each for name, each in module.named_parameters()}
        for name, leaf in (("input", x), *named.items()):
            if leaf.grad is not None:
                outcomes[f"gradient of {name}"] = _exact_copy(leaf.grad)
        return outcomes

    def roundings(self, tensor: str, reference: Tensor) -> Roundings:
        """Of one result."""
        length = self.setup.sequence_length
        llama = self.model.architecture is Architecture.LLAMA
        rotates = llama and self.kind is LayerKind.TRANSFORMER
        return layer_roundings(
            tensor,
            self.operators,
            tokens=self.setup.microbatch_size * length,
            rotary_positions=length if rotates else 0,
        )


def _exact_copy(value: Tensor) -> Tensor:
    return value.detach().to(device="cpu", dtype=torch.float64, copy=True)


def _update_unit(layer: _Layer) -> _Unit:
    """The change of a transformer layer's weights by one update, before it is rounded.

    The first update of AdamW is the sign of the gradient, and would turn the rounding of a small
    gradient into a whole step. So every device updates with the reference's gradients, and from
    the same moments, as after `_UPDATES` updates: as if two gradients had come in turn, these and
    their neighbours, so that the first moment never exceeds the root of the second. All in float32,
    which the devices can hold; the rule works on float32 weights, the reference on float64.
    """
    setup, cpu = layer.setup, torch.device("cpu")
    computed = layer.compute(cpu, torch.float64)
    named = list(layer.module(cpu, torch.float64).named_parameters())
    before = torch.cat([_exact_copy(weight).flatten() for _, weight in named])
    names = [f"gradient of {name.rpartition('.')[2]}" for name, _ in named]
    gradients = torch.cat([computed[name].flatten() for name in names]).float().double()
    other = gradients.roll(1)
    moments = {
        "exp_avg": ((gradients + other) / 2.0).float(),
        "exp_avg_sq": ((gradients.square() + other.square()) / 2.0).float(),
    }
    weights_rms = _rms(before)

    def compute(device: torch.device, dtype: torch.dtype) -> Outcomes:
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        weights = nn.Parameter(before.to(device, kept, copy=True))
        weights.grad = gradients.to(device, weights.dtype)
        rule = make_rule(setup.optimizer, [weights])
        for name, state in rule_state(rule, weights).items():
            state.copy_(moments[name])
        set_updates(rule, weights, _UPDATES)
        rule.step()
        return {"change of weights": _exact_copy(weights) - before}

    def roundings(tensor: str, reference: Tensor) -> Roundings:
        # About a dozen operations of the rule, and two roundings of the weights themselves, which
        # are relative to the weights and not to the change.
        return Roundings(
            inner=12.0 + 2.0 * weights_rms / _rms(reference),
            peak=float(before.abs().max()) / weights_rms,
        )

    return _Unit(
        operator=OperatorClass.OPTIMIZER.value,
        what=f"{setup.optimizer.value} step",
        tp=layer.tp,
        compute=compute,
        roundings=roundings,
    )
