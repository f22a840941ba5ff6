"""docs/cost.md names every component of a step."""

from __future__ import annotations

from pathlib import Path

from hetplan.cost.estimate_values import Component

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cost.md"


def test_every_component_is_explained() -> None:
    names = [line.partition(":")[0] for line in PAGE.read_text().splitlines() if line[:3] == "- `"]
    for component in Component:
        assert any(f"`{component.value}`" in name for name in names), component.value
