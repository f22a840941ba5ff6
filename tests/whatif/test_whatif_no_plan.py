"""Jobs without a plan: what cannot hold together, and changes that were found to help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from search_jobs import cluster, island, job, model
from sweep_files import plan_command, sweep_files

from hetplan.cluster import libraries
from hetplan.cluster.devices import HostInterface
from hetplan.cluster.libraries import AS_NCCL
from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import InfeasibleError
from hetplan.job.spec import Forbids, Job, Pins
from hetplan.library.verbs import plan
from hetplan.model.spec import ModelSpec
from hetplan.plans.check import check_plan
from hetplan.predict.fit import FittedPredictor
from hetplan.schedulers.vendors import vendor_of
from hetplan.search.result import Question
from hetplan.search.search import search
from hetplan.whatif import no_plan
from hetplan.whatif.ask import Change
from hetplan.whatif.conflict import Feasible, constraints, find_conflict
from hetplan.whatif.memory_shortage import room_lines
from hetplan.whatif.no_plan import relaxations

_PREDICTOR = FittedPredictor.datasheet_only()


def two(**first: object) -> Cluster:
    return cluster(
        replace(island("a", nodes=2), **first),  # type: ignore[arg-type]
        island("b", kind="other", teraflops=60, nodes=2),
    )


def small(gigabytes: float, nodes: int = 2) -> Cluster:
    return cluster(island("small", gigabytes=gigabytes, nodes=nodes))


def of_two_makers(gigabytes: float) -> Cluster:
    islands = [
        island(name, kind=f"k{name}", nodes=1, gigabytes=gigabytes, teraflops=100.0)
        for name in ("nvidia", "amd")
    ]
    return cluster(
        *(replace(each, device=replace(each.device, vendor=each.name)) for each in islands)
    )


CASES: dict[str, tuple[ModelSpec, Cluster, Job, str]] = {
    "memory": (model(8), small(0.35), job(4), "devices: 2 of small | memory of fast: 333.8 MiB"),
    "recompute": (
        model(3),
        small(1.45, nodes=1),
        replace(job(4), pin=Pins(recompute=False, microbatch_size=4)),
        "pin microbatch_size: 4 | pin recompute: false",
    ),
    "one stage": (
        model(8),
        cluster(island("tight", gigabytes=1.1, nodes=4, per_node=2)),
        replace(job(4), pin=Pins(tp=1, cp=1, pp=1, dp=1)),
        "pin dp: 1 | pin pp: 1 | pin cp: 1 | memory_reserve_fraction: 0.1 | memory of fast",
    ),
    "divisibility": (
        model(6),
        two(),
        replace(job(7), pin=Pins(dp=2)),
        "pin dp: 2 | target: megatron | global_batch_size: 7",
    ),
    "ends": (
        model(6),
        two(),
        replace(job(4), pin=Pins(embedding_on="a", head_on="b", pp=1)),
        "pin pp: 1 | pin embedding_on: a | pin head_on: b",
    ),
    "all nodes forbidden": (
        model(6),
        two(),
        replace(job(4), forbid=Forbids(nodes=("a/0", "a/1", "b/0", "b/1"))),
        "forbid nodes: a/0, a/1, b/0, b/1 | devices: 2 of a + 2 of b",
    ),
    "forbidden island": (
        model(6),
        cluster(island("a", nodes=1, gigabytes=0.6), island("b", kind="other")),
        replace(job(4), forbid=Forbids(islands=("b",))),
        "forbid islands: b | devices: 1 of a + 2 of b | memory of fast: 572.2 MiB",
    ),
    "target": (
        model(6),
        two(),
        replace(job(4, target="torchtitan"), pin=Pins(pp=3, microbatch_size=2)),
        "pin microbatch_size: 2 | pin pp: 3 | target: torchtitan | global_batch_size: 4",
    ),
    "library": (
        model(8),
        of_two_makers(1.5),
        replace(job(2), pin=Pins(recompute=True)),
        "one library of collectives, of nccl, rccl | target: megatron | devices: 1 of nvidia",
    ),
}


def asked_of(name: str) -> tuple[Question, tuple[str, ...]]:
    of, there, wanted, words = CASES[name]
    question = Question(model=of, cluster=there, job=replace(wanted, gap=0.2))
    return question, tuple(words.split(" | "))


def has_plan(asked: Question) -> bool:
    """By the search itself, which must also give a legal plan that fits."""
    try:
        found = search(asked.model, asked.cluster, asked.job, _PREDICTOR)
    except InfeasibleError:
        return False
    assert check_plan(found.plan, asked.model, asked.cluster, asked.job) == ()
    assert found.estimate.fits
    return True


def test_changes_that_no_time_was_left_for_are_not_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_plan, "_SECONDS", 0.0)
    asked = Question(model=model(8), cluster=small(0.35), job=job(4))
    *_, last = no_plan.why_no_plan(asked, _PREDICTOR)
    assert last.startswith("memory allows these, and no plan was found in time: ")
    assert "more nodes of small" in last


@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
@pytest.mark.parametrize("batch", [4, 6])
def test_microbatches_of_one_sequence_need_least(trainer: str, batch: int) -> None:
    """Where the smaller question has no plan the whole one has none, with little memory or more."""
    answers = set()
    for gigabytes in (0.5, 0.8, 0.9, 1.0, 1.2, 2.0):
        asked = Question(
            model=model(8), cluster=small(gigabytes), job=job(batch, target=trainer, gap=0.9)
        )
        found = has_plan(asked)
        assert Feasible(_PREDICTOR)(asked) == found
        answers.add(found)
    assert answers == {False, True}


def test_the_islands_that_hold_most_are_named_where_libraries_keep_them_apart() -> None:
    little, much = of_two_makers(0.35).islands
    much = replace(much, memory_bytes=2.0 * little.memory_bytes)
    shown = [
        room_lines(Question(model=model(20), cluster=cluster(*islands), job=job(4)), _PREDICTOR)
        for islands in ((little, much), (much, little))
    ]
    for first, *_ in shown:
        assert f"a device of {much.name} offers" in first
    assert shown[0][-1] == shown[1][-1]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "ends" else name for name in CASES],
)
def test_the_smallest_conflict_is_named_and_every_offer_has_a_plan(name: str) -> None:
    asked, words = asked_of(name)
    with pytest.raises(InfeasibleError) as error:
        plan(asked.model, asked.cluster, asked.job, _PREDICTOR)
    lines = error.value.reasons
    assert "no plan meets these" in lines[0] or "this alone cannot be met" in lines[0]
    named = [line.strip() for line in lines[1 : 1 + len(words)]]
    for want in words:
        assert any(line.startswith(want) for line in named), lines
    offers = lines[lines.index("each of these alone gives a plan:") + 1 :]
    assert offers, lines
    possible = {each.words: each.question for each in relaxations(asked, Feasible(_PREDICTOR))}
    for offer in offers:
        change = offer.strip().split(" (the plan has")[0].rpartition(": ")[0] or offer.strip()
        found = [each for text, each in possible.items() if offer.strip().startswith(text)]
        assert found, change
        assert has_plan(found[0]), change


def test_host_memory_that_no_file_mentions_is_offered() -> None:
    there, host = (
        island("small", gigabytes=1.45, nodes=1),
        HostInterface(pcie_generation=4, lanes=16),
    )
    hosted = replace(there, device=replace(there.device, host=host))
    asked = Question(model=model(8), cluster=cluster(hosted), job=job(2, gap=0.2))
    assert not has_plan(asked)
    offers = [
        each for each in relaxations(asked, Feasible(_PREDICTOR)) if "host_memory" in each.words
    ]
    assert len(offers) == 1
    assert has_plan(offers[0].question)
    known = replace(hosted, host_memory_bytes=1e6)  # too little, and the file says so
    said = relaxations(asked.with_island(known), Feasible(_PREDICTOR))
    assert not any("host_memory" in each.words for each in said)


# That pinned ends leave no plan for any target, with any devices, takes the search a minute.
@pytest.mark.parametrize("name", [name for name in CASES if name != "ends"])
def test_a_conflict_has_no_plan_and_loses_it_with_every_part(name: str) -> None:
    """By searches of the questions, not by what said so."""
    asked, _ = asked_of(name)
    every = constraints(asked)
    conflict = find_conflict(asked, every, Feasible(_PREDICTOR)).constraints

    def only(kept: tuple[object, ...]) -> Question:
        question = replace(asked, job=replace(asked.job, time_limit_seconds=None))
        for each in every:
            if each not in kept:
                question = each.without(question)
        # Whatever is left open is planned as one pipeline, which is enough to have a plan.
        pins = question.job.pin
        if pins.pipelines is None:
            pins = replace(pins, pipelines=1)
        return replace(question, job=replace(question.job, pin=pins, gap=0.9))

    assert conflict
    assert not has_plan(only(conflict))
    for part in conflict:
        assert has_plan(only(tuple(each for each in conflict if each is not part))), part.words


# ---- by the command


def change(path: Path, old: str, new: str) -> int:
    """The line of the change."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return text[: text.index(old)].count("\n") + 1


def test_no_plan_exits_with_3_and_writes_nothing(tmp_path: Path) -> None:
    sweep_files(tmp_path)
    ends = "pin: {embedding_on: a, head_on: b, pp: 1, "
    change(tmp_path / "job.yaml", "pin: {", f"trainer: {{mixed_libraries: true}}\n{ends}")
    done = plan_command(tmp_path)
    assert done.exit_code == 3, done.output
    for words in ("no plan meets these", "pin pp: 1", "each of these alone gives a plan:"):
        assert words in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "field", "words"),
    [
        ("one", "      - name: a\n", "      - name: b\n", "islands", "b"),
        
        ("one", "        nodes: 2\n", "        nodes: 2\n        nodes_out: [0, 5]\n", "nodes_out",
         "5"),
        ("job", "microbatch_size: 1", "microbatch_size: 3", "pin.microbatch_size", "divide"),
        ("job", "cp: 1", "cp: 1, pp: 9", "pin.pp", "9 stages for 4 transformer layers"),
        ("job", "cp: 1", "embedding_on: nowhere", "pin.embedding_on", "nowhere"),
        ("job", "pin: {", "forbid: {islands: [a, b]}\npin: {", "forbid.islands", "every island"),
        ("job", "pin: {", "forbid: {islands: [a]}\npin: {embedding_on: a, ", "pin.embedding_on",
         "forbidden"),
        ("job", "pin: {", "pin: {pipelines: 2, ", "pin.pipelines", "target megatron"),
        ("job", "pin: {", "pin: {dp: 4, pp: 2, ", "pin", "need at least 8 devices"),
        ("job", "pin: {", "objective: cost_per_token\npin: {", "objective", "price"),
        ("job", "target: megatron", "target: alpa", "target", "alpa"),
    ],
)  # fmt: skip
def test_contradictions_exit_with_2_and_their_line(
    tmp_path: Path, file: str, old: str, new: str, field: str, words: str
) -> None:
    sweep_files(tmp_path)
    path = tmp_path / f"{file}.yaml"
    line = change(path, old, new)
    done = plan_command(tmp_path)
    assert done.exit_code == 2, done.output
    assert f"{file}.yaml:" in done.stderr, done.stderr
    numbers = [int(text.split(":")[0]) for text in done.stderr.split(f"{file}.yaml:")[1:]]
    # A flow mapping is one line; what was put in above it moves it down by one.
    assert any(abs(number - line) <= 15 for number in numbers), (numbers, line)
    assert field in done.stderr, done.stderr
    assert words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "p.json").exists()


def test_a_patched_trainer_is_offered_on_what_torch_runs_as_nccl_only() -> None:
    nvidia, amd = of_two_makers(0.35).islands
    huawei = island("huawei", kind="khuawei", nodes=1, gigabytes=0.35, teraflops=100.0)
    huawei = replace(huawei, device=replace(huawei.device, vendor="huawei"))

    def offers(*islands: Island) -> list[Change]:
        asked = Question(model=model(8), cluster=cluster(*islands), job=job(4))
        found = relaxations(asked, lambda question: True)
        return [each for each in found if "mixed_libraries" in each.words]

    (every,) = offers(nvidia, amd)
    assert every.question.job.forbid == Forbids()
    (some,) = offers(nvidia, amd, huawei)
    assert "without huawei" in some.words
    assert some.question.job.forbid.islands == ("huawei",)
    assert offers(nvidia, huawei) == []  # `emit` for Megatron-LM refuses it, patched or not


def test_libraries_like_nccl_are_those_of_torchs_backend() -> None:
    for vendor, library in libraries._LIBRARIES.items():
        assert (vendor_of(vendor, "").backend == "nccl") == (library in AS_NCCL), vendor


def test_no_question_is_asked_twice_and_an_undecided_offer_costs_no_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, _ = asked_of("memory")
    seen: list[Question] = []

    def once(self: Feasible, question: Question) -> bool:
        assert question not in seen
        seen.append(question)
        return plain(self, question)

    plain = Feasible.__call__
    monkeypatch.setattr(Feasible, "__call__", once)
    find_conflict(asked, constraints(asked), Feasible(_PREDICTOR))
    assert len(seen) > 2
    monkeypatch.setattr(Feasible, "__call__", plain)
    searched: list[Question] = []

    def one_is_open(question: Question, feasible: Feasible) -> Iterator[Change]:
        for number, change in enumerate(relaxations(question, feasible)):
            feasible.uncertain = number == 0
            yield change

    monkeypatch.setattr(no_plan, "relaxations", one_is_open)
    plain_ask = no_plan.ask
    monkeypatch.setattr(
        no_plan, "ask", lambda question, by: (searched.append(question), plain_ask(question, by))[1]
    )
    lines = no_plan.why_no_plan(asked, _PREDICTOR)
    first, *others = relaxations(asked, Feasible(_PREDICTOR))
    if others:
        assert lines[-1] == f"whether these give a plan is not decided: {first.words}"
        assert len(searched) == len(others)
