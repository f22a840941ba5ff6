"""An existing launch as a plan with its model, cluster and job, priced like any other plan.

`import_launch` is what `hetplan import launch` calls. `model_text` and `job_text` write what it
found as files that a user can plan with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate_with
from hetplan.cost.estimate_values import Estimate
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import FaultList, InputError
from hetplan.files.reading import Document, document_of, read_bytes, read_document
from hetplan.job.load import JOB_SCHEMA, load_job
from hetplan.job.spec import Job
from hetplan.model.layers import Attention, Experts, Mlp, Norm, TransformerLayer
from hetplan.model.load import MODEL_SCHEMA, load_model
from hetplan.model.spec import Architecture, ModelSpec
from hetplan.plans.check_job import check_job_against
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.files import load_legal_plan, priced_result
from hetplan.search.result import Inputs, SearchResult
from hetplan.search.space.allowed import allowed_cluster
from hetplan.trainers.flagscale.read import hosts_of_file
from hetplan.trainers.launch_plan import launch_plan
from hetplan.trainers.launch_values import Given, LaunchText
from hetplan.trainers.megatron.read_model import launch_model
from hetplan.trainers.read import PLAN_FILE, read_launch

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
    inputs = Inputs(
        model=imported.model,
        cluster=imported.cluster,
        job=imported.job,
        sha256=imported.sha256,
    )
    return priced_result(inputs, imported.plan, estimate, predictor_sha256)


def _inputs(
    text: LaunchText, path: Path, model: Path | None, cluster: Path, job: Path | None
) -> tuple[ModelSpec, Cluster, Job | None]:
    """Model, cluster and job, faults of all together; the model is the launch's unless given."""
    faults = FaultList()
    name = path.stem if path.stem.isprintable() and path.stem else "launch"
    spec = faults.of(launch_model, text, name) if model is None else faults.of(load_model, model)
    where = faults.of(load_cluster, cluster)
    base = None if job is None else faults.of(load_job, job)
    if faults.found or spec is None or where is None:
        raise InputError(*faults.found)
    return spec, where, base


# ---- files for the next plan


def model_text(model: ModelSpec) -> str:
    """A model file that is read back as this model.

    An InputError for models that the form of the files cannot say.
    """
    text = _TITLE + yaml.safe_dump(_model_entries(model), sort_keys=False, width=100)
    if _read_back(text, "model.yaml", load_model) != model:
        raise InputError(f"no model file says what {model.name} is; write one by hand")
    return text


def job_text(job: Job) -> str:
    """A job file that is read back as this job; of a job that a launch gave."""
    names = ("name", "global_batch_size", "sequence_length", "precision", "optimizer", "target")
    entries = {
        "schema": JOB_SCHEMA,
        **_plain({name: getattr(job, name) for name in (*names, "gradient_clipping")}),
    }
    trainer = _plain(asdict(job.trainer))
    if trainer:
        entries["trainer"] = trainer
    text = _TITLE + yaml.safe_dump(entries, sort_keys=False, width=100)
    if _read_back(text, "job.yaml", load_job) != job:
        raise InputError(f"the job {job.name} has settings of its own file; copy that one")
    return text


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """The values that are given, as YAML has them."""
    return {
        name: str(value) if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def _read_back(text: str, name: str, load: Callable[[Document], _T]) -> _T:
    return load(document_of(name, text.encode()))


def _model_entries(model: ModelSpec) -> dict[str, object]:
    layers = [run.layer for run in model.layer_runs]
    attention = layers[0].attention
    dense = [layer.mlp for layer in layers if isinstance(layer.mlp, Mlp)]
    gpt = layers[0].norm is Norm.LAYER_NORM
    runs: list[dict[str, object]] = [
        {"count": run.count, **_run_entries(run.layer)} for run in model.layer_runs
    ]
    entries: dict[str, object] = {
        "schema": MODEL_SCHEMA,
        "name": model.name,
        "architecture": Architecture.GPT if gpt else Architecture.LLAMA,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": dense[0].ffn_hidden_size if dense else None,
        "num_attention_heads": getattr(attention, "num_heads", None),
    }
    if isinstance(attention, Attention):
        for name in ("num_kv_heads", "head_dim", "qkv_bias", "output_bias", "qk_norm", "rotary"):
            entries[name] = getattr(attention, name)
    else:
        latent = _plain(asdict(attention))
        del latent["num_heads"]
        entries["latent_attention"] = latent
    if len(runs) > 1:
        entries["layers"] = runs
    else:
        entries |= _run_entries(layers[0])
    if model.num_mtp_layers:
        entries["multi_token_prediction"] = {"num_layers": model.num_mtp_layers}
    entries["mlp_bias"] = dense[0].bias if dense else None
    entries["gated_mlp"] = layers[0].mlp.gated
    for name in (
        *("vocab_size", "max_sequence_length", "tied_embeddings", "learned_positions"),
        *("norm_epsilon", "rotary_base", "rotary_fraction", "activation"),
    ):
        entries[name] = getattr(model, name)
    for name in ("rotary_scaling", "router"):
        value = getattr(model, name)
        entries[name] = None if value is None else _plain(asdict(value))
    return _plain(entries)


def _run_entries(layer: TransformerLayer) -> dict[str, object]:
    """What a run of layers may have for itself: experts, a window."""
    entries = _plain({"window": layer.window})
    if isinstance(layer.mlp, Experts):
        names = (
            "num_experts",
            "experts_per_token",
            "shared_ffn_hidden_size",
            "shared_gate",
            "bias",
        )
        experts = _plain({name: getattr(layer.mlp, name) for name in names})
        entries["experts"] = {"ffn_hidden_size": layer.mlp.expert_ffn_hidden_size, **experts}
    return entries
