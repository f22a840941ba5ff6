"""Do ranks, heads, sequence, experts and vocabulary of a launch divide as its trainer needs it?

Sources, read: Megatron-LM megatron/training/arguments.py (ranks, sequence, experts),
megatron/core/transformer/transformer_config.py (heads, groups), core/tensor_parallel/mappings.py
(sequence over tp), core/transformer/moe/moe_layer.py (sequence parallelism of experts),
core/tokenizers/utils/build_tokenizer.py (padding of the vocabulary); FlagScale
train/hetero/parallel_context.py; torchtitan distributed/parallel_dims.py, models/common/decoder.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.importers.launches.values import Setting
from hetplan.lint.findings import Severity
from hetplan.lint.launch_rules_view import Launch, Seen, launch_rule, product, seen

_TP = "tensor-model-parallel-size"
_PP = "pipeline-model-parallel-size"
_CP = "context-parallel-size"


def _ranks(launch: Launch) -> Iterator[Seen]:
    world = launch.world_size
    if world is None:
        return
    if launch.is_hetero:
        yield from _hetero_ranks(launch, world)
    elif launch.is_megatron_like:
        yield from _megatron_ranks(launch, world)
    else:
        yield from _torchtitan_ranks(launch, world)


def _megatron_ranks(launch: Launch, world: int) -> Iterator[Seen]:
    tp, pp, cp = launch.tp, launch.pp, launch.cp
    size = product((tp, pp, cp))
    if size is None or launch.may_have("tensor-parallel-num-weight-shards"):
        return
    if world % size:
        yield seen(
            f"{world} ranks for tp {tp} x pp {pp} x cp {cp} = {size}: start a multiple of {size} "
            "ranks, or choose degrees whose product divides them",
            *_where_ranks(launch),
            launch.get(_TP),
            launch.get(_PP),
            launch.get(_CP),
        )


def _where_ranks(launch: Launch) -> tuple[Setting | None, ...]:
    return (launch.torchrun("nnodes"), launch.torchrun("nproc-per-node"))


def _hetero_ranks(launch: Launch, world: int) -> Iterator[Seen]:
    meshes = launch.numbers("hetero-process-meshes")
    if not meshes or len(meshes) % 5 or min(meshes) < 1:
        return
    rows = [meshes[at : at + 5] for at in range(0, len(meshes), 5)]
    need = sum(tp * cp * dp * pp for tp, cp, _, dp, pp in rows)
    if need != world:
        yield seen(
            f"{world} ranks, and hetero_process_meshes asks for {need} (tp x cp x dp x pp of every "
            "mesh): FlagScale stops with `World size mismatch`",
            launch.get("hetero-process-meshes"),
        )


def _torchtitan_ranks(launch: Launch, world: int) -> Iterator[Seen]:
    names = (
        "data-parallel-replicate-degree",
        "context-parallel-degree",
        "tensor-parallel-degree",
        "pipeline-parallel-degree",
    )
    size = product(launch.number(name, 1) for name in names)
    shard = launch.number("data-parallel-shard-degree", -1)
    if size is None or shard is None:
        return
    shows = [launch.get(name) for name in (*names, "data-parallel-shard-degree")]
    shows = [*_where_ranks(launch), *shows]
    if shard < 0 and world % size:
        yield seen(
            f"{world} ranks for dp_replicate x cp x tp x pp = {size}: what is left is no whole "
            "data_parallel_shard_degree",
            *shows,
        )
    elif shard >= 1 and shard * size != world:
        yield seen(
            f"{world} ranks for dp_replicate x dp_shard x cp x tp x pp = {shard * size}; write "
            f"--parallelism.data_parallel_shard_degree -1 to take what is left",
            *shows,
        )


def _divisions(launch: Launch) -> Iterator[Seen]:
    if launch.is_hetero:
        meshes = launch.numbers("hetero-process-meshes") or ()
        degrees = sorted(set(meshes[0::5])) if len(meshes) % 5 == 0 else []
    else:
        degrees = [launch.tp] if launch.tp else []
    for tp in degrees:
        yield from _heads(launch, tp)
        yield from _sequence(launch, tp)
    yield from _experts(launch)


def _heads(launch: Launch, tp: int) -> Iterator[Seen]:
    model = launch.model if not launch.is_megatron_like else None
    shows = launch.get(_TP) or launch.get("tensor-parallel-degree")
    heads = launch.number("num-attention-heads") if model is None else model.num_attention_heads
    groups = _groups(launch)
    if heads and heads % tp:
        yield seen(
            f"{heads} attention heads over tp {tp}: tp must divide them",
            launch.get("num-attention-heads"),
            shows,
        )
    elif groups and groups % tp and (tp % groups or not launch.is_megatron_like):
        needs = (
            "must be a multiple or a divisor of them"
            if launch.is_megatron_like
            else ("must divide them: torchtitan copies no key-value head")
        )
        yield seen(
            f"{groups} key-value heads over tp {tp}: tp {needs}",
            launch.get("num-query-groups"),
            shows,
        )
    hidden = launch.number("hidden-size")
    own = not launch.is_megatron_like or launch.may_have("kv-channels")
    if not own and heads and hidden and hidden % heads:
        yield seen(
            f"hidden size {hidden} over {heads} heads: not a whole number per head; write "
            "--kv-channels",
            launch.get("hidden-size"),
            launch.get("num-attention-heads"),
        )


def _groups(launch: Launch) -> int | None:
    if not launch.is_megatron_like:
        return launch.model.num_kv_heads if launch.model is not None else None
    return launch.number("num-query-groups") if launch.has("group-query-attention") else None


def _sequence(launch: Launch, tp: int) -> Iterator[Seen]:
    if not launch.is_megatron_like:
        return
    length, cp = launch.number("seq-length"), launch.cp
    if length is None or cp is None or cp < 1:
        return
    shows = (launch.get("seq-length"), launch.get(_CP), launch.get(_TP))
    if cp > 1 and length % (2 * cp):
        yield seen(
            f"sequence length {length} over cp {cp}: it must be a multiple of 2 x cp = {2 * cp}, "
            "as every rank gets a piece of the front and one of the back",
            *shows,
        )
    elif tp > 1 and launch.has("sequence-parallel") and (length // cp) % tp:
        yield seen(
            f"sequence length {length} over cp {cp} leaves {length // cp}, which tp {tp} does not "
            "divide; --sequence-parallel cuts it once more",
            launch.get("sequence-parallel"),
            *shows,
        )


def _experts(launch: Launch) -> Iterator[Seen]:
    experts, ep = launch.number("num-experts"), launch.ep
    if not launch.is_megatron_like or experts is None or ep is None or ep < 1:
        return
    etp = launch.number("expert-tensor-parallel-size", launch.tp)
    world, pp = launch.world_size, launch.pp
    shows = (launch.get("expert-model-parallel-size"), launch.get("num-experts"))
    if experts % ep:
        yield seen(f"{experts} experts over ep {ep}: ep must divide them", *shows)
    size = product((etp, ep, pp))
    if not launch.is_hetero and world and size and world % size:
        yield seen(
            f"{world} ranks for expert tp {etp} x ep {ep} x pp {pp} = {size}: not a multiple",
            launch.get("expert-tensor-parallel-size"),
            *shows,
        )
    split = not launch.is_hetero and launch.tp is not None and launch.tp > 1
    if split and not launch.may_have("sequence-parallel"):
        yield seen(
            f"experts with tp {launch.tp} and no --sequence-parallel: Megatron-LM's MoELayer "
            "raises while training; write it",
            launch.get(_TP),
            *shows,
        )


def padded(vocab: int, tp: int, multiple: int) -> int:
    """Vocabulary as Megatron-LM pads it: up to a multiple of `multiple` times tp."""
    return -(-vocab // (multiple * tp)) * multiple * tp


def _vocabulary(launch: Launch) -> Iterator[Seen]:
    name = "make-vocab-size-divisible-by"
    if not launch.is_megatron_like or launch.may_have(name) or launch.may_have("padded-vocab-size"):
        return
    vocab = launch.number("vocab-size")
    if vocab is None and launch.model is not None:
        vocab = launch.model.vocab_size
    tps = _vocabulary_degrees(launch)
    if vocab is None or vocab < 1 or not tps:
        return
    default = 128  # megatron/training/arguments.py
    sizes = {tp: padded(vocab, tp, default) for tp in sorted({1, *tps})}
    if len(set(sizes.values())) == 1:
        return
    most = sizes[max(sizes)]
    shown = ", ".join(f"{size} at tp {tp}" for tp, size in sizes.items())
    tp = max(tps)
    yield seen(
        f"vocabulary {vocab} becomes {shown}: a checkpoint of format torch, or a loss, is not the "
        f"same at another tp. Write --{name} {most // tp} at tp {tp}"
        + "".join(f", {most // each} at tp {each}" for each in sorted(sizes) if each != tp)
        + f", which keeps {most}",
        launch.get("vocab-size"),
        launch.get(_TP),
    )


def _vocabulary_degrees(launch: Launch) -> tuple[int, ...]:
    if launch.is_hetero:
        meshes = launch.numbers("hetero-process-meshes") or ()
        # Only the first and the last stage have a piece of the vocabulary.
        return (meshes[0], meshes[-5]) if meshes and len(meshes) % 5 == 0 else ()
    return (launch.tp,) if launch.tp and launch.tp > 1 else ()


RULES = (
    launch_rule(
        id="launch-ranks-do-not-divide",
        severity=Severity.ERROR,
        title="ranks that the degrees do not use up",
        explanation="The trainer splits all ranks into tensor, context and pipeline parallel "
        "groups and makes data-parallel copies of what is left. It stops where that is no whole "
        "number.",
        advice="Start as many ranks as a multiple of the product of the degrees, or change them. "
        "The data-parallel degree is not written: it follows from the ranks.",
        look=_ranks,
    ),
    launch_rule(
        id="launch-sizes-do-not-divide",
        severity=Severity.ERROR,
        title="heads, sequence or experts that a degree does not divide",
        explanation="Tensor parallelism splits attention heads, context parallelism the sequence "
        "in two pieces per rank, sequence parallelism what is left of it, expert parallelism the "
        "experts. The trainer stops where the split is no whole number, at times at the first "
        "step.",
        advice="Choose degrees that divide the model; tp may exceed the key-value heads of "
        "Megatron-LM only as their multiple.",
        look=_divisions,
    ),
    launch_rule(
        id="launch-padded-vocabulary",
        severity=Severity.WARNING,
        title="a padded vocabulary that changes with tp",
        explanation="Megatron-LM pads the vocabulary to a multiple of "
        "--make-vocab-size-divisible-by (128) times tp. With another tp, or another tp in the last "
        "stage, the embedding has another size: checkpoints of format torch are refused, losses "
        "differ in the dummy tokens, and every device holds other bytes.",
        advice="Write --make-vocab-size-divisible-by so that its product with tp is the size "
        "wanted.",
        look=_vocabulary,
    ),
)
