"""What a user of `hetplan profile` asks for, and what that means: device, grid, pace, sizes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hetplan.errors import InputError
from hetplan.files.shipped import default_store
from hetplan.job.load import load_job
from hetplan.job.spec import Job, Precision
from hetplan.model.load import load_model
from hetplan.model.spec import Architecture, ModelSpec
from hetplan.profiling.grid import GridPoint, job_grid, plain_models, points
from hetplan.profiling.pacing import PacedKind, load_pace
from hetplan.units import Dimension, parse_quantity

OPERATORS = "operators"
"""What stands after `hetplan profile` to measure operators instead of whole layers."""

_Choice = TypeVar("_Choice", Architecture, Precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """Shapes that are measured where the user names none."""

    hidden: tuple[int, ...]
    seq: tuple[int, ...]
    vocab: int
    microbatch: tuple[int, ...]
    tp: tuple[int, ...]
    precision: Precision


# Under a minute on one core; three hidden sizes, so that a fit can leave one out.
_CPU = _Defaults(
    hidden=(128, 192, 256),
    seq=(128,),
    vocab=1024,
    microbatch=(1, 2, 4),
    tp=(1, 2),
    precision=Precision.FLOAT32,
)
# From the 3 B to the 70 B class; minutes on a current accelerator.
_ACCELERATOR = _Defaults(
    hidden=(2048, 4096, 8192),
    seq=(2048,),
    vocab=32000,
    microbatch=(1, 2, 4),
    tp=(1, 2, 4, 8),
    precision=Precision.BFLOAT16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """The options of the command, as they were given."""

    store: Path | None = None
    device: str | None = None
    kind: str | None = None
    model: Path | None = None
    job: Path | None = None
    architecture: str = "gpt"
    hidden: str | None = None
    seq: str | None = None
    vocab: int | None = None
    microbatch: str | None = None
    tp: str | None = None
    precision: str | None = None
    threads: int = 1
    budget: float | None = None
    pace: Path | None = None
    link: str | None = None
    sizes: str | None = None
    groups: str | None = None
    again: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise InputError(f"--threads is {self.threads}; it must be at least 1")
        if self.vocab is not None and self.vocab < 1:
            raise InputError(f"--vocab is {self.vocab}; it must be at least 1")
        if self.budget is not None and not self.budget > 0:
            raise InputError(f"--budget is {self.budget}; it is a positive number of seconds")
        if (self.model is None) != (self.job is None):
            raise InputError("--model and --job belong together: give both or neither")
        if self.model is not None and (self.hidden or self.vocab is not None):
            raise InputError("--hidden and --vocab come from the model; leave them out")
        if self.job is not None and (self.seq or self.precision):
            raise InputError("--seq and --precision come from the job; leave them out")

    @property
    def store_folder(self) -> Path:
        """The store that samples are added to."""
        return self.store if self.store is not None else default_store()

    @property
    def threads_here(self) -> int:
        """The threads to measure with; an InputError where this process may use fewer cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        if cores is not None and self.threads > cores:
            raise InputError(
                f"--threads is {self.threads}, and this process may use {cores} cores: threads "
                f"that wait for each other measure nothing; at most {cores}"
            )
        return self.threads

    def load(self) -> tuple[ModelSpec, Job] | None:
        """Model and job, where they were given."""
        if self.model is None or self.job is None:
            return None
        return load_model(self.model), load_job(self.job)

    def paced_kind(self) -> PacedKind | None:
        """The kind that is played; None without a pace file."""
        if self.pace is None:
            return None
        pace = load_pace(self.pace)
        if self.kind is not None:
            return pace.kind(self.kind)
        if len(pace.kinds) != 1:
            names = ", ".join(kind.device for kind in pace.kinds)
            raise InputError(f"the pace has the device kinds {names}; choose one with --kind")
        return pace.kinds[0]

    def grid(self, *, is_accelerator: bool) -> tuple[GridPoint, ...]:
        """The points to measure."""
        degrees, microbatches = integers("--tp", self.tp), integers("--microbatch", self.microbatch)
        loaded = self.load()
        if loaded is not None:
            return job_grid(
                *loaded,
                tp_degrees=degrees,
                microbatch_sizes=microbatches,
                # A pace is of one model: other sizes have no times.
                neighbours=self.pace is None,
            )
        if self.pace is not None:
            raise InputError("--pace needs the --model and --job that its times are of")
        default = _ACCELERATOR if is_accelerator else _CPU
        lengths = integers("--seq", self.seq) or default.seq
        models = plain_models(
            _choice("--architecture", self.architecture, Architecture),
            integers("--hidden", self.hidden) or default.hidden,
            vocab_size=default.vocab if self.vocab is None else self.vocab,
            sequence_length=max(lengths),
        )
        names = self.precision.split(",") if self.precision else [default.precision]
        return points(
            models,
            sequence_lengths=lengths,
            microbatch_sizes=microbatches or default.microbatch,
            tp_degrees=degrees or default.tp,
            precisions=tuple(_choice("--precision", name.strip(), Precision) for name in names),
        )


def check_modes(
    *,
    list_: bool,
    campaign: Path | None,
    merge: bool,
    paths: Sequence[Path] | None,
    cluster: Path | None,
    out: Path | None,
    operators: bool,
) -> None:
    """An InputError where options were given that do not belong together."""
    if operators and campaign is not None:
        raise InputError(
            f"a campaign measures layers and links, not {OPERATORS}: leave the word out, or run "
            f"`hetplan profile {OPERATORS}` on a device where hetplan is installed"
        )
    modes = [
        name
        for name, given in (("--list", list_), ("--campaign", campaign), ("--merge", merge))
        if given
    ]
    if len(modes) > 1:
        raise InputError(f"{' and '.join(modes)} are different things to do; give one")
    if merge and not paths:
        raise InputError("--merge needs files or folders that came back: --merge FOLDER")
    if paths and not merge:
        raise InputError(
            f"{paths[0]} is left over; files are given with --merge, and `hetplan profile "
            f"{OPERATORS}` alone measures operators"
        )
    if cluster is not None and not list_:
        raise InputError("--cluster goes with --list; a campaign is --campaign CLUSTER")
    if out is not None and campaign is None:
        raise InputError("--out is the folder of a campaign; it goes with --campaign")


def check_for(
    *,
    model: Path | None,
    cluster: Path | None,
    job: Path | None,
    campaign: Path | None,
    merge: bool,
    operators: bool,
) -> None:
    """An InputError where --for was given with what it does not go with, or without what does."""
    others = (("--campaign", campaign is not None), ("--merge", merge), (OPERATORS, operators))
    for name, given in others:
        if given:
            raise InputError(f"--for and {name} are different things to do; give one")
    if job is not None:
        raise InputError("--for JOB names the job; leave out --job")
    missing = [
        name for name, given in (("--model", model), ("--cluster", cluster)) if given is None
    ]
    if missing:
        raise InputError(f"--for needs {' and '.join(missing)} too: it searches the job's plans")


def budget_seconds(text: str | None) -> float | None:
    """Seconds of a budget such as `10min`, `90s`, `1h` or `90`; None without one."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parse_quantity(text, Dimension.TIME)
        except InputError as error:
            raise InputError(f"--budget: {error}") from None
    if not 0 < seconds < float("inf"):
        raise InputError(f"--budget is {text}; it is a time to spend, as in 10min, 90s or 1h")
    return seconds


def integers(option: str, text: str | None) -> tuple[int, ...]:
    """Positive whole numbers separated by commas, smallest first; none where nothing was given."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or not int(part)]
    if wrong:
        raise InputError(f"{option} is {text}; found {wrong[0]!r}, write as in {option} 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def byte_sizes(option: str, text: str | None) -> tuple[int, ...]:
    """Numbers of bytes separated by commas, plain or with a unit, smallest first."""
    if text is None:
        return ()
    sizes = set()
    for part in (part.strip() for part in text.split(",")):
        plain = f"{part} B" if re.fullmatch(r"\d+", part) else part
        try:
            sizes.add(round(parse_quantity(plain, Dimension.MEMORY)))
        except InputError as error:
            raise InputError(f"{option}: {error}") from error
    return tuple(sorted(sizes))


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command for the provenance; programs' own paths say nothing to others."""
    return shlex.join(["hetplan", *(sys.argv[1:] if arguments is None else arguments)])


def _choice(option: str, text: str, of: type[_Choice]) -> _Choice:
    try:
        return of(text)
    except ValueError:
        raise InputError(f"{option} is {text}; it is one of {', '.join(of)}") from None
