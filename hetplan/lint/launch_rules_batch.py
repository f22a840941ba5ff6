"""Does the batch of a launch divide into microbatches, and are there enough of them?

Sources, read: Megatron-LM core/num_microbatches_calculator.py, training/arguments.py (the batch of
the evaluation is checked first), core/pipeline_parallel/schedules.py (groups of interleaving);
FlagScale train/arguments.py (the first mesh's dp loads the data); torchtitan trainer.py; torch's
distributed/pipelining/schedules.py (Schedule1F1B needs a microbatch per stage).
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.errors import InputError
from hetplan.importers.launches.layout import segments_of
from hetplan.lint.findings import Severity
from hetplan.lint.launch_rules_view import Launch, Seen, launch_rule, product, seen

_PP = "pipeline-model-parallel-size"
_CHANGING_BATCH = ("rampup-batch-size", "step-batch-size-schedule")


def _batch(launch: Launch) -> Iterator[Seen]:
    if not launch.is_megatron_like:
        yield from _torchtitan_batch(launch)
        return
    if launch.has("step-batch-size-schedule") and launch.has("global-batch-size"):
        yield seen(
            "--global-batch-size together with --step-batch-size-schedule: Megatron-LM stops; "
            "leave one of them out",
            launch.get("global-batch-size"),
            launch.get("step-batch-size-schedule"),
        )
    if any(launch.may_have(name) for name in _CHANGING_BATCH):
        return
    dp, size = _data_ranks(launch), launch.number("micro-batch-size")
    batch = launch.number("global-batch-size")
    each = product((dp, size))
    if each is None or batch is None or batch % each == 0:
        return
    shows = (launch.get("global-batch-size"), launch.get("micro-batch-size"))
    ranks = "rank" if dp == 1 else "ranks"
    asked = f"global batch {batch}, microbatches of {size} on {dp} data-parallel {ranks}"
    good = _near(batch, each)
    if launch.has("decrease-batch-size-if-needed"):
        kept = batch // each * each
        yield seen(
            f"{asked}: --decrease-batch-size-if-needed trains {kept} sequences per step, "
            f"{batch - kept} fewer than asked, with one line in the log; write "
            f"--global-batch-size {good}",
            *shows,
        )
    else:
        yield seen(
            f"{asked}: not a multiple of {each}, and the trainer stops; write "
            f"--global-batch-size {good}",
            *shows,
        )


def _near(batch: int, each: int) -> str:
    below, above = batch // each * each, -(-batch // each) * each
    return f"{below} or {above}" if below else str(above)


def _data_ranks(launch: Launch) -> int | None:
    """Data-parallel ranks that load data; of FlagScale's meshes those of the first."""
    if not launch.is_hetero:
        return launch.dp
    meshes = launch.numbers("hetero-process-meshes")
    return meshes[3] if meshes and len(meshes) % 5 == 0 else None


def _torchtitan_batch(launch: Launch) -> Iterator[Seen]:
    if _counts_tokens(launch):
        yield from _batch_of_tokens(launch)
        return
    local, batch = launch.number("local-batch-size", 8), launch.number("global-batch-size", -1)
    each = product((local, launch.dp))
    if each is not None and batch is not None and batch > 0 and batch % each:
        yield seen(
            f"global batch {batch}, local batches of {local} on {launch.dp} data-parallel ranks: "
            f"not a multiple of {each}, and torchtitan stops; write --training.global_batch_size "
            f"{_near(batch, each)}",
            launch.get("global-batch-size"),
            launch.get("local-batch-size"),
        )
    size, pp = launch.number("pipeline-parallel-microbatch-size", 1), launch.pp
    if pp and pp > 1 and local and size and local % size:
        yield seen(
            f"a local batch of {local} in microbatches of {size}: torchtitan stops; write "
            f"--training.local_batch_size {_near(local, size)}",
            launch.get("local-batch-size"),
            launch.get("pipeline-parallel-microbatch-size"),
        )


def _counts_tokens(launch: Launch) -> bool:
    """Whether the batch is given in tokens, as after release 0.3 of torchtitan."""
    names = ("num-tokens-per-microbatch-per-dp-rank", "num-tokens-per-train-step")
    return any(launch.may_have(name) for name in (*names, "num-pp-microbatches"))


def _batch_of_tokens(launch: Launch) -> Iterator[Seen]:
    tokens = launch.number("num-tokens-per-train-step", -1)
    per = launch.number("num-tokens-per-microbatch-per-dp-rank", 16384)
    count = 1 if launch.pp == 1 else launch.number("num-pp-microbatches", 1)
    each = product((per, count, launch.dp))
    if tokens is None or tokens < 0 or each is None or tokens % each == 0:
        return
    yield seen(
        f"{tokens} tokens per step, {each} in one pass of all ranks: torchtitan stops; write "
        f"--training.num_tokens_per_train_step {_near(tokens, each)}",
        launch.get("num-tokens-per-train-step"),
        launch.get("num-tokens-per-microbatch-per-dp-rank"),
        launch.get("num-pp-microbatches"),
    )


def _num_microbatches(launch: Launch) -> int | None:
    """Microbatches of one step on one data-parallel rank; None: not known."""
    if not launch.is_megatron_like:
        if _counts_tokens(launch):
            return launch.number("num-pp-microbatches", 1)
        local = launch.number("local-batch-size", 8)
        size = launch.number("pipeline-parallel-microbatch-size", 1)
        return None if local is None or not size else local // size
    if any(launch.may_have(name) for name in _CHANGING_BATCH):
        return None
    each = product((_data_ranks(launch), launch.number("micro-batch-size")))
    batch = launch.number("global-batch-size")
    if each is None or batch is None or batch < each:
        return None
    return batch // each


def virtual_stages(launch: Launch) -> int | None:
    """Virtual stages of each pipeline rank of a Megatron-LM launch; None: not known."""
    pp, layers = launch.pp, launch.num_layers
    layout = launch.word("pipeline-model-parallel-layout")
    if pp is None or pp < 1:
        return None
    if launch.has("pipeline-model-parallel-layout"):
        try:
            return None if layout is None else len(segments_of(layout)) // pp
        except InputError:
            return None  # a rule of its own says so
    count = launch.number("num-virtual-stages-per-pipeline-rank", 0)
    each = launch.number("num-layers-per-virtual-pipeline-stage", 0)
    if count is None or each is None or (each and layers is None):
        return None
    if count:
        return count
    return max(1, (layers or 0) // pp // each) if each else 1


def _microbatches(launch: Launch) -> Iterator[Seen]:
    """Fewer microbatches than stages."""
    count, pp = _num_microbatches(launch), launch.pp
    if count is None or pp is None or pp < 2 or count >= pp:
        return
    idle = (pp - 1) / (count + pp - 1)
    shows = ("global-batch-size", "micro-batch-size", "num-pp-microbatches", "local-batch-size")
    if launch.is_megatron_like:
        tail = f"write --global-batch-size for {2 * pp} microbatches or more, or fewer stages"
    else:
        more = (
            f"--parallelism.num_pp_microbatches {2 * pp}"
            if _counts_tokens(launch)
            else f"--training.local_batch_size of {2 * pp} microbatches"
        )
        tail = f"torch's 1F1B stops (a microbatch per stage), GPipe runs; write {more} or more"
    yield seen(
        f"{count} microbatch{'es' if count > 1 else ''} for {pp} stages: with equal stages each "
        f"device idles {idle:.0%} of the step; {tail}",
        *(launch.get(name) for name in shows),
        launch.get(_PP),
    )


def _interleaving(launch: Launch) -> Iterator[Seen]:
    if not launch.is_megatron_like or launch.is_hetero:
        return
    virtual, pp = virtual_stages(launch), launch.pp
    count = _num_microbatches(launch)
    if virtual is None or virtual < 2 or pp is None or pp < 2:
        return
    sends_wait = launch.has("no-overlap-p2p-communication")
    if pp == 2 and sends_wait:
        yield seen(
            "virtual stages on 2 stages with --no-overlap-p2p-communication: Megatron-LM "
            "interleaves from 3 stages on then; leave that flag out",
            launch.get("no-overlap-p2p-communication"),
            launch.get(_PP),
        )
    group = launch.number("microbatch-group-size-per-virtual-pipeline-stage", pp)
    if count is None or group is None:
        return
    shows = (
        launch.get("microbatch-group-size-per-virtual-pipeline-stage"),
        launch.get("global-batch-size"),
        launch.get("micro-batch-size"),
        launch.get(_PP),
    )
    if not pp <= group <= count:
        yield seen(
            f"interleaving with groups of {group} microbatches, {count} microbatches and {pp} "
            f"stages: a group has from {pp} to {count}",
            *shows,
        )
    elif 0 < count % group < pp:
        yield seen(
            f"interleaving of {count} microbatches in groups of {group} leaves {count % group}, "
            f"fewer than the {pp} stages: make them a multiple of {group}",
            *shows,
        )


RULES = (
    launch_rule(
        id="launch-batch-does-not-divide",
        severity=Severity.ERROR,
        title="a global batch that microbatches and copies do not divide",
        explanation="A step trains the same number of microbatches on every data-parallel copy. "
        "Megatron-LM and torchtitan stop where the batch is no multiple of them; with "
        "--decrease-batch-size-if-needed Megatron-LM trains fewer sequences than asked.",
        advice="Choose a global batch that is a multiple of the microbatch size times the "
        "data-parallel degree (ranks over tp x pp x cp).",
        look=_batch,
    ),
    launch_rule(
        id="launch-too-few-microbatches",
        severity=Severity.WARNING,
        title="fewer microbatches than stages",
        explanation="A pipeline is full only while it has a microbatch for every stage. With fewer "
        "it never is, and most of the step is waiting.",
        advice="Make microbatches smaller, the batch larger, or the pipeline shorter.",
        look=_microbatches,
    ),
    launch_rule(
        id="launch-interleaving-groups",
        severity=Severity.ERROR,
        title="microbatches that do not fit virtual stages",
        explanation="With virtual stages Megatron-LM runs microbatches in groups of as many as "
        "stages (--microbatch-group-size-per-virtual-pipeline-stage); it stops where the last "
        "group is smaller than the pipeline.",
        advice="Choose a batch whose number of microbatches is a multiple of the stages.",
        look=_interleaving,
    ),
)
