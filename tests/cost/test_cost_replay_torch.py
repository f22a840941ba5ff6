"""Orders and programs against torch's own schedules, run with stages that only take notes."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from hetplan.cost.replay.programs import (
    Receive,
    Send,
    Step,
    Wait,
    early_receives,
    one_forward_one_backward,
    programs,
)
from hetplan.cost.schedules import passes
from hetplan.plans.v_schedules import Pass, is_v, virtual_stage_of

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

Note = tuple[Any, ...]


class NotingStage:
    """Stands for a PipelineStage: its operations are names, what is done with them is noted."""

    has_backward = True

    def __init__(self, index: int, count: int, notes: list[Note]) -> None:
        self.stage_index, self.num_stages, self.notes = index, count, notes

    def _ops(self, verb: str, direction: int, boundary: int, i: int) -> list[Note]:
        inside = 0 <= boundary < self.num_stages - 1
        return [(verb, (direction, boundary, i))] if inside else []

    def get_fwd_recv_ops(self, i: int) -> list[Note]:
        return self._ops("receive", 0, self.stage_index - 1, i)

    def get_fwd_send_ops(self, i: int) -> list[Note]:
        return self._ops("send", 0, self.stage_index, i)

    def get_bwd_recv_ops(self, i: int) -> list[Note]:
        return self._ops("receive", 1, self.stage_index, i)

    def get_bwd_send_ops(self, i: int) -> list[Note]:
        return self._ops("send", 1, self.stage_index - 1, i)

    def forward_one_chunk(self, i: int, *_: object, **__: object) -> None:
        self.notes.append(("F", i))

    def backward_one_chunk(self, i: int, **_: object) -> None:
        self.notes.append(("B", i))

    def perform_reduce_grad(self, _: object) -> None:
        self.notes.append(("reduce",))


def torch_notes(
    monkeypatch: pytest.MonkeyPatch, name: str, s: int, stages: int, m: int
) -> list[Note]:
    notes: list[Note] = []

    def batch(ops: list[Note], desc: str | None = None) -> list[Note]:
        notes.extend(ops)
        return list(ops)

    def sorted_batch(ops: list[Note], desc: str | None = None) -> dict[int, list[Note]]:
        return {0: batch(ops)} if ops else {}

    def wait(work: list[Note]) -> None:
        if work:
            notes.append(("wait", frozenset(work)))

    monkeypatch.setattr(schedules, "_batch_p2p", batch)
    monkeypatch.setattr(schedules, "_sorted_batch_p2p", sorted_batch)
    monkeypatch.setattr(schedules, "_wait_batch_p2p", wait)
    schedule = object.__new__(getattr(schedules, name))
    schedule._n_microbatches = m
    schedule._num_stages = stages
    schedule._stage = NotingStage(s, stages, notes)
    schedule.scale_grads = False
    for method in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        monkeypatch.setattr(schedule, method, lambda *_, **__: None)
    monkeypatch.setattr(schedule, "_check_inputs", lambda *_: ([None] * m, [{}] * m))
    schedule._step_microbatches()
    assert notes.pop() == ("reduce",)
    return notes


def notes_of(program: list[Step] | tuple[Step, ...]) -> list[Note]:
    notes: list[Note] = []
    for step in program:
        if isinstance(step, Pass):
            notes.append((step.kind, step.microbatch))
        elif isinstance(step, Send):
            notes.append(("send", step.message))
        elif isinstance(step, Receive):
            notes.append(("receive", step.message))
        elif isinstance(step, Wait) and (step.sent or step.received):
            sent = {("send", message) for message in step.sent}
            notes.append(("wait", frozenset(sent | {("receive", m) for m in step.received})))
    return notes


def joined(notes: list[Note]) -> list[Note]:
    """Waits right after each other as one."""
    found: list[Note] = []
    for waits, part in groupby(notes, key=lambda note: note[0] == "wait"):
        run = list(part)
        found += [("wait", frozenset().union(*(note[1] for note in run)))] if waits else run
    return found


@pytest.mark.parametrize(("stages", "m"), [(1, 3), (2, 2), (3, 8), (4, 4), (5, 7), (4, 2), (5, 1)])
def test_1f1b_program_is_torchs(monkeypatch: pytest.MonkeyPatch, stages: int, m: int) -> None:
    for s in range(stages):
        own = list(one_forward_one_backward(s, stages, min(m, stages - s), m))
        assert notes_of(own) == torch_notes(monkeypatch, "Schedule1F1B", s, stages, m)
        if stages > 1:
            assert programs("1f1b", stages, m, 1, None, True)[s] == tuple(own)


@pytest.mark.parametrize(("stages", "m"), [(2, 2), (3, 8), (4, 2), (5, 1)])
def test_gpipe_program_is_torchs(monkeypatch: pytest.MonkeyPatch, stages: int, m: int) -> None:
    for s, program in enumerate(programs("gpipe", stages, m, 1, None, True)):
        theirs = torch_notes(monkeypatch, "ScheduleGPipe", s, stages, m)
        assert joined(notes_of(program)) == joined(theirs)


def torch_order(name: str, rank: int, stages: int, m: int, chunks: int) -> list[Any]:
    """One rank's passes under one of torch's schedules with several stages per rank."""
    schedule = object.__new__(getattr(schedules, name))
    schedule.pp_group_size, schedule.n_local_stages = stages, chunks
    schedule.rank, schedule._n_microbatches = rank, m
    schedule.number_of_rounds = max(1, m // stages)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    schedule.num_stages = stages * chunks
    actions = schedule._calculate_single_rank_operations(rank)
    return [action for action in actions if action is not None]


KINDS = {"F": "F", "B": "B", "I": "B", "W": "W"}


def as_passes(actions: list[Any], stages: int, full: str = "B") -> list[Pass]:
    """`full`: what a whole backward pass is called where the schedule has split ones too."""
    found = []
    for action in actions:
        parts = action.sub_actions or (action,)
        for at, a in enumerate(parts):
            kind = KINDS[a.computation_type.value]
            kind = full if a.computation_type.value == "B" else kind
            chunk, last = a.stage_index // stages, at == len(parts) - 1
            found.append(Pass(kind, chunk, a.microbatch_index, not last))  # type: ignore[arg-type]
    return found


def own_order(name: str, rank: int, stages: int, m: int, chunks: int) -> list[Pass]:
    return list(
        passes(name, stage=rank, num_stages=stages, num_microbatches=m, virtual_stages=chunks)
    )


INTERLEAVED = [(2, 2, 2), (2, 6, 3), (4, 4, 2), (4, 8, 3), (4, 12, 2), (3, 9, 4)]


@pytest.mark.parametrize(("stages", "m", "chunks"), INTERLEAVED)
def test_interleaved_order_is_torchs(stages: int, m: int, chunks: int) -> None:
    for rank in range(stages):
        theirs = torch_order("ScheduleInterleaved1F1B", rank, stages, m, chunks)
        assert own_order("interleaved-1f1b", rank, stages, m, chunks) == as_passes(theirs, stages)


ZERO_BUBBLE = [(2, 2, 1), (3, 6, 1), (4, 4, 1), (4, 12, 1), (5, 10, 1)]
V_SHAPES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 5), (3, 12), (4, 8), (4, 17), (5, 10), (6, 13)]


@pytest.mark.parametrize(("stages", "m", "chunks"), [*ZERO_BUBBLE, *INTERLEAVED])
def test_zero_bubble_order_is_torchs(stages: int, m: int, chunks: int) -> None:
    # torch's class is ZB-H1 ("ZB1P") where a rank has one stage; with more it interleaves too.
    for rank in range(stages):
        theirs = torch_order("ScheduleInterleavedZeroBubble", rank, stages, m, chunks)
        assert own_order("zb-h1", rank, stages, m, chunks) == as_passes(theirs, stages)


@pytest.mark.parametrize(("stages", "m"), V_SHAPES)
def test_v_orders_are_torchs(stages: int, m: int) -> None:
    for rank in range(stages):
        theirs = torch_order("ScheduleZBVZeroBubble", rank, stages, m, 2)
        assert own_order("zbv", rank, stages, m, 2) == as_passes(theirs, stages)
        if m >= 2 * stages:
            theirs = torch_order("ScheduleDualPipeV", rank, stages, m, 2)
            assert own_order("dualpipev", rank, stages, m, 2) == as_passes(theirs, stages, "BW")


TORCHS = {
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", INTERLEAVED),
    "zb-h1": ("ScheduleInterleavedZeroBubble", [*ZERO_BUBBLE, *INTERLEAVED]),
    "zbv": ("ScheduleZBVZeroBubble", [(*shape, 2) for shape in V_SHAPES]),
    "dualpipev": ("ScheduleDualPipeV", [(p, m, 2) for p, m in V_SHAPES if m >= 2 * p]),
}


@pytest.mark.parametrize(
    ("name", "stages", "m", "chunks"),
    [(name, *shape) for name, (_, shapes) in TORCHS.items() for shape in shapes],
)
def test_early_receives_are_where_torchs_lowering_puts_them(
    name: str, stages: int, m: int, chunks: int
) -> None:
    lowered = schedules._add_send_recv(
        {rank: torch_order(TORCHS[name][0], rank, stages, m, chunks) for rank in range(stages)},
        stage_to_rank=lambda k: 2 * stages - 1 - k if is_v(name) and k >= stages else k % stages,
        num_stages=stages * chunks,
    )
    orders = [own_order(name, rank, stages, m, chunks) for rank in range(stages)]
    for rank, program in enumerate(early_receives(orders, chunks, name)):
        own = [step for step in program if not isinstance(step, Wait)]
        assert [note_of_step(name, step, rank, stages) for step in own] == [
            note_of_action(a) for action in lowered[rank] for a in action.sub_actions or (action,)
        ]


def note_of_step(name: str, step: Step, rank: int, stages: int) -> Note:
    if isinstance(step, Pass):
        return (step.kind[0], virtual_stage_of(name, rank, step.chunk, stages), step.microbatch)
    direction, hop, i = step.message  # type: ignore[union-attr]
    if isinstance(step, Send):
        return ("send", direction, hop + direction, i)
    return ("receive", direction, hop + 1 - direction, i)


def note_of_action(action: Any) -> Note:
    kind, at = action.computation_type.value, (action.stage_index, action.microbatch_index)
    names = {"SEND_F": ("send", 0), "SEND_B": ("send", 1)}
    names |= {"RECV_F": ("receive", 0), "RECV_B": ("receive", 1)}
    return (*names[kind], *at) if kind in names else (KINDS[kind], *at)
