"""What a launch of Megatron-LM asks for, its defaults filled in.

Defaults and derived values: megatron/training/arguments.py (validate_args), megatron/core/
transformer/transformer_config.py, megatron/core/optimizer/optimizer_config.py of Megatron-LM
d98e8a64.

Layers per stage: megatron/core/transformer/transformer_block.py (get_num_layers_to_build). Versions
that do not validate round down and lose the layers that are left over; the numbers here do the
same, so that a reader of them sees the loss.

`--pipeline-model-parallel-layout` (megatron/core/transformer/pipeline_parallel_layer_layout.py,
parse_str_to_list): commas are dropped; once `(TEXT)*n` becomes TEXT n times, then once `x*n`
becomes the sign x n times, `|` too; `|` ends a segment; E embedding, t transformer layer, m
multi-token prediction, L loss. Segment i is virtual stage i // PP of stage i % PP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import shown
from hetplan.job.spec import ExpertDispatcher, Precision, ProductFormat, TrainerOptions
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
)
from hetplan.trainers.launch_values import (
    MAX_STAGES,
    LaunchFacts,
    LaunchMesh,
    LaunchText,
    ValueNotGivenError,
    algorithm_remarks,
    count_of,
    fault_of,
    flag,
    fraction_of,
    held_algorithm,
    is_set,
    number_of,
    word_of,
    world_size,
)
from hetplan.trainers.megatron.flags import FLAGS, RENAMED, UNPLANNED

_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_SIGN = re.compile(r"(.)\*(\d+)")
_MAX_SIGNS = 400_000
"""More layers than a model has (`hetplan.model.spec.MAX_LAYERS`), and their separators."""


def megatron_facts(text: LaunchText, num_layers: int | None = None) -> LaunchFacts:
    """The facts; `num_layers` is the model's, for a launch that does not give it.

    An InputError where a number is none, or the ranks cannot be dealt out.
    """
    _check_renamed(text)
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
    given_layers = number_of(text, None, "num-layers")
    layers = stage_layers(text, pp, num_layers if given_layers is None else given_layers)
    return common_facts(
        text,
        world=world,
        meshes=(mesh,),
        layers=layers,
        num_layers=given_layers,
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
            expert_parallel=is_set(text, "overlap-moe-expert-parallel-comm"),
        ),
        schedule="interleaved-1f1b" if virtual > 1 else "1f1b",
        gradient_clipping=fraction_of(text, 1.0, "clip-grad") > 0,
        options=_options(text),
        refusals=(*_refusals(text),),
        remarks=tuple(remarks),
    )


def microbatch_size(text: LaunchText) -> int:
    """--micro-batch-size, without which Megatron-LM does not start."""
    size = number_of(text, None, "micro-batch-size")
    if size is None:
        raise ValueNotGivenError(
            fault_of(None, text, "has no --micro-batch-size; give --set micro-batch-size=N")
        )
    return size


def vocabulary(text: LaunchText) -> int | None:
    """--vocab-size; None where the tokenizer decides, or the value is a template's placeholder."""
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
    # transformer_config.py: allgather unless given, which matters where there are experts.
    dispatchers = {"flex": ExpertDispatcher.DEEPEP}
    if flag(text, "num-experts") is not None:
        dispatchers["allgather"] = ExpertDispatcher.ALLGATHER
    return TrainerOptions(
        fused_attention=False if backend in ("unfused", "local") else None,
        # transformer_config.py: 0.1 unless given.
        attention_dropout=fraction_of(text, 0.1, "attention-dropout") > 0 or None,
        hidden_dropout=fraction_of(text, 0.1, "hidden-dropout") > 0 or None,
        fused_loss=is_set(text, "cross-entropy-loss-fusion") or None,
        fused_accumulation=False if is_set(text, "no-gradient-accumulation-fusion") else None,
        overlap_grad_reduce=is_set(text, "overlap-grad-reduce") or None,
        overlap_param_gather=is_set(text, "overlap-param-gather") or None,
        tp_comm_overlap=is_set(text, "tp-comm-overlap") or None,
        context_exchange=(exchange is not None and exchange.values[:1] == ("a2a",)) or None,
        expert_dispatcher=dispatchers.get(word_of(text, "allgather", "moe-token-dispatcher-type")),
        shared_expert_overlap=is_set(text, "moe-shared-expert-overlap") or None,
        gradient_precision=_gradients(text),
        product_format=products,
        collective_algorithm=held_algorithm(text),
    )


def _gradients(text: LaunchText) -> Precision | None:
    """Format of gradients where it is not float32 (arguments.py: bf16 turns float32 ones on)."""
    if is_set(text, "bf16"):
        return Precision.BFLOAT16 if is_set(text, "grad-reduce-in-bf16") else None
    if is_set(text, "fp16") and not is_set(text, "accumulate-allreduce-grads-in-fp32"):
        return Precision.FLOAT16
    return None


def _check_renamed(text: LaunchText) -> None:
    for name, today in RENAMED.items():
        setting = flag(text, name)
        if setting is not None:
            message = f"no version that hetplan plans for takes it; it is --{today} today"
            raise InputError(fault_of(setting, text, message))


def _refusals(text: LaunchText) -> Iterator[Fault]:
    for name in UNPLANNED:
        setting = flag(text, name)
        if setting is not None and setting.values != ("1",):
            what = FLAGS[name].meaning.removeprefix("none: ")
            message = f"no plan has {what}; take it out of a copy of the launch to price it"
            yield fault_of(setting, text, message)
    if _optimizer(text) not in ("adamw", "sgd"):
        name = word_of(text, "", "optimizer")
        message = f"{name} is no optimizer of plans; they have adam and sgd"
        yield fault_of(flag(text, "optimizer"), text, message)


def _remarks(text: LaunchText) -> Iterator[str]:
    yield from algorithm_remarks(text)
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


# ---- layers


def segments_of(layout: str) -> tuple[str, ...]:
    """The segments of a layout, written out; an InputError for a wrong layout."""
    text = layout.replace(",", "")
    for pattern in (_GROUP, _SIGN):
        total = len(text)
        for found in pattern.finditer(text):
            times = found.group(2)
            if len(times) > 7:
                raise InputError(f"{shown(layout)} repeats something {times[:20]} times")
            total += len(found.group(1)) * int(times)
        if total > _MAX_SIGNS:
            raise InputError(f"{shown(layout)} has over {_MAX_SIGNS:,} layers")
        text = pattern.sub(lambda found: found.group(1) * int(found.group(2)), text)
    wrong = sorted({sign for sign in text if sign not in "EtmL|"})
    if wrong:
        raise InputError(
            f"{shown(layout)} has {wrong[0]!a}, which is neither E, t, m, L nor |, or a bracket "
            "without a number after it"
        )
    return tuple(text.split("|"))


def layers_of_layout(layout: str, pp: int) -> tuple[tuple[int, ...], ...]:
    """Transformer layers of each stage, one number per virtual stage.

    An InputError where Megatron-LM refuses the layout for so many stages.
    """
    segments = segments_of(layout)
    if len(segments) % pp:
        raise InputError(
            f"{shown(layout)} has {len(segments)} segments, which {pp} stages do not divide"
        )
    whole = "".join(segments)
    if whole.count("E") != 1 or whole.count("L") != 1 or whole[0] != "E" or whole[-1] != "L":
        raise InputError(f"{shown(layout)} must begin with its one E and end with its one L")
    if re.search("mt", whole.replace("|", "")) is not None:
        raise InputError(f"{shown(layout)} has a t behind an m; multi-token prediction comes last")
    virtual = len(segments) // pp
    return tuple(
        tuple(segments[stage + chunk * pp].count("t") for chunk in range(virtual))
        for stage in range(pp)
    )


def stage_layers(text: LaunchText, pp: int, num_layers: int | None) -> tuple[tuple[int, ...], ...]:
    """Layers of each stage, one number per virtual stage; empty where nobody says how many."""
    layout = flag(text, "pipeline-model-parallel-layout")
    if layout is not None:
        try:
            return layers_of_layout("".join(layout.values), pp)
        except InputError as error:
            raise InputError(fault_of(layout, text, str(error))) from error
    if num_layers is None:
        return ()
    first = number_of(text, None, "decoder-first-pipeline-num-layers")
    last = number_of(text, None, "decoder-last-pipeline-num-layers")
    if first is not None or last is not None:
        counts = _uneven(text, pp, num_layers, first, last)
        virtual = count_of(text, 1, "num-virtual-stages-per-pipeline-rank")
        return _chunks(text, counts, virtual)
    embedding = is_set(text, "account-for-embedding-in-pipeline-split")
    loss = is_set(text, "account-for-loss-in-pipeline-split")
    each = (num_layers + embedding + loss) // pp
    virtual = _virtual(text, each)
    found = [list(row) for row in _chunks(text, [each] * pp, virtual)]
    found[0][0] -= embedding
    found[-1][-1] -= loss
    return tuple(tuple(max(0, count) for count in row) for row in found)


def _uneven(
    text: LaunchText, pp: int, num_layers: int, first: int | None, last: int | None
) -> list[int]:
    """Layers of the stages where the first or the last has a number of its own."""
    middle_stages = pp - (first is not None) - (last is not None)
    middle = num_layers - (first or 0) - (last or 0)
    if middle < 0 or (middle_stages < 1 and middle) or middle_stages < 0:
        setting = flag(
            text, "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
        )
        message = (
            f"first {first}, last {last} of {num_layers} layers leave {middle} for "
            f"{max(middle_stages, 0)} stages between them"
        )
        raise InputError(fault_of(setting, text, message))
    each = middle // middle_stages if middle_stages else 0
    return [
        *([] if first is None else [first]),
        *[each] * middle_stages,
        *([] if last is None else [last]),
    ]


def _virtual(text: LaunchText, each: int) -> int:
    """Virtual stages of an even split."""
    setting = flag(text, "num-layers-per-virtual-pipeline-stage")
    if setting is None:
        return count_of(text, 1, "num-virtual-stages-per-pipeline-rank")
    layers = count_of(text, 1, "num-layers-per-virtual-pipeline-stage")
    virtual = each // layers
    if virtual < 1:
        message = f"{layers} layers in a virtual stage, and a stage has {each}; use at most {each}"
        raise InputError(fault_of(setting, text, message))
    return virtual


def _chunks(text: LaunchText, counts: list[int], virtual: int) -> tuple[tuple[int, ...], ...]:
    if virtual * len(counts) > MAX_STAGES:
        setting = flag(text, "num-virtual-stages-per-pipeline-rank", "pipeline-model-parallel-size")
        raise InputError(
            fault_of(
                setting,
                text,
                f"{virtual * len(counts):,} virtual stages; no model has so many layers",
            )
        )
    return tuple((count // virtual,) * virtual for count in counts)
