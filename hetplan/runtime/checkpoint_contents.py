"""What a checkpoint of the reference trainer holds, and how its folder is opened and finished.

    FOLDER/hetplan-checkpoint.json   model, step, states; written last
    FOLDER/.metadata, *.distcp       torch's distributed checkpoint: one tensor per full weight

A full weight is a weight of one of the trainer's layers before it is cut or fused
(`hetplan.profiling.weights`). Its name is the position of its layer in `ModelSpec.layers` and its
own name, without padding and without a rank: a checkpoint knows no plan, so whatever plan wrote
it, any plan reads it. A tied head has no vocabulary matrix of its own: it is the embedding's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.numerics import OWN_NORM_EPSILON, OWN_ROTARY_BASE, Activation
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.profiling.weights import parameter_slices
from hetplan.runtime.checkpoint_format import Reader, shown_names
from hetplan.version import __version__

SCHEMA = "hetplan.checkpoint/3"
MANIFEST = "hetplan-checkpoint.json"
WEIGHTS = "weights"
"""The state that every checkpoint has; the others belong to the optimizer."""
VOCABULARY = "vocabulary"
"""Name of the matrix of embedding and head in `hetplan.profiling.weights`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One full weight of one layer."""

    position: int
    """Of its layer in `ModelSpec.layers`."""
    name: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its name in the checkpoint."""
        return f"layers.{self.position}.{self.name}"


def state_key(state: str, weight: Weight) -> str:
    """Name of a weight's tensor in this state."""
    return weight.key if state == WEIGHTS else f"{state}.{weight.key}"


def weights_of(model: ModelSpec) -> tuple[Weight, ...]:
    """Every full weight once, layer by layer.

    An InputError where the trainer's layers are not those of the model.
    """
    return tuple(_weights(model))


def _weights(model: ModelSpec) -> Iterator[Weight]:
    for position, kind in enumerate(model.layers):
        for parameter in parameter_slices(model, kind, tp=1, tp_rank=0):
            for part in parameter.parts:
                if part.name == VOCABULARY and not owns_vocabulary(model, kind):
                    continue
                yield Weight(position=position, name=part.name, shape=part.full_shape)


def owns_vocabulary(model: ModelSpec, kind: LayerKind) -> bool:
    """Whether a layer of this kind has a vocabulary matrix that is not another layer's."""
    return kind is not LayerKind.HEAD or not model.tied_embeddings


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


def check_checkpoint(folder: Path) -> None:
    """An InputError unless the folder holds a whole checkpoint."""
    manifest, reader = read_manifest(folder), Reader(folder)
    if WEIGHTS not in manifest.states:
        message = f"has {', '.join(manifest.states) or 'nothing'} and no weights"
        raise InputError(Fault(file=str(folder / MANIFEST), field="states", message=message))
    check_tensors(folder, reader, manifest)


def open_checkpoint(
    folder: Path, model: ModelSpec, states: Sequence[str]
) -> tuple[CheckpointManifest, Reader]:
    """Manifest and reader of a checkpoint of this model.

    An InputError where it is of another model, lacks one of the states or is damaged.
    """
    manifest = read_manifest(folder)
    place = str(folder / MANIFEST)
    unlike = _model_differences(manifest.model, model)
    if unlike:
        message = (
            f"is of {manifest.model.name}, whose {', '.join(unlike)} is not that of {model.name}"
        )
        raise InputError(Fault(file=place, field="model", message=message))
    missing = [state for state in states if state not in manifest.states]
    if missing:
        message = f"has {', '.join(manifest.states)}; it lacks {', '.join(missing)}"
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
    weights = {
        state_key(state, weight): weight
        for state in manifest.states
        for weight in weights_of(manifest.model)
    }
    tensors = reader.tensors
    _check_names(str(folder), have={*tensors, *reader.objects}, expected=set(weights))
    faults = []
    for key, weight in weights.items():
        shape = tuple(tensors[key].size)
        if shape != weight.shape:
            message = f"has shape {shape}; the model's is {weight.shape}"
            faults.append(Fault(file=str(folder), field=key, message=message))
    if faults:
        raise InputError(*faults)


def _check_names(file: str, *, have: set[str], expected: set[str]) -> None:
    kinds: Iterable[tuple[str, set[str]]] = (
        ("missing", expected - have),
        ("unknown", have - expected),
    )
    faults = [
        Fault(
            file=file,
            message=f"{kind} tensors: {shown_names(sorted(names))}; is it a checkpoint of this "
            "model?",
        )
        for kind, names in kinds
        if names
    ]
    if faults:
        raise InputError(*faults)
