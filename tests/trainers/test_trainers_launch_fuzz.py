"""Broken and hostile launches end in an InputError or in facts, in nothing else."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from importers_mutations import mutated
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
from hetplan.trainers.megatron.read_model import launch_model
from hetplan.trainers.read import facts_of, read_launch

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
    *("$", "${", "$(", "$((", "`", "'", '"', "(", ")", "{", "}", "|", "&&", ";;", "<<E", "\\"),
    *("#", "*", "--", "-1", "\n", "if ", "fi ", "case ", "done ", "[[ ", "]] ", "\x00", "\u2028"),
    "9" * 30,
)


def try_all(trainer: str, path: Path) -> int:
    """How far it is read: 0 refused, 1 read, 2 understood, 3 with its model."""
    steps = 0
    try:
        text = read_launch(path, trainer, (("nnodes", "16"), ("nproc-per-node", "8")))
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
    for _ in range(40):
        at = rng.randrange(len(text))
        broken = text[:at] + rng.choice(_SIGNS) + text[at:]
        path.write_text(mutated(rng, rng.choice((text, broken))), errors="replace")
        reached[try_all(trainer, path)] += 1
    # Neither is everything refused nor everything read.
    assert reached[0] > 0
    assert reached[2] + reached[3] > 0
    alphabet = "".join(_SIGNS) + "abt=E|L 09-.\n:,[]"
    for _ in range(25):
        path.write_text("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 200))))
        try_all(trainer, path)
        with contextlib.suppress(InputError):
            read_launch(path)


def test_numbers_of_toml_without_end(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[training]\nseq_len = " + "9" * 5000 + "\n")
    with pytest.raises(InputError, match="is not TOML"):
        read_launch(path)
