"""Which files does the loop keep, and where? One folder, from which an interrupted loop goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evaluation.closed_loop.values import SPEC_SCHEMA, LoopSpec
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.files.writing import write_atomically

SMALL_JOB, SHORT_JOB = "closed-loop", "closed-loop-short"
TOGETHER_JOB = "closed-loop-together"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFiles:
    """Files of one loop."""

    folder: Path
    short: bool = False
    """Files of the short version."""

    @property
    def model(self) -> Path:
        """The model that is trained."""
        return shipped_folder("configs") / "models" / "gpt-tiny.yaml"

    @property
    def cluster(self) -> Path:
        """The emulated cluster."""
        return shipped_folder("configs") / "clusters" / "emulated-two-regions.yaml"

    @property
    def job(self) -> Path:
        """The job of the plans that are compared."""
        name = SHORT_JOB if self.short else SMALL_JOB
        return shipped_folder("configs") / "jobs" / f"{name}.yaml"

    @property
    def together_job(self) -> Path:
        """The job of all kinds together."""
        return shipped_folder("configs") / "jobs" / f"{TOGETHER_JOB}.yaml"

    @property
    def searched_together(self) -> Path:
        """What `hetplan plan` found for it."""
        return self.folder / "searched-together.json"

    @property
    def spec(self) -> Path:
        """What the loop was asked."""
        return self.folder / "spec.json"

    @property
    def core_store(self) -> Path:
        """Measurements of one core of this machine, of which the pace is made."""
        return self.folder / "core"

    @property
    def link_store(self) -> Path:
        """Measurements of the emulated links."""
        return self.folder / "links"

    def done(self, what: str) -> Path:
        """There as soon as something was measured whole."""
        return self.folder / f"{what}.done"

    def pace(self, kind: str) -> Path:
        """The pace of a pass, `plain` or `jitter`."""
        return self.folder / f"pace-{kind}.json"

    def device_store(self, kind: str) -> Path:
        """Measurements of the device kinds at that pace."""
        return self.folder / f"devices-{kind}"

    def predictor(self, kind: str) -> Path:
        """The fit of both."""
        return self.folder / f"predictor-{kind}.json"

    @property
    def searched(self) -> Path:
        """What `hetplan plan` found."""
        return self.folder / "searched.json"

    @property
    def plans(self) -> Path:
        """The plans that are trained."""
        return self.folder / "plans.json"

    def trained(self, kind: str, name: str) -> Path:
        """What one training of a pass measured."""
        return self.folder / f"trained-{kind}" / f"{name}.json"


def open_folder(folder: Path, spec: LoopSpec) -> LoopFiles:
    """The folder of this loop, new or as it was left; an InputError where another one is there."""
    files = LoopFiles(folder=folder, short=spec.short)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to folder {folder}: {error.strerror or error}") from error
    if files.spec.exists():
        there = decode(read_document(files.spec), LoopSpec, schema=SPEC_SCHEMA)
        if there != spec:
            raise InputError(
                f"{folder} has a closed loop that was asked otherwise ({there}); give another "
                "--out, or remove it"
            )
    elif any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and has no closed loop; give another --out")
    else:
        write_atomically(files.spec, encode(spec, schema=SPEC_SCHEMA))
    return files
