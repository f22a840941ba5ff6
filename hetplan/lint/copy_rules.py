"""Rules about numbers that stand under a name they were not measured for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from itertools import combinations
from typing import TypeVar

from hetplan.lint.evidence import SENTINEL_SECONDS, Evidence, Timed
from hetplan.lint.findings import Severity
from hetplan.lint.rows import CollectiveRow, DeviceFigures, LayerSampleRow, Polynomial, RunRow
from hetplan.lint.rule import Rule, Sighting, grouped, per_file, sighting

Owner = TypeVar("Owner", bound=Hashable)

MIN_EQUAL = 8  # equal values: eight six-digit times do not agree by chance
SHARE_EQUAL = 0.9  # a copy is edited here and there
DIGITS = 3  # times with fewer digits agree by chance


def _digits(seconds: float) -> int:
    """Significant digits of the time in microseconds, to a nanosecond."""
    return len(f"{seconds * 1e6:.3f}".replace(".", "").strip("0"))


def _equal(first: dict[object, float], second: dict[object, float]) -> int:
    """How many values two tables share at the same keys; 0 where too few of them do."""
    common = first.keys() & second.keys()
    telling = [key for key in common if _digits(first[key]) >= DIGITS]
    same = [key for key in telling if first[key] == second[key]]
    distinct = {first[key] for key in same}
    enough = len(distinct) >= MIN_EQUAL and len(same) >= SHARE_EQUAL * len(telling)
    return sum(first[key] == second[key] for key in common) if enough else 0


def _alike(
    tables: Mapping[Owner, dict[object, float]],
) -> Iterator[tuple[Owner, Owner, int]]:
    """Pairs of tables in their order that share values, and how many.

    Only pairs with enough telling values in common are compared: most tables have none.
    """
    owners: dict[tuple[object, float], list[int]] = {}
    for at, table in enumerate(tables.values()):
        for key, value in table.items():
            if _digits(value) >= DIGITS:
                owners.setdefault((key, value), []).append(at)
    shared: Counter[tuple[int, int]] = Counter()
    for group in owners.values():
        shared.update(combinations(group, 2))
    names = tuple(tables)
    for one, two in sorted(pair for pair, count in shared.items() if count >= MIN_EQUAL):
        same = _equal(tables[names[one]], tables[names[two]])
        if same:
            yield names[one], names[two], same


def _copied_layers(evidence: Evidence) -> Iterator[Sighting]:
    rows = [row for row in evidence.timed if row.forward is not None]
    tables = grouped(rows, lambda row: (row.origin, row.precision))
    for group in tables.values():
        owners = grouped(group, _device_and_model)
        # A store's model is its shape: only devices can be copied there.
        yield from _copies(owners)
    # Files that hold one device or model each, as the folders of Sailor's profiles do.
    single = [row for row in rows if row.whole and row.layer is not None]
    files = grouped(single, lambda row: (row.origin, *_device_and_model(row)))
    by_origin = grouped(files, lambda key: key[0])
    lone = {key: files[key] for key in files if len(by_origin[key[0]]) == 1}
    yield from _copies({key: group for key, group in lone.items()}, across=True)


def _device_and_model(row: Timed) -> tuple[str, ...]:
    return (row.device, row.model)


def _copies(
    owners: Mapping[tuple[str, ...], list[Timed]], *, across: bool = False
) -> Iterator[Sighting]:
    tables = {owner: _times(rows) for owner, rows in owners.items()}
    for one, two, same in _alike(tables):
        if across and one[1:] == two[1:]:
            continue  # the same device and model in two files is one measurement kept twice
        common = len(tables[one].keys() & tables[two].keys())
        for source, copy in ((one, two), (two, one)):
            rows = owners[copy]  # which of the two was measured, the numbers do not say
            yield sighting(
                (row.place for row in rows),
                f"{same} of {common} times of {_owner(copy)} equal those of {_owner(source)} "
                "exactly",
            )


def _owner(key: tuple[str, ...]) -> str:
    device, model = key[-2:]
    return f"{model} on {device}"


def _times(rows: list[Timed]) -> dict[object, float]:
    found: dict[object, float] = {}
    for row in rows:
        key = (row.operation, row.layer, row.variant, row.microbatch_size, row.tp)
        found[(*key, "forward")] = row.forward or 0.0
        if row.backward is not None:
            found[(*key, "backward")] = row.backward
    return found


def _copied_collectives(evidence: Evidence) -> Iterator[Sighting]:
    rows = [row for row in evidence.material.collectives if row.seconds and row.size_bytes]
    for group in grouped(rows, lambda row: row.place.file).values():
        owners = grouped(group, lambda row: row.device)
        tables = {name: _messages(each) for name, each in owners.items()}
        for one, two, same in _alike(tables):
            yield sighting(
                (row.place for row in owners[two]),
                f"{same} times of {two} equal those of {one} exactly",
            )


def _messages(rows: list[CollectiveRow]) -> dict[object, float]:
    return {
        (row.operation, row.ranks, row.scope, row.size_bytes): row.seconds or 0.0
        for row in rows
        if (row.seconds or 0.0) < SENTINEL_SECONDS
    }


def _copied_samples(evidence: Evidence) -> Iterator[Sighting]:
    owners: dict[str, list[LayerSampleRow]] = grouped(
        evidence.material.layer_samples, lambda row: row.sample.device
    )
    tables: dict[str, dict[object, float]] = {
        name: {row.sample.shape: row.sample.median_seconds for row in rows}
        for name, rows in owners.items()
    }
    for one, two, same in _alike(tables):
        places = [row.place for row in owners[two]]
        for file in grouped(places, lambda place: place.file).values():
            yield sighting(file, f"{same} times of {two} equal those of {one} exactly")


def _fit(entry: Polynomial) -> tuple[float, ...]:
    return (*entry.coefficients, entry.most_bytes_per_second)


def _copied_fits(evidence: Evidence) -> Iterator[Sighting]:
    """Links inside one kind of device whose fit is another kind's, number by number."""
    rows = [
        row for row in evidence.material.polynomials if row.ends[0] and row.ends[0] == row.ends[1]
    ]
    for group in grouped(rows, lambda row: row.place.file).values():
        wanted: dict[tuple[object, ...], Polynomial] = {}
        copies: list[tuple[Polynomial, Polynomial]] = []
        for row in group:
            key = (_fit(row), tuple(part for part in row.path if part not in row.ends))
            first = wanted.setdefault(key, row)
            if first.ends != row.ends:
                copies.append((row, first))
        yield from per_file(
            copies,
            lambda entry: entry[0].place,
            lambda found: (
                f"the fit of {'/'.join(found[0][0].path)} is that of {'/'.join(found[0][1].path)}"
            ),
        )


def _copied_figures(evidence: Evidence) -> Iterator[Sighting]:
    for group in grouped(evidence.material.figures, lambda row: row.place.file).values():
        equal: dict[object, list[DeviceFigures]] = grouped(
            [row for row in group if len({value for _, value in row.figures}) > 2],
            lambda row: row.figures,
        )
        for rows in equal.values():
            if len(rows) > 1:
                names = ", ".join(row.device for row in rows)
                yield sighting(
                    (row.place for row in rows[1:]), f"the figures of {names} are all the same"
                )


def _derived_fits(evidence: Evidence) -> Iterator[Sighting]:
    """Fits between two kinds that are the fit of one of them at home, number by number."""
    for group in grouped(evidence.material.polynomials, lambda row: row.place.file).values():
        home: dict[tuple[float, ...], Polynomial] = {}
        for row in group:
            if row.ends[0] and row.ends[0] == row.ends[1]:
                home.setdefault(_fit(row), row)
        derived = [
            (row, home[_fit(row)])
            for row in group
            if row.ends[0] != row.ends[1] and _fit(row) in home
        ]
        yield from per_file(
            derived,
            lambda entry: entry[0].place,
            lambda found: (
                f"the fit of {'/'.join(found[0][0].path)} is that of {'/'.join(found[0][1].path)}"
            ),
        )


def _copied_runs(evidence: Evidence) -> Iterator[Sighting]:
    """Runs in different settings with equal step times, and equal memory where it is known.

    Among fifty step times of six digits two are equal by chance in one table of a hundred: without
    memory two such pairs, or three equal times, are needed.
    """
    runs = [row for row in evidence.material.runs if row.step_seconds]
    for group in grouped(runs, lambda row: (row.place.file, row.source, row.model)).values():
        same = grouped(group, lambda row: (row.step_seconds, row.memory_bytes)).values()
        copies = [
            rows
            for rows in same
            if len({_setting(row) for row in rows}) > 1 and rows[0].step_kind[:7] != "derived"
        ]
        extra = sum(len(rows) - 1 for rows in copies if rows[0].memory_bytes is None)
        for rows in copies:
            if rows[0].memory_bytes is not None or extra > 1:
                yield sighting(
                    (row.place for row in rows),
                    f"{len(rows)} runs of {rows[0].model} in different settings took exactly "
                    f"{rows[0].step_seconds:g} s",
                )


def _setting(row: RunRow) -> tuple[object, ...]:
    return (
        row.device,
        row.devices,
        row.tp,
        row.pp,
        row.cp,
        row.dp,
        row.microbatch_size,
        row.global_batch_size,
        row.precision,
        row.recompute,
        row.sequence_length,
    )


def _copied_plans(evidence: Evidence) -> Iterator[Sighting]:
    plans = [plan for plan in evidence.material.plans if plan.step_seconds]
    for rows in grouped(plans, lambda plan: plan.step_seconds).values():
        files = {plan.place.file for plan in rows}
        if len(files) > 1:
            for plan in rows:
                others = ", ".join(sorted(files - {plan.place.file}))
                yield sighting(
                    [plan.place], f"step of {plan.step_seconds:g} s, as in {others}: one is a copy"
                )


def _every_copy(evidence: Evidence) -> Iterator[Sighting]:
    yield from _copied_layers(evidence)
    yield from _copied_collectives(evidence)
    yield from _copied_samples(evidence)
    yield from _copied_fits(evidence)
    yield from _copied_figures(evidence)
    yield from _copied_runs(evidence)
    yield from _copied_plans(evidence)


RULES = (
    Rule(
        id="copied-values",
        severity=Severity.SUSPICIOUS,
        title="numbers of another device or model",
        explanation="Many times with many digits are exactly equal under two names. Two "
        "measurements never are: one of them was copied, by hand or by a script that fell back.",
        advice="Find out which of the two was measured; leave the other out.",
        check=_every_copy,
    ),
    Rule(
        id="derived-values",
        severity=Severity.SUSPICIOUS,
        title="figures between two devices that are those of one of them",
        explanation="The path between two kinds of devices has exactly the figures of one kind "
        "with itself: it was derived by a rule (the slower of the two), not measured. What joins "
        "them (another network, another zone) is not in it.",
        advice="Measure the path between the two kinds, or mark the figures as derived.",
        check=_derived_fits,
    ),
)
