"""An existing launch as a plan with its model, cluster and job, priced like any other plan.

`import_launch` is what `hetplan import launch` calls. `model_text` and `job_text` write what it
found as files that a user can plan with.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate_with
from hetplan.cost.estimate_values import Estimate
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_bytes, read_document
from hetplan.job.load import JOB_SCHEMA, load_job
from hetplan.job.spec import Job
from hetplan.model.layers import Attention, Experts, LatentAttention, LayerRun, Mlp, Norm
from hetplan.model.load import MODEL_SCHEMA, load_model
from hetplan.model.spec import Architecture, ModelSpec
from hetplan.plans.check_job import check_job_against
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.files import SCHEMA, load_legal_plan
from hetplan.search.result import Inputs, SearchResult
from hetplan.search.space.allowed import allowed_cluster
from hetplan.trainers.flagscale.read import hosts_of_file
from hetplan.trainers.launch_plan import launch_plan
from hetplan.trainers.launch_values import Given, LaunchText
from hetplan.trainers.megatron.read_model import launch_model
from hetplan.trainers.read import PLAN_FILE, read_launch
from hetplan.version import __version__

_T = TypeVar("_T")
_TITLE = "# Drafted by hetplan import; read it before you plan with it.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLaunch:
    """A launch as a plan, and what the plan is for."""

    title: str
    """The launch in one line."""
    model: ModelSpec
    cluster: Cluster
    job: Job
    plan: Plan
    remarks: tuple[str, ...]
    """What was left out, or is priced a little otherwise, a line each."""
    sha256: tuple[tuple[str, str], ...]
    """(input, digest) of the files that were read."""


def import_launch(
    path: Path,
    *,
    cluster: Path | None = None,
    model: Path | None = None,
    job: Path | None = None,
    trainer: str | None = None,
    target: str | None = None,
    given: Given = (),
    nodes: Path | tuple[str, ...] = (),
) -> ImportedLaunch:
    """The launch in a file; the plan of a folder that hetplan emitted, with the inputs in it.

    model, job: files that say what the launch leaves out. target: whose limits the plan must keep,
    the trainer's by default. given: values of variables and settings. nodes: a hostfile, or names
    of islands whose nodes a launch without hosts takes. An InputError lists what is wrong.
    """
    if (path / PLAN_FILE).is_file():
        return _emitted(path / PLAN_FILE)
    if cluster is None:
        raise InputError("a launch is priced on a cluster: give --cluster FILE")
    hosts = hosts_of_file(nodes) if isinstance(nodes, Path) else ()
    islands = nodes if isinstance(nodes, tuple) else ()
    text = read_launch(path, trainer, given, hosts)
    spec, where, base = _inputs(text, path, model, cluster, job)
    usable = where if base is None else allowed_cluster(where, base)
    planned = launch_plan(text, spec, usable, base, target, islands)
    faults = check_job_against(planned.job, spec, where, searched=False)
    if faults:
        raise InputError(*faults)
    files = (("model", model), ("cluster", cluster), ("job", job))
    digests = [(name, read_document(file).sha256) for name, file in files if file is not None]
    return ImportedLaunch(
        title=planned.facts.title(),
        model=spec,
        cluster=usable,
        job=planned.job,
        plan=planned.plan,
        remarks=planned.remarks,
        sha256=(*digests, ("launch", hashlib.sha256(read_bytes(path)).hexdigest())),
    )


def _emitted(path: Path) -> ImportedLaunch:
    result = load_legal_plan(path)
    inputs = result.inputs
    return ImportedLaunch(
        title=f"emitted by hetplan {result.hetplan_version} for {inputs.job.target}",
        model=inputs.model,
        cluster=inputs.cluster,
        job=inputs.job,
        plan=result.plan,
        remarks=(),
        sha256=inputs.sha256,
    )


def price_launch(
    imported: ImportedLaunch, predictor: Predictor, predictor_sha256: str
) -> SearchResult:
    """The launch with its estimate, as a plan file holds it: without a certificate."""
    pricer = Pricer(imported.model, imported.cluster, imported.job, predictor)
    estimate: Estimate = estimate_with(pricer, imported.plan)
    return SearchResult(
        schema=SCHEMA,
        hetplan_version=__version__,
        seed=imported.job.seed,
        inputs=Inputs(
            model=imported.model,
            cluster=imported.cluster,
            job=imported.job,
            sha256=(*imported.sha256, ("predictor", predictor_sha256)),
        ),
        plan=imported.plan,
        estimate=estimate,
        certificate=None,
    )


def _inputs(
    text: LaunchText, path: Path, model: Path | None, cluster: Path, job: Path | None
) -> tuple[ModelSpec, Cluster, Job | None]:
    """Model, cluster and job, faults of all together; the model is the launch's unless given."""
    faults: list[Fault] = []

    def attempt(load: Callable[[], _T]) -> _T | None:
        try:
            return load()
        except InputError as error:
            faults.extend(error.faults)
            return None

    name = path.stem if path.stem.isprintable() and path.stem else "launch"
    spec = attempt(lambda: launch_model(text, name) if model is None else load_model(model))
    where = attempt(lambda: load_cluster(cluster))
    base = None if job is None else attempt(lambda: load_job(job))
    if faults or spec is None or where is None:
        raise InputError(*faults)
    return spec, where, base


# ---- files for the next plan


def model_text(model: ModelSpec) -> str:
    """A model file that is read back as this model.

    An InputError for models that the form of the files cannot say.
    """
    text = _TITLE + yaml.safe_dump(dict(_model_entries(model)), sort_keys=False, width=100)
    if _read_back(text, "model.yaml", load_model) != model:
        raise InputError(f"no model file says what {model.name} is; write one by hand")
    return text


def job_text(job: Job) -> str:
    """A job file that is read back as this job; of a job that a launch gave."""
    trainer = {
        name: str(value) if isinstance(value, str) else value
        for name, value in asdict(job.trainer).items()
        if value is not None
    }
    entries: dict[str, object] = {
        "schema": JOB_SCHEMA,
        "name": job.name,
        "global_batch_size": job.global_batch_size,
        "sequence_length": job.sequence_length,
        "precision": job.precision.value,
        "optimizer": job.optimizer.value,
        "target": job.target,
    }
    if job.gradient_clipping is not None:
        entries["gradient_clipping"] = job.gradient_clipping
    if trainer:
        entries["trainer"] = trainer
    text = _TITLE + yaml.safe_dump(entries, sort_keys=False, width=100)
    if _read_back(text, "job.yaml", load_job) != job:
        raise InputError(f"the job {job.name} has settings of its own file; copy that one")
    return text


def _read_back(text: str, name: str, load: Callable[[Path], _T]) -> _T:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        return load(path)


def _model_entries(model: ModelSpec) -> Iterator[tuple[str, object]]:
    first = model.layer_runs[0].layer
    attention = first.attention
    dense = [run.layer.mlp for run in model.layer_runs if isinstance(run.layer.mlp, Mlp)]
    experts = [run.layer.mlp for run in model.layer_runs if isinstance(run.layer.mlp, Experts)]
    gpt = first.norm is Norm.LAYER_NORM
    yield "schema", MODEL_SCHEMA
    yield "name", model.name
    yield "architecture", (Architecture.GPT if gpt else Architecture.LLAMA).value
    yield "num_layers", model.num_layers
    yield "hidden_size", model.hidden_size
    if dense:
        yield "ffn_hidden_size", dense[0].ffn_hidden_size
    yield from _attention_entries(attention)
    if len(model.layer_runs) == 1:
        yield from _run_entries(model.layer_runs[0])
    else:
        yield (
            "layers",
            [{"count": run.count, **dict(_run_entries(run))} for run in model.layer_runs],
        )
    if model.num_mtp_layers:
        yield "multi_token_prediction", {"num_layers": model.num_mtp_layers}
    yield "vocab_size", model.vocab_size
    yield "max_sequence_length", model.max_sequence_length
    yield "tied_embeddings", model.tied_embeddings
    yield "learned_positions", model.learned_positions
    if isinstance(attention, Attention):
        yield "qkv_bias", attention.qkv_bias
        yield "output_bias", attention.output_bias
        yield "qk_norm", attention.qk_norm
        yield "rotary", attention.rotary
    if dense:
        yield "mlp_bias", dense[0].bias
    yield "gated_mlp", (dense[0] if dense else experts[0]).gated
    yield from _numerics_entries(model)


def _numerics_entries(model: ModelSpec) -> Iterator[tuple[str, object]]:
    """What was said beyond shapes."""
    for name in ("norm_epsilon", "rotary_base", "rotary_fraction"):
        if getattr(model, name) is not None:
            yield name, getattr(model, name)
    if model.activation is not None:
        yield "activation", model.activation.value
    for name, part in (("rotary_scaling", model.rotary_scaling), ("router", model.router)):
        if part is not None:
            yield (
                name,
                {
                    key: str(value) if isinstance(value, str) else value
                    for key, value in asdict(part).items()
                    if value is not None
                },
            )


def _attention_entries(attention: Attention | LatentAttention) -> Iterator[tuple[str, object]]:
    yield "num_attention_heads", attention.num_heads
    if isinstance(attention, Attention):
        yield "num_kv_heads", attention.num_kv_heads
        yield "head_dim", attention.head_dim
        return
    yield (
        "latent_attention",
        {
            name: value
            for name, value in asdict(attention).items()
            if name != "num_heads" and value is not None
        },
    )


def _run_entries(run: LayerRun) -> Iterator[tuple[str, object]]:
    """What a run of layers may have for itself: experts, a window."""
    mlp = run.layer.mlp
    if run.layer.window is not None:
        yield "window", run.layer.window
    if isinstance(mlp, Experts):
        yield (
            "experts",
            {
                "num_experts": mlp.num_experts,
                "experts_per_token": mlp.experts_per_token,
                "ffn_hidden_size": mlp.expert_ffn_hidden_size,
                "shared_ffn_hidden_size": mlp.shared_ffn_hidden_size,
                "shared_gate": mlp.shared_gate,
                "bias": mlp.bias,
            },
        )
