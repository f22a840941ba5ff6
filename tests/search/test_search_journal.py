"""A search that was cut off goes on from its journal as if it had never stopped."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from search_jobs import job, mixed, model

from hetplan.errors import InputError, LimitError
from hetplan.job.spec import Job
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import result_text
from hetplan.search.journal import JournalFile
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.search.solver import Best

PREDICTOR = FittedPredictor.datasheet_only()


def _find(asked: Job, path: Path | None = None, *, resume: bool = False) -> SearchResult:
    return search(
        model(8),
        mixed(),
        asked,
        PREDICTOR,
        journal=None if path is None else JournalFile(path, resume),
        sha256=(("predictor", "00ff"),),
    )


@pytest.fixture
def whole(tmp_path: Path) -> tuple[bytes, SearchResult]:
    """The journal and the result of a search that nobody stopped."""
    path = tmp_path / "whole.jsonl"
    result = _find(job(8, gap=0.01), path)
    return path.read_bytes(), result


def test_a_journal_cut_off_at_any_byte_gives_the_same_plan(
    whole: tuple[bytes, SearchResult], tmp_path: Path
) -> None:
    data, result = whole
    for cut in (7, len(data) // 3, 2 * len(data) // 3, len(data) - 1):
        path = tmp_path / "torn.jsonl"
        path.write_bytes(data[:cut])
        again = _find(job(8, gap=0.01), path, resume=True)
        assert result_text(again) == result_text(result)
        # What the resumed search wrote can be resumed once more.
        third = _find(job(8, gap=0.01), path, resume=True)
        assert result_text(third) == result_text(result)


def test_steps_on_record_are_not_computed_again(
    whole: tuple[bytes, SearchResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, result = whole
    path = tmp_path / "done.jsonl"
    path.write_bytes(data)

    def never(self: object, best: Best) -> None:
        raise AssertionError("this step is on record")

    monkeypatch.setattr("hetplan.search.one_f_one_b.solver.OneFOneBSolver.improve", never)
    monkeypatch.setattr("hetplan.search.one_f_one_b.solver.OneFOneBSolver.prove", never)
    assert result_text(_find(job(8, gap=0.01), path, resume=True)) == result_text(result)


def test_a_smaller_gap_goes_on_from_plans_and_bounds(
    whole: tuple[bytes, SearchResult], tmp_path: Path
) -> None:
    data, result = whole
    path = tmp_path / "smaller.jsonl"
    path.write_bytes(data)
    closer = _find(job(8, gap=0.001), path, resume=True)
    assert closer.estimate.step_seconds <= result.estimate.step_seconds * (1 + 1e-9)
    assert closer.certificate is not None
    assert closer.certificate.gap <= 0.001 + 1e-9


def test_a_search_without_time_gives_the_plan_on_record(
    whole: tuple[bytes, SearchResult], tmp_path: Path
) -> None:
    data, _ = whole
    path = tmp_path / "late.jsonl"
    lines = data.splitlines(keepends=True)
    first_offer = next(k for k, line in enumerate(lines) if b'"event": "offer"' in line)
    path.write_bytes(b"".join(lines[: first_offer + 1]))  # the step that found it never ended
    asked = replace(job(8, gap=0.01), time_limit_seconds=1e-6)
    found = _find(asked, path, resume=True)
    offered = json.loads(lines[first_offer])["seconds"]
    assert found.certificate is not None
    assert found.certificate.status == "limit"
    assert found.estimate.step_seconds == pytest.approx(offered)
    with pytest.raises(LimitError):
        _find(asked)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"no json\n" + data, "line of a journal"),
        (lambda data: data.replace(b'"event": "step"', b'"event": 3', 1), "event"),
        (lambda data: data.replace(b'"hetplan_version": "', b'"hetplan_version": "0.', 1), "0."),
        (lambda data: data.replace(b"hetplan.journal/2", b"hetplan.journal/1", 1), "older hetplan"),
        (lambda data: data.replace(b'["predictor", "00', b'["predictor", "11', 1), "predictor"),
    ],
)
def test_a_journal_of_something_else_is_refused(
    whole: tuple[bytes, SearchResult],
    tmp_path: Path,
    change,  # type: ignore[no-untyped-def]
    words: str,
) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(change(whole[0]))
    with pytest.raises(InputError, match=words) as error:
        _find(job(8, gap=0.01), path, resume=True)
    assert str(path) in str(error.value)


def _with(line: bytes, **values: object) -> bytes:
    return json.dumps({**json.loads(line), **values}).encode() + b"\n"


@pytest.mark.parametrize("seconds", [1e-9, 1e9, math.nan, None])
@pytest.mark.parametrize("which", [0, -1])
def test_an_offer_that_was_changed_by_hand_is_refused_with_its_line(
    whole: tuple[bytes, SearchResult], tmp_path: Path, seconds: float | None, which: int
) -> None:
    lines = whole[0].splitlines(keepends=True)
    offers = [at for at, line in enumerate(lines) if b'"event": "offer"' in line]
    at = offers[which]
    lines[at] = _with(lines[at], seconds=seconds)
    path = tmp_path / "changed.jsonl"
    path.write_bytes(b"".join(lines))
    if seconds == 1e9:
        # Nobody takes a plan that slow: the search finds it again.
        again = _find(job(8, gap=0.01), path, resume=True)
        assert again.estimate.step_seconds <= whole[1].estimate.step_seconds * 1.01
        return
    with pytest.raises(InputError, match="start again without --resume") as error:
        _find(job(8, gap=0.01), path, resume=True)
    assert f"{path}:{at + 1}" in str(error.value)


@pytest.mark.parametrize("event", ["bound", "step"])
def test_a_bound_below_nothing_is_refused_with_its_line(
    whole: tuple[bytes, SearchResult], tmp_path: Path, event: str
) -> None:
    lines = whole[0].splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if f'"event": "{event}"'.encode() in line)
    lines[at] = _with(lines[at], seconds=-1.0)
    path = tmp_path / "changed.jsonl"
    path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match="start again without --resume") as error:
        _find(job(8, gap=0.01), path, resume=True)
    assert f"{path}:{at + 1}" in str(error.value)


def test_another_job_is_refused(whole: tuple[bytes, SearchResult], tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(whole[0])
    with pytest.raises(InputError, match="another job"):
        _find(job(16, gap=0.01), path, resume=True)


def test_a_journal_apart_goes_on_from_its_own_file_before_the_other(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "journal", resume=True)
    journal.path.write_bytes(b"older\n")
    beside = journal.apart().path
    assert beside.read_bytes() == b"older\n"
    beside.write_bytes(b"newer\n")
    assert journal.apart().path.read_bytes() == b"newer\n"
    assert journal.path.read_bytes() == b"older\n"
