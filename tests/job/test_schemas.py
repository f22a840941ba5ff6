import json
import re

import jsonschema
import pytest
import yaml

from hetplan.files.shipped import shipped_folder
from hetplan.job.schemas import input_schemas, write_schemas

CONFIGS = shipped_folder("configs")
FOLDERS = {
    "model": "models",
    "cluster": "clusters",
    "devices": "devices",
    "job": "jobs",
    "sweep": "sweeps",
}
FILES = [path for folder in FOLDERS.values() for path in sorted((CONFIGS / folder).glob("*.yaml"))]


def test_the_schemas_in_configs_are_fresh(tmp_path):
    write_schemas(tmp_path)
    for name, text in input_schemas():
        assert (tmp_path / name).read_text(encoding="utf-8") == text
        assert (CONFIGS / "schemas" / name).read_text(encoding="utf-8") == text, (
            "stale: run `python -m hetplan.job.schemas configs/schemas`"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_config_names_and_satisfies_its_schema(path):
    kind = next(kind for kind, folder in FOLDERS.items() if folder == path.parent.name)
    text = path.read_text(encoding="utf-8")
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert named is not None
    schema = json.loads((path.parent / named.group(1)).read_text(encoding="utf-8"))
    assert named.group(1).endswith(f"/{kind}.schema.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(text), schema)


def _properties(schema):
    yield from schema.get("properties", {}).items()
    for definition in schema.get("$defs", {}).values():
        yield from _properties(definition)


def test_every_key_of_every_schema_is_described():
    for _, text in input_schemas():
        schema = json.loads(text)
        for name, entry in _properties(schema):
            # pydantic leaves out a description that repeats the one of the type.
            referred = schema.get("$defs", {}).get(entry.get("$ref", "").rpartition("/")[2], {})
            assert entry.get("description") or referred.get("description"), name


COMPLETE = {"model": "deepseek-v3", "cluster": "mixed-768", "job": "llama-140b"}


@pytest.mark.parametrize(("kind", "example"), COMPLETE.items())
def test_the_complete_examples_show_every_key(kind, example):
    schema = json.loads(dict(input_schemas())[f"{kind}.schema.json"])
    text = (CONFIGS / FOLDERS[kind] / f"{example}.yaml").read_text(encoding="utf-8")
    missing = [name for name, _ in _properties(schema) if not re.search(rf"\b{name}:", text)]
    assert not missing
