"""What is wrong in launches of torchtitan: modules that no stage has, degrees, and batches.

Read in torchtitan b5bcd76: distributed/pipeline_parallel.py (_split_module keeps what a list names
and drops the rest without a check; _get_pipeline_metadata; _generate_llm_fqn_per_model_part),
models/common/decoder.py (tied embeddings with pipelines), distributed/parallel_dims.py, trainer.py;
torch's distributed/pipelining/schedules.py (Schedule1F1B needs a microbatch per stage).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hetplan.errors import InputError
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
)
from hetplan.trainers.torchtitan.read import listed_layers, module_parts

_LISTS = "module-fqns-per-model-part"
_PP = "pipeline-parallel-degree"
_SCHEDULE = "pipeline-parallel-schedule"
_SINGLE = ("1f1b", "gpipe")
_HEADS = ("lm_head", "output")
"""Name of the output projection today, and up to torchtitan 0.2."""


def _modules(launch: Launch) -> Iterator[Violation]:
    setting = launch.get(_LISTS)
    if setting is None or _LISTS in launch.unread_names or not setting.values:
        return
    try:
        parts = module_parts(setting)
    except InputError:
        return  # a value of the wrong form is refused by the reader's own rule
    try:
        listed_layers(launch.text, setting, launch.pp or 1)
    except InputError as error:
        yield violation(error.faults[0].message, setting)
        return
    yield from _missing(launch, [name for part in parts for name in part])
    yield from _stages(launch, len(parts))


def _missing(launch: Launch, names: list[str]) -> Iterator[Violation]:
    shows = launch.get(_LISTS)
    layers = sorted({int(name[7:]) for name in names if re.fullmatch(r"layers\.\d{1,6}", name)})
    count = launch.num_layers
    most = count if count is not None else (layers[-1] + 1 if layers else 0)
    if layers and layers[-1] + 1 < most:
        yield violation(
            f"layers from {layers[-1] + 1} on are in no stage: torchtitan drops them and trains "
            f"{layers[-1] + 1} of {most} layers, without a word",
            shows,
        )
    if count is not None and layers and layers[-1] >= count:
        yield violation(f"layers.{layers[-1]}, and the model has {count} layers", shows)
    ends = [name for name in ("tok_embeddings", "norm") if name not in names]
    if not any(name in names for name in _HEADS):
        ends.append("lm_head")
    if ends:
        yield violation(f"{', '.join(ends)} in no stage: the model is trained without", shows)


def _stages(launch: Launch, count: int) -> Iterator[Violation]:
    pp = launch.pp
    shows = (launch.get(_LISTS), launch.get(_PP), launch.get(_SCHEDULE))
    if pp is None or pp < 1:
        return
    if pp == 1 and count > 1:
        yield violation(
            f"{count} model parts and pipeline_parallel_degree 1: the lists are not used; write "
            f"--parallelism.pipeline_parallel_degree {count}",
            *shows,
        )
    elif pp > 1 and count % pp == 0:
        schedule = launch.word("pipeline-parallel-schedule") or "1F1B"
        each, single = count // pp, schedule.lower() in _SINGLE
        if single and each != 1:
            yield violation(
                f"schedule {schedule} runs one stage per rank, and there are {each}; write "
                "--parallelism.pipeline_parallel_schedule Interleaved1F1B",
                *shows,
            )
        elif not single and each < 2 and not launch.has("pipeline-parallel-schedule-csv"):
            yield violation(
                f"schedule {schedule} needs two stages per rank or more, and there is one; write "
                "--parallelism.pipeline_parallel_schedule 1F1B, or more lists",
                *shows,
            )


def _tied(launch: Launch) -> Iterator[Violation]:
    model = launch.model
    if model is None or not model.tied_embeddings:
        return
    if launch.pp is not None and launch.pp > 1:
        yield violation(
            f"{model.name} ties embedding and output, and there are {launch.pp} stages: torchtitan "
            "stops (`Weight tying is not supported with Pipeline Parallel`); write "
            "--parallelism.pipeline_parallel_degree 1",
            launch.get(_PP),
        )


def _heads(launch: Launch) -> Iterator[Violation]:
    model, tp = launch.model, launch.tp
    if model is None or not tp:
        return
    heads, groups = model.num_attention_heads, model.num_kv_heads
    shows = launch.get("tensor-parallel-degree")
    if heads and heads % tp:
        yield violation(f"{heads} attention heads over tp {tp}: tp must divide them", shows)
    elif groups and groups % tp:
        yield violation(
            f"{groups} key-value heads over tp {tp}: tp must divide them: torchtitan copies no "
            "key-value head",
            shows,
        )


def _batch(launch: Launch) -> Iterator[Violation]:
    if _counts_tokens(launch):
        yield from _batch_of_tokens(launch)
        return
    local, batch = launch.number("local-batch-size", 8), launch.number("global-batch-size", -1)
    per_step = product((local, launch.dp))
    if per_step is not None and batch is not None and batch > 0 and batch % per_step:
        yield violation(
            f"global batch {batch}, local batches of {local} on {launch.dp} data-parallel ranks: "
            f"not a multiple of {per_step}, and torchtitan stops; write "
            f"--training.global_batch_size {nearest_multiples(batch, per_step)}",
            launch.get("global-batch-size"),
            launch.get("local-batch-size"),
        )
    size, pp = launch.number("pipeline-parallel-microbatch-size", 1), launch.pp
    if pp and pp > 1 and local and size and local % size:
        yield violation(
            f"a local batch of {local} in microbatches of {size}: torchtitan stops; write "
            f"--training.local_batch_size {nearest_multiples(local, size)}",
            launch.get("local-batch-size"),
            launch.get("pipeline-parallel-microbatch-size"),
        )


def _counts_tokens(launch: Launch) -> bool:
    """Whether the batch is given in tokens, as after release 0.3 of torchtitan."""
    names = ("num-tokens-per-microbatch-per-dp-rank", "num-tokens-per-train-step")
    return any(launch.may_have(name) for name in (*names, "num-pp-microbatches"))


def _batch_of_tokens(launch: Launch) -> Iterator[Violation]:
    tokens = launch.number("num-tokens-per-train-step", -1)
    per = launch.number("num-tokens-per-microbatch-per-dp-rank", 16384)
    count = 1 if launch.pp == 1 else launch.number("num-pp-microbatches", 1)
    per_step = product((per, count, launch.dp))
    if tokens is None or tokens < 0 or per_step is None or tokens % per_step == 0:
        return
    yield violation(
        f"{tokens} tokens per step, {per_step} in one pass of all ranks: torchtitan stops; write "
        f"--training.num_tokens_per_train_step {nearest_multiples(tokens, per_step)}",
        launch.get("num-tokens-per-train-step"),
        launch.get("num-tokens-per-microbatch-per-dp-rank"),
        launch.get("num-pp-microbatches"),
    )


def _microbatches(launch: Launch) -> Iterator[Violation]:
    """Fewer microbatches than stages."""
    pp, by_tokens = launch.pp, _counts_tokens(launch)
    size = launch.number("pipeline-parallel-microbatch-size", 1)
    local = launch.number("local-batch-size", 8)
    count = None if local is None or not size else local // size
    more = f"--training.local_batch_size of {2 * (pp or 0)} microbatches"
    if by_tokens:
        count = launch.number("num-pp-microbatches", 1)
        more = f"--parallelism.num_pp_microbatches {2 * (pp or 0)}"
    if count is None or pp is None or pp < 2 or count >= pp:
        return
    yield violation(
        f"{count} microbatch{'es' if count > 1 else ''} for {pp} stages: with equal stages each "
        f"device idles {(pp - 1) / (count + pp - 1):.0%} of the step; torch's 1F1B stops (a "
        f"microbatch per stage), GPipe runs; write {more} or more",
        launch.get("num-pp-microbatches"),
        launch.get("local-batch-size"),
    )


_MODULES = LaunchRule(
    id="launch-module-lists",
    certain=True,
    title="modules that no stage has, or several, or stages that ranks do not divide",
    explanation="module_fqns_per_model_part names the modules of each stage. torchtitan "
    "deletes from each stage what its list does not name, and does not check that the lists "
    "together are the model: a forgotten layer is not trained.",
    advice="Name tok_embeddings, every layers.N once and in order, norm and lm_head; as many "
    "lists as pipeline ranks, or a multiple for interleaved schedules.",
)
_TIED = LaunchRule(
    id="launch-tied-embeddings",
    certain=True,
    title="tied embeddings over several stages of torchtitan",
    explanation="A model whose output matrix is its embedding needs both on one rank, or a "
    "reduction between the ends of the pipeline, which torchtitan does not have.",
    advice="Use one stage, a model without tied embeddings, or Megatron-LM.",
)
CHECKS: tuple[Check, ...] = (
    (_MODULES, _modules),
    (_TIED, _tied),
    (SIZES, _heads),
    (BATCH, _batch),
    (MICROBATCHES, _microbatches),
)
