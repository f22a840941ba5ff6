"""What of the training state does a rank hold, and how is it saved and loaded under any plan?

The state is a few vectors over the rank's parameters: the weights as the update rule sees them
(float32, whatever the precision of the passes) and what the rule keeps of every element. Where
ranks share the optimizer, a rank holds a range of each. In a checkpoint every state of every full
weight is one tensor; a rank writes the boxes of it that it holds, where no lower rank holds the
same, and reads those that it is to hold. So no rank ever has more of it than it trains with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.model.spec import ModelSpec
from hetplan.profiling.updating import FlatParameters
from hetplan.runtime.gradients import Named
from hetplan.runtime.norm import counts
from hetplan.runtime.placement import RankPlace
from hetplan.runtime.sharded import Shard
from hetplan.runtime.weights.distributed import Chunk, Reader
from hetplan.runtime.weights.native import WEIGHTS, TrainedJob, state_key
from hetplan.runtime.weights.slices import Piece, pieces_of, slices_of
from hetplan.runtime.weights.stage import finish_save, open_checkpoint, save_chunks


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
        shard: Shard | None,
    ) -> None:
        """`shard`: the rank's part of the optimizer, where its stage shares one."""
        self._model, self._place, self._named = model, place, named
        self._parameters, self._shard = parameters, shard

    @property
    def writes(self) -> bool:
        """Whether no lower rank holds the same elements for other samples."""
        return counts(self._place, 1 if self._shard is None else self._shard.parts)

    def save(
        self, folder: Path, *, step: int, trained: TrainedJob, group: dist.ProcessGroup | None
    ) -> None:
        """Save with all ranks of the group, which call this too, as the checkpoint `folder`."""
        held = tuple(self._held())
        chunks = [
            _chunk(each, piece)
            for each in (held if self.writes else ())
            for piece in self._pieces(each)
            if piece.first
        ]
        save_chunks(folder, chunks, group=group)
        finish_save(
            folder,
            self._model,
            step=step,
            states=[each.state for each in held],
            group=group,
            trained=trained,
        )

    def load(self, folder: Path, states: Sequence[str]) -> None:
        """Take these states from the checkpoint.

        States that are not read begin anew. An InputError as `open_checkpoint`.
        """
        manifest, reader = open_checkpoint(folder, self._model, states)
        if self._shard is not None:
            self._read(reader, _Held(state=WEIGHTS, vector=self._parameters.weights, start=0))
        for each in self._held():
            if each.state in states:
                self._read(reader, each)
        updates = manifest.step if len(states) > 1 else 0
        (self._parameters if self._shard is None else self._shard).resume(updates)

    def _held(self) -> Iterator[_Held]:
        source = self._parameters if self._shard is None else self._shard
        start = 0 if self._shard is None else self._shard.start
        yield _Held(state=WEIGHTS, vector=source.updated.detach(), start=start)
        for name, vector in source.state().items():
            yield _Held(state=name, vector=vector, start=start)

    def _pieces(self, held: _Held) -> Iterator[Piece]:
        base, place = self._parameters.weights, self._place
        seen = set[int]()
        for layers in place.chunks:
            for part in slices_of(self._model, layers, tp=place.tp, tp_index=place.tp_index):
                if 0 in part.shape:
                    continue
                parameter = self._named[part.position, part.name]
                at = (parameter.data_ptr() - base.data_ptr()) // base.element_size()
                tied = part.weight.position != part.position
                if tied and at in seen:
                    continue  # the head has the embedding's own matrix, whose slice came first
                seen.add(at)
                yield from pieces_of(
                    part,
                    parameter.shape,
                    at,
                    start=held.start,
                    stop=held.start + held.vector.numel(),
                )

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
