"""The reference trainer's checkpoint: what is in its folder, and how it is read and written.

    FOLDER/hetplan-checkpoint.json   model, step, what is kept; written last
    FOLDER/.metadata, *.distcp       torch's distributed checkpoint: one tensor per full weight

Tensors are named as in `tensors.Weight.key` and have no padding, so a checkpoint knows no plan:
whatever plan wrote it, any plan reads it (`hetplan.runtime.weights.stage`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import ModelSpec
from hetplan.runtime.weights.distributed import Chunk, Reader, write_chunks
from hetplan.runtime.weights.numerics import Numerics
from hetplan.runtime.weights.tensors import (
    Weight,
    WeightSource,
    by_layer,
    check_names,
    check_shape,
    converted,
    weights_of,
)
from hetplan.version import __version__

SCHEMA = "hetplan.checkpoint/3"
MANIFEST = "hetplan-checkpoint.json"
WEIGHTS = "weights"
"""The state that every checkpoint has; others are as large and belong to the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedJob:
    """What of a job decides how its loss goes on."""

    optimizer: Optimizer
    gradient_clipping: bool
    global_batch_size: int
    sequence_length: int
    seed: int
    """Of the data and of the first weights."""
    precision: Precision
    """Of the weights and activations while it was trained; all states are kept in float32."""
    begun_from: str = ""
    """Empty: the training is what the seed gives. Else the folder of converted weights that it
    began from, or the checkpoint at which it went on in another precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint is of."""

    model: ModelSpec
    numerics: Numerics
    """What the model that the weights come from computes."""
    step: int
    """Optimizer steps that were done; 0 for converted weights."""
    states: tuple[str, ...]
    """`weights`, and what else is kept of every weight."""
    huggingface_config: str | None = None
    """The config.json that the weights came with, as it was."""
    trained: TrainedJob | None = None
    """None: weights that were converted, or saved by themselves."""
    hetplan_version: str = __version__
    schema: str = SCHEMA


def state_key(state: str, weight: Weight) -> str:
    """Name of a weight's tensor in this state."""
    return weight.key if state == WEIGHTS else f"{state}.{weight.key}"


def read_manifest(folder: Path) -> CheckpointManifest:
    """What the folder's checkpoint is of; an InputError where it is none."""
    return decode(read_document(folder / MANIFEST), CheckpointManifest, schema=SCHEMA)


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Make the folder a finished checkpoint."""
    write_atomically(folder / MANIFEST, encode(manifest, schema=SCHEMA))


def check_tensors(folder: Path, reader: Reader, manifest: CheckpointManifest) -> None:
    """An InputError unless the checkpoint has every weight, in its shape, and nothing else."""
    wanted = {
        state_key(state, weight): weight
        for state in manifest.states
        for weight in weights_of(manifest.model)
    }
    found = reader.tensors
    check_names(str(folder), found=(*found, *reader.objects), wanted=wanted)
    faults = [
        fault
        for key, weight in wanted.items()
        for fault in check_shape(str(folder), key, found[key].size, weight.shape)
    ]
    if faults:
        raise InputError(*faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSource:
    """A checkpoint of the reference trainer."""

    folder: Path
    manifest: CheckpointManifest
    reader: Reader

    @property
    def model(self) -> ModelSpec:
        """What the weights are of."""
        return self.manifest.model

    @property
    def numerics(self) -> Numerics:
        """What the model computes."""
        return self.manifest.numerics

    def dtype(self, weight: Weight) -> torch.dtype:
        """Number format of the weight."""
        found: torch.dtype = self.reader.tensors[weight.key].properties.dtype
        return found

    def read(self, weight: Weight) -> Tensor:
        """The full weight."""
        return self.reader.read(weight.key)


def open_native(folder: Path) -> NativeSource:
    """The checkpoint in this folder; an InputError where it is not whole."""
    manifest, reader = read_manifest(folder), Reader(folder)
    if WEIGHTS not in manifest.states:
        message = f"has {', '.join(manifest.states) or 'nothing'} and no weights"
        raise InputError(Fault(file=str(folder / MANIFEST), field="states", message=message))
    check_tensors(folder, reader, manifest)
    return NativeSource(folder=folder, manifest=manifest, reader=reader)


def write_native(
    folder: Path,
    source: WeightSource,
    *,
    dtype: torch.dtype | None,
    huggingface_config: str | None,
) -> None:
    """Write the source's weights as a checkpoint into the folder, layer by layer."""
    chunks = [_whole(source, weight, dtype) for layer in by_layer(source.model) for weight in layer]
    write_chunks(folder, chunks)
    manifest = CheckpointManifest(
        model=source.model,
        numerics=source.numerics,
        step=0,
        states=(WEIGHTS,),
        huggingface_config=huggingface_config,
    )
    write_manifest(folder, manifest)


def _whole(source: WeightSource, weight: Weight, dtype: torch.dtype | None) -> Chunk:
    return Chunk(
        key=weight.key,
        full_shape=weight.shape,
        offsets=(0,) * len(weight.shape),
        shape=weight.shape,
        dtype=dtype or source.dtype(weight),
        file_group=str(weight.position),
        read=lambda: converted(source.read(weight), dtype),
    )
