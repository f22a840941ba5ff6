"""The rendezvous programs against torch's own Schedule1F1B with stages that only take notes."""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.cost.replay import _Compute, _Receive, _rendezvous_program, _Send, _Wait

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


def torch_notes(monkeypatch: pytest.MonkeyPatch, s: int, stages: int, m: int) -> list[Note]:
    notes: list[Note] = []

    def batch(ops: list[Note], desc: str | None = None) -> list[Note]:
        notes.extend(ops)
        return list(ops)

    def wait(work: list[Note]) -> None:
        if work:
            notes.append(("wait", frozenset(work)))

    monkeypatch.setattr(schedules, "_batch_p2p", batch)
    monkeypatch.setattr(schedules, "_wait_batch_p2p", wait)
    schedule = object.__new__(schedules.Schedule1F1B)
    schedule._n_microbatches = m
    schedule._num_stages = stages
    schedule._stage = NotingStage(s, stages, notes)
    schedule.scale_grads = False
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        monkeypatch.setattr(schedule, name, lambda *_, **__: None)
    monkeypatch.setattr(schedule, "_check_inputs", lambda *_: ([None] * m, [{}] * m))
    schedule._step_microbatches()
    assert notes.pop() == ("reduce",)
    return notes


def own_notes(s: int, stages: int, m: int) -> list[Note]:
    notes: list[Note] = []
    for step in _rendezvous_program(s, stages, min(m, stages - s), m):
        if isinstance(step, _Compute):
            notes.append((step.kind, step.microbatch))
        elif isinstance(step, _Send):
            notes.append(("send", step.message))
        elif isinstance(step, _Receive):
            notes.append(("receive", step.message))
        elif isinstance(step, _Wait) and (step.sent or step.received):
            sent = {("send", message) for message in step.sent}
            notes.append(("wait", frozenset(sent | {("receive", m) for m in step.received})))
    return notes


@pytest.mark.parametrize(("stages", "m"), [(1, 3), (2, 2), (3, 8), (4, 4), (5, 7), (4, 2), (5, 1)])
def test_program_is_torchs(monkeypatch: pytest.MonkeyPatch, stages: int, m: int) -> None:
    for s in range(stages):
        assert own_notes(s, stages, m) == torch_notes(monkeypatch, s, stages, m)
