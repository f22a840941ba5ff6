"""Host buffers carry every byte, two at a time, and errors are not lost in their threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetplan.runtime.communicator import staging
from hetplan.runtime.communicator.channels import backend_of, needs_staging

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)


class Wire:
    """Takes what is on its way when it is waited for, and counts what is on its way at once."""

    def __init__(self) -> None:
        self.carried: list[Tensor] = []
        self.under_way = self.most = 0

    def send(self, buffer: Tensor) -> _Trip:
        return _Trip(self, lambda: self.carried.append(buffer.clone()))

    def receive(self, buffer: Tensor) -> _Trip:
        return _Trip(self, lambda: buffer.copy_(self.carried.pop(0)))

    def double(self, buffer: Tensor) -> _Trip:
        return _Trip(self, lambda: buffer.mul_(2))


class _Trip:
    def __init__(self, wire: Wire, arrive: object) -> None:
        self._wire, self._arrive = wire, arrive
        wire.under_way += 1
        wire.most = max(wire.most, wire.under_way)

    def wait(self) -> None:
        if self._arrive is not None:
            self._arrive()
            self._arrive = None
            self._wire.under_way -= 1


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> object:
    patch = pytest.MonkeyPatch()
    patch.setattr(staging, "CHUNK_BYTES", 40)
    yield
    patch.undo()


@SETTINGS
@given(size=st.integers(1, 75), wide=st.booleans())
def test_what_is_sent_arrives(size: int, wide: bool) -> None:
    tensor = torch.arange(float(size), dtype=torch.float64 if wide else torch.float32)
    wire = Wire()
    staging.send(tensor, wire.send)
    chunks = -(-tensor.nbytes // 40)
    assert len(wire.carried) == chunks
    assert wire.most == min(2, chunks)
    into = torch.zeros_like(tensor)
    staging.receive(into, wire.receive)
    assert torch.equal(into, tensor)
    staging.reduce(into, wire.double)
    assert torch.equal(into, 2 * tensor)
    assert wire.under_way == 0


def test_errors_of_a_thread_are_raised_by_who_waits() -> None:
    def fail() -> None:
        raise RuntimeError("the link is gone")

    work = staging.Background(fail)
    with pytest.raises(RuntimeError, match="the link is gone"):
        work.wait()


@pytest.mark.parametrize(
    ("transport", "collectives", "backend", "staged"),
    [
        ("host-staged", "nccl", "gloo", True),
        ("device-direct", "nccl", "nccl", False),
        ("host-staged", "gloo", "gloo", False),
        ("device-direct", "gloo", "gloo", False),
    ],
)
def test_the_plan_names_the_backend(
    transport: str, collectives: str, backend: str, staged: bool
) -> None:
    assert backend_of(transport, collectives) == backend
    assert needs_staging(backend, collectives) is staged
