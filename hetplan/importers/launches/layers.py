"""How many transformer layers does Megatron-LM really put on each stage?

megatron/core/transformer/transformer_block.py (get_num_layers_to_build) and the validation in
megatron/training/arguments.py and transformer_config.py. Versions that do not validate round down
and lose the layers that are left over; the numbers here do the same, so that a reader of them sees
the loss.
"""

from __future__ import annotations

from hetplan.errors import InputError
from hetplan.importers.launches.flags import count_of, fault_of, flag, is_set, number_of
from hetplan.importers.launches.layout import layers_of_layout
from hetplan.importers.launches.values import LaunchText

MAX_STAGES = 100_000
"""As many as a model has layers at most (`hetplan.model.spec.MAX_LAYERS`)."""


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
