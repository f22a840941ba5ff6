"""What a checkpoint of the reference trainer holds, and how its folder is opened and finished.

    FOLDER/hetplan-checkpoint.json   model, step, states; written last
    FOLDER/.metadata, *.distcp       torch's distributed checkpoint: one tensor per full weight

The name of a full weight (`weight_slices`) is the position of its layer in `ModelSpec.layers` and
its own name, without padding and without a rank: a checkpoint knows no plan, so whatever plan wrote
it, any plan reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Optimizer, Precision, Synchronisation
from hetplan.model.numerics import OWN_NORM_EPSILON, OWN_ROTARY_BASE, Activation
from hetplan.model.spec import Architecture, ModelSpec
from hetplan.runtime.checkpoint_format import Reader, shown_names
from hetplan.runtime.weight_slices import Weight, weights_of
from hetplan.version import __version__

SCHEMA = "hetplan.checkpoint/4"
MANIFEST = "hetplan-checkpoint.json"
WEIGHTS = "weights"
"""The state that every checkpoint has; the others belong to the optimizer."""
_CONSTANTS = (
    *("norm_epsilon", "activation", "rotary_base", "rotary_fraction", "rotary_scaling"),
    "router",
)
"""Fields of ModelSpec that decide what is computed, not which weights there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's stretching of rotary positions (transformers, `rope_type` llama3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Constants of a model's forward pass."""

    norm_epsilon: float
    rotary_base: float | None
    """Base of the rotary frequencies; None where positions are learned."""
    activation: Activation
    rotary_scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedJob:
    """The fields of a job that decide how its loss continues."""

    optimizer: Optimizer
    gradient_clipping: bool
    global_batch_size: int
    sequence_length: int
    seed: int
    """Of the data and of the first weights."""
    precision: Precision
    """Of the weights and activations during training; all states are kept in float32."""
    begun_from: str = ""
    """Empty: the training began from the seed's weights. Else the folder that it began from, or
    the checkpoint at which it changed its precision."""
    synchronisation: Synchronisation | None = None
    """Of local steps: the state of their averaging goes on under equal settings alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """Content of hetplan-checkpoint.json."""

    model: ModelSpec
    numerics: Numerics
    """Constants of the model that the weights come from."""
    step: int
    """Optimizer steps that were done."""
    states: tuple[str, ...]
    """`weights`, and the optimizer's states of every weight."""
    huggingface_config: str | None = None
    """The config.json that imported weights came with; earlier versions wrote it."""
    trained: TrainedJob | None = None
    """None: weights alone, as earlier versions converted them; no run goes on from those."""
    hetplan_version: str = __version__
    schema: str = SCHEMA


def state_key(state: str, weight: Weight) -> str:
    """Name of a weight's tensor in this state."""
    return weight.key if state == WEIGHTS else f"{state}.{weight.key}"


def own_numerics(model: ModelSpec) -> Numerics:
    """Constants of hetplan's own layers."""
    gpt = model.architecture is Architecture.GPT
    return Numerics(
        norm_epsilon=OWN_NORM_EPSILON,
        rotary_base=None if gpt else OWN_ROTARY_BASE,
        activation=Activation.GELU if gpt else Activation.SILU,
    )


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of the checkpoint in this folder; an InputError where there is none."""
    return decode(read_document(folder / MANIFEST), CheckpointManifest, schema=SCHEMA)


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Make the folder a finished checkpoint."""
    write_atomically(folder / MANIFEST, encode(manifest, schema=SCHEMA))


def open_checkpoint(
    folder: Path, model: ModelSpec | None = None, states: Sequence[str] = (WEIGHTS,)
) -> tuple[CheckpointManifest, Reader]:
    """Manifest and reader of a checkpoint, of this model where one is given.

    An InputError where it is of another model, lacks one of the states or is damaged.
    """
    manifest = read_manifest(folder)
    place = str(folder / MANIFEST)
    unlike = () if model is None else _model_differences(manifest.model, model)
    if model is not None and unlike:
        message = (
            f"is of {manifest.model.name}, whose {', '.join(unlike)} is not that of {model.name}"
        )
        raise InputError(Fault(file=place, field="model", message=message))
    missing = [state for state in states if state not in manifest.states]
    if missing:
        message = f"has {', '.join(manifest.states) or 'nothing'}; it lacks {', '.join(missing)}"
        raise InputError(Fault(file=place, field="states", message=message))
    reader = Reader(folder)
    check_tensors(folder, reader, manifest)
    return manifest, reader


def _model_differences(one: ModelSpec, two: ModelSpec) -> tuple[str, ...]:
    """`shape`, or the constants that both models state differently; names may differ."""
    shapes = [
        replace(model, name="", **dict.fromkeys(_CONSTANTS))  # type: ignore[arg-type]
        for model in (one, two)
    ]
    if shapes[0] != shapes[1]:
        return ("shape",)
    constants = ((name, getattr(one, name), getattr(two, name)) for name in _CONSTANTS)
    return tuple(
        name for name, left, right in constants if None not in (left, right) and left != right
    )


def check_tensors(folder: Path, reader: Reader, manifest: CheckpointManifest) -> None:
    """An InputError unless the checkpoint has every weight, in its shape, and nothing else."""
    shapes = {
        state_key(state, weight): weight.shape
        for state in manifest.states
        for weight in weights_of(manifest.model)
    }
    tensors, file = reader.tensors, str(folder)
    names = {*tensors, *reader.objects}
    faults = [
        Fault(
            file=file,
            message=f"{kind} tensors: {shown_names(sorted(keys))}; is it a checkpoint of this "
            "model?",
        )
        for kind, keys in (("missing", shapes.keys() - names), ("unknown", names - shapes.keys()))
        if keys
    ]
    faults += [
        Fault(file=file, field=key, message=f"has shape {have}; the model's is {shape}")
        for key, shape in shapes.items()
        if key in tensors and (have := tuple(tensors[key].size)) != shape
    ]
    if faults:
        raise InputError(*faults)
