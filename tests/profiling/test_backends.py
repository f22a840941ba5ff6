"""Devices and their clock settings; a vendor's plug-in is played by a module with its calls."""

import sys
import types

import pytest
import torch

from hetplan.errors import InputError
from hetplan.profiling.backends import (
    AcceleratorBackend,
    CpuBackend,
    nvidia_clocks,
    open_backend,
)


def asked(text):
    """A tool that prints this, and notes what it was asked."""
    calls = []

    def ask(command):
        calls.append(command)
        return text

    ask.calls = calls
    return ask


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1980, 1980, 2619, 2619, 700.00, 700.00\n", ""),
        ("1410, 1980, 1593, 2619, 350.00, 700.00\n", "sm 1410 MHz, memory 1593 MHz, limit 350 W"),
        ("[N/A], [N/A], [N/A], [N/A], 300.00, 700.00\n", "limit 300 W"),
        ("", ""),
        ("1410, 1980, 2619, 2619, 700, 700\n1410, 1980, 2619, 2619, 700, 700\n", ""),
        ("nan, inf, 1e400, -3, 1, 1\n", ""),
    ],
)
def test_nvidia_settings_that_are_not_the_defaults(text, words) -> None:
    ask = asked(text)
    assert nvidia_clocks("GPU-0", ask) == words
    assert "--id=GPU-0" in ask.calls[0]


class Event:
    clock = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = -1.0

    def record(self) -> None:
        Event.clock += 2.0
        self.at = Event.clock

    def elapsed_time(self, other) -> float:
        return other.at - self.at


def full_library():
    return types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=lambda index: None,
        synchronize=lambda: None,
        Event=Event,
        reset_peak_memory_stats=lambda: None,
        memory_allocated=lambda: 100,
        max_memory_allocated=lambda: 350,
        get_device_name=lambda index: "Ascend 910B3",
    )


@pytest.fixture
def npu(monkeypatch):
    library = full_library()
    monkeypatch.setattr(torch, "npu", library, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(__version__="2.1.0"))
    return library


def test_a_plugin_with_every_call(npu) -> None:
    backend = open_backend("npu", index=1)
    assert isinstance(backend, AcceleratorBackend)
    assert (backend.name, backend.collectives, backend.is_accelerator) == ("npu", "hccl", True)
    first, second = backend.mark(), backend.mark()
    assert backend.seconds_between(first, second) == pytest.approx(2e-3)
    assert backend.reset_peak_memory()
    assert backend.peak_memory_bytes() == 250.0
    assert backend.kind() == "huawei-ascend-910b3"
    assert backend.driver() == "torch_npu 2.1.0"
    assert (backend.clock_hertz(), backend.clocks()) == (0, "")


def test_devices_that_are_absent_are_refused(npu) -> None:
    with pytest.raises(InputError, match="sees 2 npu devices"):
        open_backend("npu", index=2)
    npu.is_available = lambda: False
    with pytest.raises(InputError, match="torch_npu"):
        open_backend("npu")
    with pytest.raises(InputError, match="sees 0 mlu devices"):
        open_backend("mlu")
    with pytest.raises(InputError, match="npu, mlu, musa"):
        open_backend("abacus")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="--device cpu"):
            open_backend("cuda")


def test_peak_memory_of_a_cpu_is_what_is_allocated() -> None:
    backend = CpuBackend()
    if not backend.reset_peak_memory():
        pytest.skip("the kernel does not let the high-water mark be reset")
    size = 64 << 20
    block = torch.ones(size // 4)
    assert size <= backend.peak_memory_bytes() <= size * 1.1
    del block
    assert backend.reset_peak_memory()
    assert backend.peak_memory_bytes() <= size * 0.1
