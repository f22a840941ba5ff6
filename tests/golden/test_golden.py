"""Every value that is written to disk keeps its form: one file per type and schema number.

`python tests/golden/test_golden.py` writes the files that are missing. A file that exists is never
rewritten: where a form changes, raise the schema number and let the reader accept the old one.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from golden_values import GOLDEN, GOLDEN_ROWS

from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.profiling.samples import LATER_COLUMNS, header, read_samples, row

FOLDER = Path(__file__).parent


def _file(value: object, schema: str) -> Path:
    return FOLDER / f"{type(value).__name__}.v{schema.rpartition('/')[2]}.json"


@pytest.mark.parametrize(("schema", "value"), GOLDEN, ids=[schema for schema, _ in GOLDEN])
def test_every_value_that_is_written_has_a_golden_file_and_keeps_its_form(schema, value):
    path = _file(value, schema)
    assert path.is_file(), (
        f"{path.name} is missing: run `python tests/golden/test_golden.py`, look at what it wrote, "
        "and commit it"
    )
    assert encode(value, schema=schema) == path.read_text(encoding="utf-8"), (
        f"the form of {type(value).__name__} has changed: raise its schema number, keep "
        f"{path.name} for readers of old files, and write the new golden file"
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_golden_files_of_every_number_are_read(path):
    name, number = path.stem.rsplit(".v", 1)
    schema, value = next(entry for entry in GOLDEN if type(entry[1]).__name__ == name)
    read = decode(read_document(path), type(value), schema=schema)
    if schema.endswith(f"/{number}"):
        assert read == value


def _csv(sample: object, number: int) -> Path:
    """Files of samples have no schema line; a new column makes a new number."""
    return FOLDER / f"{type(sample).__name__}.v{number}.csv"


@pytest.mark.parametrize(
    ("number", "sample"), GOLDEN_ROWS, ids=lambda each: getattr(type(each), "__name__", "")
)
def test_every_csv_file_keeps_its_form(number, sample):
    path = _csv(sample, number)
    assert path.read_text(encoding="utf-8") == f"{header(type(sample))}\n{row(sample)}\n"
    assert read_samples(path, type(sample)) == (sample,)


OLDER_ROWS = [(older, sample) for number, sample in GOLDEN_ROWS for older in range(1, number)]


@pytest.mark.parametrize(
    ("number", "sample"), OLDER_ROWS, ids=[f"{type(s).__name__}.v{n}" for n, s in OLDER_ROWS]
)
def test_older_csv_files_are_read(number, sample):
    path = _csv(sample, number)
    (read,) = read_samples(path, type(sample))
    names = path.read_text(encoding="utf-8").partition("\n")[0].split(",")
    later = [name for name in header(type(sample)).split(",") if name not in names]
    assert later
    assert {name: getattr(read, name) for name in later} == {
        name: LATER_COLUMNS[name] for name in later
    }
    assert replace(read, **{name: getattr(sample, name) for name in later}) == sample


def write_missing() -> None:
    for number, sample in GOLDEN_ROWS:
        path = _csv(sample, number)
        if not path.exists():
            path.write_text(f"{header(type(sample))}\n{row(sample)}\n", encoding="utf-8")
    for schema, value in GOLDEN:
        path = _file(value, schema)
        if not path.exists():
            path.write_text(encode(value, schema=schema), encoding="utf-8")


if __name__ == "__main__":
    write_missing()
