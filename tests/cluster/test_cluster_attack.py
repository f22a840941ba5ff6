"""Cluster files that an editor's schema and the loader must judge alike, and bombs."""

import copy
import json

import pytest
import yaml
from counted_steps import counted_steps
from jsonschema import Draft202012Validator

from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder

CONFIGS = shipped_folder("configs")
SCHEMA = json.loads((CONFIGS / "schemas" / "cluster.schema.json").read_text())
ISLAND = (
    "{name: a, device: nvidia-a100-80gb-sxm, nodes: 1, devices_per_node: 8, "
    "intra_node: {bandwidth: 300 GB/s, latency: 3 us}}"
)
HEAD = "schema: hetplan.cluster/2\nname: x\n"
ONE = HEAD + "regions:\n  - name: r\n    islands:\n      - "


def keys(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from keys(inner, (*path, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from keys(inner, (*path, position))


def load(folder, text):
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


def test_a_typo_in_any_key_is_refused_by_the_schema_and_the_loader(tmp_path):
    right = yaml.safe_load((CONFIGS / "clusters" / "mixed-768.yaml").read_text())
    validator = Draft202012Validator(SCHEMA)
    assert not list(validator.iter_errors(right))
    paths = list(keys(right))
    assert len(paths) > 30
    for path in paths:
        wrong = copy.deepcopy(right)
        place = wrong
        for step in path[:-1]:
            place = place[step]
        place[f"{path[-1]}x"] = place.pop(path[-1])
        assert list(validator.iter_errors(wrong)), path
        with pytest.raises(InputError):
            load(tmp_path, yaml.safe_dump(wrong, sort_keys=False))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE + "&i " + ISLAND + "\n" + "      - *i\n" * 20000, "by aliases"),
        (HEAD + "regions: &r\n  - name: r\n    islands: *r\n", "no finished anchor"),
        (ONE + ISLAND[:-1] + ", node_names: ['n[0-999999999]']}", "name every node"),
        (ONE + ISLAND.replace("name: a", "name: 'Zoë \u202e'"), "letters, digits"),
    ],
)
def test_bombs_end_in_a_fault_after_a_look_at_the_text(tmp_path, text, message):
    def refused():
        with pytest.raises(InputError, match=message):
            load(tmp_path, text)

    # What the bombs ask for takes millions of steps and more; the text has its own length.
    assert counted_steps(refused)[1] < 50_000 + 3 * len(text)
