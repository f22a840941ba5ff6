import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.units import (
    EXAMPLES,
    Dimension,
    digits,
    format_bandwidth,
    format_bytes,
    format_count,
    format_seconds,
    parse_count,
    parse_quantity,
    pattern,
)

steady = settings(derandomize=True, deadline=None, max_examples=200)


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GiB", Dimension.MEMORY, 80 * 2**30),
        ("200 Gbit/s", Dimension.BANDWIDTH, 25e9),
        ("5 µs", Dimension.TIME, 5e-6),
        ("0 ms", Dimension.TIME, 0.0),
        ("10 Gbps", Dimension.BANDWIDTH, 1.25e9),
        ("10Gbit", Dimension.BANDWIDTH, 1.25e9),
        ("100mbit", Dimension.BANDWIDTH, 12.5e6),
        ("30ms", Dimension.TIME, 0.03),
        ("1.5e-3 s", Dimension.TIME, 1.5e-3),
        ("  15.7   TFLOP/s ", Dimension.RATE, 15.7e12),
        ("2.5 USD/h", Dimension.HOURLY_PRICE, 2.5),
        ("0.02 USD/GB", Dimension.TRAFFIC_PRICE, 2e-11),
    ],
)
def test_parse(text, dimension, value):
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "dimension", "says"),
    [
        (200, Dimension.BANDWIDTH, ["200 without a unit", '"200 GB/s" or "200 Gbit/s"']),
        ("200 Gb/s", Dimension.BANDWIDTH, ["write Gbit/s for bits or GB/s"]),
        ("200 GB", Dimension.BANDWIDTH, ["'GB' is a unit of memory", '"25 GB/s"']),
        ("80 gb", Dimension.MEMORY, ["unknown unit 'gb'", "did you mean 'GB'"]),
        ("five us", Dimension.TIME, ["not a number and a unit", '"5 us"']),
        ("0 GB/s", Dimension.BANDWIDTH, ["is zero"]),
        ("1e400 GB", Dimension.MEMORY, ["too large"]),
        (None, Dimension.TIME, ["a key without a value"]),
        ("٣ GB", Dimension.MEMORY, ["not a number and a unit"]),
    ],
)
def test_wrong_quantities_show_a_right_example(text, dimension, says):
    with pytest.raises(InputError) as caught:
        parse_quantity(text, dimension)
    for part in says:
        assert part in str(caught.value)


@given(value=st.floats(1e-9, 1e12))
@steady
def test_parse_inverts_format_seconds(value):
    text = format_seconds(value)
    assert parse_quantity(text, Dimension.TIME) == pytest.approx(value, rel=6e-4)


@given(value=st.floats(1.0, 1e18))
@steady
def test_parse_inverts_the_other_formats(value):
    for write, dimension in (
        (format_bytes, Dimension.MEMORY),
        (format_bandwidth, Dimension.BANDWIDTH),
    ):
        assert parse_quantity(write(value), dimension) == pytest.approx(value, rel=6e-4)


@given(text=st.text(max_size=12))
@steady
def test_any_text_is_a_quantity_or_an_input_error(text):
    for dimension in Dimension:
        try:
            value = parse_quantity(text, dimension)
        except InputError:
            continue
        assert math.isfinite(value)
        assert value >= 0
        assert re.fullmatch(pattern(dimension), text.strip()), text


def test_examples_are_right():
    for dimension, examples in EXAMPLES.items():
        for example in examples:
            assert parse_quantity(example, dimension) > 0
            assert re.fullmatch(pattern(dimension), example)


@pytest.mark.parametrize(
    ("number", "text"),
    [(2 * 10**12, "2T"), (1_500_000_000, "1.5B"), (1_048_576, "1,048,576"), (120, "120")],
)
def test_counts_are_short_only_where_they_stay_exact(number: int, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(44.0, "44.0"), (0.1234, "0.123"), (99.96, "100"), (1234.5, "1,234")]
)
def test_three_digits(number: float, text: str) -> None:
    assert digits(number) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2T", 2 * 10**12),
        ("1.5 B", 1_500_000_000),
        ("300M", 300_000_000),
        ("8k", 8000),
        ("2e12", 2 * 10**12),
        ("2,000,000", 2_000_000),
        (" 17 ", 17),
    ],
)
def test_counts_as_people_write_them(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "2Q", "-1", "1.5", "0.0001k", "1e40", "nan", "9" * 5000, "T"])
def test_a_text_that_is_no_count_shows_a_right_one(text):
    with pytest.raises(InputError, match="as in 2T"):
        parse_count(text)


@given(st.integers(1, 10**18))
def test_a_count_is_read_as_it_is_shown(number):
    assert parse_count(format_count(number)) == number
