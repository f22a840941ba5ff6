"""What does a launch of Megatron-LM ask for, its defaults filled in?

Defaults and derived values: megatron/training/arguments.py (validate_args), megatron/core/
transformer/transformer_config.py, megatron/core/optimizer/optimizer_config.py of Megatron-LM
d98e8a64. They were read there; what of them emitted launches use is run by tests.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.errors import Fault, InputError
from hetplan.importers.launches.flags import (
    count_of,
    fault_of,
    flag,
    fraction_of,
    is_set,
    number_of,
    word_of,
)
from hetplan.importers.launches.layers import MAX_STAGES, stage_layers
from hetplan.importers.launches.values import LaunchFacts, LaunchMesh, LaunchText
from hetplan.job.spec import Precision, ProductFormat, TrainerOptions
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
)

_NO_PLAN = (
    ("use-megatron-fsdp", "Megatron-FSDP shards in a way of its own"),
    ("use-custom-fsdp", "Megatron-FSDP shards in a way of its own"),
    ("use-torch-fsdp2", "torch's FSDP2 inside Megatron-LM has no plan"),
    ("tensor-parallel-num-weight-shards", "weight shards beside tensor parallelism have no plan"),
    ("hybrid-layer-pattern", "a row of unlike layers (state space, attention) has no plan"),
    ("hybrid-override-pattern", "a row of unlike layers (state space, attention) has no plan"),
    ("encoder-num-layers", "a model with an encoder has no plan"),
    ("num-experts-per-layer", "experts that differ by layer are given in a model file only"),
    ("heterogeneous-layers-config-path", "layers that differ are given in a model file only"),
    ("yaml-cfg", "the arguments stand in a YAML file; write them as flags"),
)
"""(flag, why): what changes the layout of a run and cannot be in a plan."""
_DEAD = (
    ("model-parallel-size", "tensor-model-parallel-size"),
    ("batch-size", "micro-batch-size"),
    ("checkpoint-activations", "recompute-activations"),
)
"""Flags of old versions, which arguments.py refuses, and their names of today."""


def megatron_facts(text: LaunchText, num_layers: int | None = None) -> LaunchFacts:
    """The facts; `num_layers` counts where the launch does not say it.

    An InputError where a number is none, or the ranks cannot be dealt out.
    """
    _check_dead(text)
    world = world_size(text)
    tp = count_of(text, 1, "tensor-model-parallel-size")
    pp = count_of(text, 1, "pipeline-model-parallel-size")
    cp = count_of(text, 1, "context-parallel-size")
    if world % (tp * pp * cp) or pp > MAX_STAGES:
        setting = flag(text, "pipeline-model-parallel-size", "tensor-model-parallel-size")
        message = (
            f"tp {tp} x pp {pp} x cp {cp} does not divide the {world} ranks of the launch, which "
            "Megatron-LM refuses"
        )
        raise InputError(fault_of(setting, text, message))
    mesh = LaunchMesh(
        tp=tp,
        cp=cp,
        ep=count_of(text, 1, "expert-model-parallel-size"),
        # --expert-tensor-parallel-size: tp unless given.
        etp=count_of(text, tp, "expert-tensor-parallel-size"),
        dp=world // (tp * pp * cp),
        pp=pp,
        microbatch_size=microbatch_size(text),
    )
    said = number_of(text, None, "num-layers")
    layers = stage_layers(text, pp, num_layers if said is None else said)
    return common_facts(
        text,
        world=world,
        meshes=(mesh,),
        layers=layers,
        num_layers=said,
        stage_recompute=(recompute_of(text),) * pp,
        sends=bool(layers)
        and len(layers[0]) > 1
        and not is_set(text, "no-overlap-p2p-communication"),
    )


def common_facts(
    text: LaunchText,
    *,
    world: int,
    meshes: tuple[LaunchMesh, ...],
    layers: tuple[tuple[int, ...], ...],
    num_layers: int | None,
    stage_recompute: tuple[Recompute, ...],
    sends: bool,
) -> LaunchFacts:
    """What Megatron-LM and the trainers made from it have in common."""
    first = meshes[0]
    copies = first.dp * first.microbatch_size
    # arguments.py: one microbatch for each data-parallel rank where nobody gives the batch.
    batch = count_of(text, copies, "global-batch-size")
    remarks = [*_remarks(text)]
    schedule = flag(text, "step-batch-size-schedule")
    if schedule is not None and schedule.values:
        last = schedule.values[-1].split()[-1].rpartition(":")[2]
        if last.isdecimal() and len(last) < 16:
            batch = int(last)
        remarks.append("the batch grows by --step-batch-size-schedule: its last size is priced")
    granularities = {each.granularity for each in stage_recompute}
    virtual = len(layers[0]) if layers else 1
    return LaunchFacts(
        text=text,
        world_size=world,
        meshes=meshes,
        layers=layers,
        num_layers=num_layers,
        global_batch_size=batch,
        num_microbatches=batch // copies,
        sequence_length=number_of(text, None, "seq-length", "encoder-seq-length"),
        vocab_size=vocabulary(text),
        vocab_multiple=count_of(text, 128, "make-vocab-size-divisible-by"),
        # arguments.py turns it off where tp is 1.
        sequence_parallel=is_set(text, "sequence-parallel") and any(each.tp > 1 for each in meshes),
        sharded_optimizer=is_set(text, "use-distributed-optimizer"),
        recompute=_most(granularities),
        data_outermost=is_set(text, "use-tp-pp-dp-mapping"),
        precision=precision_of(text).value,
        tied_embeddings=not is_set(text, "untie-embeddings-and-output-weights"),
        stage_recompute=stage_recompute,
        optimizer=_optimizer(text),
        optimizer_instances=count_of(text, 1, "num-distributed-optimizer-instances"),
        optimizer_offload=_offload(text),
        overlap=OverlapSettings(
            reduction=is_set(text, "overlap-grad-reduce"),
            gathering=is_set(text, "overlap-param-gather"),
            tensor_parallel=is_set(text, "tp-comm-overlap"),
            send=sends,
        ),
        schedule="interleaved-1f1b" if virtual > 1 else "1f1b",
        gradient_clipping=fraction_of(text, 1.0, "clip-grad") > 0,
        options=_options(text),
        refusals=(*_refusals(text),),
        remarks=tuple(remarks),
    )


def _most(found: set[RecomputeGranularity]) -> str:
    for each in (RecomputeGranularity.FULL, RecomputeGranularity.SELECTIVE):
        if each in found:
            return each.value
    return RecomputeGranularity.NONE.value


def world_size(text: LaunchText) -> int:
    """Ranks of the launch; an InputError that says how to give their number where none is said."""
    if text.hosts and all(host.devices is not None for host in text.hosts):
        return sum(host.devices or 0 for host in text.hosts)
    given = flag(text, "WORLD-SIZE")
    if given is not None:
        return count_of(text, 1, "WORLD-SIZE")
    if text.nodes is not None and text.devices_per_node is not None:
        return text.nodes * text.devices_per_node
    file = next((each.file for each in text.settings), "")
    unread = [each for each in text.unread if each.name.startswith("torchrun")]
    raise InputError(
        Fault(
            file=unread[0].file if unread else file,
            line=unread[0].line if unread else 0,
            message="how many ranks it starts is not said; give --set nnodes=N and --set "
            "nproc-per-node=N, or --set WORLD_SIZE=N",
        )
    )


def microbatch_size(text: LaunchText) -> int:
    """--micro-batch-size, without which Megatron-LM does not start."""
    found = number_of(text, None, "micro-batch-size")
    if found is None:
        raise InputError(
            fault_of(None, text, "has no --micro-batch-size; give --set micro-batch-size=N")
        )
    return found


def vocabulary(text: LaunchText) -> int | None:
    """--vocab-size; None where it is left to the tokenizer, or a template's word stands there."""
    try:
        return number_of(text, None, "vocab-size")
    except InputError:
        return None


def precision_of(text: LaunchText) -> Precision:
    """--bf16, --fp16 or neither."""
    if is_set(text, "bf16"):
        return Precision.BFLOAT16
    return Precision.FLOAT16 if is_set(text, "fp16") else Precision.FLOAT32


def _optimizer(text: LaunchText) -> str:
    """The name that plans have for --optimizer; adam, the default, decouples weight decay."""
    found = word_of(text, "adam", "optimizer")
    return {"adam": "adamw", "dist_adam": "adamw"}.get(found, found)


def _offload(text: LaunchText) -> float:
    """--optimizer-cpu-offload, all of it unless --optimizer-offload-fraction says less."""
    if not is_set(text, "optimizer-cpu-offload"):
        return 0.0
    return fraction_of(text, 1.0, "optimizer-offload-fraction")


def recompute_of(text: LaunchText) -> Recompute:
    """--recompute-granularity and what belongs to it, one for all stages."""
    granularity = word_of(text, "", "recompute-granularity")
    if is_set(text, "recompute-activations"):
        granularity = "selective"  # arguments.py
    if granularity == "selective":
        named = flag(text, "recompute-modules")
        known = tuple(RecomputeModule)
        modules = tuple(
            RecomputeModule(each)
            for each in (("core_attn",) if named is None else named.values)
            if each in known
        )
        if not modules:
            return Recompute()
        return Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=modules)
    if granularity != "full":
        return Recompute()
    block = word_of(text, "uniform", "recompute-method") == "block"
    return Recompute(
        granularity=RecomputeGranularity.FULL,
        layers=count_of(text, 1, "recompute-num-layers") if block else None,
    )


def _options(text: LaunchText) -> TrainerOptions:
    """The trainer's own choices (`hetplan.job.trainer` has their sources)."""
    backend = word_of(text, "auto", "attention-backend")
    formats = {"delayed": ProductFormat.FLOAT8, "tensorwise": ProductFormat.FLOAT8}
    formats["mxfp8"] = ProductFormat.MXFP8
    products: ProductFormat | None = None
    if flag(text, "fp8-format", "fp8-hybrid", "fp8-e4m3") is not None:
        # A recipe of blocks has no rate of its own here: it is priced as one scale per tensor.
        products = formats.get(word_of(text, "delayed", "fp8-recipe"), ProductFormat.FLOAT8)
    elif flag(text, "fp4-format") is not None:
        products = ProductFormat.NVFP4
    exchange = flag(text, "cp-comm-type")
    return TrainerOptions(
        fused_attention=False if backend in ("unfused", "local") else None,
        # transformer_config.py: 0.1 unless given.
        attention_dropout=fraction_of(text, 0.1, "attention-dropout") > 0 or None,
        hidden_dropout=fraction_of(text, 0.1, "hidden-dropout") > 0 or None,
        fused_loss=is_set(text, "cross-entropy-loss-fusion") or None,
        fused_accumulation=False if is_set(text, "no-gradient-accumulation-fusion") else None,
        context_exchange=(exchange is not None and exchange.values[:1] == ("a2a",)) or None,
        gradient_precision=_gradients(text),
        product_format=products,
    )


def _gradients(text: LaunchText) -> Precision | None:
    """Format of gradients where it is not float32 (arguments.py: bf16 turns float32 ones on)."""
    if is_set(text, "bf16"):
        return Precision.BFLOAT16 if is_set(text, "grad-reduce-in-bf16") else None
    if is_set(text, "fp16") and not is_set(text, "accumulate-allreduce-grads-in-fp32"):
        return Precision.FLOAT16
    return None


def _check_dead(text: LaunchText) -> None:
    for name, today in _DEAD:
        setting = flag(text, name)
        if setting is not None:
            message = f"no version that hetplan plans for takes it; it is --{today} today"
            raise InputError(fault_of(setting, text, message))


def _refusals(text: LaunchText) -> Iterator[Fault]:
    for name, why in _NO_PLAN:
        setting = flag(text, name)
        if setting is not None and setting.values != ("1",):
            yield fault_of(setting, text, f"{why}; take it out of a copy of the launch to price it")
    backend = word_of(text, "nccl", "optimizer")
    if _optimizer(text) not in ("adamw", "sgd"):
        setting = flag(text, "optimizer")
        yield fault_of(setting, text, f"{backend} is no optimizer of plans; they have adam and sgd")


def _remarks(text: LaunchText) -> Iterator[str]:
    named = flag(text, "recompute-modules")
    for each in () if named is None else named.values:
        if each not in tuple(RecomputeModule):
            yield f"--recompute-modules {each} is priced as not recomputed"
    uniform = word_of(text, "uniform", "recompute-method") == "uniform"
    if uniform and count_of(text, 1, "recompute-num-layers") > 1:
        yield "--recompute-num-layers keeps fewer inputs than priced: one of every layer is"
    if flag(text, "rampup-batch-size") is not None:
        yield "the batch grows by --rampup-batch-size: the full one is priced"
    if word_of(text, "delayed", "fp8-recipe") == "blockwise":
        yield "--fp8-recipe blockwise is priced as one scale per tensor"
