"""nccl-tests and rccl-tests: what is printed comes back, and what contradicts itself does not."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importers_renderers import Table, nccl_json, nccl_text, rccl_json, row_line, seconds_of

from hetplan.errors import InputError
from hetplan.importers import nccl_tests, rccl_tests
from hetplan.importers.records import ImportContext, Imported

CONTEXT = ImportContext(file="run.log", link="here")
WORDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
}
TABLE = Table(
    program="all_reduce",
    ranks=8,
    rows=((1048576, 5123), (4194304, 9877), (16777216, 21350), (67108864, 71234)),
)


def read(text: str, file: str = "run.log") -> Imported:
    return nccl_tests.parse(text, ImportContext(file=file, link="here"))


def fault(text: str) -> str:
    with pytest.raises(InputError) as caught:
        read(text)
    return str(caught.value)


def expected(tables: list[Table]) -> list[tuple[str, int, int, float, int]]:
    return [
        (WORDS[table.program], table.ranks, size, seconds_of(hundredths), table.iterations)
        for table in tables
        for at, (size, hundredths) in enumerate(table.rows)
        if not (at < len(table.wrong) and table.wrong[at])
    ]


def found(imported: Imported) -> list[tuple[str, int, int, float, int]]:
    assert all(each.link == "here" and each.backend == "nccl" for each in imported.links)
    assert all(
        each.p10_seconds == each.median_seconds == each.p90_seconds for each in imported.links
    )
    return [
        (each.operation, each.group_size, each.message_bytes, each.median_seconds, each.repeats)
        for each in imported.links
    ]


LABELS = (
    "",
    "0: ",
    " 7: ",
    "[0] ",
    "[1,0]<stdout>:",
    "node1: ",
    "2026-03-04T09:15:00.123456Z ",
    "2026-03-04 09:15:00 [1,0]<stdout>: ",
)
ROWS = st.lists(
    st.tuples(
        st.integers(min_value=1, max_value=2**31).map(lambda n: n * 16),
        st.integers(min_value=100, max_value=999_999),
    ),
    min_size=1,
    max_size=6,
).map(tuple)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    hosts = draw(st.sampled_from((1, 2, 3)))
    return Table(
        program=draw(st.sampled_from(sorted(WORDS))),
        ranks=hosts * draw(st.integers(min_value=2, max_value=5)),
        hosts=hosts,
        rows=draw(ROWS),
        iterations=draw(st.integers(min_value=1, max_value=1000)),
        wrong=tuple(draw(st.lists(st.integers(min_value=0, max_value=3), max_size=4))),
    )


@settings(max_examples=15, deadline=None)
@given(
    runs=st.lists(tables(), min_size=1, max_size=3),
    label=st.sampled_from(LABELS),
)
def test_printed_runs_come_back(runs: list[Table], label: str) -> None:
    text = "".join(map(nccl_text, runs))
    imported = read("\n".join(label + line for line in text.split("\n")))
    assert found(imported) == expected(runs)
    wrong = sum(number > 0 for run in runs for number, _ in zip(run.wrong, run.rows, strict=False))
    assert len(imported.skipped) == wrong


@settings(max_examples=15, deadline=None)
@given(run=tables())
def test_json_comes_back(run: Table) -> None:
    assert found(read(nccl_json(run))) == expected([run])


@settings(max_examples=10, deadline=None)
@given(run=tables())
def test_listed_json_of_rccl_comes_back(run: Table) -> None:
    imported = rccl_tests.parse(rccl_json([run]), CONTEXT)
    assert [entry[:4] for entry in found(imported)] == [entry[:4] for entry in expected([run])]


@pytest.mark.parametrize("program", ["all_reduce", "reduce_scatter", "broadcast", "sendrecv"])
def test_a_program_that_is_not_named_is_known_by_its_numbers(program: str) -> None:
    run = Table(program=program, ranks=6, rows=TABLE.rows)
    assert found(read(nccl_text(run, names_program=False))) == expected([run])


@pytest.mark.parametrize("program", ["all_gather", "alltoall"])
def test_all_gather_and_all_to_all_differ_by_what_was_checked(program: str) -> None:
    run = Table(program=program, ranks=4, rows=TABLE.rows)
    text = nccl_text(run, names_program=False)
    assert found(read(text)) == expected([run])
    unchecked = re.sub(r"(?m) (?:0|N/A)(?= {2}|$)", " N/A", text)
    assert "add a line such as `# Collective test starting" in fault(unchecked)
    named = read(unchecked, file=f"logs/{program}.txt")
    assert found(named) == expected([run])
    assert found(read(f"$ mpirun -np 4 ./{program}_perf_mpi -c 0\n{unchecked}")) == expected([run])


def test_two_ranks_that_reduce_or_only_send_unchecked_are_told_apart_by_name() -> None:
    run = Table(program="sendrecv", ranks=2, rows=TABLE.rows)
    text = nccl_text(run, names_program=False)
    assert found(read(text)) == expected([run])
    text = re.sub(r"(?m) (?:0|N/A)(?= {2}|$)", " N/A", text)
    assert "could be all_reduce, sendrecv" in fault(text)
    assert found(read(text, file="sendrecv.log")) == expected([run])


def test_a_name_that_the_operator_contradicts_is_refused() -> None:
    text = nccl_text(Table(program="reduce_scatter", ranks=4, rows=TABLE.rows))
    assert "so it is not of all_gather" in fault(text.replace("reduce_scatter", "all_gather"))


def test_a_wrong_number_of_ranks_is_found() -> None:
    text = nccl_text(TABLE)
    lines = [line for line in text.split("\n") if "Rank  7" not in line]
    assert "busbw is" in fault("\n".join(lines))
    lines = [line for line in text.split("\n") if "Rank  3" not in line]
    assert "rank 3 is missing" in fault("\n".join(lines))
    lines = [line for line in text.split("\n") if "Rank" not in line]
    assert "rank 0 is missing" in fault("\n".join(lines))


def test_copies_of_one_rank_each_are_told_how_to_build() -> None:
    alone = nccl_text(Table(program="broadcast", ranks=1, rows=TABLE.rows))
    imported = read(alone + alone)
    assert imported.links == ()
    assert "make MPI=1" in imported.skipped[0]
    lines = alone.split("\n")
    at = next(at for at, line in enumerate(lines) if "Rank" in line)
    mixed = "\n".join([*lines[: at + 1], lines[at].replace("4100", "4177"), *lines[at + 1 :]])
    assert "make MPI=1" in fault(mixed)


def test_the_ranks_of_a_split_count_by_group() -> None:
    run = Table(program="all_reduce", ranks=4, rows=TABLE.rows)
    text = nccl_text(run)
    second = [
        line.replace(f"Rank  {rank} Group  0", f"Rank  {rank + 4} Group  1")
        for rank, line in enumerate(line for line in text.split("\n") if "Group" in line)
    ]
    lines = text.split("\n")
    at = max(at for at, line in enumerate(lines) if "Group" in line) + 1
    imported = read("\n".join([*lines[:at], *second, *lines[at:]]))
    assert found(imported) == expected([run])
    assert "2 groups worked at the same time" in imported.notes


def test_every_cut_gives_a_prefix_or_an_error() -> None:
    text = nccl_text(TABLE)
    everything = expected([TABLE])
    for end in range(text.index("out-of-place"), len(text)):
        try:
            imported = read(text[:end])
        except InputError:
            continue
        links = found(imported)
        assert links == everything[: len(links)], text[:end][-80:]
        if end < text.index("# Avg bus"):
            assert any("has no end" in note for note in imported.notes) or "Out of" in text[:end]


def test_no_changed_digit_of_bytes_or_time_goes_unnoticed() -> None:
    text = nccl_text(TABLE)
    right = expected([TABLE])
    row = row_line(TABLE, 2)
    begin = text.index(row)
    lines: set[int] = set()
    for place in (*range(12), *range(begin_of_time(row), begin_of_time(row) + 7)):
        for digit in "0123456789":
            if not row[place].isdigit() or row[place] == digit:
                continue
            changed = text[: begin + place] + digit + text[begin + place + 1 :]
            try:
                links = found(read(changed))
            except InputError as error:
                lines.add(error.faults[0].line)
                continue
            # What rounding hides: 0.3 % of the bandwidth, printed to three or four digits.
            assert links[2][2] == pytest.approx(right[2][2], rel=5e-3)
            assert links[2][3] == pytest.approx(right[2][3], rel=5e-3)
    assert lines == {text[:begin].count("\n") + 1}


def begin_of_time(row: str) -> int:
    return row.index("213.50")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  213.50", "     nan", "time is nan"),
        ("  213.50", "    0.00", "the time is 0"),
        ("  213.50", "   -3.50", "time is -3.50"),
    ],
)
def test_rows_that_measured_nothing_are_left_out_with_their_line(
    old: str, new: str, message: str
) -> None:
    text = nccl_text(TABLE).replace(old, new)
    imported = read(text)
    line = next(at for at, each in enumerate(text.split("\n"), start=1) if new in each)
    assert imported.skipped == (f"line {line}: {message}",)
    assert len(imported.links) == 3


def test_a_word_where_a_number_belongs_is_refused() -> None:
    assert "time: found 'fast'; a number" in fault(nccl_text(TABLE).replace("  213.50", "    fast"))
    assert "without the header" in fault(row_line(TABLE, 0))
    assert "no row of results" in fault("NCCL version 2.21.5+cuda12.4\n")
    assert "outputs of several programs" in fault(
        nccl_text(TABLE).replace("concluded: all_reduce", "concluded: all_gather")
    )


def test_times_of_the_processor_are_left_out() -> None:
    text = nccl_text(TABLE).replace("   time   algbw", "cputime   algbw")
    imported = read(text)
    assert not imported.links
    assert len(imported.skipped) == 4
    document = json.loads(nccl_json(TABLE))
    for row in document["results"]:
        row["out_of_place"]["cpu_time"] = row["out_of_place"].pop("time")
    assert not read(json.dumps(document)).links


def test_processes_with_several_devices_count_all_of_them() -> None:
    """-J lists the first device of each process only."""
    document = json.loads(nccl_json(TABLE))
    document["config"]["devices"] = document["config"]["devices"][::4]
    document["config"]["ngpus"] = 4
    assert found(read(json.dumps(document))) == expected([TABLE])
    document["config"]["ngpus"] = 2
    assert "busbw is" in fault(json.dumps(document, indent=1))


def test_the_note_of_how_operations_ran() -> None:
    text = nccl_text(TABLE).replace("agg iters: 1", "agg iters: 8").replace("graph: 0", "graph: 2")
    notes = " ".join(read(text).notes)
    assert "8 operations were started together" in notes
    assert "replayed from a graph" in notes


def test_a_program_that_failed_says_why() -> None:
    text = nccl_text(TABLE)
    text = text[: text.index("#\n#        ")] + (
        "node1: Test NCCL failure common.cu:1012 'unhandled system error'\n"
        " .. node1 pid 4100: Test failure common.cu:891\n"
    )
    assert 'the program says "Test NCCL failure common.cu:1012' in fault(text)


def test_the_csv_of_rccl_is_named() -> None:
    text = "numCycle,collective,gpus,size,type,redop,inplace,time,algbw,busbw,#wrong\n"
    with pytest.raises(InputError, match="-Z json"):
        rccl_tests.parse(text, CONTEXT)
