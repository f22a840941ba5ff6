"""Hostfiles and Slurm node lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.importers import hostfile, slurm_nodes
from hetplan.importers.records import Host, ImportContext

CONTEXT = ImportContext(file="hosts")
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


@settings(max_examples=10, deadline=None)
@given(
    entries=st.lists(
        st.builds(Host, name=NAMES, slots=SLOTS), min_size=1, unique_by=lambda host: host.name
    )
)
def test_mpich_hostfiles_come_back(entries: list[Host]) -> None:
    text = "".join(f"{e.name}{f':{e.slots}' if e.slots else ''}\n" for e in entries)
    assert hosts(text) == tuple(entries)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=0", "slots: found '0'"),
        ("node1 slots=", "slots: found ''"),
        ("node1 slots=1e3", "slots: found '1e3'"),
        ("node1 slots=8 slots=8", "'slots' is given twice"),
        ("node1:8 slots=8", "'slots' is given twice"),
        ("node1 slots=8 max_slots=4", "max_slots is 4, less than slots, 8"),
        ("node1 slot=8", "found 'slot=8'; a hostfile has slots"),
        ("node1 8", "found '8'; write key=value"),
        ("node1 type=A100\nnode1 type=H100", "has the types A100 and H100"),
        ("^node1", "a host name or an address"),
        ("[fe80::1", "a host name or an address"),
        ("n\u00f6de", "a host name or an address"),
        ("node1 slots=\u0668", "a whole number from 1"),
        ("# nothing", "names no host"),
    ],
)
def test_wrong_hostfiles_are_refused_with_their_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        hosts("\n" + text)
    assert message in str(caught.value)
    if "names no" not in message:
        assert f"hosts:{2 + text.count(chr(10))}:" in str(caught.value)


def test_slots_of_two_digits_are_two_digits() -> None:
    """Readers of one character are known to take slots=16 for 1."""
    assert hosts("worker-0 slots=16\n") == (Host(name="worker-0", slots=16),)


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
@given(counts=st.lists(st.integers(min_value=1, max_value=128), min_size=1, max_size=30))
def test_counts_come_back(counts: list[int]) -> None:
    parts: list[list[int]] = []
    for count in counts:
        if parts and parts[-1][0] == count:
            parts[-1][1] += 1
        else:
            parts.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in parts)
    names = f"node[1-{len(counts)}]"
    assert [host.slots for host in nodes(f"{names} {text}")] == counts
    said = nodes(f"SLURM_NODELIST={names}\nSLURM_TASKS_PER_NODE={text}\n")
    assert [host.slots for host in said] == counts


def test_names_with_several_brackets_multiply() -> None:
    assert [host.name for host in nodes("r[1-2]n[08-10]")] == [
        "r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node[1-999999999]", "stands for 999999999 hosts; 2097152 are read at most"),
        ("a[1-99999]b[1-99999]c[1-99999]", "are read at most"),
        ("[1,0]" * 20000, "stands for 10**18 or more hosts"),
        ("node[1-99999999999999999999]", "a range is 1-4"),
        ("node[1-4", "a bracket is not closed"),
        ("node1-4]", "brackets do not nest, and open first"),
        ("node[1-[2-3]]", "brackets do not nest"),
        ("node[4-1]", "the range 4-1 ends before it begins"),
        ("node[]", "a range is 1-4"),
        ("node[1,]", "a range is 1-4"),
        ("node1,,node2", "an empty name"),
        ("node[1-2] 8(x3)", "more counts than nodes"),
        ("node[1-3] 8(x2)", "there are 2 counts for 3 nodes"),
        ("node[1-2] 8(x999999999)", "counts are written as in 2(x3),1"),
        ("SLURM_JOB_NODELIST=n[1-3]\nSLURM_NNODES=4", "there are 4 nodes by this line"),
        ("SLURM_NODELIST=a1\nSLURM_JOB_NODELIST=a2", "is not the list of SLURM_NODELIST"),
        ("SLURM_NODELIST=a1\nSLURM_GPUS_ON_NODE=many", "a number of devices"),
        ("PATH=/usr/bin", "names no node"),
        ("SLURM_JOB_ID=4", "names no node"),
    ],
)
def test_wrong_node_lists_are_refused_with_their_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        nodes(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("hosts")


def test_a_step_of_a_part_of_the_job_does_not_matter() -> None:
    text = "SLURM_JOB_NODELIST=n[1-3]\nSLURM_STEP_NODELIST=n1\nSLURM_STEP_NUM_NODES=1\n"
    assert [host.name for host in nodes(text)] == ["n1", "n2", "n3"]


def test_a_list_of_the_largest_size_is_read() -> None:
    assert len(nodes("node[1-131072]")) == 131_072
