"""Laws of the importers: what is printed comes back, and no changed digit goes unnoticed."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importers_golden_inputs import FOLDER, GOLDEN_INPUTS
from importers_renderers import Table, nccl_text, row_line, seconds_of
from topologies_rendered import nvidia_topologies, render_nvidia

from hetplan.errors import InputError
from hetplan.importers import hostfile, iperf3, nccl_tests, nvidia_topo, slurm_nodes
from hetplan.importers.records import Host, ImportContext, Imported, NodeTopology
from hetplan.importers.table import importer_called

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


def iperf(name: str) -> dict:
    return json.loads((FOLDER / "iperf3" / name).read_text(encoding="utf-8"))


@settings(max_examples=10, deadline=None)
@given(
    rate=st.floats(min_value=1e3, max_value=1e13),
    trip=st.integers(min_value=1, max_value=10**7),
    window=st.integers(min_value=1, max_value=2**31),
    streams=st.integers(min_value=1, max_value=16),
)
def test_figures_of_tcp_come_back(rate: float, trip: int, window: int, streams: int) -> None:
    document = iperf("tcp-four-streams.json")
    document["end"]["streams"] = [document["end"]["streams"][0]] * streams
    document["end"]["streams"][0]["sender"] |= {"mean_rtt": trip, "max_snd_cwnd": window}
    document["start"]["test_start"]["num_streams"] = streams
    document["end"]["sum_received"]["bits_per_second"] = rate
    (path,) = iperf3.parse(json.dumps(document), CONTEXT).paths
    assert path.bandwidth_bytes_per_second == rate / 8
    assert path.round_trip_seconds == pytest.approx(trip / 1e6)
    assert (path.window_bytes, path.streams) == (window, streams)


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,5}(-[a-z0-9]{1,4})?(\.[a-z]{2,5})?", fullmatch=True)
SLOTS = st.none() | st.integers(min_value=1, max_value=512)
TYPES = st.none() | st.sampled_from(("A100", "MI300X", "BI-V150"))


def hosts(text: str) -> tuple[Host, ...]:
    return hostfile.parse(text, CONTEXT).hosts


def nodes(text: str) -> tuple[Host, ...]:
    return slurm_nodes.parse(text, CONTEXT).hosts


@settings(max_examples=20, deadline=None)
@given(
    entries=st.lists(
        st.builds(Host, name=NAMES, slots=SLOTS, device=TYPES),
        min_size=1,
        max_size=12,
        unique_by=lambda host: host.name,
    ),
    gap=st.sampled_from((" ", "\t", "   ")),
)
def test_hostfiles_come_back(entries: list[Host], gap: str) -> None:
    lines = ["# hosts", ""]
    for host in entries:
        words = [host.name]
        words += [f"slots={host.slots}"] if host.slots else []
        words += [f"type={host.device}"] if host.device else []
        lines.append(gap.join(words) + "  # here")
    assert hosts("\n".join(lines)) == tuple(entries)


@st.composite
def slurm_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list and the names that it stands for."""
    texts, names = [], []
    for at in range(draw(st.integers(min_value=1, max_value=4))):
        prefix = f"{draw(NAMES).partition('.')[0]}{at}x"
        suffix = draw(st.sampled_from(("", "-ib", ".site")))
        ranges, numbers = [], []
        for _ in range(draw(st.integers(min_value=1, max_value=3))):
            first = draw(st.integers(min_value=0, max_value=1200))
            last = first + draw(st.integers(min_value=0, max_value=30))
            # Slurm writes every number of a padded range with the same width.
            width = draw(st.sampled_from((0, len(str(last)), 5)))
            ranges.append(f"{first:0{width}d}" + (f"-{last:0{width}d}" if last > first else ""))
            numbers += [f"{number:0{width}d}" for number in range(first, last + 1)]
        texts.append(f"{prefix}[{','.join(ranges)}]{suffix}")
        names += [f"{prefix}{number}{suffix}" for number in numbers]
    return ",".join(texts), list(dict.fromkeys(names))


@settings(max_examples=20, deadline=None)
@given(both=slurm_lists())
def test_node_lists_come_back(both: tuple[str, list[str]]) -> None:
    text, names = both
    assert [host.name for host in nodes(text)] == names
    assert [host.name for host in nodes("\n".join(names))] == names
    assert [host.name for host in nodes(f"export SLURM_JOB_NODELIST='{text}'")] == names


@settings(max_examples=15, deadline=None)
@given(
    topology=nvidia_topologies,
    separator=st.sampled_from(["\t", "     "]),
    escapes=st.booleans(),
    legend=st.booleans(),
)
def test_topologies_come_back(
    topology: NodeTopology, separator: str, escapes: bool, legend: bool
) -> None:
    text = render_nvidia(topology, separator=separator, escapes=escapes, legend=legend)
    assert nvidia_topo.parse(text, CONTEXT).topology == topology


def test_a_time_too_small_to_be_a_float_of_seconds_is_skipped() -> None:
    """As microseconds it is a float above 0."""
    (text, *_) = (each.text for each in GOLDEN_INPUTS if '"time": 500.0' in each.text)
    text = text.replace('"time": 500.0', '"time": 1e-320', 1)
    imported = importer_called("rccl-tests").parse(text, CONTEXT)
    assert any("the time is 0" in each for each in imported.skipped)
