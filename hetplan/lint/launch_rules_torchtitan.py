"""Does a launch of torchtitan give every module to one stage, and every rank its stages?

Read in torchtitan b5bcd76: distributed/pipeline_parallel.py (_split_module keeps what a list names
and drops the rest without a check; _get_pipeline_metadata; _generate_llm_fqn_per_model_part),
models/common/decoder.py (tied embeddings with pipelines).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from hetplan.lint.findings import Severity
from hetplan.lint.launch_rules_view import Launch, Seen, launch_rule, seen

_LISTS = "module-fqns-per-model-part"
_PP = "pipeline-parallel-degree"
_PER_STAGE = "pipeline-parallel-layers-per-stage"
_SCHEDULE = "pipeline-parallel-schedule"
_SINGLE = ("1f1b", "gpipe")
_HEADS = ("lm_head", "output")
"""Name of the output projection today, and up to torchtitan 0.2."""


def module_lists(launch: Launch) -> tuple[tuple[str, ...], ...] | None:
    """Modules of each model part; None where none are written or they cannot be read.

    A part is a JSON list, or names with commas between them (the command line of release 0.3).
    """
    found = launch.get(_LISTS)
    if found is None or _LISTS in launch.unread_names or not found.values:
        return None
    parts: list[tuple[str, ...]] = []
    for value in found.values:
        if value.lstrip().startswith("["):
            try:
                read = json.loads(value)
            except (ValueError, RecursionError):
                return None
            if not isinstance(read, list) or not all(isinstance(name, str) for name in read):
                return None
            parts.append(tuple(read))
        else:
            parts.append(tuple(name.strip() for name in value.split(",")))
    return tuple(parts)


def _modules(launch: Launch) -> Iterator[Seen]:
    if launch.text.trainer != "torchtitan":
        return
    parts = module_lists(launch)
    if parts is None:
        yield from _generated(launch)
        return
    shows = launch.get(_LISTS)
    names = [name for part in parts for name in part]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        yield seen(
            f"{', '.join(twice[:6])} in several stages: each trains a copy of its own", shows
        )
    yield from _missing(launch, names)
    yield from _order(launch, parts)
    yield from _stages(launch, len(parts))


def _missing(launch: Launch, names: list[str]) -> Iterator[Seen]:
    shows = launch.get(_LISTS)
    layers = sorted({int(name[7:]) for name in names if re.fullmatch(r"layers\.\d{1,6}", name)})
    count = launch.num_layers
    most = count if count is not None else (layers[-1] + 1 if layers else 0)
    lost = [at for at in range(most) if at not in {*layers}]
    if lost:
        shown = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
        yield seen(
            f"layers {shown} of {most} stand in no stage: torchtitan drops "
            f"{'them' if len(lost) > 1 else 'it'} and trains {most - len(lost)} layers, without a "
            "word",
            shows,
        )
    if count is not None and layers and layers[-1] >= count:
        yield seen(f"layers.{layers[-1]}, and the model has {count} layers", shows)
    ends = [name for name in ("tok_embeddings", "norm") if name not in names]
    if not any(name in names for name in _HEADS):
        ends.append("lm_head")
    if ends:
        yield seen(f"{', '.join(ends)} in no stage: the model is trained without", shows)


def _order(launch: Launch, parts: tuple[tuple[str, ...], ...]) -> Iterator[Seen]:
    placed = [
        int(name[7:]) for part in parts for name in part if re.fullmatch(r"layers\.\d{1,6}", name)
    ]
    within = [tuple(name for name in part if name.startswith("layers.")) for part in parts]
    if placed != sorted(placed):
        at = next(left for left, right in pairwise(placed) if right < left)
        split = any(len(part) > 1 for part in within)
        yield seen(
            f"layers.{at} stands before an earlier layer: stages run in the order of the lists"
            + (", layers of one stage in the model's" if split else ""),
            launch.get(_LISTS),
        )


def _stages(launch: Launch, count: int) -> Iterator[Seen]:
    pp = launch.pp
    shows = (launch.get(_LISTS) or launch.get(_PER_STAGE), launch.get(_PP), launch.get(_SCHEDULE))
    if pp is None or pp < 1:
        return
    if pp == 1 and count > 1:
        yield seen(
            f"{count} model parts and pipeline_parallel_degree 1: the lists are not used; write "
            f"--parallelism.pipeline_parallel_degree {count}",
            *shows,
        )
    elif count % pp:
        yield seen(
            f"{count} model parts over {pp} pipeline ranks: a multiple of {pp} is needed", *shows
        )
    elif pp > 1:
        schedule = launch.word("pipeline-parallel-schedule") or "1F1B"
        each, single = count // pp, schedule.lower() in _SINGLE
        if single and each != 1:
            yield seen(
                f"schedule {schedule} runs one stage per rank, and there are {each}; write "
                "--parallelism.pipeline_parallel_schedule Interleaved1F1B",
                *shows,
            )
        elif not single and each < 2 and not launch.has("pipeline-parallel-schedule-csv"):
            yield seen(
                f"schedule {schedule} needs two stages per rank or more, and there is one; write "
                "--parallelism.pipeline_parallel_schedule 1F1B, or more lists",
                *shows,
            )


def _generated(launch: Launch) -> Iterator[Seen]:
    """Stages that torchtitan makes itself of a number of layers per stage."""
    per, layers, pp = launch.number(_PER_STAGE), launch.num_layers, launch.pp
    first = launch.number("pipeline-parallel-first-stage-less-layers", 1)
    last = launch.number("pipeline-parallel-last-stage-less-layers", 1)
    if not per or layers is None or pp is None or pp < 2 or first is None or last is None:
        return
    count = math.ceil((layers + first + last) / per)
    if count % pp:
        yield seen(
            f"{layers} layers and {first + last} for the ends, {per} per stage, are {count} stages "
            f"for {pp} pipeline ranks: torchtitan stops; write "
            f"--parallelism.pipeline_parallel_layers_per_stage "
            f"{math.ceil((layers + first + last) / pp)}",
            launch.get(_PER_STAGE),
            launch.get(_PP),
        )
    else:
        yield from _stages(launch, count)


def _tied(launch: Launch) -> Iterator[Seen]:
    model = launch.model
    if launch.text.trainer != "torchtitan" or model is None or not model.tied_embeddings:
        return
    if launch.pp is not None and launch.pp > 1:
        yield seen(
            f"{model.name} ties embedding and output, and there are {launch.pp} stages: torchtitan "
            "stops (`Weight tying is not supported with Pipeline Parallel`); write "
            "--parallelism.pipeline_parallel_degree 1",
            launch.get(_PP),
        )


RULES = (
    launch_rule(
        id="launch-module-lists",
        severity=Severity.ERROR,
        title="modules that no stage has, or several, or stages that ranks do not divide",
        explanation="module_fqns_per_model_part names the modules of each stage. torchtitan "
        "deletes from each stage what its list does not name, and does not check that the lists "
        "together are the model: a forgotten layer is not trained.",
        advice="Name tok_embeddings, every layers.N once and in order, norm and lm_head; as many "
        "lists as pipeline ranks, or a multiple for interleaved schedules.",
        look=_modules,
    ),
    launch_rule(
        id="launch-tied-embeddings",
        severity=Severity.ERROR,
        title="tied embeddings over several stages of torchtitan",
        explanation="A model whose output matrix is its embedding needs both on one rank, or a "
        "reduction between the ends of the pipeline, which torchtitan does not have.",
        advice="Use one stage, a model without tied embeddings, or Megatron-LM.",
        look=_tied,
    ),
)
