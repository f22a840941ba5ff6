"""Overlap against two resources that slow each other down, simulated with exact fractions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.spec import Link, Transport
from hetplan.cost.components.overlap import (
    ASSUMED_COMMUNICATION_SLOWDOWN,
    ASSUMED_COMPUTE_SLOWDOWN,
    Overlap,
    Slowdowns,
    beside,
    bucket_count,
    exposed_gathering,
    exposed_reduction,
    exposed_ring,
    gathering_of_chunks,
    in_buckets,
    not_overlapped,
    reduction_of_chunks,
    send_slowdowns,
    slowdowns,
)
from hetplan.errors import InputError

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


def reduction_jobs(reductions: list[Fraction], backward: list[Fraction]) -> list[OracleJob]:
    n = len(backward)
    return [OracleJob("compute", work, ()) for work in backward] + [
        OracleJob("communication", work, (at,)) for at, work in enumerate(reductions[:n])
    ]


def gathering_jobs(gatherings: list[Fraction], forward: list[Fraction]) -> list[OracleJob]:
    return [OracleJob("communication", work, ()) for work in gatherings] + [
        OracleJob("compute", work, (at,)) for at, work in enumerate(forward)
    ]


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


@settings(max_examples=300, deadline=None)
@given(parts=pieces, slow=slow)
def test_reduction_in_pieces_is_what_two_resources_do(parts, slow):
    reductions, backward = parts
    run = simulate(reduction_jobs(fractions(reductions), fractions(backward)), rates(slow))
    agrees(exposed_reduction(reductions, backward, slow), run, sum(backward))


@settings(max_examples=300, deadline=None)
@given(parts=pieces, slow=slow)
def test_gathering_in_pieces_is_what_two_resources_do(parts, slow):
    gatherings, forward = parts
    run = simulate(gathering_jobs(fractions(gatherings), fractions(forward)), rates(slow))
    agrees(exposed_gathering(gatherings, forward, slow), run, sum(forward))


@settings(max_examples=200, deadline=None)
@given(total=exact, compute=exact, buckets=st.integers(1, 12), slow=slow)
def test_equal_buckets_have_a_closed_form_for_both(total, compute, buckets, slow):
    found = in_buckets(total, compute, buckets, slow)
    each, beside_each = [total / buckets] * buckets, [compute / buckets] * buckets
    for replayed in (
        exposed_reduction(each, beside_each, slow),
        exposed_gathering(each, beside_each, slow),
    ):
        assert found.hidden_seconds == pytest.approx(replayed.hidden_seconds, rel=1e-9, abs=1e-9)
        assert found.added_seconds == pytest.approx(replayed.added_seconds, rel=1e-9, abs=1e-9)


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


@settings(max_examples=300, deadline=None)
@given(parts=pieces, slow=slow, faster=st.floats(0.01, 1))
def test_laws_of_all_forms(parts, slow, faster):
    communication, compute = parts
    total, work = sum(communication), sum(compute)

    def forms(scale: float):
        scaled = [each * scale for each in communication]
        return [
            exposed_reduction(scaled, compute, slow),
            exposed_gathering(scaled, compute, slow),
            in_buckets(total * scale, work, len(compute), slow),
            beside(total * scale, work, slow),
            exposed_ring(total * scale, work, 4, slow),
        ]

    for found, sooner in zip(forms(1.0), forms(faster), strict=True):
        assert 0 <= found.exposed_seconds <= total * (1 + 1e-12)
        assert found.hidden_seconds >= 0
        assert found.compute_delay_seconds >= 0
        assert found.exposed_seconds + found.hidden_seconds == pytest.approx(total, abs=1e-12)
        # More bandwidth is never slower.
        assert sooner.exposed_seconds <= found.exposed_seconds + 1e-9
        assert sooner.added_seconds <= found.added_seconds + 1e-9
        if slow.compute == 1:
            assert found.compute_delay_seconds == 0
        if 1 / slow.compute + 1 / slow.communication >= 1:
            # No worse than one after the other.
            assert found.added_seconds <= total + 1e-9


@given(total=exact, compute=exact, slow=slow)
def test_one_bucket_hides_nothing_and_more_hide_more(total, compute, slow):
    assert in_buckets(total, compute, 1, slow) == not_overlapped(total)
    hidden = [in_buckets(total, compute, n, slow).hidden_seconds for n in (1, 2, 4, 64)]
    assert hidden == sorted(hidden)
    assert in_buckets(total, 0.0, 8, slow) == not_overlapped(total)


def test_an_example_by_hand():
    # 6 s of communication in 3 buckets beside 3 s of compute; both take twice as long together.
    twice = Slowdowns(compute=2.0, communication=2.0)
    found = exposed_reduction([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], twice)
    # After 1 s both run for 4 s, in which two pieces of compute and 2 s of communication are done.
    assert (found.hidden_seconds, found.exposed_seconds) == (2.0, 4.0)
    assert found.compute_delay_seconds == 2.0
    assert found + not_overlapped(1.0) == Overlap(
        exposed_seconds=5.0, hidden_seconds=2.0, compute_delay_seconds=2.0
    )
    # The last bucket has nothing to hide behind, however fast the network.
    assert exposed_reduction([0.1, 0.1], [5.0, 5.0], Slowdowns()).exposed_seconds == 0.1


def test_unequal_numbers_of_pieces_are_refused():
    with pytest.raises(InputError, match="one for each gradients"):
        exposed_reduction([1.0], [1.0, 2.0], Slowdowns())
    with pytest.raises(InputError, match="at least 1"):
        Slowdowns(compute=0.5)
    assert exposed_reduction([], [], Slowdowns()) == not_overlapped(0.0)
    assert exposed_ring(3.0, 5.0, 1, Slowdowns()) == not_overlapped(0.0)


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


def test_sends_without_compute_units_slow_nothing():
    free = beside(2.0, 10.0, send_slowdowns(A100, LINK))
    assert (free.exposed_seconds, free.hidden_seconds, free.compute_delay_seconds) == (0, 2, 0)
    assert send_slowdowns(A100, LINK) == Slowdowns()
    tenth = replace(LINK, compute_share=0.1)
    measured = replace(A100, overlap_communication_slowdown=1.0)
    taxed = beside(2.0, 10.0, send_slowdowns(measured, tenth))
    # For 2 s the compute has nine tenths of its units.
    assert taxed.compute_delay_seconds == pytest.approx(0.2)
    assert taxed.exposed_seconds == 0
    assert send_slowdowns(measured, tenth).notes == ()
    assert len(send_slowdowns(A100, tenth).notes) == 1


def test_buckets_of_megatron():
    assert bucket_count(1e9, 8) == 25
    assert bucket_count(1e9, 100) == 10
    assert bucket_count(1.0, 8) == 1
    assert bucket_count(0.0, 8) == 1
