"""What of a legal plan can Megatron-LM not be told?

A legal plan of target megatron has one pipeline of stages with equal degrees, one recomputation and
the schedule's own depths (`hetplan.plans.check_target`); this is the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.emitters.megatron.layout import layout_faults
from hetplan.emitters.megatron.model import model_faults
from hetplan.emitters.megatron.optimizer import optimizer_faults
from hetplan.emitters.megatron.parallel import parallel_faults
from hetplan.emitters.sheet import Host, LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.emitters.vendors import Vendor, vendor_of
from hetplan.errors import Fault
from hetplan.job.trainer import trainer_settings_of
from hetplan.search.result import SearchResult


def megatron_faults(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> tuple[Fault, ...]:
    """Everything that stock Megatron-LM cannot be told."""
    return (*device_faults(sheet), *common_faults(result, options))


def common_faults(result: SearchResult, options: EmitOptions) -> tuple[Fault, ...]:
    """The same but for devices: what holds for every trainer that takes Megatron's arguments."""
    exchange = bool(result.inputs.job.trainer.context_exchange)
    models = tuple(model_faults(result.inputs.model, result.inputs.job))
    if models:
        # What follows asks the model's parts.
        return (*models, *_job_faults(result), *option_faults(options))
    return (
        *layout_faults(result.plan.pipelines[0], result.inputs.model),
        *parallel_faults(result, context_exchange=exchange),
        *optimizer_faults(result),
        *_job_faults(result),
        *option_faults(options),
    )


def _vendors(sheet: LaunchSheet) -> dict[Vendor, list[Host]]:
    found: dict[Vendor, list[Host]] = {}
    for host in sheet.hosts:
        found.setdefault(vendor_of(host.vendor, host.device_kind), []).append(host)
    return found


def device_faults(sheet: LaunchSheet) -> Iterator[Fault]:
    """Devices of several vendors, or ones whose collectives torch does not know as nccl."""
    vendors = _vendors(sheet)
    if len({vendor.library for vendor in vendors}) > 1:
        listed = "; ".join(
            f"{vendor.library} on {', '.join(dict.fromkeys(host.device_kind for host in hosts))}"
            for vendor, hosts in vendors.items()
        )
        yield Fault(
            field="plan.pipelines[0].stages",
            message=f"its devices speak through {len(vendors)} libraries ({listed}), and a run of "
            "Megatron-LM has one for all groups: forbid the islands of all vendors but one, or "
            "emit for target flagscale, which goes through host memory between meshes",
        )
        return
    for vendor, hosts in vendors.items():
        if vendor.backend == "nccl":
            continue
        if vendor.vendor == "huawei":
            instead = "emit for target mindspeed"
        elif vendor.backend == "gloo":
            instead = "plan for target native, which `hetplan launch` trains on such devices"
        else:
            instead = (
                "forbid these islands, or use the vendor's own Megatron with other launch files"
            )
        yield Fault(
            field="plan.pipelines[0].stages",
            message=f"devices of kind {hosts[0].device_kind}; stock Megatron-LM wants devices that "
            f"torch calls cuda, with its nccl backend: {instead}",
        )


def _job_faults(result: SearchResult) -> Iterator[Fault]:
    """Settings of the job; the plan's target can run them all, today's Megatron-LM cannot."""
    job = result.inputs.job
    settings = trainer_settings_of("megatron", job.precision, job.trainer)
    if settings.scattered_sends:
        yield Fault(
            field="inputs.job.trainer.scattered_sends",
            message="on; Megatron-core sends whole activations (versions of 2021 scattered them): "
            "leave it out and plan again",
        )
    if settings.blocking_sends:
        yield Fault(
            field="inputs.job.trainer.blocking_sends",
            message="on; only DeepSpeed's pipeline engine sends so: leave it out and plan again",
        )
    if job.sequence_lengths:
        yield Fault(
            field="inputs.job.sequence_lengths",
            message="given; pretrain_gpt.py fills every sequence to sequence_length with the next "
            "document: leave sequence_lengths and packing out and plan again",
        )


def option_faults(options: EmitOptions) -> Iterator[Fault]:
    """What must be said with real data."""
    if not options.data:
        return
    if not options.tokenizer:
        yield Fault(
            field="--tokenizer",
            message="is missing; with --data it says which tokenizer made them",
        )
    if options.learning_rate is None:
        yield Fault(
            field="--learning-rate",
            message="is missing; with --data the run learns, and no plan says how fast",
        )
