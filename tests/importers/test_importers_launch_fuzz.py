"""Broken and hostile launches end in an InputError or in facts, in nothing else."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from counted_steps import steps_of
from importers_mutations import HOSTILE, change_bytes, cut, cut_front
from launches_handwritten import (
    ARGUMENTS,
    EXPERIMENT,
    GPT3,
    HETERO,
    HOSTS,
    LLAMA,
    MIXTRAL,
    TITAN,
    TOML,
)

from hetplan.errors import InputError
from hetplan.importers.launches.emitted import agents_of
from hetplan.importers.launches.facts import facts_of
from hetplan.importers.launches.model import launch_model
from hetplan.importers.launches.open import launch_of, read_launch
from hetplan.importers.launches.trees import toml_settings

LAUNCHES = (
    ("megatron", "a.sh", GPT3),
    ("megatron", "b.sh", LLAMA),
    ("megatron", "c.sh", MIXTRAL),
    ("megatron", "d.txt", ARGUMENTS),
    ("flagscale", "e.yaml", HETERO),
    ("flagscale", "f.yaml", EXPERIMENT),
    ("torchtitan", "g.sh", TITAN),
    ("torchtitan", "h.toml", TOML),
)
_SIGNS = (
    "$",
    "${",
    "$(",
    "$((",
    "`",
    "'",
    '"',
    "(",
    ")",
    "{",
    "}",
    "|",
    "&&",
    ";;",
    "<<E",
    "\\",
    "\n",
    "if ",
    "fi ",
    "case ",
    "done ",
    "[[ ",
    "]] ",
    "#",
    "*",
    "\x00",
    "\u2028",
    "--",
    "-1",
    "9" * 30,
)


def try_all(trainer: str, path: Path) -> int:
    """How far it is read: 0 refused, 1 read, 2 understood, 3 with its model."""
    steps = 0
    try:
        text = read_launch(trainer, path, (("nnodes", "16"), ("nproc-per-node", "8")))
        steps = 1
        facts = facts_of(text, 32)
        assert facts.num_microbatches >= 0
        assert facts.world_size > 0
        assert all(count >= 0 for row in facts.layers for count in row)
        steps = 2
        launch_model(text, "m")
        steps = 3
    except InputError as error:
        told = str(error)
    else:
        told = "read"
    assert 0 < len(told) < 20_000
    return steps


def mutated(rng: random.Random, text: str) -> str:
    """Cut, changed, with signs put in or numbers and words exchanged."""
    kind = rng.randrange(6)
    if kind == 0:
        return cut(rng, text)
    if kind == 1:
        return cut_front(rng, text)
    if kind == 2:
        return change_bytes(rng, text)
    words = text.split(" ")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(words))
        if kind == 3:
            words[at] = words[at] + rng.choice(_SIGNS)
        elif kind == 4:
            words[at] = rng.choice(HOSTILE)
        else:
            words[at] = rng.choice(words)
    return " ".join(words)


@pytest.mark.parametrize(("trainer", "name", "text"), LAUNCHES)
def test_broken_launches(tmp_path: Path, trainer: str, name: str, text: str) -> None:
    rng = random.Random(name)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "hetero.yaml").write_text(HETERO)
    (tmp_path / "hosts").write_text(HOSTS)
    path = tmp_path / name
    path.write_text(text)
    assert try_all(trainer, path) >= 2
    reached = [0, 0, 0, 0]
    for _ in range(150):
        path.write_text(mutated(rng, text), errors="replace")
        reached[try_all(trainer, path)] += 1
    # Neither is everything refused nor everything read.
    assert reached[0] > 0
    assert reached[2] + reached[3] > 0


def test_noise(tmp_path: Path) -> None:
    rng = random.Random(9)
    alphabet = "".join(_SIGNS) + "abt=E|L 09-.\n:,[]"
    for _ in range(400):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 200)))
        for trainer, name in (
            ("megatron", "a.sh"),
            ("flagscale", "a.yaml"),
            ("torchtitan", "a.toml"),
        ):
            path = tmp_path / name
            path.write_text(text)
            try_all(trainer, path)
            with contextlib.suppress(InputError):
                launch_of(path)


def test_broken_lists_of_agents(tmp_path: Path) -> None:
    good = (
        "node_rank\thost\taddress\tdomain\tfirst_rank\tranks\tlocal_devices\n"
        "0\ta\t10.0.0.1\td\t0\t2\t0,1\n1\tb\t10.0.0.2\td\t2\t2\t3,2\n"
    )
    path = tmp_path / "agents.tsv"
    path.write_text(good)
    assert [(each.name, each.local_devices) for each in agents_of(path)] == [
        ("a", (0, 1)),
        ("b", (3, 2)),
    ]
    rng = random.Random(4)
    refused = 0
    for _ in range(200):
        path.write_text(mutated(rng, good), errors="replace")
        try:
            agents_of(path)
        except InputError:
            refused += 1
    assert refused > 50


def test_numbers_of_toml_without_end(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[training]\nseq_len = " + "9" * 5000 + "\n")
    with pytest.raises(InputError, match="is not TOML"):
        read_launch("torchtitan", path)


def test_the_steps_of_toml_grow_no_faster_than_its_lines() -> None:
    def steps(count: int) -> int:
        lines = "".join(f"key-{at} = {at}\n" for at in range(count))
        return steps_of(lambda: toml_settings("a.toml", "[training]\n" + lines))

    assert steps(1000) < 2.1 * steps(500)
    found = toml_settings("a.toml", "a = 1\n[b]\nc = 2\n[b.d]\n'e' = 3\n")
    assert [(each.name, each.line) for each in found] == [("a", 1), ("b.c", 3), ("b.d.e", 0)]
