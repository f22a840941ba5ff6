"""A plan file is accepted as it was written, and refused when anything in it was changed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import changed, leaves
from plan_files import write_sealed
from search_jobs import cluster, island, job, model

from hetplan.cost.estimate import estimate
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError, OutOfTimeError
from hetplan.files.encoding import encode
from hetplan.job.spec import Job
from hetplan.predict.fit import FittedPredictor
from hetplan.proof import verify as verify_module
from hetplan.proof.verify import Verification, verify
from hetplan.search.files import result_text, save_result
from hetplan.search.result import SearchResult
from hetplan.search.search import search

PREDICTOR = FittedPredictor.datasheet_only()
TARGETS = ("flagscale", "megatron", "native", "torchtitan")


@lru_cache
def _result(trainer: str) -> SearchResult:
    slow = island("slow", kind="old", teraflops=40.0, nodes=1, per_node=2)
    quick = island("quick", kind="new", teraflops=120.0, nodes=2, per_node=2)
    asked: Job = replace(job(8, gap=0.05), target=trainer)
    sources = (("predictor", "00ff"),)
    return search(model(8), cluster(slow, quick), asked, PREDICTOR, sha256=sources)


def _file(folder: Path, trainer: str = "flagscale") -> Path:
    path = folder / "plan.json"
    save_result(_result(trainer), path)
    return path


def _verified(path: Path, **options: Any) -> Verification:
    return verify(path, PREDICTOR, "00ff", **options)


@pytest.mark.parametrize(
    "trainer",
    [pytest.param(each, marks=pytest.mark.slow) if each == "native" else each for each in TARGETS],
)
def test_a_plan_is_accepted_as_it_was_written(trainer: str, tmp_path: Path) -> None:
    result = _result(trainer)
    found = _verified(_file(tmp_path, trainer))
    certificate = result.certificate
    assert certificate is not None
    assert found.sealed
    assert found.not_checked == ()
    assert found.step_seconds == result.estimate.step_seconds
    bound = found.bound
    assert bound is not None
    assert bound.claimed_seconds == certificate.lower_bound_seconds
    assert 0.3 * bound.claimed_seconds <= bound.shown_seconds <= bound.claimed_seconds
    singles = [each for each in bound.unshown if each.plans != "several pipelines"]
    counted = bound.without_room + bound.by_closed_form + bound.by_orders + len(singles)
    assert counted == bound.families
    # More of it is not shown only where less was proven than asked.
    assert (bound.shown_seconds < bound.claimed_seconds) == bool(bound.unshown)


def test_a_plan_on_devices_of_unlike_speed_is_accepted(tmp_path: Path) -> None:
    """Its step has a wait for the slowest ranks that no replay has."""
    spread = replace(island("quick", nodes=2, per_node=2), speed_spread=0.05)
    slow = replace(island("slow", kind="old", teraflops=60.0, nodes=1, per_node=2))
    asked = replace(job(8, gap=0.05), pin=replace(job(8).pin, pp=3))
    result = search(model(8), cluster(spread, slow), asked, PREDICTOR)
    pricer = Pricer(result.inputs.model, result.inputs.cluster, asked, PREDICTOR)
    assert pricer.step(result.plan).step_seconds < result.estimate.step_seconds
    path = tmp_path / "plan.json"
    save_result(result, path)
    assert _verified(path).step_seconds == result.estimate.step_seconds


def test_what_no_time_was_left_for_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, "megatron")
    whole = _verified(path)

    def over() -> None:
        raise OutOfTimeError

    monkeypatch.setattr(verify_module, "check_time", over)
    found = _verified(path)
    assert found.step_seconds == whole.step_seconds
    assert found.bound is not None
    assert found.bound.looked_at == found.bound.shown_seconds == 0
    assert [words.endswith("for the time limit") for words in found.not_checked] == [True]


def test_a_sample_says_what_it_left_out(tmp_path: Path) -> None:
    found = _verified(_file(tmp_path, "megatron"), sample=5)
    assert found.bound is not None
    assert found.bound.without_room + found.bound.by_closed_form == 5
    assert found.bound.looked_at == 5 + found.bound.by_orders + len(found.bound.unshown)
    left = found.bound.families - found.bound.looked_at
    assert found.not_checked == (f"{left:,} families outside the sample",)


CHANGES: tuple[tuple[tuple[str | int, ...], Any, str], ...] = (
    (("estimate", "step_seconds"), 1e-3, "estimate.tokens_per_second"),
    (("estimate", "p95_seconds"), 1e-3, "estimate.p95_seconds"),
    (("certificate", "lower_bound_seconds"), 1e9, "certificate.lower_bound_seconds"),
    (("certificate", "gap"), 0.5, "certificate.gap"),
    (("certificate", "proof", "families"), 3, "certificate.proof"),
    (("certificate", "proof", "families_sha256"), "0" * 64, "certificate.proof"),
    (("certificate", "proof", "raised"), [], "certificate.lower_bound_seconds"),
    (("certificate", "proof", "raised", 0, "family"), 10**6, "certificate.proof.raised[0]"),
    (("certificate", "proof", "raised", 0, "plans"), "others", "certificate.proof.raised[0]"),
    (("certificate", "proof", "raised", 0, "bound_seconds"), 1e-9, "certificate.proof.raised[0]"),
    (("certificate", "proof", "raised", 0, "grounds"), "x\x1b[2J", "certificate.proof.raised[0]"),
    (("certificate", "status"), "best", "certificate.status"),
    (("plan", "pipelines", 0, "num_microbatches"), 3, "plan"),
    (("inputs", "job", "global_batch_size"), 16, ""),
    (("inputs", "cluster", "islands", 0, "nodes"), 2, ""),
)


@pytest.mark.parametrize(("place", "value", "field"), CHANGES)
def test_a_change_that_is_sealed_again_is_refused_for_what_it_is(
    place: tuple[str | int, ...], value: Any, field: str, tmp_path: Path
) -> None:
    """The seal tells a change by hand; whoever makes a new one meets the proof itself."""
    path = _file(tmp_path)
    data = json.loads(path.read_text())
    holder = data
    for step in place[:-1]:
        holder = holder[step]
    assert holder[place[-1]] != value
    holder[place[-1]] = value
    write_sealed(path, data)
    with pytest.raises(InputError) as refused:
        _verified(path)
    assert any(fault.field.startswith(field) for fault in refused.value.faults)


def test_a_higher_bound_is_refused_though_all_its_arithmetic_is_right(tmp_path: Path) -> None:
    result = _result("flagscale")
    certificate = result.certificate
    assert certificate is not None
    assert certificate.proof is not None
    step = result.estimate.step_seconds
    claimed = replace(certificate, lower_bound_seconds=step, gap=0.0)
    raised = tuple(replace(each, bound_seconds=None) for each in certificate.proof.raised[1:])
    path = tmp_path / "plan.json"
    proof = replace(certificate.proof, raised=raised)
    save_result(replace(result, certificate=replace(claimed, proof=proof)), path)
    with pytest.raises(InputError, match="the proof does not name a family"):
        _verified(path)
    # Naming it does not help: what is not shown is said, and the gap with it.
    every = tuple(replace(each, bound_seconds=step) for each in certificate.proof.raised)
    proof = replace(certificate.proof, raised=every)
    save_result(replace(result, certificate=replace(claimed, proof=proof)), path)
    bound = _verified(path).bound
    assert bound is not None
    assert bound.unshown
    assert bound.shown_seconds < step


def test_several_pipelines_are_not_forgotten_where_the_file_says_nothing(tmp_path: Path) -> None:
    """The pin that left them out can be taken out of the file."""
    asked = replace(job(8, gap=0.2), target="native")
    two = cluster(island("slow", kind="old", teraflops=40.0), island("quick"))
    alone = replace(asked, pin=replace(asked.pin, pipelines=1))
    result = search(model(4), two, alone, PREDICTOR)
    free = replace(result, inputs=replace(result.inputs, job=asked))
    path = tmp_path / "plan.json"
    save_result(free, path)
    bound = _verified(path).bound
    assert bound is not None
    assert "several pipelines" in [each.plans for each in bound.unshown]


def _refused(data: Any, path: Path) -> bool:
    path.write_text(json.dumps(data))
    try:
        _verified(path)
    except InputError:
        return True
    return False


def _mutations(count: int, path: Path, trainer: str, seed: int) -> tuple[int, int]:
    """(changed files, of them refused)."""
    data = json.loads(_file(path.parent, trainer).read_text())
    places, random = list(leaves(data)), np.random.default_rng(seed)
    tried = refused = 0
    while tried < count:
        mutated = changed(data, places[int(random.integers(len(places)))], random)
        if mutated != data:
            tried += 1
            refused += _refused(mutated, path)
    return tried, refused


def test_changed_files_are_refused(tmp_path: Path) -> None:
    tried, refused = _mutations(20, tmp_path / "changed.json", "flagscale", 1)
    assert refused == tried


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TARGETS)
def test_every_one_of_a_thousand_changed_files_is_refused(trainer: str, tmp_path: Path) -> None:
    tried, refused = _mutations(250, tmp_path / "changed.json", trainer, 2)
    assert refused == tried == 250


def test_a_file_of_an_older_form_is_verified_as_far_as_it_goes(tmp_path: Path) -> None:
    data = json.loads(_file(tmp_path).read_text())
    data["schema"] = "hetplan.plan/8"
    del data["seal"], data["certificate"]["proof"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(data))
    found = _verified(path)
    assert not found.sealed
    assert found.bound is None
    assert len(found.not_checked) == 2
    # An older number is no way around the seal of a file that has one.
    data = json.loads(_file(tmp_path).read_text()) | {"schema": "hetplan.plan/8"}
    assert _refused(data, path)


def test_a_layout_that_was_given_has_no_bound(tmp_path: Path) -> None:
    result = replace(_result("flagscale"), certificate=None)
    path = tmp_path / "plan.json"
    save_result(result, path)
    found = _verified(path)
    assert found.bound is None
    assert found.not_checked == ("that no plan is faster: the layout was given, not searched",)


def test_other_profiles_are_told_from_a_wrong_price(tmp_path: Path) -> None:
    result = _result("flagscale")
    inputs, plan = result.inputs, result.plan
    other = replace(inputs.cluster.islands[1], memory_bytes=8e9)
    slower = replace(other.device, memory_bandwidth_bytes_per_second=1e11)
    changed_cluster = replace(
        inputs.cluster, islands=(inputs.cluster.islands[0], replace(other, device=slower))
    )
    priced = estimate(plan, inputs.model, changed_cluster, inputs.job, PREDICTOR)
    path = tmp_path / "plan.json"
    assert result.certificate is not None
    gap = 1.0 - result.certificate.lower_bound_seconds / priced.step_seconds
    claimed = replace(result.certificate, gap=gap, status="limit")
    save_result(replace(result, estimate=priced, certificate=claimed), path)
    with pytest.raises(InputError) as refused:
        verify(path, PREDICTOR, "1234")
    assert [fault.field for fault in refused.value.faults] == ["inputs.sha256"]
    with pytest.raises(InputError) as refused:
        verify(path, PREDICTOR, "00ff")
    assert all(fault.field != "inputs.sha256" for fault in refused.value.faults)


def test_profiles_that_nobody_names_are_not_called_others(tmp_path: Path) -> None:
    path = _file(tmp_path)
    assert verify(path, PREDICTOR).not_checked == ()
    assert verify(path, PREDICTOR, "1234").not_checked != ()


def test_a_seal_is_of_the_whole_file(tmp_path: Path) -> None:
    result = _result("flagscale")
    text = result_text(result)
    assert text == result_text(replace(result, seal="anything"))
    assert json.loads(text)["seal"] != json.loads(result_text(replace(result, seed=7)))["seal"]
    assert encode(_verified(_file(tmp_path)), schema="hetplan.verification/1").endswith("}\n")
