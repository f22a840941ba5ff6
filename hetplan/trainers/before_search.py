"""What can be refused before a search, with file and line, beyond contradictions of the files.

What a target's trainer cannot be told whatever the plan is (`Trainer.question_faults`), and kinds
of devices of which neither figures nor measurements say anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetplan.cluster.places import island_paths
from hetplan.errors import Fault, InputError
from hetplan.files.reading import Document, read_document
from hetplan.job.kernels import job_on, used_kinds
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import LayerKind
from hetplan.predict.predictor import LayerQuery, Predictor
from hetplan.search.result import Question
from hetplan.trainers import TRAINERS, trainer_named


def question_faults(question: Question, job: Document) -> Iterator[Fault]:
    """What the job's trainer cannot be told of this model and job; of the model: at the target."""
    if question.job.target not in TRAINERS:
        return
    trainer = trainer_named(question.job.target)
    for fault in trainer.question_faults(question.model, question.job):
        part, _, place = fault.field.removeprefix("inputs.").partition(".")
        yield job.fault(("target",) if part == "model" else (*place.split("."),), fault.message)


def lacks_figures(question: Question) -> bool:
    """Whether the figures of some kind that a plan may use do not say what its layers take."""
    precision = question.job.precision.value
    return any(
        precision not in kind.dtypes or not kind.memory_bandwidth_bytes_per_second
        for kind in used_kinds(question.cluster, question.job)
    )


def unknown_kinds(
    question: Question, predictor: Predictor, cluster: Path | Document | None
) -> Iterator[Fault]:
    """Every kind that a plan may use and of whose layers nothing is known: neither figures nor
    measurements. In the cluster's file, where it came from one, at its first island.
    """
    if not lacks_figures(question):
        return
    document, job = None if cluster is None else read_document(cluster), question.job
    for kind in used_kinds(question.cluster, job):
        query = LayerQuery(
            model=question.model,
            layer=LayerKind.TRANSFORMER,
            microbatch_size=1,
            sequence_length=job.sequence_length,
            tp=1,
            precision=job.precision,
            kernels=trainer_settings(job_on(kind, job)).kernels(LayerKind.TRANSFORMER),
        )
        try:
            predictor.layer(kind, query)
        except InputError as error:
            message = f"{error}; or forbid the islands of {kind.kind}"
            if document is None:
                yield Fault(field="cluster", message=message)
                continue
            islands = zip(question.cluster.islands, island_paths(document), strict=True)
            place = next(path for island, (_, path) in islands if island.device.kind == kind.kind)
            yield document.fault((*place, "device"), message)
