"""The report in headless Chromium: it paints at once, loads nothing, and works on a phone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, Browser, browser
from report_pages import RESULTS, searched, stages_in, view_of

from hetplan.reports.html.page import report_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
MAX_PAINT_MILLISECONDS = 1000
AXE = "4.10.3"
"""Of axe-core: the rules that are checked do not change by themselves."""

CONTENT = """
return [...document.querySelectorAll('[data-chart]')].map((each) => [
  each.dataset.chart, each.getBoundingClientRect().width > 100,
  each.querySelectorAll('rect, path').length > 0 || each.innerText.trim().length > 40]);
"""
PAINT = """
const done = arguments[arguments.length - 1];
new PerformanceObserver((list) => done(list.getEntries()[0].startTime))
  .observe({type: 'paint', buffered: true});"""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    views = {name: [view_of(make())] for name, make in RESULTS.items()}
    views["side by side"] = [view_of(searched(), "one.json"), view_of(stages_in("gpipe"))]
    views["long"] = [view_of(stages_in("1f1b", count=2048))]
    found = {}
    for number, (name, shown) in enumerate(views.items()):
        found[name] = folder / f"{number}.html"
        found[name].write_text(report_text(shown), encoding="utf-8")
    return found


NAMES = (*RESULTS, "side by side", "long")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_pages_are_whole_and_load_nothing(
    chrome: Browser, pages: dict[str, Path], name: str, width: int, *, dark: bool
) -> None:
    page = pages[name]
    chrome.look(width, dark=dark)
    chrome.log("browser")
    chrome.loads()
    chrome.open(page)
    charts = chrome.run(CONTENT)
    assert len(charts) > 5
    assert [chart for chart, wide, full in charts if not (wide and full)] == []
    assert chrome.log("browser") == []
    assert chrome.loads() == [page.resolve().as_uri()]
    assert chrome.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.alone
@pytest.mark.parametrize("name", ["long", "side by side"])
def test_pages_paint_within_a_second(chrome: Browser, pages: dict[str, Path], name: str) -> None:
    """The best of three: other work of the machine only makes it later."""
    chrome.look(1280)
    seconds = []
    for _ in range(3):
        chrome.open(pages[name])
        seconds.append(chrome.wait(PAINT))
    assert min(seconds) < MAX_PAINT_MILLISECONDS


def test_the_timeline_zooms_by_button_and_key_and_says_what_is_under_the_pointer(
    chrome: Browser, pages: dict[str, Path]
) -> None:
    chrome.look(1280)
    chrome.open(pages["1f1b"])
    box = "return document.querySelector('svg.steps').getAttribute('viewBox')"
    whole = chrome.run(box)
    chrome.run("document.querySelector('[data-do=in]').click()")
    assert float(chrome.run(box).split()[2]) == pytest.approx(50_000)
    press = """
    const key = new KeyboardEvent('keydown', {key: arguments[0]});
    document.querySelector('.plot').dispatchEvent(key);"""
    chrome.run(press, "ArrowRight")
    assert float(chrome.run(box).split()[0]) == pytest.approx(45_000)
    chrome.run(press, "Home")
    assert [float(n) for n in chrome.run(box).split()] == [float(n) for n in whole.split()]
    move = """
    const svg = document.querySelector('svg.steps'), box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: box.left + 2,
      clientY: box.top + 8}));
    return document.querySelector('.tip').textContent;"""
    assert "stage 0, forward of microbatch 0" in chrome.run(move)
    assert chrome.log("browser") == []


def test_everything_is_readable_without_script(
    chrome: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    text = pages["searched"].read_text(encoding="utf-8")
    start = text.rindex("<script>")
    bare = tmp_path / "bare.html"
    bare.write_text(text[:start] + text[text.rindex("</script>") + 9 :], encoding="utf-8")
    chrome.look(1280)
    chrome.open(bare)
    assert all(wide and full for _, wide, full in chrome.run(CONTENT))
    assert chrome.run("return document.querySelectorAll('.tools:not([hidden])').length") == 0


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core's script, from the npm registry."""
    folder = tmp_path_factory.mktemp("axe")
    try:
        done = subprocess.run(
            ["npm", "pack", f"axe-core@{AXE}", "--silent"],
            cwd=folder, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        archive = folder / done.stdout.split()[-1]
        subprocess.run(["tar", "xzf", archive, "package/axe.min.js"], cwd=folder, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"axe-core could not be fetched by npm: {error}")
    return (folder / "package" / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["searched", "several pipelines", "side by side", "does not fit"])
def test_axe_finds_no_fault(
    chrome: Browser, pages: dict[str, Path], axe: str, name: str, *, dark: bool
) -> None:
    chrome.look(1280, dark=dark)
    chrome.open(pages[name])
    chrome.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    chrome.run(axe)
    found: dict[str, Any] = chrome.wait("axe.run().then(arguments[arguments.length - 1])")
    faults = [
        f"{each['impact']}: {each['id']}: {each['nodes'][0]['html'][:200]}"
        for each in found["violations"]
    ]
    assert faults == []
