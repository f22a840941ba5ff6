"""Campaigns and stores of hostile and of unlucky people."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from campaign_runs import invoke, make
from profiling_samples import LAYER, PROVENANCE

from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.profiling.campaign import CAMPAIGN_FILE, load_campaign
from hetplan.profiling.campaign_rows import SCHEMA as RESULTS
from hetplan.profiling.campaign_rows import RecordFile, read_own_records, record_line
from hetplan.profiling.merge import merge
from hetplan.profiling.store_state import PROVENANCE_FILE, SCHEMA, population_state

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    return make(tmp_path_factory.mktemp("attack"))


def results(path, provenance=PROVENANCE, *more):
    records = [
        {"record": "run", "schema": RESULTS, "campaign": "c1", "run": "r1", "link": ""}
        | {"kind": provenance.device, "provenance": asdict(provenance)},
        {"record": "layer", "run": "r1", "number": 1}
        | {"sample": asdict(LAYER) | {"measured_on": "2026-01-02"}},
        *more,
    ]
    path.write_text("".join(record_line(record) + "\n" for record in records))
    return path


def script(campaign, *arguments, before=""):
    """The campaign's script in a Python of its own."""
    run = f"import runpy, sys\n{before}\nsys.argv = sys.argv[1:]\n"
    run += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-I", "-c", run, str(campaign / "measure_cpu.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=campaign,
        check=False,
    )


@pytest.mark.parametrize(
    ("before", "lacks"),
    [
        ("sys.modules['torch'] = None", "has no torch that works"),
        ("import types; t = sys.modules['torch'] = types.ModuleType('torch'); "
         "t.__version__ = '1.13.1+cu117'", "has torch 1.13.1"),
    ],
)  # fmt: skip
def test_a_python_without_its_torch_is_told_what_is_needed(campaign, before, lacks):
    done = script(campaign, "--help", before=before)
    assert done.returncode == 1
    assert "Needs Python 3.8 or later and torch 2.1 or later" in done.stderr
    assert lacks in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "/nonexistent/results.jsonl"), "cannot be written"),
        (("--out", "/dev/full"), "is no plain file"),  # read for ever before
        (("--out", "."), "is no plain file"),
        (("--threads", "0"), "write 1 to"),
        (("--budget", "nan"), "write seconds above 0"),
        (("--index", "-1"), "write a number from 0"),
    ],
)
def test_arguments_that_cannot_be_are_a_line_and_no_traceback(campaign, arguments, message):
    done = script(campaign, "layers", "--device", "cpu", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_two_starts_do_not_measure_into_one_file(tmp_path):
    path = str(tmp_path / "results.jsonl")
    first = RecordFile(path)
    first.add({"record": "begin", "run": "a", "unit": 0})
    with pytest.raises(InputError, match="another start"):
        RecordFile(path)
    del first  # as when its process ends, however it ends
    RecordFile(path).add({"record": "begin", "run": "b", "unit": 0})
    assert [record["run"] for record in read_own_records(path)] == ["a", "b"]


def test_a_reason_cannot_write_to_the_terminal(tmp_path):
    failure = {"record": "failure", "run": "r1", "unit": 0, "reason": ESCAPE + "\nnothing missing"}
    end = {"record": "end", "run": "r1", "clocks": ESCAPE}
    report = merge((results(tmp_path / "r.jsonl", PROVENANCE, failure, end),), tmp_path / "s", None)
    assert report.added == 1
    texts = [each.reason for each in report.failures] + list(report.notes)
    assert len(texts) == 2
    assert all(text.isprintable() for text in texts)


def test_provenance_cannot_write_to_the_terminal(tmp_path):
    evil = replace(PROVENANCE, device_name=ESCAPE)
    report = merge((results(tmp_path / "r.jsonl", evil),), tmp_path / "s", None)
    assert report.added == 0
    assert report.refused[0].field == "device_name"
    (tmp_path / PROVENANCE_FILE).write_text(encode(evil, schema=SCHEMA))
    state = population_state(tmp_path)
    assert state.provenance is None
    assert [fault.field for fault in state.damage] == ["device_name"]


def test_brackets_in_a_name_are_no_markup(tmp_path):
    odd = replace(PROVENANCE, device_name="[/b] [red]x[/red]")
    merge((results(tmp_path / "r.jsonl", odd),), tmp_path / "s", None)
    assert "[/b] [red]x[/red]" in invoke("--list", "--store", tmp_path / "s").stdout


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("kinds", "script", "measure.py; touch owned"),
        ("kinds", "kind", "$(touch owned)"),
        ("links", "name", "`touch owned`"),
        ("links", "kinds", ["cpu", "-c\nowned"]),
    ],
)
def test_commands_of_a_changed_campaign_are_not_shown(campaign, tmp_path, part, key, value):
    data = json.loads((campaign / CAMPAIGN_FILE).read_text())
    data[part][0][key] = value
    path = tmp_path / CAMPAIGN_FILE
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="changed by hand"):
        load_campaign(path)


def test_no_name_of_a_campaign_is_code(tmp_path):
    for name in ('x"""; import os #', "a'+b", "$(touch owned)", "../../a", "a;b", "a b"):
        cluster = tmp_path / "cluster.yaml"
        cluster.write_text(
            "schema: hetplan.cluster/1\nname: n\nregions:\n  - name: r\n    islands:\n      - "
            + json.dumps({"name": name, "device": "cpu", "nodes": 1, "devices_per_node": 2})
        )
        with pytest.raises(InputError, match="use letters, digits"):
            invoke("--campaign", cluster, "--out", tmp_path / "out")
    assert not os.path.exists(tmp_path / "out")
