"""The training state of a rank, and how a run loads and saves it under any plan.

The state is a few vectors over the rank's parameters: the weights as the update rule sees them
(float32, whatever the precision of the passes) and what the rule keeps of every element. Where
ranks share the optimizer, a rank holds a range of each. In a checkpoint every state of every full
weight is one tensor; a rank writes the boxes of it that it holds, unless a lower rank holds the
same, and reads those that it needs. So no rank ever holds more of it than it trains with. Of local
steps the first site's states are saved as those of any plan, beside them the others' and those of
the averaging.

The elements of a slice (`weight_slices`) from one number to another are at most three boxes of it:
part of a row, whole rows, part of a row.

A save has two steps: every rank writes its chunks beside the checkpoint's place, then the first
rank checks that all weights are there and gives the folder its name. All ranks see one file system.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.errors import HetplanError, LaunchError
from hetplan.files.writing import sync_folder
from hetplan.model.spec import ModelSpec
from hetplan.profiling.weights import FlatParameters
from hetplan.runtime.activity import Activity, ActivityKind
from hetplan.runtime.averaging import Averaging
from hetplan.runtime.checkpoint_contents import (
    WEIGHTS,
    CheckpointManifest,
    TrainedJob,
    check_tensors,
    open_checkpoint,
    own_numerics,
    state_key,
    write_manifest,
)
from hetplan.runtime.checkpoint_format import Chunk, Reader, write_chunks
from hetplan.runtime.checkpoints import (
    check_save,
    clear_left_over,
    delete_old,
    resume_of,
    step_folder,
    trained_job,
)
from hetplan.runtime.gradients import Named, Shard, counts, parts_of_copies
from hetplan.runtime.placement import RankPlace
from hetplan.runtime.training import Training
from hetplan.runtime.weight_slices import Slice, Weight, slices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One state of the parameters' elements from `start` on."""

    state: str
    vector: Tensor
    start: int


class TrainingState:
    """The weights and the optimizer's state of one rank."""

    def __init__(
        self,
        model: ModelSpec,
        place: RankPlace,
        named: Named,
        parameters: FlatParameters,
        shards: Sequence[Shard],
        averaging: Averaging | None = None,
    ) -> None:
        """`shards`: the rank's parts of the optimizer, where its stage shares one."""
        self._model, self._place, self._named = model, place, named
        self._parameters, self._shards, self._averaging = parameters, shards, averaging

    def save(
        self, folder: Path, *, step: int, trained: TrainedJob, group: dist.ProcessGroup | None
    ) -> None:
        """Save with all ranks of the group, which call this too, as the checkpoint `folder`."""
        held = tuple(self._held())
        chunks = [
            _chunk(vector, piece)
            for vector in held
            for piece in self._pieces(vector)
            if piece.first
        ]
        _write_partial(folder, chunks, group)
        manifest = CheckpointManifest(
            model=self._model,
            numerics=own_numerics(self._model),
            step=step,
            states=self._states(held),
            trained=trained,
        )
        on_first_rank(group, lambda: _finish(folder, manifest), f"finish the checkpoint {folder}")

    def load(self, folder: Path, states: Sequence[str]) -> None:
        """Take these states from the checkpoint, and of local steps those of this rank's site.

        States that are not read begin anew. An InputError as `open_checkpoint`.
        """
        manifest, reader = open_checkpoint(folder, self._model, states)
        own = [*self._own()]
        if self._shards:  # the others' parts too
            whole = self._parameters.updated.detach()
            own.insert(0, _Held(state=WEIGHTS, vector=whole, start=0))
        for vector in own:
            named = _of_site(vector.state, self._place.site)
            if vector.state in states:
                has = named in manifest.states
                self._read(reader, replace(vector, state=named) if has else vector)
        self._parameters.round()
        updates = manifest.step if len(states) > 1 else 0
        for source in self._shards or (self._parameters,):
            source.resume(updates)
        if self._averaging is not None:
            self._averaging.begin_anew()
            kept = [*self._averaged()]
            before = manifest.trained and manifest.trained.synchronisation
            goes_on = before == self._averaging.settings and {vector.state for vector in kept} <= {
                *manifest.states
            }
            for vector in kept if goes_on else ():
                self._read(reader, vector)
            self._averaging.resume(manifest.step, under_way=goes_on)

    def _own(self) -> Iterator[_Held]:
        """What every trainer has."""
        for source in self._shards or (self._parameters,):
            start = source.start if isinstance(source, Shard) else 0
            yield _Held(state=WEIGHTS, vector=source.updated.detach(), start=start)
            for name, vector in source.state().items():
                yield _Held(state=name, vector=vector, start=start)

    def _averaged(self) -> Iterator[_Held]:
        """The state of the averaging, which all sites have alike."""
        states = {} if self._averaging is None else self._averaging.state()
        for name, vector in states.items():
            yield _Held(state=name, vector=vector, start=0)

    def _held(self) -> Iterator[_Held]:
        for vector in self._own():
            yield replace(vector, state=_of_site(vector.state, self._place.site))
        if self._place.site == 0:
            yield from self._averaged()

    def _states(self, held: Sequence[_Held]) -> tuple[str, ...]:
        """What all ranks save, as the first rank knows it."""
        names = dict.fromkeys(vector.state for vector in self._own())
        sites = 1 if self._averaging is None else self._averaging.num_sites
        others = [_of_site(name, site) for site in range(1, sites) for name in names]
        return tuple(dict.fromkeys([*(vector.state for vector in held), *others]))

    def _pieces(self, held: _Held) -> Iterator[Piece]:
        base, place = self._parameters.weights, self._place
        whole = held.vector.numel() == base.numel()
        parts = parts_of_copies(() if whole else self._shards)
        stop = held.start + held.vector.numel()
        seen = set[int]()
        for layers in place.chunks:
            for part in slices_of(self._model, layers, place.cut):
                parameter = self._named[part.position, part.name]
                at = (parameter.data_ptr() - base.data_ptr()) // base.element_size()
                tied = part.weight.position != part.position
                if tied and at in seen:
                    continue  # the head has the embedding's own matrix, whose slice came first
                seen.add(at)
                first = part.first and counts(place, parts, expert=part.expert)
                yield from pieces_of(replace(part, first=first), at, start=held.start, stop=stop)

    def _read(self, reader: Reader, held: _Held) -> None:
        held.vector.zero_()  # padding of the vocabulary has no place in the checkpoint
        with torch.no_grad():
            for piece in self._pieces(held):
                reader.read(
                    state_key(held.state, piece.weight),
                    offsets=piece.offsets,
                    shape=piece.shape,
                    into=piece.of(held.vector),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a full weight whose elements follow each other in a vector."""

    weight: Weight
    offsets: tuple[int, ...]
    """In the full weight."""
    shape: tuple[int, ...]
    start: int
    """Its first element in the vector."""
    first: bool
    """No lower rank holds the same elements."""

    def of(self, vector: Tensor) -> Tensor:
        """The piece as a view of the vector."""
        return vector[self.start : self.start + math.prod(self.shape)].view(self.shape)


def pieces_of(part: Slice, at: int, *, start: int, stop: int) -> Iterator[Piece]:
    """What of a slice lies in the elements `start` to `stop` of all parameters of a rank.

    The slice's parameter begins at element `at` of them; pieces are in a vector from `start` on.
    """
    columns = math.prod(part.shape[1:])
    begin = at + part.row * columns
    low, high = max(start, begin), min(stop, begin + math.prod(part.shape))
    while low < high:
        row, column = divmod(low - begin, columns)
        rows = (high - low) // columns if column == 0 else 0
        size = rows * columns if rows else min(columns - column, high - low)
        offsets = (row, column)[: len(part.shape)]
        shape = (rows, columns) if rows else (1, size)
        yield Piece(
            weight=part.weight,
            offsets=tuple(a + b for a, b in zip(part.offsets, offsets, strict=True)),
            shape=shape[: len(part.shape)],
            start=low - start,
            first=part.first,
        )
        low += size


def _of_site(state: str, site: int) -> str:
    """Its name in a checkpoint: the first site's has no site in it."""
    return state if site == 0 else f"site{site}_{state}"


def _chunk(held: _Held, piece: Piece) -> Chunk:
    return Chunk(
        key=state_key(held.state, piece.weight),
        full_shape=piece.weight.shape,
        offsets=piece.offsets,
        shape=piece.shape,
        dtype=held.vector.dtype,
        file_group=f"{held.state} {piece.weight.position}",
        read=lambda: piece.of(held.vector).cpu(),
    )


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is until it is finished; every rank finds the same name."""
    return folder.with_name(f".{folder.name}.partial")


def _write_partial(folder: Path, chunks: Sequence[Chunk], group: dist.ProcessGroup | None) -> None:
    partial = partial_folder(folder)

    def make() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    on_first_rank(group, make, f"make the folder {partial}")
    write_chunks(partial, chunks, group=group)


def _finish(folder: Path, manifest: CheckpointManifest) -> None:
    """Give the folder its name; an InputError where a weight is missing, as no rank held it."""
    partial = partial_folder(folder)
    check_tensors(partial, Reader(partial), manifest)
    write_manifest(partial, manifest)
    partial.rename(folder)  # an OSError where a checkpoint is there: none is ever replaced
    sync_folder(folder.parent)


def on_first_rank(group: dist.ProcessGroup | None, action: Callable[[], None], what: str) -> None:
    """Let the group's first rank do something, and tell every rank whether it succeeded."""
    failure: Exception | None = None
    if group is None or dist.get_rank(group) == 0:
        try:
            action()
        except Exception as error:
            failure = error
    if group is not None:
        # Only the group's first rank can have failed; the others would wait for ever.
        failed = torch.tensor([int(failure is not None)])
        dist.all_reduce(failed, group=group)
        if failed.item() and failure is None:
            raise LaunchError(f"the first rank could not {what}; its message says why")
    if failure is not None:
        raise failure


class RunCheckpoints:
    """The checkpoints of one run, as one of its ranks makes them."""

    def __init__(
        self,
        training: Training,
        state: TrainingState,
        control: dist.ProcessGroup,
        activity: Activity,
    ) -> None:
        """Every rank of `control` makes one and calls it alike; `activity` records each load and
        each save.
        """
        self._training, self._state, self._control = training, state, control
        self._activity = activity
        self._request = training.checkpoints
        self._trained = trained_job(training.job)

    def resume(self) -> int:
        """Take the state of the checkpoint that the run goes on from; its steps, 0 without one.

        `Training.checkpoints.load` is one checkpoint. An InputError where the run cannot go on from
        it, or must not save to its folder.
        """
        training, request = self._training, self._request
        resume = None
        if request.load:
            self._activity.begin("load of a checkpoint", kind=ActivityKind.SAVING)
            folder = Path(request.load)
            resume = resume_of(folder, training.model, training.job, steps=training.steps)
            self._state.load(folder, resume.states)
            self._trained = resume.trained
        if request.save:
            loaded = None if resume is None else resume.folder
            on_first_rank(
                self._control,
                lambda: check_save(Path(request.save), loaded),
                f"save to {request.save}",
            )
        return 0 if resume is None else resume.manifest.step

    def after_step(self, done: int, *, last: bool) -> None:
        """Save where a checkpoint is due after this many steps; a LaunchError where it fails."""
        if not self._request.is_due(done, last=last):
            return
        self._activity.begin("save of a checkpoint", kind=ActivityKind.SAVING)
        parent = Path(self._request.save)
        folder = step_folder(parent, done)
        first = dist.get_rank(self._control) == 0
        try:
            on_first_rank(self._control, lambda: clear_left_over(parent), f"clear {parent}")
            self._state.save(folder, step=done, trained=self._trained, group=self._control)
        except (HetplanError, OSError, RuntimeError) as error:
            if first:
                shutil.rmtree(partial_folder(folder), ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise LaunchError(
                f"the checkpoint {folder} could not be saved: {reason}; earlier checkpoints are "
                "as they were"
            ) from error
        if first:
            delete_old(parent, self._request.keep)
        self._activity.end()
