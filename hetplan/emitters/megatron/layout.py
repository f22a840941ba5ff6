"""How is a plan's cut of the layers written as Megatron's --pipeline-model-parallel-layout?

Symbols: E embedding, t transformer layer, m multi-token prediction layer, L loss; `t*10` repeats
one symbol; `|` ends a chunk. Chunks count through all stages, then on to the next virtual stage
(megatron/core/transformer/transformer_config.py, `pipeline_model_parallel_layout`). Only repeats of
one symbol are written: the parser (pipeline_parallel_layer_layout.py, `parse_str_to_list`) expands
parentheses in one pass and without nesting, takes no blanks, and repeats `|` like any symbol.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.errors import Fault
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import LayerRange, Pipeline

_SYMBOLS = (
    (LayerKind.EMBEDDING, "E"),
    (LayerKind.TRANSFORMER, "t"),
    (LayerKind.MULTI_TOKEN_PREDICTION, "m"),
    (LayerKind.HEAD, "L"),
)


def layout_text(pipeline: Pipeline, model: ModelSpec) -> str:
    """The layout of a pipeline, as in `Et*10|t*10|t*6|t*6L`."""
    kinds = model.layers
    virtual = pipeline.schedule.virtual_stages
    chunks = [stage.chunks[v] for v in range(virtual) for stage in pipeline.stages]
    return "|".join(_chunk_text(chunk, kinds) for chunk in chunks)


def _chunk_text(chunk: LayerRange, kinds: tuple[LayerKind, ...]) -> str:
    held = kinds[chunk.start : chunk.stop]
    counts = ((symbol, held.count(kind)) for kind, symbol in _SYMBOLS)
    return "".join(
        symbol if count == 1 else f"{symbol}*{count}" for symbol, count in counts if count
    )


def layout_faults(pipeline: Pipeline, model: ModelSpec) -> Iterator[Fault]:
    """Why Megatron refuses the cut; legal plans break only its rules about further predictions.

    `validate_layer_layout`: all multi-token prediction layers are in one chunk, in the last virtual
    stage of its rank.
    """
    first = 1 + model.num_layers
    stop = first + model.num_mtp_layers
    holding = [
        s
        for s, stage in enumerate(pipeline.stages)
        for chunk in stage.chunks
        if max(chunk.start, first) < min(chunk.stop, stop)
    ]
    if len(holding) > 1:
        yield Fault(
            field="plan.pipelines[0].stages",
            message=f"the {model.num_mtp_layers} multi-token prediction layers are cut between "
            f"stages {holding[0]} and {holding[-1]}; Megatron-LM keeps them in one chunk: plan "
            "again, plans that are searched hold them together with the head",
        )
