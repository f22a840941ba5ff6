"""Writers of one population: several at once, without space, and what damage leaves."""

import logging
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from profiling_samples import LAYER, PROVENANCE, layer

from hetplan.errors import HetplanError, InputError
from hetplan.profiling.samples import row
from hetplan.profiling.store import (
    LayerWriter,
    read_populations,
    read_store,
    store_state,
)

# The children of a fork only append rows; torch's threads, where others loaded it, do not matter.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

APPEND_ROWS = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from profiling_samples import LAYER, PROVENANCE
from hetplan.profiling.store import LayerWriter
writer = LayerWriter(Path(sys.argv[1]), PROVENANCE)
for number in range(int(sys.argv[3])):
    writer.append(replace(LAYER, sequence_length=1 + int(sys.argv[2]) * 1000 + number))
"""


def test_rows_of_writers_at_the_same_time_are_all_there(tmp_path) -> None:
    here = os.path.dirname(__file__)
    writers, rows = 4, 40
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", APPEND_ROWS, str(tmp_path), str(number), str(rows), here]
        )
        for number in range(writers)
    ]
    assert [job.wait(60) for job in jobs] == [0] * writers
    found = read_store(tmp_path)
    assert len(found.provenance) == 1
    assert sorted(sample.sequence_length for sample in found.layers) == sorted(
        1 + number * 1000 + index for number in range(writers) for index in range(rows)
    )


def test_a_full_disk_is_an_error_and_costs_no_row_that_was_there(tmp_path) -> None:
    writer = LayerWriter(tmp_path, PROVENANCE)
    writer.append(LAYER)
    path = writer.folder / "layers.csv"
    limit = path.stat().st_size + 20
    child = os.fork()
    if child == 0:
        # A file may not grow past its limit: writes are cut short, then refused, as by a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        refused = 0
        for _ in range(3):
            try:
                writer.append(LAYER)
            except HetplanError as error:
                refused += str(path) in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert read_store(tmp_path).layers == (LAYER,)
    writer.append(layer(tp=2))
    assert read_store(tmp_path).layers == (LAYER, layer(tp=2))


def test_a_store_that_is_read_only_is_told(tmp_path, monkeypatch) -> None:
    writer = LayerWriter(tmp_path, PROVENANCE)

    def refuse(path, flags, *rest, **names):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(os, "open", refuse)
    for work in (lambda: writer.append(LAYER), lambda: LayerWriter(tmp_path, PROVENANCE)):
        with pytest.raises(InputError, match="Read-only file system"):
            work()


def test_provenance_that_was_cut_or_changed_is_refused_and_the_rest_is_listed(tmp_path) -> None:
    cut = LayerWriter(tmp_path, replace(PROVENANCE, driver="Linux 7"))
    cut.append(LAYER)
    whole = LayerWriter(tmp_path, PROVENANCE)
    whole.append(LAYER)
    path = cut.folder / "provenance.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    states = {state.folder: state for state in store_state(tmp_path)}
    assert states[cut.folder].provenance is None
    assert [fault.file for fault in states[cut.folder].damage] == [str(path)]
    assert states[whole.folder].profiles.layers == states[cut.folder].profiles.layers == (LAYER,)
    with pytest.raises(InputError, match="damaged"):
        read_populations(tmp_path)
    with pytest.raises(InputError, match=r"provenance\.json"):
        LayerWriter(tmp_path, replace(PROVENANCE, driver="Linux 7"))
    path.write_text(text.replace("Linux 7", "Linux 8"))
    with pytest.raises(InputError, match="changed by hand"):
        LayerWriter(tmp_path, replace(PROVENANCE, driver="Linux 7"))
    with pytest.raises(InputError, match="changed by hand"):
        read_populations(tmp_path)
    # A folder with a name of somebody's own says nothing of its circumstances.
    cut.folder.rename(tmp_path / "from-a-colleague")
    assert len(read_populations(tmp_path)) == 2


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00garbage",
        b'"an open quote,' + b"x" * 50,
        b"too,short",
        row(LAYER).replace("0.001", "1" + "0" * 400, 1).encode(),
        row(LAYER).replace("0.001", "-1.0", 1).encode(),
        row(LAYER).replace("0.001", "NaN", 1).encode(),
        b"x" * 200_000,
        (row(LAYER) + "yesterday").encode(),
    ],
)
def test_a_spoilt_row_spoils_itself_only(tmp_path, line) -> None:
    writer = LayerWriter(tmp_path, PROVENANCE)
    writer.append(LAYER)
    path = writer.folder / "layers.csv"
    path.write_bytes(path.read_bytes() + line + b"\n" + row(layer(tp=2)).encode() + b"\n")
    (state,) = store_state(tmp_path)
    assert state.profiles.layers == (LAYER, layer(tp=2))
    assert {(fault.file, fault.line) for fault in state.damage} == {(str(path), 3)}
    with pytest.raises(InputError, match=r"layers\.csv:3"):
        read_populations(tmp_path)


def test_rows_of_another_device_do_not_hide_in_a_population(tmp_path) -> None:
    LayerWriter(tmp_path, PROVENANCE).append(layer(device="tortoise"))
    with pytest.raises(InputError, match="tortoise stand in a population of cpu"):
        read_populations(tmp_path)


def test_new_rows_are_added_once_and_repeats_are_kept(tmp_path) -> None:
    writer = LayerWriter(tmp_path, PROVENANCE)
    assert writer.add_new([LAYER, LAYER, layer(tp=2)]) == 3
    assert writer.add_new([LAYER, LAYER, layer(tp=2)]) == 0
    assert writer.add_new([layer(median_seconds=0.0011)]) == 1
    assert len(read_store(tmp_path).layers) == 4


def test_a_half_row_is_cut_off_with_a_warning(tmp_path, caplog) -> None:
    writer = LayerWriter(tmp_path, PROVENANCE)
    path = writer.folder / "layers.csv"
    path.write_bytes(path.read_bytes() + b"cpu,half" * 20_000)
    (state,) = store_state(tmp_path)
    assert not state.damage
    assert len(state.torn) == 1
    with caplog.at_level(logging.WARNING):
        writer.append(LAYER)
    assert "torn" in caplog.text
    assert read_store(tmp_path).layers == (LAYER,)
