import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.files.nodes import json_nodes, plain
from hetplan.files.reading import decode, read_document

steady = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int
    length: float = 1.0

    def __post_init__(self):
        if self.size < 0:
            raise InputError(f"size is {self.size}; it must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    colour: Colour = Colour.RED
    flag: bool = False
    inner: tuple[Inner, ...] = ()
    pair: tuple[str, Inner] | None = None


SCHEMA = "hetplan.test/2"


def write(folder: Path, text: str | bytes, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def faults(path: Path):
    """(line, field, message) of every fault, and the file named in each."""
    with pytest.raises(InputError) as caught:
        decode(read_document(path), Outer, schema=SCHEMA)
    assert {fault.file for fault in caught.value.faults} == {str(path)}
    return [(fault.line, fault.field, fault.message) for fault in caught.value.faults]


def test_every_fault_of_a_file_is_reported_at_once_in_file_order(tmp_path):
    path = write(
        tmp_path,
        """schema: hetplan.test/2
colour: rde
flag: 1
inner:
  - {size: "3", lenght: 2}
  - size: 2.0
    length: yes
  - size: true
  - 7
pair: [a]
zzz: 1
""",
    )
    assert [(line, field) for line, field, _ in faults(path)] == [
        (1, "name"),
        (2, "colour"),
        (3, "flag"),
        (5, "inner[0].lenght"),
        (5, "inner[0].size"),
        (6, "inner[1].size"),
        (7, "inner[1].length"),
        (8, "inner[2].size"),
        (9, "inner[3]"),
        (10, "pair[1]"),
        (11, "zzz"),
    ]


def test_a_dataclass_that_refuses_its_fields_is_located(tmp_path):
    text = "schema: hetplan.test/2\nname: a\npair: [x, {size: -1}]\n"
    text += "inner:\n  - size: 2\n  - size: -5\n"
    found = faults(write(tmp_path, text))
    assert found == [
        (3, "pair[1]", "size is -1; it must not be negative"),
        (6, "inner[1]", "size is -5; it must not be negative"),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("schema: hetplan.test/3", "reads up to hetplan.test/2; use a newer hetplan"),
        ("schema: hetplan.cluster/1", "this is a hetplan.cluster file, a hetplan.test file"),
        ("schema: hetplan.test/²", "write `schema: hetplan.test/2`"),
        ("schema: [2]", "write `schema: hetplan.test/2`"),
    ],
)
def test_schema_numbers(tmp_path, line, says):
    found = faults(write(tmp_path, f"name: a\n{line}\n"))
    assert [(at, field) for at, field, _ in found] == [(2, "schema")]
    assert says in found[0][2]


def test_older_schema_numbers_are_read_and_a_missing_one_is_a_fault(tmp_path):
    old = write(tmp_path, "schema: hetplan.test/1\nname: a\n")
    assert decode(read_document(old), Outer, schema=SCHEMA) == Outer(name="a")
    found = faults(write(tmp_path, "name: a\n"))
    assert found == [(1, "", "required key `schema` is missing; add `schema: hetplan.test/2`")]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 0, "the file is empty"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "not YAML"),
        ("a: 1\n\tb: 2\n", 2, "indent with spaces, not tabs"),
        (b"a: 1\nb: \xff\n", 2, "byte 0xff is not UTF-8"),
        ("a: 1\n---\nb: 2\n", 2, "a second document"),
        ("a: 1\nb: !!python/object:os.system x\n", 2, "tags are not accepted"),
        ("a: *nothing\n", 1, "alias *nothing"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "merge keys"),
        ("? [a, b]\n: c\n", 1, "as a key"),
        ("a: " + "[" * 5000 + "]" * 5000 + "\n", 1, "levels deep"),
        ("a: 1\nb: 2\na: 3\n", 3, "already on line 1"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, line, says):
    found = faults(write(tmp_path, text))
    assert len(found) == 1
    assert found[0][0] == line
    assert says in found[0][2]


def test_alias_bombs_are_refused_before_they_grow(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 30):
        many = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{many}]")
    found = faults(write(tmp_path, "\n".join(lines)))
    assert found[0][0] == 5
    assert "stands for more than 100000 values" in found[0][2]


def test_scalars_follow_yaml_1_2(tmp_path):
    path = write(tmp_path, "a: [no, 010, 1e3, .5, 2026-01-01, 60:30, ~, True, '1', 0x10, .inf]\n")
    assert read_document(path).root == {
        "a": ["no", 10, 1000.0, 0.5, "2026-01-01", "60:30", None, True, "1", "0x10", ".inf"]
    }


def test_missing_files_folders_and_near_names(tmp_path):
    write(tmp_path, "a: 1\n", "cluster.yaml")
    with pytest.raises(InputError, match=r"no such file; nearest: .*cluster\.yaml"):
        read_document(tmp_path / "clutser.yaml")
    with pytest.raises(InputError, match="is a folder"):
        read_document(tmp_path)
    with pytest.raises(InputError, match="not a regular file"):
        read_document(Path("/dev/null"))
    with pytest.raises(InputError, match=r"cannot be read|no such file"):
        read_document(Path("a\0b"))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('{"a": 1,\n}', 2, "not JSON"),
        ('{"a": NaN}', 0, "NaN is not a number"),
        ('{"a": 1,\n "a": 2}', 2, "already on line 1"),
        ("[" * 100_000, 0, "levels deep"),
        ('{"a": ' + "1" * 5000 + "}", 0, "not JSON"),
        ('{"schema": "hetplan.test/2",\n "name": "\\ud800"}', 1, "surrogate"),
    ],
)
def test_json_files(tmp_path, text, line, says):
    found = faults(write(tmp_path, text, "a.json"))
    assert len(found) == 1
    assert found[0][0] == line
    assert says in found[0][2]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(value=json_values, indent=st.sampled_from([None, 0, 2]))
@steady
def test_the_json_tree_holds_what_json_holds(value, indent):
    text = json.dumps(value, indent=indent, allow_nan=True)
    assert plain(json_nodes(text)) == json.loads(text)
