"""Overlap against two resources that slow each other down, simulated with exact fractions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.spec import Link, Transport
from hetplan.cost.step_model.overlap import (
    ASSUMED_COMMUNICATION_SLOWDOWN,
    ASSUMED_COMPUTE_SLOWDOWN,
    Overlap,
    Slowdowns,
    beside,
    bucket_count,
    exposed_ring,
    gathering_of_chunks,
    in_buckets,
    least_added,
    reduction_of_chunks,
    slowdowns,
)

A100 = next(kind for kind in load_catalogue() if kind.kind == "nvidia-a100-80gb-sxm")
LINK = Link(
    bandwidth_bytes_per_second=25e9, latency_seconds=5e-6, transport=Transport.DEVICE_DIRECT
)


@dataclass
class OracleJob:
    resource: str  # compute, communication
    work: Fraction
    after: tuple[int, ...]
    left: Fraction = field(default=Fraction(0))
    done: bool = False


@dataclass
class OracleRun:
    elapsed: Fraction = Fraction(0)
    only_communication: Fraction = Fraction(0)
    hidden_work: Fraction = Fraction(0)


def simulate(jobs: list[OracleJob], slow: dict[str, Fraction]) -> OracleRun:
    """Each resource works on its first unfinished job, in list order, as soon as it may."""
    for job in jobs:
        job.left = job.work
    run = OracleRun()
    while not all(job.done for job in jobs):
        running: dict[str, OracleJob] = {}
        for resource in ("compute", "communication"):
            first = next((j for j in jobs if j.resource == resource and not j.done), None)
            if first is not None and all(jobs[at].done for at in first.after):
                running[resource] = first
        assert running, "nothing can run"
        together = len(running) == 2
        rate = {r: 1 / slow[r] if together else Fraction(1) for r in running}
        step = min(job.left / rate[r] for r, job in running.items())
        run.elapsed += step
        if together:
            run.hidden_work += step * rate["communication"]
        elif "communication" in running:
            run.only_communication += step
        for resource, job in running.items():
            job.left -= step * rate[resource]
            job.done = job.left == 0
    return run


# Multiples of 1/64: exact both as floats and as fractions.
exact = st.integers(0, 640).map(lambda n: n / 64)
factor = st.integers(64, 160).map(lambda n: n / 64)
slow = st.builds(Slowdowns, compute=factor, communication=factor)
pieces = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(exact, min_size=n, max_size=n), st.lists(exact, min_size=n, max_size=n)
    )
)


def rates(found: Slowdowns) -> dict[str, Fraction]:
    return {
        "compute": Fraction(found.compute),
        "communication": Fraction(found.communication),
    }


def fractions(values: list[float]) -> list[Fraction]:
    return [Fraction(value) for value in values]


def agrees(found: Overlap, run, compute: float) -> None:
    close = {"rel": 1e-9, "abs": 1e-9}
    assert found.hidden_seconds == pytest.approx(float(run.hidden_work), **close)
    assert found.exposed_seconds == pytest.approx(float(run.only_communication), **close)
    assert compute + found.added_seconds == pytest.approx(float(run.elapsed), **close)


@settings(max_examples=200, deadline=None)
@given(total=exact, compute=exact, buckets=st.integers(1, 12), slow=slow)
def test_equal_buckets_have_a_closed_form_for_both(total, compute, buckets, slow):
    found = in_buckets(total, compute, buckets, slow)
    for form in (reduction_of_chunks, gathering_of_chunks):
        replayed = form([total], [compute], slow, buckets=buckets, microbatches_per_group=1)
        assert found.hidden_seconds == pytest.approx(replayed.hidden_seconds, rel=1e-9, abs=1e-9)
        assert found.added_seconds == pytest.approx(replayed.added_seconds, rel=1e-9, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(total=exact, compute=exact, buckets=st.integers(1, 12), more=factor, slow=slow)
def test_no_less_is_added_with_less_compute_and_fewer_buckets(total, compute, buckets, more, slow):
    def least(seconds, pieces):
        given = (np.array([total]), np.array([seconds]), np.array([pieces]))
        return float(least_added(*given, slow)[0])

    added = in_buckets(total, compute, buckets, slow).added_seconds
    if slow.communication * (1 - 1 / slow.compute) <= 1:
        assert least(compute, buckets) == pytest.approx(added, rel=1e-9, abs=1e-9)
    else:
        assert least(compute, buckets) == pytest.approx(total)
    assert least(compute * more, buckets) <= added + 1e-9
    assert least(compute, np.inf) <= added + 1e-9


@settings(max_examples=200, deadline=None)
@given(chunks=pieces, buckets=st.integers(1, 5), group=st.integers(1, 6), slow=slow)
def test_chunks_hide_no_more_than_a_group_of_longest_passes(chunks, buckets, group, slow):
    sent, passes = chunks
    turns = group * sum(passes)
    least = least_added(np.array([sum(sent)]), np.array([turns]), np.array([np.inf]), slow)
    for form in (reduction_of_chunks, gathering_of_chunks):
        found = form(sent, passes, slow, buckets=buckets, microbatches_per_group=group)
        assert float(least[0]) <= found.added_seconds + 1e-9


@settings(max_examples=200, deadline=None)
@given(total=exact, compute=exact, slow=slow)
def test_what_starts_together_is_what_two_resources_do(total, compute, slow):
    jobs = [
        OracleJob("compute", Fraction(compute), ()),
        OracleJob("communication", Fraction(total), ()),
    ]
    agrees(beside(total, compute, slow), simulate(jobs, rates(slow)), compute)


@settings(max_examples=200, deadline=None)
@given(transfers=exact, compute=exact, ranks=st.integers(2, 8), slow=slow)
def test_a_ring_hides_a_transfer_behind_each_block_but_the_last(transfers, compute, ranks, slow):
    each, block = Fraction(transfers) / (ranks - 1), Fraction(compute) / ranks
    # Block i + 1 needs transfer i; transfers follow each other.
    jobs = [OracleJob("communication", each, ()) for _ in range(ranks - 1)]
    jobs += [OracleJob("compute", block, () if at == 0 else (at - 1,)) for at in range(ranks)]
    agrees(exposed_ring(transfers, compute, ranks, slow), simulate(jobs, rates(slow)), compute)


@settings(max_examples=150, deadline=None)
@given(
    parts=pieces,
    slow=slow,
    buckets=st.sampled_from([1, 2, 4]),
    group=st.integers(1, 5),
    gathering=st.booleans(),
)
def test_chunks_hide_behind_whole_groups_of_microbatches(parts, slow, buckets, group, gathering):
    communication, compute = parts
    # Every pass of every microbatch of the group is a job of its own here.
    jobs: list[OracleJob] = []
    for total, once in zip(fractions(communication), fractions(compute), strict=True):
        others = [OracleJob("compute", once, ()) for _ in range(group - 1)]
        if not gathering:
            jobs += others
        for _ in range(buckets):
            transfer = OracleJob("communication", total / buckets, ())
            piece = OracleJob("compute", once / buckets, ())
            if gathering:
                jobs += [transfer, replace(piece, after=(len(jobs),))]
            else:
                jobs += [piece, replace(transfer, after=(len(jobs),))]
        if gathering:
            jobs += others
    run = simulate(jobs, rates(slow))
    form = gathering_of_chunks if gathering else reduction_of_chunks
    found = form(communication, compute, slow, buckets=buckets, microbatches_per_group=group)
    agrees(found, run, group * sum(compute))
    # More microbatches in a group hide no less.
    more = form(communication, compute, slow, buckets=buckets, microbatches_per_group=group + 1)
    assert more.hidden_seconds >= found.hidden_seconds - 1e-9


def test_slowdowns_come_from_the_device_then_the_link_then_an_assumption():
    assumed = slowdowns(A100)
    assert assumed.communication == ASSUMED_COMMUNICATION_SLOWDOWN
    assert assumed.compute == ASSUMED_COMPUTE_SLOWDOWN
    assert len(assumed.notes) == 2
    assert all(note.startswith("nvidia-a100-80gb-sxm: assumed that") for note in assumed.notes)
    quarter = replace(LINK, compute_share=0.25)
    shared = slowdowns(A100, quarter)
    assert shared.compute == pytest.approx(4 / 3)
    assert len(shared.notes) == 1
    measured = replace(A100, overlap_compute_slowdown=1.05, overlap_communication_slowdown=1.2)
    assert slowdowns(measured, quarter) == Slowdowns(compute=1.05, communication=1.2)


def test_buckets_of_megatron():
    assert bucket_count(1e9, 8) == 25
    assert bucket_count(1e9, 100) == 10
    assert bucket_count(1.0, 8) == 1
    assert bucket_count(0.0, 8) == 1
