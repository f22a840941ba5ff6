import pytest

from hetplan.profiling.clocks import cpu_clocks, nvidia_clocks, rocm_clocks, run_tool


def asked(text):
    """A tool that prints this, and notes what it was asked."""
    calls = []

    def ask(command):
        calls.append(command)
        return text

    ask.calls = calls
    return ask


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1980, 1980, 2619, 2619, 700.00, 700.00\n", ""),
        ("1410, 1980, 2619, 2619, 700.00, 700.00\n", "sm 1410 MHz"),
        ("1410, 1980, 1593, 2619, 350.00, 700.00\n", "sm 1410 MHz, memory 1593 MHz, limit 350 W"),
        ("[N/A], [N/A], [N/A], [N/A], 300.00, 700.00\n", "limit 300 W"),
        ("[Not Supported], 1, x, y, , \n", ""),
        ("", ""),
        ("No devices were found\n", ""),
        ("1410, 1980, 2619, 2619, 700, 700\n1410, 1980, 2619, 2619, 700, 700\n", ""),
        ("nan, inf, 1e400, -3, 1, 1\n", ""),
    ],
)
def test_nvidia_settings_that_are_not_the_defaults(text, words) -> None:
    ask = asked(text)
    assert nvidia_clocks("GPU-0", ask) == words
    assert "--id=GPU-0" in ask.calls[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device,GPU performance level\ncard0,auto\n", ""),
        ("device,GPU performance level\ncard0,manual\n", "performance level manual"),
        ("", ""),
        ("WARNING: something\n", ""),
    ],
)
def test_rocm_performance_level(text, words) -> None:
    assert rocm_clocks("0", asked(text)) == words


def test_a_tool_that_is_missing_or_fails_says_nothing() -> None:
    assert run_tool(("hetplan-has-no-such-tool",)) == ""
    assert run_tool(("false",)) == ""
    assert run_tool(("echo", "yes")) == "yes\n"


def cores(folder, **words):
    for core in range(256):
        place = folder / f"cpu{core}" / "cpufreq"
        place.mkdir(parents=True)
        for name, text in words.items():
            (place / name).write_text(text + "\n")
    return folder


def test_cpu_settings_that_somebody_chose(tmp_path) -> None:
    limits = {"scaling_max_freq": "3000000", "cpuinfo_max_freq": "3000000"}
    free = cores(tmp_path / "free", scaling_governor="schedutil", **limits)
    assert cpu_clocks(free) == ""
    follows = {"scaling_governor": "powersave", "scaling_driver": "intel_pstate"}
    assert cpu_clocks(cores(tmp_path / "follows", **follows, **limits)) == ""
    held = {**limits, "scaling_governor": "performance", "scaling_max_freq": "2000000"}
    place = cores(tmp_path / "held", **held)
    (place / "intel_pstate").mkdir()
    (place / "intel_pstate" / "no_turbo").write_text("1\n")
    assert cpu_clocks(place) == "governor performance, at most 2000 MHz, boost off"
    assert cpu_clocks(tmp_path / "nothing") == ""
    odd = cores(tmp_path / "odd", scaling_max_freq="<unknown>", cpuinfo_max_freq="x")
    assert cpu_clocks(odd) == ""
