"""How each rank of the reference trainer saves and loads its stage's slices, under any plan.

A rank's parameters are slices of full weights, some fused, some with padding. In the checkpoint
each slice is a chunk of its full weight, at its place in it; of slices that several ranks hold
alike (norms, copied key-value heads, data-parallel copies, the tied head) one rank writes one.
Loading asks for the slices of the plan at hand, so the plan that saved does not matter.

Saving is two steps, so that a caller can do other work between them, or see that every rank is
done: `save_stage` on every rank, then `finish_save` on every rank. Until the second nothing has
the checkpoint's name. All ranks of a save see one file system; loading needs no group.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import Fault, InputError, LaunchError
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange
from hetplan.profiling.layers import Embedding, GptLayer, Head, LlamaLayer
from hetplan.profiling.weights import parameter_slices
from hetplan.runtime.placement import RankPlace
from hetplan.runtime.weights.distributed import Chunk, Reader, write_chunks
from hetplan.runtime.weights.folders import put_in_place
from hetplan.runtime.weights.native import (
    MANIFEST,
    CheckpointManifest,
    TrainedJob,
    check_tensors,
    read_manifest,
    state_key,
    write_manifest,
)
from hetplan.runtime.weights.numerics import differences, own_numerics
from hetplan.runtime.weights.slices import Slice, slices_of
from hetplan.runtime.weights.tensors import unlike_parts

States = Mapping[str, Mapping[str, Tensor]]
"""State (`weights`, or an optimizer's such as `exp_avg`) -> parameter -> the rank's slice.
Parameters are named `layers.POSITION.ATTRIBUTE`, as `stage_tensors` names them."""

_OWN_LAYERS = (Embedding, GptLayer, LlamaLayer, Head)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Which slices of which layers a rank holds."""

    layers: LayerRange
    tp: int
    tp_index: int
    dp_index: int
    """Ranks other than 0 hold copies and write nothing."""


def part_of(place: RankPlace) -> StagePart:
    """The part that the rank of this place holds."""
    return StagePart(
        layers=place.layers,
        tp=len(place.tp_ranks),
        tp_index=place.tp_index,
        dp_index=place.dp_index,
    )


def stage_tensors(module: nn.Module, layers: LayerRange) -> dict[str, Tensor]:
    """A stage module's parameters by name; `layers` are the positions that it was built for."""
    own = [each for each in module.modules() if isinstance(each, _OWN_LAYERS)]
    positions = range(layers.start, layers.stop)
    return {
        f"layers.{position}.{name}": parameter.detach()
        for position, layer in zip(positions, own, strict=True)
        for name, parameter in layer.named_parameters(recurse=False)
    }


def vector_tensors(module: nn.Module, layers: LayerRange, vector: Tensor) -> dict[str, Tensor]:
    """Parts of one vector as large as all parameters, under the parameters' names.

    For an optimizer's state over `hetplan.profiling.updating.FlatParameters`: the vector has the
    parameters in the module's order, a tied matrix once.
    """
    views: dict[int, Tensor] = {}
    at = 0
    for parameter in module.parameters():
        stop = at + parameter.numel()
        views[parameter.data_ptr()] = vector[at:stop].view(parameter.shape)
        at = stop
    tensors = stage_tensors(module, layers)
    return {name: views[tensor.data_ptr()] for name, tensor in tensors.items()}


def save_stage(
    folder: Path,
    model: ModelSpec,
    part: StagePart,
    states: States,
    *,
    group: dist.ProcessGroup | None,
) -> None:
    """Write this rank's slices beside `folder`; `finish_save` makes them a checkpoint.

    Every rank of the group, which moves CPU memory (gloo), calls it, also one that has nothing to
    write; None: one process holds all slices. An InputError where the folder exists or a tensor is
    not the part's.
    """
    if folder.exists():
        raise InputError(Fault(file=str(folder), message="exists; a checkpoint is never replaced"))
    slices = tuple(slices_of(model, part.layers, tp=part.tp, tp_index=part.tp_index))
    for tensors in states.values():
        _check_states(model, part, tensors)
    chunks = [
        _chunk(state, each, tensors[each.parameter])
        for state, tensors in states.items()
        for each in slices
        if part.dp_index == 0 and each.first and 0 not in each.shape
    ]
    save_chunks(folder, chunks, group=group)


def save_chunks(folder: Path, chunks: Sequence[Chunk], *, group: dist.ProcessGroup | None) -> None:
    """`save_stage` of chunks that the caller has cut."""
    partial = partial_folder(folder)

    def make() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    on_first_rank(group, make, f"make the folder {partial}")
    write_chunks(partial, chunks, group=group)


def _chunk(state: str, piece: Slice, tensor: Tensor) -> Chunk:
    return Chunk(
        key=state_key(state, piece.weight),
        full_shape=piece.weight.shape,
        offsets=piece.offsets,
        shape=piece.shape,
        dtype=tensor.dtype,
        file_group=f"{state} {piece.weight.position}",
        read=lambda: piece.of(tensor).cpu(),
    )


def finish_save(
    folder: Path,
    model: ModelSpec,
    *,
    step: int,
    states: Sequence[str],
    group: dist.ProcessGroup | None,
    trained: TrainedJob | None = None,
) -> None:
    """Give the folder its name, after every rank's `save_stage`; returns when it has it.

    `states` are the names that the ranks saved, `trained` what they were trained on. An InputError
    on the group's first rank where a weight is missing: no rank held it.
    """
    partial = partial_folder(folder)
    manifest = CheckpointManifest(
        model=model,
        numerics=own_numerics(model),
        step=step,
        states=tuple(states),
        trained=trained,
    )

    def finish() -> None:
        check_tensors(partial, Reader(partial), manifest)
        write_manifest(partial, manifest)
        put_in_place(partial, folder)

    on_first_rank(group, finish, f"finish the checkpoint {folder}")


def load_stage(
    folder: Path, model: ModelSpec, part: StagePart, states: States
) -> CheckpointManifest:
    """Fill this rank's tensors from the checkpoint, in place, and say what it is.

    Values are rounded to the tensors' number format; padding becomes zero. An InputError where the
    checkpoint is of another model, lacks a state or is damaged.
    """
    manifest, reader = open_checkpoint(folder, model, tuple(states))
    for state, tensors in states.items():
        _check_states(model, part, tensors)
        for tensor in tensors.values():
            tensor.detach().zero_()
        for piece in slices_of(model, part.layers, tp=part.tp, tp_index=part.tp_index):
            if 0 in piece.shape:
                continue
            with torch.no_grad():
                reader.read(
                    state_key(state, piece.weight),
                    offsets=piece.offsets,
                    shape=piece.shape,
                    into=piece.of(tensors[piece.parameter].detach()),
                )
    return manifest


def open_checkpoint(
    folder: Path, model: ModelSpec, states: Sequence[str]
) -> tuple[CheckpointManifest, Reader]:
    """What the checkpoint is, and its reader.

    An InputError where it is of another model, lacks one of the states or is damaged.
    """
    manifest = read_manifest(folder)
    place = str(folder / MANIFEST)
    unlike = unlike_parts(manifest.model, model)
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


def inexact(manifest: CheckpointManifest) -> tuple[str, ...]:
    """What the trainer computes otherwise than the model that the weights come from, in words."""
    return differences(manifest.numerics, manifest.model)


def _check_states(model: ModelSpec, part: StagePart, tensors: Mapping[str, Tensor]) -> None:
    wanted = {
        f"layers.{position}.{parameter.name}": parameter.shape
        for position in range(part.layers.start, part.layers.stop)
        for parameter in parameter_slices(
            model, model.layers[position], tp=part.tp, tp_rank=part.tp_index
        )
    }
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if wrong:
        raise InputError(
            *(
                f"{name} has shape {found.get(name)}; the stage's is {wanted.get(name)}"
                for name in wrong
            )
        )


def partial_folder(folder: Path) -> Path:
    """Where a save is until it is finished; every rank finds the same name."""
    return folder.with_name(f".{folder.name}.partial")


def on_first_rank(group: dist.ProcessGroup | None, do: Callable[[], None], what: str) -> None:
    """Let the group's first rank do something, and every rank know whether it did."""
    failure: Exception | None = None
    if group is None or dist.get_rank(group) == 0:
        try:
            do()
        except Exception as error:
            failure = error
    if group is not None:
        # Of the group's ranks only the first can have failed; the others would wait for ever.
        failed = torch.tensor([int(failure is not None)])
        dist.all_reduce(failed, group=group)
        if failed.item() and failure is None:
            raise LaunchError(f"the first rank could not {what}; its message says why")
    if failure is not None:
        raise failure
