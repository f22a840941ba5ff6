"""What starts a trainer on a plan: program, arguments, environment and files, for any scheduler.

A trainer's `write` module makes a `TrainerLaunch`; a scheduler's module turns it into a script.
Texts here are plain: whoever writes them into a script quotes them (`hetplan.schedulers.quoting`).
"""

from __future__ import annotations

from dataclasses import dataclass

MOCK_LEARNING_RATE = 1e-5
"""With mock data nothing is learned; a step takes as long with any rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmissionOptions:
    """What a user says beside the plan: paths on the hosts, length of the run, scheduler."""

    trainer_folder: str = ""
    """The trainer's checkout on every host; empty: the TRAINER_FOLDER of the environment in which
    the script runs."""
    python: str = "python3"
    """Interpreter on the hosts; torchrun is started as its module torch.distributed.run."""
    data: tuple[str, ...] = ()
    """Data prefixes or folders, as the trainer wants them; empty: the trainer's mock data."""
    tokenizer: str = ""
    """Tokenizer model or folder; needed with `data`."""
    save: str = ""
    """Folder for checkpoints; empty: none are saved."""
    load: str = ""
    steps: int = 50
    learning_rate: float | None = None
    """None: MOCK_LEARNING_RATE with mock data; with `data` it must be given."""
    extra_arguments: tuple[str, ...] = ()
    """Handed to the trainer unchanged, after the plan's."""
    scheduler: str = "torchrun"
    """What starts the hosts, as in `hetplan.schedulers`."""

    @property
    def rate(self) -> float:
        """The learning rate that the trainer is told."""
        return MOCK_LEARNING_RATE if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedFile:
    """One file of an emitted folder."""

    path: str
    """Relative to the folder, with forward slashes."""
    text: str
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLaunch:
    """One trainer's side of a launch."""

    target: str
    """As in `hetplan emit --target`."""
    title: str
    """Name of the trainer for a reader, with the version whose code was read or run."""
    program: tuple[str, ...]
    """What torchrun starts: a script relative to the trainer's folder, or `-m` and a module."""
    arguments: tuple[tuple[str, ...], ...]
    """One entry per flag, with its values. A text may hold `{folder}`, which scripts replace by the
    emitted folder's place on the host."""
    environment: tuple[tuple[str, str], ...]
    """Of every rank; values may hold `{folder}`."""
    agent_environment: tuple[tuple[tuple[str, str], ...], ...]
    """Of each agent in the order of node ranks, after `environment`: what its vendor's libraries
    want, interface names, visible devices."""
    agent_arguments: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """Of each agent in the order of node ranks, after `arguments`, of which they may repeat one
    (the last one counts); empty: none."""
    files: tuple[EmittedFile, ...] = ()
    """Beside the scripts."""
    remarks: tuple[str, ...] = ()
    """What the plan has that the trainer does otherwise or decides itself, a line each."""
    own_runner: tuple[str, ...] = ()
    """Words of the trainer's own command that starts all hosts by ssh, from its folder; empty: it
    has none. Words may hold `{folder}`."""
