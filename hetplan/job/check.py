"""Whether a job can be asked of this model on this cluster: names, degrees and lengths exist."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault
from hetplan.files.nodes import Path, field_text
from hetplan.files.reading import Document
from hetplan.job.pins import pin_faults
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_faults
from hetplan.model.differences import planning_faults
from hetplan.model.layers import Experts
from hetplan.model.spec import ModelSpec


def check_job_against(
    job: Job,
    model: ModelSpec,
    cluster: Cluster,
    document: Document | None = None,
    *,
    searched: bool = True,
) -> tuple[Fault, ...]:
    """Every fault; with the job's `document`, each names its file and line.

    Not searched: models that can be priced but not searched are no fault.
    """

    def fault(path: Path, message: str) -> Fault:
        if document is not None:
            return document.fault(path, message)
        return Fault(field=field_text(path), message=message)

    found = (
        *_lengths(job, model),
        *_experts(job, model),
        *_degrees(job, model, cluster),
        *_names(job, cluster),
        *((("trainer", name), message) for name, message in trainer_faults(job)),
        *_product_format(job, cluster),
        *(_unsearched(job) if searched else ()),
        *(pin_faults(job, model, cluster) if searched else ()),
    )
    # What is wrong with the model stands in no line of the job's file.
    of_model = (
        Fault(field="model", message=message)
        for message in (planning_faults(model, job.sequence_length) if searched else ())
    )
    return (*of_model, *(fault(path, message) for path, message in found))


def _lengths(job: Job, model: ModelSpec) -> Iterator[tuple[Path, str]]:
    if job.sequence_length > model.max_sequence_length:
        yield (
            ("sequence_length",),
            f"{job.sequence_length} is longer than max_sequence_length "
            f"{model.max_sequence_length} of {model.name}; shorten it or change the model",
        )


def _experts(job: Job, model: ModelSpec) -> Iterator[tuple[Path, str]]:
    if job.expert_load_factor > 1 and not any(
        isinstance(run.layer.mlp, Experts) for run in model.layer_runs
    ):
        yield (
            ("expert_load_factor",),
            f"{job.expert_load_factor:g}, and {model.name} has no experts; remove it",
        )


def _product_format(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    asked = job.trainer.product_format
    used = [island for island in cluster.islands if island.name not in job.forbid.islands]
    for kind in dict.fromkeys(island.device for island in used):
        if asked is not None and asked.rate not in kind.dtypes:
            have = ", ".join(kind.dtypes) or "none"
            yield (
                ("trainer", "product_format"),
                f"{asked} needs a {asked.rate} rate, and {kind.kind} has none (rates it has: "
                f"{have}); leave it out or forbid its islands",
            )


def _unsearched(job: Job) -> Iterator[tuple[Path, str]]:
    if job.trainer.blocking_sends:
        yield (
            ("trainer", "blocking_sends"),
            "can be priced (hetplan estimate), not searched; leave it out",
        )


def _degrees(job: Job, model: ModelSpec, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    tp, pp, dp = job.pin.tp, job.pin.pp, job.pin.dp
    if tp is not None:
        for fault in model.slicing_faults(tp):
            yield ("pin", "tp"), fault
        per_node = sorted({island.devices_per_node for island in cluster.islands})
        if not any(count % tp == 0 for count in per_node):
            counts = ", ".join(map(str, per_node))
            yield ("pin", "tp"), f"{tp} divides no node; nodes have {counts} devices"
    if pp is not None and pp > model.num_layers:
        yield (
            ("pin", "pp"),
            f"{pp} stages for {model.num_layers} transformer layers of {model.name}; "
            "each stage needs at least one",
        )
    # Every pipeline has devices of its own.
    needed = (tp or 1) * (pp or 1) * (dp or 1) * (job.pin.cp or 1) * (job.pin.pipelines or 1)
    usable = sum(len(island.usable_nodes) * island.devices_per_node for island in cluster.islands)
    if not usable:
        yield (), f"{cluster.name} has no usable device: nodes_out names every node"
    elif needed > usable:
        yield (
            ("pin",),
            f"the pinned degrees need at least {needed} devices, {cluster.name} has {usable} "
            "usable",
        )


def _names(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    islands = {island.name: island for island in cluster.islands}
    places = set(islands) | {island.device.kind for island in cluster.islands}
    for key, name in (("embedding_on", job.pin.embedding_on), ("head_on", job.pin.head_on)):
        if name is not None and name not in places:
            yield ("pin", key), _unknown(name, places, "island or device kind", cluster)
        elif name in job.forbid.islands:
            yield ("pin", key), f"island {name} is forbidden; remove one of the two"
    for at, name in enumerate(job.forbid.islands):
        if name not in islands:
            yield ("forbid", "islands", at), _unknown(name, set(islands), "island", cluster)
    if islands and set(islands) <= set(job.forbid.islands):
        yield ("forbid", "islands"), f"every island of {cluster.name} is forbidden"
    for at, node in enumerate(job.forbid.nodes):
        name, _, number = node.rpartition("/")
        path: Path = ("forbid", "nodes", at)
        if name not in islands:
            yield path, _unknown(name, set(islands), "island", cluster)
        elif not number.isdecimal() or int(number[:12]) >= islands[name].nodes:
            last = islands[name].nodes - 1
            yield path, f"island {name} has no node {number}; it has {name}/0 to {name}/{last}"


def _unknown(name: str, known: set[str], what: str, cluster: Cluster) -> str:
    near = get_close_matches(name, sorted(known), n=3, cutoff=0.4) or sorted(known)
    return f"{cluster.name} has no {what} named {name}; it has {', '.join(near)}"
