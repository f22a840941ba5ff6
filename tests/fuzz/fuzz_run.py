"""Fuzzes every form: a changed input gives a value or a HetplanError, soon and in little memory.

As a program: `python tests/fuzz/fuzz_run.py --cases 1000000 --seed 0`; it prints a table, and puts
the smallest input of every fault that it finds into tests/fuzz/corpus, where `test_fuzz.py` tries
it from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import resource
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

if __name__ == "__main__":
    sys.path += [str(each) for each in Path(__file__).parents[1].iterdir() if each.is_dir()]
    sys.path.insert(0, str(Path(__file__).parents[2]))

from fuzz_changes import DRAWN, Change, changed, edited, edits
from fuzz_forms import FORMS, Form
from hypothesis import HealthCheck, Phase, given, seed, settings

from hetplan.errors import HetplanError, InputError

CORPUS = Path(__file__).with_name("corpus")
CPU_SECONDS = 5.0
"""Of one case, against a hang: the slowest answer to a text that is right takes 0.1 s."""
MEMORY_BYTES = 1 << 30
"""That one case may add: 1,000 times the largest text."""
MAX_MESSAGE = 20_000
"""Characters of one fault; of a list of faults the command line shows 20."""
_AT_ONCE = 500
"""Examples of one run of hypothesis, whose bookkeeping grows with their number."""


class TooLongError(Exception):
    """A case took more than CPU_SECONDS."""


@contextmanager
def limits() -> Iterator[None]:
    """CPU_SECONDS and MEMORY_BYTES more from here on; then as before."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TooLongError(f"more than {CPU_SECONDS:g} s of CPU")

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    handler = signal.signal(signal.SIGVTALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, handler)


def prepared(form: Form, folder: Path) -> Path:
    """The place of the form's file, with the other files that it names."""
    for name, text in (*form.always, (form.file, "")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / form.file


def answered(form: Form, path: Path, text: str) -> bool:
    """Whether the text is read (False: refused); anything else that happens is raised."""
    try:
        data = text.encode(form.encoding, "surrogateescape")
    except UnicodeEncodeError:
        data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(data)
    began = time.process_time()
    logging.disable()
    with limits():
        try:
            form.read(path)
            read = True
        except HetplanError as error:
            faults = error.faults if isinstance(error, InputError) else (error,)
            longest = max(len(str(each)) for each in faults)
            assert 0 < longest < MAX_MESSAGE, f"a fault of {longest} characters"
            str(error).encode("utf-8")
            read = False
        finally:
            logging.disable(logging.NOTSET)
    # A limit may have been caught as any exception.
    assert time.process_time() - began < CPU_SECONDS, "took too long"
    return read


def case_text(form: Form, drawn: Sequence[Change], which: int) -> str:
    """The text of a case; of an emitted form its edits, which `whole` makes the text of."""
    seeds = form.seeds()
    text = seeds[which % len(seeds)]
    if form.is_emitted:
        return json.dumps(edits(json.loads(text), drawn))
    return changed(text, drawn)


def whole(form: Form, text: str) -> str:
    """The text that is read."""
    if not form.is_emitted:
        return text
    data = json.loads(form.seeds()[0])
    for place, what, value in json.loads(text):
        data = edited(data, (tuple(place), what, value))
    return json.dumps(data)


@dataclass(slots=True)
class Tally:
    """What became of the cases of one form."""

    form: Form
    read: int = 0
    refused: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)
    """Text of the smallest case, traceback."""
    seconds: float = 0.0


def fuzz(form: Form, count: int, seed_number: int, *, stop: bool = True) -> Tally:
    """The form's answers to that many changed texts; `stop`: at the first fault."""
    tally, began = Tally(form), time.process_time()
    with tempfile.TemporaryDirectory(prefix="hetplan-fuzz-") as folder:
        path = prepared(form, Path(folder))
        for run, first in enumerate(range(0, count, _AT_ONCE)):
            number = zlib.crc32(f"{form.name} {seed_number} {run}".encode())
            _run(tally, path, min(_AT_ONCE, count - first), number)
            if tally.faults and stop:
                break
    tally.seconds = time.process_time() - began
    return tally


def _run(tally: Tally, path: Path, count: int, number: int) -> None:
    form, last = tally.form, ""
    texts = range(len(form.seeds()))
    found: Counter[bool] = Counter()

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(drawn=DRAWN, which=_positions(len(texts)))
    def case(drawn: list[Change], which: int) -> None:
        nonlocal last
        last = case_text(form, drawn, which)
        found[answered(form, path, whole(form, last))] += 1

    try:
        case()
    except Exception:
        tally.faults.append((last, traceback.format_exc()))
    tally.read += found[True]
    tally.refused += found[False]


def _positions(count: int):  # type: ignore[no-untyped-def]
    from hypothesis import strategies as st

    return st.integers(0, count - 1)


def keep(form: Form, text: str) -> Path:
    """Put the case into the corpus."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    path = CORPUS / form.name / f"{digest}{'.json' if form.is_emitted else Path(form.file).suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
    return path


def corpus() -> Iterator[tuple[Form, Path]]:
    """Every case that once failed."""
    for form in FORMS:
        for path in sorted((CORPUS / form.name).glob("*")):
            yield form, path


def corpus_text(path: Path) -> str:
    """As it was kept."""
    return path.read_bytes().decode("utf-8", "surrogateescape")


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Fuzz, print the table, keep what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forms", default="", help="Only forms whose names hold this.")
    asked = parser.parse_args(arguments)
    forms = [form for form in FORMS if asked.forms in form.name]
    say(f"{'form':34}{'cases':>9}{'read':>9}{'refused':>9}{'faults':>8}{'CPU s':>9}")
    total = Tally(forms[0])
    for form in forms:
        tally = fuzz(form, -(-asked.cases // len(forms)), asked.seed, stop=False)
        say(_row(form.name, tally))
        for text, trace in tally.faults:
            say(f"  kept as {keep(form, text)}\n{trace}")
        total.read += tally.read
        total.refused += tally.refused
        total.faults += tally.faults
        total.seconds += tally.seconds
    say(_row(f"all {len(forms)}", total))
    return bool(total.faults)


def _row(name: str, tally: Tally) -> str:
    cases = tally.read + tally.refused + len(tally.faults)
    return (
        f"{name:34}{cases:>9,}{tally.read:>9,}{tally.refused:>9,}"
        f"{len(tally.faults):>8,}{tally.seconds:>9.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
