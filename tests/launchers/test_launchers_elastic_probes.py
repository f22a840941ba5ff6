"""Answers of probes are read whatever other hosts do; no host is really asked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

import pytest
from elastic_cases import cluster

from hetplan.emulation import measuring
from hetplan.emulation.layout import lay_out
from hetplan.emulation.values import Emulation
from hetplan.launchers.elastic_backend import reachable

ALL = ("north1", "north2", "south1", "south2")


@pytest.mark.parametrize("silent", ALL[:2])
def test_a_probe_that_does_not_end_silences_no_other_host(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation = lay_out(cluster(), name="test")
    addresses = [
        address
        for host in emulation.hosts
        if host.name != silent
        for address in (host.data_address, host.control_address)
    ]

    def start(
        emulation: Emulation, host: str, command: Sequence[str], *, stdout: int, stderr: int
    ) -> subprocess.Popen[bytes]:
        words = ("sleep", "60") if host == silent else ("echo", json.dumps(addresses))
        return subprocess.Popen(words, stdout=stdout, stderr=stderr, start_new_session=True)

    monkeypatch.setattr(measuring, "start", start)
    monkeypatch.setattr("hetplan.launchers.elastic_backend.LIMIT_SECONDS", 1.0)
    assert reachable(emulation, ALL) == tuple(name for name in ALL if name != silent)
