"""An emitted folder is whole, old and new files are never mixed, nothing of a person's is lost."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from trainer_plans import PLAIN, plain_launch, two_regions

from hetplan.errors import InputError
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout
from hetplan.search.result import SearchResult
from hetplan.trainers import folder as folder_module
from hetplan.trainers.emission import emission_for
from hetplan.trainers.folder import emitted_files, write_folder

RESULT = two_regions()


def files(*more: str, steps: int = 50) -> tuple[EmittedFile, ...]:
    """What is emitted of a plan by a trainer with files of these names."""

    def launch(result: SearchResult, ranks: RankLayout, options: EmissionOptions) -> TrainerLaunch:
        return replace(
            plain_launch(result, ranks, options),
            files=tuple(EmittedFile(path=name, text=f"{name}\n") for name in more),
            arguments=(("--steps", str(steps)),),
        )

    return emission_for(RESULT, replace(PLAIN, launch=launch), EmissionOptions()).files


def texts(place: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in place.iterdir()}


def test_a_new_folder_holds_the_files_and_their_list(tmp_path: Path) -> None:
    out, made = tmp_path / "run", files("x.yaml")
    written = write_folder(out, made)
    assert texts(out) == {each.path: each.text for each in made}
    assert set(emitted_files(out)) == set(written.files) == set(texts(out))
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    runs = {each.name for each in out.iterdir() if os.access(each, os.X_OK)}
    assert runs == {"launch.sh", "check.py"}


def test_a_folder_with_anything_in_it_is_refused_without_force(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"not empty.*--force"):
        write_folder(tmp_path, files())
    assert texts(tmp_path) == {"notes.txt": "mine"}


def test_force_replaces_what_was_emitted_and_keeps_the_rest(tmp_path: Path) -> None:
    write_folder(tmp_path, files("x.yaml", "y.yaml"))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "z.yaml").write_text("mine, in the way")
    check = (tmp_path / "check.py").read_text().replace("GIB = ", "GIB = 1 * ")
    for name, text in (("README.md", "my words"), ("y.yaml", "a: 2\n"), ("check.py", check)):
        (tmp_path / name).write_text(text)
    (tmp_path / "launch.sh").unlink()
    (tmp_path / "launch.sh").symlink_to(tmp_path / "notes.txt")
    newer = files("z.yaml", steps=7)
    written = write_folder(tmp_path, newer, force=True)
    assert sorted(written.edited) == ["README.md", "check.py", "launch.sh", "y.yaml", "z.yaml"]
    assert written.removed == ("x.yaml",)
    assert texts(tmp_path) == {
        **{each.path: each.text for each in newer},
        "notes.txt": "mine",
        "z.yaml~": "mine, in the way",
        "README.md~": "my words",
        "y.yaml~": "a: 2\n",
        "check.py~": check,
        "launch.sh~": "mine",
    }
    # What was kept once is not replaced by what is kept the next time.
    (tmp_path / "README.md").write_text("other words")
    with pytest.raises(InputError, match=r"README.md~: is there already"):
        write_folder(tmp_path, newer, force=True)
    assert (tmp_path / "README.md").read_text() == "other words"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/b", ".hidden", "a b", "", "-x"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InputError, match="cannot be a file in an emitted folder"):
        write_folder(tmp_path / "run", (EmittedFile(path=path, text=""),))
    assert not (tmp_path / "run").exists()


class Killed(BaseException):
    """Stands for a signal that ends the program."""


@pytest.mark.parametrize("at", range(5))
def test_a_kill_leaves_no_mixture_and_the_folder_can_be_emitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    older, newer = files("old.yaml", "x.yaml"), files("x.yaml", steps=7)
    write_folder(tmp_path / "run", older)
    writes = 0
    write = folder_module.write_atomically

    def dying(path: Path, text: str) -> None:
        nonlocal writes
        if writes == at:
            raise Killed
        writes += 1
        write(path, text)

    monkeypatch.setattr(folder_module, "write_atomically", dying)
    with pytest.raises(Killed):
        write_folder(tmp_path / "run", newer, force=True)
    left = texts(tmp_path / "run")
    assert all(
        left[each.path] == each.text for each in newer if each.path in left.keys() - {"check.py"}
    )
    with pytest.raises(Killed):
        write_folder(tmp_path / "another", newer)
    monkeypatch.undo()
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    write_folder(tmp_path / "run", newer, force=True)
    found = texts(tmp_path / "run")
    assert {name: found[name] for name in found if not name.endswith("~")} == {
        each.path: each.text for each in newer
    }
