"""Which demands cannot hold together, and what would help."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.load import load_cluster
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Pins
from hetplan.model.load import load_model
from hetplan.search.result import Question
from hetplan.whatif.conflict import Constraint, constraints, find_conflict


def _asked() -> Question:
    configs = shipped_folder("configs")
    return Question(
        model=load_model(configs / "models" / "llama-2-7b.yaml"),
        cluster=load_cluster(configs / "clusters" / "two-regions.yaml"),
        job=load_job(configs / "jobs" / "llama-2-7b.yaml"),
    )


class _Marked:
    """Demands by number: which are kept is written into the job's seed as bits."""

    def __init__(self, count: int) -> None:
        self.asked = replace(_asked(), job=replace(_asked().job, seed=2**count - 1))
        self.every = [Constraint(words=str(n), without=self._without(n)) for n in range(count)]

    @staticmethod
    def _without(number: int):  # type: ignore[no-untyped-def]
        def change(asked: Question) -> Question:
            return replace(asked, job=replace(asked.job, seed=asked.job.seed & ~(1 << number)))

        return change


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_conflict_is_in_conflict_and_nothing_of_it_can_go(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    conflicts = data.draw(
        st.lists(st.sets(st.integers(0, count - 1), min_size=1, max_size=4), min_size=1, max_size=4)
    )
    marked = _Marked(count)

    def feasible(asked: Question) -> bool:
        kept = {n for n in range(count) if asked.job.seed >> n & 1}
        return not any(conflict <= kept for conflict in conflicts)

    found = find_conflict(marked.asked, marked.every, feasible)
    numbers = {int(each.words) for each in found.constraints}
    assert any(conflict <= numbers for conflict in conflicts)
    for part in combinations(numbers, len(numbers) - 1):
        assert not any(conflict <= set(part) for conflict in conflicts)
    if found.smallest:
        assert len(numbers) == min(map(len, conflicts))


def test_every_demand_of_a_job_is_named_and_can_go() -> None:
    asked = _asked()
    job = replace(
        asked.job,
        pin=Pins(tp=2, recompute=False),
        forbid=replace(asked.job.forbid, islands=(asked.cluster.islands[0].name,)),
    )
    asked = replace(asked, job=job)
    found = constraints(asked)
    words = [each.words for each in found]
    assert "pin tp: 2" in words
    assert "pin recompute: false" in words
    assert f"forbid islands: {asked.cluster.islands[0].name}" in words
    free = asked
    for each in found:
        changed = each.without(free)
        # A batch that everything divides is no demand.
        assert changed != free or each.words.startswith("global_batch_size"), each.words
        free = changed
    assert free.job.pin == Pins()
    assert free.job.forbid.islands == ()
