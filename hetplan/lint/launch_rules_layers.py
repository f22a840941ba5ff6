"""Does a launch of Megatron-LM place every layer that it names, once, and where it says?

Read in Megatron-LM from core 0.4 to main (megatron/core/transformer/transformer_block.py,
get_num_layers_to_build; megatron/training/arguments.py; transformer_config.py), not run:

- layers % stages: up to core 0.9 rounded down without a word, unless virtual stages are asked for;
  pretrain scripts of 0.10 and later refuse it, core itself from 0.11 (NVIDIA/Megatron-LM#1304).
- --decoder-first/last-pipeline-num-layers: with no stage left between them the layers that are
  left over are dropped up to core 0.15, and refused from 0.16 (#2718, #1778).

FlagScale (flagscale/train/arguments.py, pre_validate_args, and its patch of
get_num_layers_to_build) rounds down with --enable-hetero and no --hetero-pipeline-layer-split, and
no check is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.errors import InputError
from hetplan.importers.launches.layout import segments_of
from hetplan.lint.findings import Severity
from hetplan.lint.launch_rules_view import Launch, Seen, launch_rule, seen

_LAYOUT = "pipeline-model-parallel-layout"
_FIRST = "decoder-first-pipeline-num-layers"
_LAST = "decoder-last-pipeline-num-layers"
_VIRTUAL = "num-layers-per-virtual-pipeline-stage"
_VIRTUAL_COUNT = "num-virtual-stages-per-pipeline-rank"
_EMBEDDING = "account-for-embedding-in-pipeline-split"
_LOSS = "account-for-loss-in-pipeline-split"
_OTHER_SPLITS = (_FIRST, _LAST, _EMBEDDING, _LOSS)


def even_layout(layers: int, stages: int) -> str:
    """The layout string that spreads layers evenly, the larger stages after the first."""
    each, more = divmod(layers, stages)
    counts = [each + (1 if 0 < stage <= more else 0) for stage in range(stages)]
    texts = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    return "E" + "|".join(texts) + "L"


def _has_blocks_of_its_own(launch: Launch) -> bool:
    """Whether another flag than --num-layers says which blocks the model has."""
    own = (
        "hybrid-layer-pattern",
        "hybrid-override-pattern",
        "is-hybrid-model",
        "decoder-num-layers",
    )
    return any(launch.may_have(name) for name in own)


def _lost(launch: Launch) -> Iterator[Seen]:
    layers, pp = launch.num_layers, launch.pp
    if not launch.is_megatron_like or layers is None or pp is None or pp < 1:
        return
    if launch.is_hetero:
        yield from _lost_by_flagscale(launch, layers, pp)
    elif launch.has(_FIRST) or launch.has(_LAST):
        yield from _lost_between(launch, layers, pp)
    elif not launch.may_have(_LAYOUT) and not _has_blocks_of_its_own(launch):
        yield from _lost_evenly(launch, layers, pp)


def _lost_evenly(launch: Launch, layers: int, pp: int) -> Iterator[Seen]:
    if any(name in launch.unread_names for name in (_FIRST, _LAST, _EMBEDDING, _LOSS)):
        return
    extra = launch.has(_EMBEDDING) + launch.has(_LOSS)
    each = (layers + extra) // pp
    shows = (launch.get("num-layers"), launch.get("pipeline-model-parallel-size"))
    counted = f"{layers} layers" + (f" and {extra} counted for the ends" if extra else "")
    if (layers + extra) % pp:
        built = each * pp - extra
        yield seen(
            f"{counted} on {pp} stages: up to core 0.9 Megatron-LM builds {each} on each, {built} "
            f"in all, and says nothing; later versions stop. Write "
            f"--{_LAYOUT} '{even_layout(layers, pp)}' (core 0.13 and later)",
            *shows,
        )
        return
    virtual = launch.number(_VIRTUAL)
    count = launch.number(_VIRTUAL_COUNT)
    if pp > 1 and virtual and each % virtual:
        yield seen(
            f"{each} layers per stage in virtual stages of {virtual}: Megatron-LM stops; write "
            f"--{_VIRTUAL} {_divisor(each, virtual)}",
            launch.get(_VIRTUAL),
            *shows,
        )
    elif pp > 1 and count and each % count:
        yield seen(
            f"{each} layers per stage in {count} virtual stages: core up to 0.10 drops "
            f"{pp * (each % count)} layers, later versions stop; write --{_VIRTUAL_COUNT} "
            f"{_divisor(each, count)}",
            launch.get(_VIRTUAL_COUNT),
            *shows,
        )


def _divisor(number: int, most: int) -> int:
    """The largest divisor that is at most `most`."""
    return next((each for each in range(min(most, number), 0, -1) if number % each == 0), 1)


def _lost_between(launch: Launch, layers: int, pp: int) -> Iterator[Seen]:
    first, last = launch.number(_FIRST, 0), launch.number(_LAST, 0)
    if first is None or last is None:
        return
    ends = launch.has(_FIRST) + launch.has(_LAST)
    left, between = layers - first - last, pp - ends
    shows = (launch.get(_FIRST), launch.get(_LAST), launch.get("num-layers"))
    if between <= 0 and left:
        what = f"{first + last} layers on the {'ends' if ends > 1 else 'end'}"
        kept = first + last if pp > 1 or ends == 1 else max(first, last)
        yield seen(
            f"{what} of {pp} stage{'s' if pp > 1 else ''}, and {layers} in the model: core up to "
            f"0.15 trains {kept} layers and says nothing, later versions stop. Write "
            f"--{_LAYOUT} '{even_layout(layers, pp)}', or first and last that add up to {layers}",
            *shows,
        )
    elif left < 0:
        yield seen(
            f"{first + last} layers on first and last stage, and {layers} in the model; core 0.16 "
            f"stops only where {-left} is no multiple of the stages between. Write --{_LAYOUT} "
            f"'{even_layout(layers, pp)}'",
            *shows,
        )
    elif between > 0 and (left % between or not left):
        yield seen(
            f"{left} layers are left for the {between} stages between, which must all get as "
            f"many, at least one. Write --{_LAYOUT} '{even_layout(layers, pp)}'",
            *shows,
        )


def _lost_by_flagscale(launch: Launch, layers: int, pp: int) -> Iterator[Seen]:
    if launch.may_have("hetero-pipeline-layer-split") or layers % pp == 0:
        return
    each = layers // pp
    split = [each + (1 if stage < layers % pp else 0) for stage in range(pp)]
    yield seen(
        f"{layers} layers on {pp} stages without hetero_pipeline_layer_split: FlagScale builds "
        f"{each} on each, {each * pp} in all, and says nothing. Write "
        f"hetero_pipeline_layer_split: {split}",
        launch.get("num-layers"),
        launch.get("pipeline-model-parallel-size"),
    )


def _layout(launch: Launch) -> Iterator[Seen]:
    written = launch.word(_LAYOUT)
    if not launch.is_megatron_like or written is None:
        return
    shows = launch.get(_LAYOUT)
    for fault in _layout_faults(written, launch):
        yield seen(fault, shows)
    clash = [name for name in (_VIRTUAL, _VIRTUAL_COUNT, *_OTHER_SPLITS) if launch.has(name)]
    if clash:
        yield seen(
            f"--{_LAYOUT} together with {', '.join('--' + name for name in clash)}; Megatron-LM "
            f"takes one way to split layers: leave {'them' if len(clash) > 1 else 'it'} out",
            shows,
            *(launch.get(name) for name in clash),
        )


def _layout_faults(written: str, launch: Launch) -> Iterator[str]:
    try:
        segments = segments_of(written)
    except InputError as error:
        spaces = "; white space is refused as well" if " " in written else ""
        yield f"{error.faults[0].message}{spaces}"
        return
    pp = launch.pp
    if pp and len(segments) % pp:
        yield (
            f"{written!a:.200} has {len(segments)} stages for --pipeline-model-parallel-size {pp}: "
            f"write {pp} of them, or a multiple for virtual stages"
        )
    flat = "".join(segments)
    if not flat.startswith("E") or not flat.endswith("L"):
        yield f"{written!a:.200}: the first symbol is E (embedding) and the last L (loss)"
    for symbol in "EL":
        if flat.count(symbol) > 1:
            yield f"{written!a:.200} has {flat.count(symbol)} times {symbol}; a model has one"
    layers = launch.num_layers
    if layers is not None and flat.count("t") != layers:
        yield f"{written!a:.200} has {flat.count('t')} times t for {layers} layers"
    yield from _mtp_faults(flat, segments, launch)


def _mtp_faults(flat: str, segments: tuple[str, ...], launch: Launch) -> Iterator[str]:
    mtp = launch.number("mtp-num-layers", 0)
    if mtp is not None and flat.count("m") != mtp:
        yield f"{flat.count('m')} times m in the layout for {mtp} layers of multi-token prediction"
    if "m" in flat and "t" in flat[flat.index("m") :]:
        yield "t after m; multi-token prediction comes after all layers"
    if sum("m" in each for each in segments) > 1:
        yield "m in several stages; all of them stand in one"


RULES = (
    launch_rule(
        id="launch-loses-layers",
        severity=Severity.ERROR,
        title="layers of the model that no stage gets",
        explanation="The layers do not divide over the stages as they are asked for. Depending on "
        "its version the trainer rounds down and trains a smaller model, with a loss that looks "
        "well, or stops at the start. FLOP/s in its log count the layers that were dropped.",
        advice="Say which stage gets how many layers: --pipeline-model-parallel-layout for "
        "Megatron-LM, hetero_pipeline_layer_split for FlagScale.",
        look=_lost,
    ),
    launch_rule(
        id="launch-layout-string",
        severity=Severity.ERROR,
        title="a pipeline layout that Megatron-LM refuses",
        explanation="The layout string names every stage: E embedding, t layer, m multi-token "
        "prediction, L loss, | between stages, *n for repetition. Megatron-LM counts its symbols "
        "against the model and its stages against the pipeline.",
        advice="Write stages without groups, as in Et*10|t*10|t*6|t*6L, in single quotes, which "
        "keep the shell from reading | and *.",
        look=_layout,
    ),
)
