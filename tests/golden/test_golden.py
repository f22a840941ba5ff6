"""Every value that is written to disk keeps its form: one file per type and schema number.

`python tests/golden/test_golden.py` writes the files that are missing. A file that exists is never
rewritten: where a form changes, raise the schema number and let the reader accept the old one.
"""

from pathlib import Path

import pytest
from golden_values import GOLDEN

from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document

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


def write_missing() -> None:
    for schema, value in GOLDEN:
        path = _file(value, schema)
        if not path.exists():
            path.write_text(encode(value, schema=schema), encoding="utf-8")


if __name__ == "__main__":
    write_missing()
