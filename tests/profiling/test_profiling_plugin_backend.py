"""A vendor's plug-in is played by a module with as many of its calls as the case has."""

import sys
import types

import pytest
import torch

from hetplan.errors import InputError
from hetplan.profiling.backends import open_backend
from hetplan.profiling.plugin_backend import PLUGINS, PluginBackend


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
    assert isinstance(backend, PluginBackend)
    assert (backend.name, backend.collectives, backend.is_accelerator) == ("npu", "hccl", True)
    first, second = backend.mark(), backend.mark()
    assert backend.seconds_between(first, second) == pytest.approx(2e-3)
    assert backend.reset_peak_memory()
    assert backend.peak_memory_bytes() == 250.0
    assert backend.kind() == "huawei-ascend-910b3"
    assert backend.driver() == "torch_npu 2.1.0"
    assert (backend.clock_hertz(), backend.temperature_celsius(), backend.clocks()) == (0, 0, "")


def test_a_plugin_without_timed_events_and_counters_waits_and_reads_the_clock(npu) -> None:
    waits = []
    npu.synchronize = lambda: waits.append(1)

    class Untimed(Event):
        def elapsed_time(self, other) -> float:
            raise NotImplementedError

    npu.Event = Untimed
    del npu.reset_peak_memory_stats, npu.get_device_name
    readings = iter((1.0, 1.5))
    backend = PluginBackend(PLUGINS[0], npu, 0, clock=lambda: next(readings))
    waits.clear()
    first, second = backend.mark(), backend.mark()
    assert backend.seconds_between(first, second) == 0.5
    assert len(waits) == 2
    assert not backend.reset_peak_memory()
    assert backend.kind() == "huawei-npu"


def test_what_is_absent_is_said(npu) -> None:
    with pytest.raises(InputError, match="torch sees 2"):
        open_backend("npu", index=2)
    npu.is_available = lambda: False
    with pytest.raises(InputError, match="vendor's image"):
        open_backend("npu")
    with pytest.raises(InputError, match="sees no mlu device"):
        open_backend("mlu")
    with pytest.raises(InputError, match="npu, mlu, musa"):
        open_backend("abacus")
