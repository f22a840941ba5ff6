"""What comes back from a campaign: whole, torn, edited, repeated, of another campaign, garbage."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiling_samples import LAYER, LINK, PROVENANCE, layer

from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.profiling.campaign import CAMPAIGN_FILE, SCHEMA
from hetplan.profiling.campaign_rows import SCHEMA as RESULTS
from hetplan.profiling.campaign_rows import record_line
from hetplan.profiling.campaign_values import Campaign
from hetplan.profiling.merge import merge, result_files
from hetplan.profiling.store import read_populations, read_store

TOOL = replace(PROVENANCE, tool="hetplan campaign")


def begin(name="r1", provenance=TOOL, **changes) -> dict:
    return {
        "record": "run", "schema": RESULTS, "campaign": "c1", "run": name, "kind": "cpu",
        "link": "", "provenance": asdict(provenance), **changes,
    }  # fmt: skip


def measured(number, sample=LAYER, name="r1", what="layer", **changes) -> dict:
    values = {**asdict(sample), "measured_on": "2026-01-02", **changes}
    return {"record": what, "run": name, "number": number, "sample": values}


def written(path, *records) -> bytes:
    data = "".join(record_line(record) + "\n" for record in records).encode()
    path.write_bytes(data)
    return data


def merged(tmp_path, campaign=None):
    files, _ = result_files([tmp_path])
    return merge(files, tmp_path / "store", campaign)


def test_runs_of_other_clocks_are_kept_apart_and_repeats_are_kept(tmp_path) -> None:
    slow = replace(TOOL, clocks="sm 1410 MHz")
    written(
        tmp_path / "a.jsonl",
        begin(),
        measured(1),
        measured(2, median_seconds=0.0011),
        measured(3, LINK, what="link"),
        {"record": "end", "run": "r1", "clocks": "sm 1410 MHz"},
    )
    written(tmp_path / "b.jsonl", begin("r2", slow), measured(1, name="r2"))
    report = merged(tmp_path)
    assert (report.added, report.held, report.refused) == (4, 0, ())
    assert any("several clocks" in note for note in report.notes)
    assert any("changed during run r1" in note for note in report.notes)
    found = {each.provenance[0].clocks: each for each in read_populations(tmp_path / "store")}
    assert len(read_populations(tmp_path / "store")) == 3
    assert len(found["sm 1410 MHz"].layers) == 1
    assert {row.measured_on for row in read_store(tmp_path / "store").layers} == {"2026-01-02"}


def test_the_same_file_twice_adds_nothing(tmp_path) -> None:
    data = written(tmp_path / "a.jsonl", begin(), measured(1), measured(2, layer(tp=2)))
    (tmp_path / "copy.jsonl").write_bytes(data)
    (tmp_path / "twice.jsonl").write_bytes(data + data)
    report = merged(tmp_path)
    assert (report.added, report.held) == (2, 0)
    assert any("counted once" in note for note in report.notes)
    assert (merged(tmp_path).added, merged(tmp_path).held) == (0, 2)


def test_an_edited_number_is_refused_with_its_line_and_the_rest_is_kept(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    data = written(path, begin(), measured(1), measured(2, layer(tp=2)))
    path.write_bytes(data.replace(b'"median_seconds": 0.001,', b'"median_seconds": 0.0005,', 1))
    report = merged(tmp_path)
    assert report.added == 1
    (fault,) = report.refused
    assert (fault.line, "checksum" in fault.message) == (2, True)


def test_a_torn_end_is_refused_and_the_rest_is_kept(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    data = written(path, begin(), measured(1), measured(2, layer(tp=2)))
    path.write_bytes(data[:-40])
    report = merged(tmp_path)
    assert report.added == 1
    assert [fault.line for fault in report.refused] == [3]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (measured(2, median_seconds=-1.0), "median_seconds"),
        (measured(2, median_seconds="fast"), "median_seconds"),
        (measured(2, repeats=10**400), "repeats"),
        (measured(2, device="gpu"), "device"),
        (measured(2, colour="red"), "colour"),
        (measured(2, device={"a": 1}), "device"),
        (measured("2"), "number"),
        (measured(2, name="r9"), "first line"),
        ({"record": "joke", "run": "r1"}, "newer hetplan"),
        (begin("r2", kind="gpu"), "device kind"),
        (begin("r3", provenance=replace(TOOL, device="gpu")), "device kind"),
        ({**begin("r4"), "provenance": {"device": 3}}, "device"),
        ({**begin("r5"), "provenance": None}, "mapping"),
    ],
)
def test_records_that_say_what_cannot_be_are_refused(tmp_path, record, text) -> None:
    written(tmp_path / "a.jsonl", begin(), measured(1), record)
    report = merged(tmp_path)
    assert report.added == 1
    assert {fault.line for fault in report.refused} == {3}
    assert any(text in str(fault) for fault in report.refused)


def test_results_of_another_campaign_stop_the_merge(tmp_path) -> None:
    campaign = Campaign(campaign="c2", cluster="c", model="", job="", kinds=(), links=())
    (tmp_path / CAMPAIGN_FILE).write_text(encode(campaign, schema=SCHEMA))
    written(tmp_path / "a.jsonl", begin(campaign="c2"), measured(1))
    written(tmp_path / "b.jsonl", begin("r2"), measured(1, name="r2"))
    files, found = result_files([tmp_path])
    assert found == campaign
    with pytest.raises(InputError, match="the campaign here is c2"):
        merge(files, tmp_path / "store", found)
    assert not (tmp_path / "store").exists()
    assert merge([tmp_path / "a.jsonl"], tmp_path / "store", found).added == 1


@pytest.mark.parametrize("data", [b"", b"\n\n", b"hello\n", b"\xff\xfe\0\n", b"[" * 5000 + b"\n"])
def test_files_that_are_no_results_are_refused(tmp_path, data) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.jsonl"):
        merged(tmp_path)


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 40), st.binary(max_size=8)),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_is_changed_only_rows_that_were_measured_are_added(tmp_path, cuts) -> None:
    path = tmp_path / "a.jsonl"
    data = written(
        path, begin(), measured(1), measured(2, layer(tp=2)), measured(3, LINK, what="link")
    )
    whole = {line.strip() for line in data.splitlines()}
    for at, length, new in cuts:
        at %= len(data) + 1
        data = data[:at] + new + data[at + length :]
    path.write_bytes(data)
    store = tmp_path / f"store-{abs(hash(data))}"
    try:
        report = merge([path], store, None)
    except InputError:
        return
    rows = {line.strip() for line in data.splitlines()} & whole
    assert report.added <= len(rows)
    if report.added:
        found = read_store(store)
        times = {sample.median_seconds for sample in (*found.layers, *found.links)}
        assert times <= {LAYER.median_seconds, LINK.median_seconds}


def test_a_link_that_the_library_lacks_is_a_failure(tmp_path) -> None:
    failure = {
        "record": "failure", "run": "r1", "link": "wire", "operation": "all_gather",
        "reason": "no support",
    }  # fmt: skip
    written(tmp_path / "a.jsonl", begin(link="wire"), failure, failure)
    (found,) = merged(tmp_path).failures
    assert (found.link, found.operation, found.unit) == ("wire", "all_gather", -1)
    assert json.loads(encode(found, schema="x/1"))["reason"] == "no support"
