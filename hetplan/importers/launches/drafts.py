"""A launch's model and job as files that a user can plan with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import yaml

from hetplan.errors import InputError
from hetplan.job.load import JOB_SCHEMA, load_job
from hetplan.job.spec import Job
from hetplan.model.file_form import MODEL_SCHEMA
from hetplan.model.layers import Attention, Experts, LatentAttention, LayerRun, Mlp, Norm
from hetplan.model.load import load_model
from hetplan.model.spec import Architecture, ModelSpec

_T = TypeVar("_T")
_TITLE = "# Drafted by hetplan import; read it before you plan with it.\n"


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
