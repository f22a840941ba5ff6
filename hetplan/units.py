"""How physical quantities are written: "200 Gbit/s", "5 us", "80 GiB", "312 TFLOP/s", "2 MW".

Inside hetplan every quantity is a float in its SI base unit (bytes, seconds, bytes per second,
operations per second, watts; prices in US dollars per hour, byte and joule). Text is turned into
such a float here and nowhere else, and back into text only for people. kB, MB, GB, TB are powers of
1000, KiB, MiB, GiB, TiB powers of 1024; `bit` and `B` differ by eight. `Gbps` and `Gbit` are bits
per second; `Gb/s`, which some write for bytes, is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import Decimal
from difflib import get_close_matches
from enum import StrEnum

from hetplan.errors import InputError

MEBIBYTE, GIBIBYTE = 2**20, 2**30  # IEC 80000-13: MiB and GiB, in bytes

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""A name of something in a file: a word that can stand in a path such as `island/3`."""


class Dimension(StrEnum):
    """What a quantity measures."""

    MEMORY = "memory"
    BANDWIDTH = "bandwidth"
    TIME = "time"
    RATE = "rate"
    """Operations per second."""
    POWER = "power"
    HOURLY_PRICE = "price per hour"
    TRAFFIC_PRICE = "price of traffic"
    ENERGY_PRICE = "price of energy"


_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BITS = {f"{prefix}bit": factor / 8.0 for prefix, factor in _DECIMAL.items()}
_SPOKEN_RATES = {
    f"{letter}{unit}": factor / 8.0
    for prefix, factor in _DECIMAL.items()
    for letter in {prefix, prefix.lower()}
    for unit in ("bit", "bps")
}
"""As people say them, with a small letter too: no bandwidth is counted in millibits."""

UNITS: dict[Dimension, dict[str, float]] = {
    Dimension.MEMORY: _BYTES,
    Dimension.BANDWIDTH: {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()}
    | _SPOKEN_RATES,
    Dimension.TIME: {
        "ns": 1e-9,
        "us": 1e-6,
        "µs": 1e-6,
        "ms": 1e-3,
        "s": 1.0,
        "min": 60.0,
        "h": 3600.0,
        "d": 86400.0,
    },
    Dimension.RATE: {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()},
    Dimension.POWER: {f"{prefix}W": _DECIMAL[prefix] for prefix in ("", "k", "M", "G")},
    Dimension.HOURLY_PRICE: {"USD/h": 1.0},
    Dimension.TRAFFIC_PRICE: {
        f"USD/{prefix}B": 1.0 / (_DECIMAL | _BINARY)[prefix] for prefix in ("G", "T", "Gi", "Ti")
    },
    Dimension.ENERGY_PRICE: {"USD/kWh": 1.0 / 3.6e6, "USD/MWh": 1.0 / 3.6e9},
}
"""Factor of every accepted unit, per dimension."""

EXAMPLES: dict[Dimension, tuple[str, ...]] = {
    Dimension.MEMORY: ("80 GiB", "64 GB"),
    Dimension.BANDWIDTH: ("25 GB/s", "200 Gbit/s"),
    Dimension.TIME: ("5 us", "1.5 ms", "60 s"),
    Dimension.RATE: ("312 TFLOP/s",),
    Dimension.POWER: ("700 W", "1.2 MW"),
    Dimension.HOURLY_PRICE: ("2.5 USD/h",),
    Dimension.TRAFFIC_PRICE: ("0.02 USD/GB",),
    Dimension.ENERGY_PRICE: ("0.08 USD/kWh",),
}
"""Right ways to write each dimension, for messages and documentation."""

_PRICES = (Dimension.HOURLY_PRICE, Dimension.TRAFFIC_PRICE, Dimension.ENERGY_PRICE)

_NUMBER = r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([^\s\d].*)", re.ASCII)


def pattern(dimension: Dimension) -> str:
    """Regular expression of every accepted text of this dimension, for JSON Schema."""
    units = "|".join(sorted(UNITS[dimension], key=lambda unit: (-len(unit), unit)))
    return rf"^\s*{_NUMBER}\s*(?:{units})\s*$"


def parse_quantity(text: object, dimension: Dimension) -> float:
    """The quantity in base units; an InputError that shows a right example otherwise.

    Times may be zero, everything else must be more than zero.
    """
    if not isinstance(text, str):
        shown = f"{text!r} without a unit" if _is_number(text) else f"a {_kind(text)}"
        raise InputError(f"found {shown}; write {_right_way(dimension, text)}")
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        if re.fullmatch(rf"[+-]?{_NUMBER}", text.strip(), re.ASCII):
            raise InputError(
                f"found {text!r} without a unit; write {_right_way(dimension, float(text))}"
            )
        raise InputError(f"{text!r} is not a number and a unit; write {_right_way(dimension)}")
    number, unit = float(found.group(1)), found.group(2).strip()
    factor = UNITS[dimension].get(unit)
    if factor is None:
        raise InputError(f"{text!r}: {_wrong_unit(unit, dimension)}")
    value = number * factor
    if not math.isfinite(value):
        raise InputError(f"{text!r} is too large; write {_right_way(dimension)}")
    if value == 0.0 and dimension is not Dimension.TIME:
        raise InputError(f"{text!r} is zero; a {dimension} must be more than zero")
    return value


_COUNT = re.compile(rf"({_NUMBER})\s*([kKMBT]?)", re.ASCII)
_COUNT_SIZES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
COUNT_PATTERN = rf"^\s*{_NUMBER}\s*[kKMBT]?\s*$"
"""Regular expression of a count as people write it, for JSON Schema."""


def parse_count(text: str) -> int:
    """`2T`, `1.5B`, `300M`, `2e12` or plain digits as a whole number; an InputError otherwise."""
    found = _COUNT.fullmatch(text.strip().replace(",", "").replace("_", "")[:40])
    if found is not None:
        exact = Decimal(found.group(1)) * _COUNT_SIZES[found.group(2)]
        # Beyond 28 digits a Decimal is rounded, and no count is as long.
        if exact < 10**28 and exact == exact.to_integral_value():
            return int(exact)
    raise InputError(f"found {text[:60]!a}; write a whole number, as in 2T, 1.5B or 2000000")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: object) -> str:
    if value is None:
        return "key without a value"
    names = {bool: "truth value", list: "list", dict: "mapping"}
    return names.get(type(value), type(value).__name__)


def _right_way(dimension: Dimension, number: object = None) -> str:
    """`a bandwidth with its unit, such as "25 GB/s" or "200 Gbit/s"`."""
    examples = " or ".join(f'"{example}"' for example in EXAMPLES[dimension])
    if number is not None and _is_number(number):
        units = [example.split()[1] for example in EXAMPLES[dimension]]
        examples = " or ".join(f'"{number:g} {unit}"' for unit in units)
        examples += ", whichever is meant" if len(units) > 1 else ""
    return f"a {dimension} with its unit, such as {examples}"


def _wrong_unit(unit: str, dimension: Dimension) -> str:
    """What is wrong with a unit and what was probably meant."""
    currency = re.fullmatch(r"([A-Z]{3})/\w+", unit)
    if currency and currency.group(1) != "USD" and dimension in _PRICES:
        return (
            f"a price in {currency.group(1)}; all prices are in one currency, USD: convert it, "
            f"and write {_right_way(dimension)}"
        )
    bits = re.fullmatch(r"([kKMGTP]?)b(?:it)?(?:/s|ps|it/s)", unit)
    if dimension is Dimension.BANDWIDTH and bits:
        prefix = bits.group(1).replace("K", "k")
        return (
            f"{unit!r} is easily taken for bytes; write {prefix}bit/s for bits "
            f"or {prefix}B/s for bytes per second (1 B = 8 bit)"
        )
    for other, units in UNITS.items():
        if unit in units:
            return f"{unit!r} is a unit of {other}; write {_right_way(dimension)}"
    folded = {known.lower(): known for known in UNITS[dimension]}
    close = folded.get(unit.lower()) or next(
        iter(get_close_matches(unit, UNITS[dimension], n=1)), None
    )
    hint = f" (did you mean {close!r}?)" if close else ""
    return f"unknown unit {unit!r}{hint}; write {_right_way(dimension)}"


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """`value` with four digits in the largest unit that is not larger than it."""
    if not math.isfinite(value) or value == 0.0:
        return f"{value:g} {steps[-1][1]}"
    factor, unit = next(
        ((factor, unit) for factor, unit in steps if abs(value) >= factor * (1 - 5e-5)), steps[-1]
    )
    return f"{float(f'{value / factor:.4g}'):.10g} {unit}"


def _decimal_steps(unit: str) -> tuple[tuple[float, str], ...]:
    return tuple((factor, f"{prefix}{unit}") for prefix, factor in reversed(_DECIMAL.items()))


def format_seconds(seconds: float) -> str:
    """As in `12.5 ms`, `3.2 s`, `4.1 h`."""
    steps = (
        (2 * 86400.0, "d"),
        (2 * 3600.0, "h"),
        (2 * 60.0, "min"),
        (1.0, "s"),
        (1e-3, "ms"),
        (1e-6, "us"),
        (1e-9, "ns"),
    )
    if not math.isfinite(seconds) or seconds == 0.0:
        return f"{seconds:g} s"
    unit = next((unit for least, unit in steps if abs(seconds) >= least * (1 - 5e-5)), "ns")
    return f"{float(f'{seconds / UNITS[Dimension.TIME][unit]:.4g}'):.10g} {unit}"


def digits(number: float) -> str:
    """Three digits, or all of a larger number: `44.0`, `0.123`, `1,235`."""
    return f"{number:,.0f}" if abs(number) >= 99.95 else f"{number:#.3g}"


def scaled(number: float, *units: tuple[str, float]) -> str:
    """Three digits in the largest unit that is not above the number, else the last: `412 kW`."""
    unit, size = next((each for each in units if number >= each[1]), units[-1])
    return f"{digits(number / size)}{unit}"


def format_brief(seconds: float, like: float | None = None) -> str:
    """A time with three digits, as in `29.3 s`, `991 ms`, or in the unit that `like` has."""
    unit = format_seconds(seconds if like is None else like).split()[1]
    return f"{digits(seconds / UNITS[Dimension.TIME][unit]) if seconds else 0} {unit}"


def format_count(number: int) -> str:
    """As in `2T`, `1.5B`, `120`; what four digits cannot say is written out."""
    for letter, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        short = number * 1000 // size
        if number >= size and short * size == number * 1000:
            return f"{short / 1000:g}{letter}"
    return f"{number:,}"


def format_range(seconds: float, low: float, high: float, share: str, what: str = "a step") -> str:
    """A time with its interval in one unit: `29.3 s a step (90 %: 22.3 to 48.1 s)`."""
    own, least, most = (format_brief(each, seconds) for each in (seconds, low, high))
    return f"{own} {what} ({share}: {least.split()[0]} to {most})"


def format_about(seconds: float) -> str:
    """An estimate's two digits and no more, as in `4.5 min`."""
    number, unit = format_seconds(seconds).split()
    return f"{float(f'{float(number):.2g}'):g} {unit}"


def format_bytes(size: float) -> str:
    """In powers of 1024, as in `71.2 GiB`."""
    binary = tuple((factor, f"{prefix}B") for prefix, factor in reversed(_BINARY.items()))
    return _scaled(size, (*binary, (1.0, "B")))


def format_bandwidth(bytes_per_second: float) -> str:
    """In bytes per second with powers of 1000, as in `25 GB/s`."""
    return _scaled(bytes_per_second, _decimal_steps("B/s"))


def format_power(watts: float) -> str:
    """As in `700 W`, `1.2 MW`."""
    return _scaled(watts, _decimal_steps("W")[2:])


def format_rate(per_second: float, unit: str) -> str:
    """Any count per second: `format_rate(51_200, "token/s")` is `51.2 ktoken/s`."""
    return _scaled(per_second, _decimal_steps(unit))


def format_share(fraction: float | None) -> str:
    """As in `1.25%`; None is unknown. What rounds to nothing is not less than nothing."""
    return "unknown" if fraction is None else f"{fraction:.2%}".replace("-0.00%", "0.00%")


def counted(number: int, thing: str, things: str = "") -> str:
    """As in `1 stage`, `2 stages`, `3 batches`."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def number_runs(numbers: Iterable[int], between: str = ", ", width: int = 0) -> str:
    """Ascending numbers as `0, 2-5`, each of at least `width` digits."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ends = (dict.fromkeys((run[0], run[-1])) for run in runs)
    return between.join("-".join(f"{end:0{width}d}" for end in each) for each in ends)


def format_each(values: Iterable[object]) -> str:
    """Different values in their order, as in `8/4` and `none/full`."""
    return "/".join(map(str, dict.fromkeys(values)))
