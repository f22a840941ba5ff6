"""Files of a search: its checked inputs, and its result as one JSON file with all behind it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate_values import Estimate
from hetplan.errors import Fault, FaultList, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import Document, decode, read_document
from hetplan.files.settings import Setting, with_settings
from hetplan.files.writing import write_atomically
from hetplan.job.load import read_job
from hetplan.job.spec import Job
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.check import check_plan
from hetplan.plans.check_job import check_job_against
from hetplan.plans.pinned import with_named_ends
from hetplan.plans.plan import Plan
from hetplan.plans.targets import TARGETS
from hetplan.search.result import Inputs, SearchResult
from hetplan.version import __version__

SCHEMA = "hetplan.plan/14"

MAX_PER_NAME = 200
"""Characters of a name; a list of node names in one text has as many."""
_STEPS = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
"""List positions and keys of a field's text, as in plan.pipelines[0].stages."""


def result_text(result: SearchResult) -> str:
    """Canonical JSON text of a result in the newest form; equal results give equal bytes."""
    result = replace(result, schema=SCHEMA)
    return encode(replace(result, seal=seal_of(result)), schema=SCHEMA)


def priced_result(
    inputs: Inputs, plan: Plan, estimate: Estimate, predictor_sha256: str
) -> SearchResult:
    """A plan that was given and priced, as a plan file holds it: without a certificate.

    The digest is empty where the predictor has no text.
    """
    files = tuple(entry for entry in inputs.sha256 if entry[0] != "predictor")
    if predictor_sha256:
        files += (("predictor", predictor_sha256),)
    return SearchResult(
        schema=SCHEMA,
        hetplan_version=__version__,
        seed=inputs.job.seed,
        inputs=replace(inputs, sha256=files),
        plan=plan,
        estimate=estimate,
        certificate=None,
    )


def seal_of(result: SearchResult) -> str:
    """What a result's file is sealed with: it tells an edited file from a written one."""
    text = encode(replace(result, seal=""), schema=result.schema)
    return hashlib.sha256(text.encode()).hexdigest()


def save_result(result: SearchResult, path: Path) -> None:
    """Write the result; the file is whole or, after a fault, as it was before."""
    write_atomically(path, result_text(result))


def load_plan(path: str | Path) -> SearchResult:
    """The result of a file written by `save_result`; an InputError lists what is wrong in it, be it
    a figure that no plan has.

    Whether the plan is legal for its inputs is another question: `check_plan`, or
    `load_legal_plan`.
    """
    document = read_document(Path(path))
    result = _result(document)
    faults = [*_figure_faults(result)]
    if faults:
        raise InputError(*(_placed(document, part, fault) for part, fault in faults))
    return result


def _result(document: Document) -> SearchResult:
    result = decode(document, SearchResult, schema=SCHEMA)
    # What an older number lacks has its default now, so that the value can be saved again; the seal
    # is the file's (`hetplan.proof.verify`).
    return replace(result, schema=SCHEMA, seal="")


def load_legal_plan(path: str | Path) -> SearchResult:
    """The same, and its parts agree: an InputError lists every rule that a plan edited by hand
    breaks.
    """
    document = read_document(Path(path))
    result = _result(document)
    inputs = result.inputs
    unfit = [("inputs", fault) for fault in _name_faults(inputs)]
    unfit += [("idle", fault) for fault in _idle_faults(result)]
    if unfit:
        # Other faults would print these names.
        raise InputError(*(_placed(document, part, fault) for part, fault in unfit))
    faults = [
        *(("inputs.job", fault) for fault in _job_faults(result)),
        *(
            ("plan", fault)
            for fault in check_plan(result.plan, inputs.model, inputs.cluster, inputs.job)
        ),
    ]
    if not faults:
        faults = [*_figure_faults(result)]
    if faults:
        raise InputError(*(_placed(document, part, fault) for part, fault in faults))
    return result


def _idle_faults(result: SearchResult) -> Iterator[Fault]:
    """Reasons that name no island of the cluster, or more devices than it has."""
    usable = {each.name: each.num_usable_devices for each in result.inputs.cluster.islands}
    for at, each in enumerate(result.idle):
        if each.island not in usable:
            yield Fault(field=f"[{at}].island", message="no such island; ask for the reasons again")
        elif not 0 <= each.idle_devices <= each.usable_devices <= usable[each.island]:
            message = f"of the island's {usable[each.island]}; ask for the reasons again"
            yield Fault(field=f"[{at}].idle_devices", message=message)


def placed_faults(path: str | Path, faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Faults whose fields are places in a plan file, with that file and their lines."""
    document = read_document(Path(path))
    return tuple(
        _placed(document, part, replace(fault, field=rest))
        for fault in faults
        for part, _, rest in [fault.field.partition(".")]
    )


def _placed(document: Document, part: str, fault: Fault) -> Fault:
    """The fault of one part with its file and line."""
    field = f"{part}.{fault.field}".rstrip(".").replace(".[", "[")
    steps = (int(number) if number else word for number, word in _STEPS.findall(field))
    return replace(fault, file=document.file, line=document.line(tuple(steps)), field=field)


def _name_faults(inputs: Inputs) -> Iterator[Fault]:
    """Names are words that a terminal can show: input files have only such, a plan edited by hand
    may hold control characters.
    """
    cluster = inputs.cluster
    names = [("model", inputs.model.name), ("cluster", cluster.name), ("job", inputs.job.name)]
    for at, island in enumerate(cluster.islands):
        where = f"cluster.islands[{at}]"
        names += [
            (where, island.name),
            (where, island.region),
            (f"{where}.device", island.device.kind),
            (f"{where}.device", island.device.vendor),
            *((f"{where}.node_names", name) for name in island.node_names),
        ]
    for field, name in names:
        if not (name.isprintable() and 1 <= len(name) <= MAX_PER_NAME):
            yield Fault(
                field=field,
                message=f"has the name {name[:40]!a}; a name has 1 to {MAX_PER_NAME} printable "
                "characters",
            )


def _job_faults(result: SearchResult) -> Iterator[Fault]:
    inputs = result.inputs
    yield from check_job_against(inputs.job, inputs.model, inputs.cluster, searched=False)
    if inputs.job.target not in TARGETS:
        known = ", ".join(sorted(TARGETS))
        yield Fault(field="target", message=f"{inputs.job.target!a}; known targets: {known}")


def _estimate_faults(result: SearchResult) -> Iterator[Fault]:
    """What a run is compared with must be of this plan and be a time."""
    estimate = result.estimate
    stages = sum(len(pipeline.stages) for pipeline in result.plan.pipelines)
    if len(estimate.stages) != stages:
        yield Fault(
            field="stages", message=f"has {len(estimate.stages)} entries, the plan {stages} stages"
        )
    if not _LEAST_STEP <= estimate.step_seconds < math.inf:
        yield Fault(
            field="step_seconds",
            message=f"{estimate.step_seconds}; a step takes more than 0 seconds; price the plan "
            "again with hetplan estimate",
        )
    kinds = {island.device.kind for island in result.inputs.cluster.islands}
    for at, use in enumerate(estimate.kinds):
        if use.device not in kinds:
            message = f"{use.device[:40]!a} is no kind of the cluster; {_AGAIN}"
            yield Fault(field=f"kinds[{at}].device", message=message)
    for at, stage in enumerate(estimate.stages):
        if not stage.memory.available_bytes > 0:
            message = f"{stage.memory.available_bytes}; a device has memory; {_AGAIN}"
            yield Fault(field=f"stages[{at}].memory.available_bytes", message=message)


def _figure_faults(result: SearchResult) -> Iterator[tuple[str, Fault]]:
    """(part, fault) of figures that no plan has: an edited one would print as inf, or end a report
    in a division by nothing.
    """
    for fault in _estimate_faults(result):
        yield "estimate", fault
    certificate = result.certificate
    course = () if certificate is None else certificate.course
    times = [(f"certificate.course[{at}]", each.best_seconds) for at, each in enumerate(course)]
    if result.restriction is not None:
        times += [("restriction", result.restriction.step_seconds)]
    if result.alone is not None:
        times += [("alone", result.alone.kind.tokens_per_second)]
    for part, number in times:
        if not number > 0:
            yield part, Fault(message=f"has {number:g}, where only more than 0 can be; {_AGAIN}")
    for part in (
        "inputs.cluster", "estimate", "certificate", "alternatives", "restriction", "idle",
        "prices", "alone",
    ):  # fmt: skip
        value: object = result
        for name in part.split("."):
            value = getattr(value, name)
        odd = next((number for number in _numbers(value) if _is_odd(number)), None)
        if odd is not None:
            message = f"has the number {odd:g}; figures are 0 or {_LEAST:g} to {_MOST:g}; {_AGAIN}"
            yield part, Fault(message=message)


def _is_odd(number: float) -> bool:
    return not (number == 0 or _LEAST <= abs(number) <= _MOST)


_AGAIN = "price the plan again with hetplan estimate"
_LEAST_STEP = 1e-9  # seconds: no kernel starts in less
_LEAST, _MOST = 1e-30, 1e30
"""Beyond what estimates and clusters hold: FLOPs, bytes and seconds, and their differences."""


def _numbers(value: object) -> Iterator[float]:
    """All numbers within a value."""
    if isinstance(value, float | int):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _numbers(each)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _numbers(getattr(value, each.name))


def load_inputs(
    model: Path | Document | ModelSpec,
    cluster: Path | Document | Cluster,
    job: Path | Document | Job,
    *,
    settings: Sequence[Setting] = (),
    searched: bool = True,
) -> Inputs:
    """The three inputs, checked one by one and against each other; settings replace the job
    file's. What is no path is at hand already.

    One InputError with the faults of all three files. Not searched: models that can be priced but
    not searched are read.
    """
    faults = FaultList()
    model_spec = model if isinstance(model, ModelSpec) else faults.of(load_model, model)
    cluster_spec = cluster if isinstance(cluster, Cluster) else faults.of(load_cluster, cluster)
    job_spec, document = (
        (job, None) if isinstance(job, Job) else (None, faults.of(read_document, job))
    )
    if document is not None:
        document = with_settings(document, settings)
        job_spec = faults.of(read_job, document)
    if model_spec is None or cluster_spec is None or job_spec is None:
        raise InputError(*faults.found)
    job_spec = with_named_ends(job_spec, cluster_spec)
    against = check_job_against(job_spec, model_spec, cluster_spec, document, searched=searched)
    if against:
        if not isinstance(model, ModelSpec):
            file = read_document(model).file
            against = tuple(
                replace(fault, file=file, field="") if fault.field == "model" else fault
                for fault in against
            )
        raise InputError(*against)
    return Inputs(
        model=model_spec,
        cluster=cluster_spec,
        job=job_spec,
        sha256=tuple(
            (name, read_document(file).sha256)
            for name, file in (("model", model), ("cluster", cluster), ("job", job))
            if not isinstance(file, ModelSpec | Cluster | Job)
        ),
    )
