"""What is wrong in launches of Megatron-LM: layers, sizes, batches, and flags that do not fit.

Sources, read: megatron/training/arguments.py (validate_args), megatron/core/transformer/
transformer_config.py and transformer_block.py (get_num_layers_to_build), core/tensor_parallel/
mappings.py, core/transformer/moe/moe_layer.py, core/num_microbatches_calculator.py and
core/pipeline_parallel/schedules.py, from core 0.4 to d98e8a64.

- layers % stages: up to core 0.9 rounded down silently without virtual stages; pretrain scripts of
  0.10 and later refuse it, core itself from 0.11 (NVIDIA/Megatron-LM#1304).
- --decoder-first/last-pipeline-num-layers: with no stage left between them the layers that are
  left over are dropped up to core 0.15, and refused from 0.16 (#2718, #1778).
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher, get_close_matches

from hetplan.errors import InputError
from hetplan.trainers.launch_values import Setting
from hetplan.trainers.megatron.flags import FLAGS, NEEDS, RENAMED, Takes, known_names
from hetplan.trainers.megatron.read import layers_of_layout, segments_of
from hetplan.trainers.rules import (
    BATCH,
    MICROBATCHES,
    SIZES,
    Check,
    Launch,
    LaunchRule,
    Violation,
    nearest_multiples,
    product,
    violation,
    whole,
)

_TP = "tensor-model-parallel-size"
_PP = "pipeline-model-parallel-size"
_CP = "context-parallel-size"
_LAYOUT = "pipeline-model-parallel-layout"
_FIRST = "decoder-first-pipeline-num-layers"
_LAST = "decoder-last-pipeline-num-layers"
_VIRTUAL = "num-layers-per-virtual-pipeline-stage"
_VIRTUAL_COUNT = "num-virtual-stages-per-pipeline-rank"
_EMBEDDING = "account-for-embedding-in-pipeline-split"
_LOSS = "account-for-loss-in-pipeline-split"
_OWN_BLOCKS = (
    "hybrid-layer-pattern",
    "hybrid-override-pattern",
    "is-hybrid-model",
    "decoder-num-layers",
)
"""Flags other than --num-layers that say which blocks the model has."""
_CHANGING_BATCH = ("rampup-batch-size", "step-batch-size-schedule")
_GRANULARITY = "recompute-granularity"
_METHOD = "recompute-method"
_COUNT = "recompute-num-layers"
_ALIKE = 0.85
"""Of difflib's ratio: one wrong letter in seven, or two letters in the wrong order."""
_MAX_COMPARED = 100
"""Flags that Megatron-LM does not have; a launch with more is a trainer of its own."""
_MIN_LENGTH = 8
"""Letters of a flag that is compared with others: shorter ones resemble each other by chance."""


def even_layout(layers: int, stages: int) -> str:
    """The layout string that spreads layers evenly, the larger stages after the first."""
    each, more = divmod(layers, stages)
    counts = [each + (1 if 0 < stage <= more else 0) for stage in range(stages)]
    texts = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    return "E" + "|".join(texts) + "L"


def _lost(launch: Launch) -> Iterator[Violation]:
    layers, pp = launch.num_layers, launch.pp
    if launch.is_hetero or layers is None or pp is None or pp < 1:
        return
    if launch.has(_FIRST) or launch.has(_LAST):
        yield from _lost_between(launch, layers, pp)
    elif not launch.may_have(_LAYOUT) and not any(map(launch.may_have, _OWN_BLOCKS)):
        yield from _lost_evenly(launch, layers, pp)


def _lost_evenly(launch: Launch, layers: int, pp: int) -> Iterator[Violation]:
    if any(name in launch.unread_names for name in (_FIRST, _LAST, _EMBEDDING, _LOSS)):
        return
    extra = launch.has(_EMBEDDING) + launch.has(_LOSS)
    each = (layers + extra) // pp
    shows = (launch.get("num-layers"), launch.get("pipeline-model-parallel-size"))
    counted = f"{layers} layers" + (f" and {extra} counted for the ends" if extra else "")
    if (layers + extra) % pp:
        built = each * pp - extra
        yield violation(
            f"{counted} on {pp} stages: up to core 0.9 Megatron-LM builds {each} on each, {built} "
            f"in all, and says nothing; later versions stop. Write "
            f"--{_LAYOUT} '{even_layout(layers, pp)}' (core 0.13 and later)",
            *shows,
        )
        return
    virtual = launch.number(_VIRTUAL)
    count = launch.number(_VIRTUAL_COUNT)
    if pp > 1 and virtual and each % virtual:
        yield violation(
            f"{each} layers per stage in virtual stages of {virtual}: Megatron-LM stops; write "
            f"--{_VIRTUAL} {_divisor(each, virtual)}",
            launch.get(_VIRTUAL),
            *shows,
        )
    elif pp > 1 and count and each % count:
        yield violation(
            f"{each} layers per stage in {count} virtual stages: core up to 0.10 drops "
            f"{pp * (each % count)} layers, later versions stop; write --{_VIRTUAL_COUNT} "
            f"{_divisor(each, count)}",
            launch.get(_VIRTUAL_COUNT),
            *shows,
        )


def _divisor(number: int, most: int) -> int:
    """The largest divisor that is at most `most`."""
    return next((each for each in range(min(most, number), 0, -1) if number % each == 0), 1)


def _lost_between(launch: Launch, layers: int, pp: int) -> Iterator[Violation]:
    first, last = launch.number(_FIRST, 0), launch.number(_LAST, 0)
    if first is None or last is None:
        return
    ends = launch.has(_FIRST) + launch.has(_LAST)
    left, between = layers - first - last, pp - ends
    shows = (launch.get(_FIRST), launch.get(_LAST), launch.get("num-layers"))
    if between > 0 and left >= 0 and (left % between or not left):
        yield violation(
            f"{left} layers are left for the {between} stages between, which must all get as "
            f"many, at least one. Write --{_LAYOUT} '{even_layout(layers, pp)}'",
            *shows,
        )


def _layout(launch: Launch) -> Iterator[Violation]:
    written = launch.word(_LAYOUT)
    if written is None:
        return
    shows = launch.get(_LAYOUT)
    for fault in _layout_faults(written, launch):
        yield violation(fault, shows)
    clash = [
        name
        for name in (_VIRTUAL, _VIRTUAL_COUNT, _FIRST, _LAST, _EMBEDDING, _LOSS)
        if launch.has(name)
    ]
    if clash:
        yield violation(
            f"--{_LAYOUT} together with {', '.join('--' + name for name in clash)}; Megatron-LM "
            f"takes one way to split layers: leave {'them' if len(clash) > 1 else 'it'} out",
            shows,
            *(launch.get(name) for name in clash),
        )


def _layout_faults(written: str, launch: Launch) -> Iterator[str]:
    try:
        layers_of_layout(written, launch.pp or 1)
    except InputError as error:
        yield str(error)
        return
    segments = segments_of(written)
    flat = "".join(segments)
    layers = launch.num_layers
    if layers is not None and flat.count("t") != layers:
        yield f"{written!a:.200} has {flat.count('t')} times t for {layers} layers"
    mtp = launch.number("mtp-num-layers", 0)
    if mtp is not None and flat.count("m") != mtp:
        yield f"{flat.count('m')} times m in the layout for {mtp} layers of multi-token prediction"
    if sum("m" in each for each in segments) > 1:
        yield "m in several stages; all of them stand in one"


def _divisions(launch: Launch) -> Iterator[Violation]:
    degrees = sorted({mesh[0] for mesh in launch.meshes})
    if not launch.is_hetero:
        degrees = [launch.tp] if launch.tp else []
    for tp in degrees:
        yield from _heads(launch, tp)
        yield from _sequence(launch, tp)
    yield from _experts(launch)


def _heads(launch: Launch, tp: int) -> Iterator[Violation]:
    heads, hidden = launch.number("num-attention-heads"), launch.number("hidden-size")
    grouped = launch.has("group-query-attention")
    groups = launch.number("num-query-groups") if grouped else None
    shows = (launch.get("num-attention-heads"), launch.get(_TP))
    if heads and heads % tp:
        yield violation(f"{heads} attention heads over tp {tp}: tp must divide them", *shows)
    elif groups and groups % tp and tp % groups:
        yield violation(
            f"{groups} key-value heads over tp {tp}: tp must be a multiple or a divisor of them",
            launch.get("num-query-groups"),
            launch.get(_TP),
        )
    if heads and hidden and hidden % heads and not launch.may_have("kv-channels"):
        yield violation(
            f"hidden size {hidden} over {heads} heads: not a whole number per head; write "
            "--kv-channels",
            launch.get("hidden-size"),
            launch.get("num-attention-heads"),
        )


def _sequence(launch: Launch, tp: int) -> Iterator[Violation]:
    length, cp = launch.number("seq-length"), launch.cp
    if length is None or cp is None or cp < 1:
        return
    shows = (launch.get("seq-length"), launch.get(_CP), launch.get(_TP))
    if cp > 1 and length % (2 * cp):
        yield violation(
            f"sequence length {length} over cp {cp}: it must be a multiple of 2 x cp = {2 * cp}, "
            "as every rank gets a piece of the front and one of the back",
            *shows,
        )
    elif tp > 1 and launch.has("sequence-parallel") and (length // cp) % tp:
        yield violation(
            f"sequence length {length} over cp {cp} leaves {length // cp}, which tp {tp} does not "
            "divide; --sequence-parallel cuts it once more",
            launch.get("sequence-parallel"),
            *shows,
        )


def _experts(launch: Launch) -> Iterator[Violation]:
    experts, ep = launch.number("num-experts"), launch.ep
    if experts is None or ep is None or ep < 1:
        return
    etp = launch.number("expert-tensor-parallel-size", launch.tp)
    world, pp = launch.world_size, launch.pp
    shows = (launch.get("expert-model-parallel-size"), launch.get("num-experts"))
    if experts % ep:
        yield violation(f"{experts} experts over ep {ep}: ep must divide them", *shows)
    size = product((etp, ep, pp))
    if not launch.is_hetero and world and size and world % size:
        yield violation(
            f"{world} ranks for expert tp {etp} x ep {ep} x pp {pp} = {size}: not a multiple",
            launch.get("expert-tensor-parallel-size"),
            *shows,
        )
    split = not launch.is_hetero and launch.tp is not None and launch.tp > 1
    if split and not launch.may_have("sequence-parallel"):
        yield violation(
            f"experts with tp {launch.tp} and no --sequence-parallel: Megatron-LM's MoELayer "
            "raises while training; write it",
            launch.get(_TP),
            *shows,
        )


def _batch(launch: Launch) -> Iterator[Violation]:
    if launch.has("step-batch-size-schedule") and launch.has("global-batch-size"):
        yield violation(
            "--global-batch-size together with --step-batch-size-schedule: Megatron-LM stops; "
            "leave one of them out",
            launch.get("global-batch-size"),
            launch.get("step-batch-size-schedule"),
        )
    if any(launch.may_have(name) for name in _CHANGING_BATCH):
        return
    dp, size = _data_ranks(launch), launch.number("micro-batch-size")
    batch = launch.number("global-batch-size")
    per_step = product((dp, size))
    if per_step is None or batch is None or batch % per_step == 0:
        return
    shows = (launch.get("global-batch-size"), launch.get("micro-batch-size"))
    ranks = "rank" if dp == 1 else "ranks"
    asked = f"global batch {batch}, microbatches of {size} on {dp} data-parallel {ranks}"
    good = nearest_multiples(batch, per_step)
    result = f"not a multiple of {per_step}, and the trainer stops"
    if launch.has("decrease-batch-size-if-needed"):
        kept = batch // per_step * per_step
        result = (
            f"--decrease-batch-size-if-needed trains {kept} sequences per step, {batch - kept} "
            "fewer, with one line in the log"
        )
    yield violation(f"{asked}: {result}; write --global-batch-size {good}", *shows)


def _data_ranks(launch: Launch) -> int | None:
    """Data-parallel ranks that load data; of FlagScale's meshes those of the first."""
    if not launch.is_hetero:
        return launch.dp
    return launch.meshes[0][3] if launch.meshes else None


def _num_microbatches(launch: Launch) -> int | None:
    """Microbatches of one step on one data-parallel rank; None: not known."""
    if any(launch.may_have(name) for name in _CHANGING_BATCH):
        return None
    per_step = product((_data_ranks(launch), launch.number("micro-batch-size")))
    batch = launch.number("global-batch-size")
    if per_step is None or batch is None or batch < per_step:
        return None
    return batch // per_step


def _microbatches(launch: Launch) -> Iterator[Violation]:
    """Fewer microbatches than stages."""
    count, pp = _num_microbatches(launch), launch.pp
    if count is None or pp is None or pp < 2 or count >= pp:
        return
    yield violation(
        f"{count} microbatch{'es' if count > 1 else ''} for {pp} stages: with equal stages each "
        f"device idles {(pp - 1) / (count + pp - 1):.0%} of the step; write --global-batch-size "
        f"for {2 * pp} microbatches or more, or fewer stages",
        launch.get("global-batch-size"),
        launch.get("micro-batch-size"),
        launch.get(_PP),
    )


def _recompute(launch: Launch) -> Iterator[Violation]:
    granularity = launch.word(_GRANULARITY)
    method, count = launch.has(_METHOD), launch.has(_COUNT)
    shows = tuple(launch.get(name) for name in (_GRANULARITY, _METHOD, _COUNT))
    if granularity is None and not launch.may_have(_GRANULARITY):
        if launch.has("recompute-activations"):
            granularity = "selective"
        elif method or count:
            flag = _METHOD if method else _COUNT
            yield violation(
                f"--{flag} without --{_GRANULARITY}: nothing is recomputed; write "
                f"--{_GRANULARITY} full, or leave it out",
                *shows,
            )
            return
    if granularity == "selective" and (method or count):
        flags = " and ".join(f"--{name}" for name in (_METHOD, _COUNT) if launch.has(name))
        yield violation(
            f"selective recomputation with {flags}, which belong to full: the trainer stops; write "
            f"--{_GRANULARITY} full, or name parts of a layer with --recompute-modules",
            launch.get("recompute-activations"),
            *shows,
        )
    elif granularity == "full":
        yield from _full(launch)
    elif granularity not in (None, "selective"):
        yield violation(f"--{_GRANULARITY} {granularity}: it is full or selective", *shows)


def _full(launch: Launch) -> Iterator[Violation]:
    shows = tuple(launch.get(name) for name in (_GRANULARITY, _METHOD, _COUNT))
    per_stage = launch.may_have("recompute-method-per-stage-micro-batch")
    lacks = [name for name in (_METHOD, _COUNT) if not launch.may_have(name) and not per_stage]
    if lacks:
        written = " ".join(
            {_METHOD: f"--{_METHOD} uniform", _COUNT: f"--{_COUNT} 1"}[n] for n in lacks
        )
        yield violation(
            f"full recomputation without {' and '.join('--' + name for name in lacks)}: the "
            f"trainer stops; write {written}",
            *shows,
        )
    method = launch.word(_METHOD)
    if method not in (None, "uniform", "block"):
        yield violation(f"--{_METHOD} {method}: it is uniform or block", *shows)


def _needs(launch: Launch) -> Iterator[Violation]:
    for flag, others in NEEDS:
        if not launch.has(flag) or any(launch.may_have(other) for other in others):
            continue
        wanted = " or ".join(f"--{other}" for other in others)
        yield violation(f"--{flag} without {wanted}: the trainer stops; write it", launch.get(flag))
    shards = "use-distributed-optimizer"
    optimizer = launch.word("optimizer")
    if launch.has(shards) and optimizer == "sgd":
        yield violation(
            f"--{shards} with --optimizer sgd: the trainer stops, only Adam's state is sharded; "
            f"leave --{shards} out",
            launch.get(shards),
            launch.get("optimizer"),
        )


def _idle(launch: Launch) -> Iterator[Violation]:
    """Flags without effect."""
    if launch.has("sequence-parallel") and launch.tp == 1 and not launch.is_hetero:
        yield violation(
            "--sequence-parallel with tp 1: it is switched off; leave it out",
            launch.get("sequence-parallel"),
        )
    if (
        launch.has("num-query-groups")
        and not launch.may_have("group-query-attention")
        and launch.number("num-query-groups") != launch.number("num-attention-heads")
        and not launch.may_have("multi-latent-attention")
    ):
        yield violation(
            f"--num-query-groups {launch.word('num-query-groups')} without "
            "--group-query-attention: every head gets keys and values of its own, a larger model; "
            "write --group-query-attention",
            launch.get("num-query-groups"),
        )


def _unknown(launch: Launch) -> Iterator[Violation]:
    """Flags that Megatron-LM does not have, close to one that it has."""
    if launch.text.trainer != "megatron":
        return
    known = known_names()
    compared: set[str] = set()
    for each in launch.text.settings:
        name = each.flag
        if not each.is_of_trainer:
            continue
        if name in RENAMED:
            continue
        yield from _wrong_value(each)
        if name in known or len(name) < _MIN_LENGTH:
            continue
        compared.add(name)
        if len(compared) > _MAX_COMPARED:
            return
        near = get_close_matches(name, known, n=1, cutoff=_ALIKE)
        if near and not _is_other_word(name, near[0]):
            yield violation(
                f"--{each.name} is no flag of Megatron-LM, which stops at unknown ones; did you "
                f"mean --{near[0]}?",
                each,
            )


def _is_other_word(name: str, near: str) -> bool:
    """Whether the names differ in a number or a whole word, as flags of one family do."""
    parts, others = name.split("-"), near.split("-")
    if len(parts) != len(others):
        return sorted("".join(parts)) != sorted("".join(others))
    unlike = [pair for pair in zip(parts, others, strict=True) if pair[0] != pair[1]]
    return any(SequenceMatcher(None, *pair).ratio() < 0.6 for pair in unlike)


def _wrong_value(setting: Setting) -> Iterator[Violation]:
    """A value of a flag that takes none, or none of the form that it takes."""
    flag = FLAGS.get(setting.flag)
    if flag is None or not setting.values:
        return
    text = " ".join(setting.values)
    if flag.takes in (Takes.SWITCH, Takes.OFF) and text.lower() not in ("true", "false"):
        yield violation(f"--{flag.name} takes no value, and {text:.60} follows it", setting)
    elif flag.takes is Takes.COUNT and whole(text) is None:
        yield violation(
            f"--{flag.name} ({flag.meaning}) takes one whole number, not {text:.60}", setting
        )


def _timeout(launch: Launch) -> Iterator[Violation]:
    cluster = launch.cluster
    flag = "distributed-timeout-minutes"
    if cluster is None or len(cluster.regions) < 2:
        return
    if not launch.may_have(flag):
        regions = ", ".join(cluster.regions[:4])
        yield violation(
            f"regions {regions}, and no --{flag}: a collective that waits 10 minutes for a rank "
            f"elsewhere ends the run; write --{flag} 60"
        )


LAYERS = LaunchRule(
    id="launch-loses-layers",
    certain=True,
    title="layers of the model that no stage gets",
    explanation="The layers do not divide over the stages as they are asked for. Depending on "
    "its version the trainer rounds down and trains a smaller model, with a loss that looks "
    "well, or stops at the start. FLOP/s in its log count the layers that were dropped.",
    advice="Say which stage gets how many layers: --pipeline-model-parallel-layout for "
    "Megatron-LM, hetero_pipeline_layer_split for FlagScale.",
)
_LAYOUTS = LaunchRule(
    id="launch-layout-string",
    certain=True,
    title="a pipeline layout that Megatron-LM refuses",
    explanation="The layout string names every stage: E embedding, t layer, m multi-token "
    "prediction, L loss, | between stages, *n for repetition. Megatron-LM counts its symbols "
    "against the model and its stages against the pipeline.",
    advice="Write stages without groups, as in Et*10|t*10|t*6|t*6L, in single quotes, which "
    "keep the shell from reading | and *.",
)
_CONTRADICT = LaunchRule(
    id="launch-flags-contradict",
    certain=True,
    title="flags that contradict each other, or lack one that they need",
    explanation="Full recomputation needs a method and a number of layers; selective takes "
    "neither. Gathering of parameters overlaps only with the distributed optimizer and overlapped "
    "reduction, tensor parallelism only with sequence parallelism. Megatron-LM stops otherwise.",
    advice="Write the flag that is missing, or leave the other one out.",
)
_IDLE = LaunchRule(
    id="launch-flag-without-effect",
    certain=False,
    title="flags that do nothing as they are written",
    explanation="Megatron-LM switches some flags off and goes on, with a line in the log at "
    "most: the run is not the one that the script names.",
    advice="Leave the flag out, or write what makes it count.",
)
_UNKNOWN = LaunchRule(
    id="launch-unknown-flag",
    certain=False,
    title="a flag that resembles one of Megatron-LM",
    explanation="Megatron-LM neither knows abbreviations nor passes over flags that it does "
    "not know. One that is almost a known one is a slip, unless the script's own program adds "
    "it.",
    advice="Write the flag as the trainer has it.",
)
_TIMEOUT = LaunchRule(
    id="launch-timeout",
    certain=False,
    title="ten minutes for collectives between regions",
    explanation="Megatron-LM gives a collective 10 minutes by default "
    "(distributed_timeout_minutes in training/config/common_config.py). Between regions one "
    "rank may wait longer for the others: while they start, load or write a checkpoint, or a "
    "route is lost. All ranks end then.",
    advice="Write --distributed-timeout-minutes 60.",
)
CHECKS: tuple[Check, ...] = (
    (LAYERS, _lost),
    (_LAYOUTS, _layout),
    (SIZES, _divisions),
    (BATCH, _batch),
    (MICROBATCHES, _microbatches),
    (_CONTRADICT, _recompute),
    (_CONTRADICT, _needs),
    (_IDLE, _idle),
    (_UNKNOWN, _unknown),
    (_TIMEOUT, _timeout),
)
"""Of Megatron-LM's arguments, whatever trainer takes them."""
