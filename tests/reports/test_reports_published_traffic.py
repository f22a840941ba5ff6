"""The article's table comes out to 0.5 %, and its errors as they were found by hand."""

from __future__ import annotations

import pytest

from hetplan.reports.published_traffic import (
    ARTICLE,
    SWITCH_BITS_PER_SECOND,
    ArticleInputs,
    Groups,
    article_rows,
    article_slips,
    switches_for,
)

ROWS = {row.name: row for row in article_rows()}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("DP backward", 1396e15),
        ("FSDP forward", 175e15),
        ("FSDP backward", 175e15),
        ("TP backward", 26_622e15),
        ("TP forward", 21_840e15),
        ("PP forward", 17.9e15),
        ("3D", 84.7e18),
    ],
)
def test_the_article_is_reproduced(name: str, published: float) -> None:
    assert ROWS[name].as_published == pytest.approx(published, rel=0.005)


def test_without_the_slip_of_units() -> None:
    assert ROWS["TP backward"].bytes == pytest.approx(27_910e15, rel=0.005)
    assert ROWS["TP forward"].bytes == pytest.approx(22_901e15, rel=0.005)
    assert ROWS["3D backward"].bytes == pytest.approx(61.82e18, rel=0.001)
    assert ROWS["3D forward"].bytes == pytest.approx(22.92e18, rel=0.001)


def test_published_figures_stand_beside_the_articles_own_inputs_only() -> None:
    others = ArticleInputs(
        batches=10.0,
        parameters=1e9,
        layers=4,
        hidden_size=64,
        tokens=1e6,
        alone=Groups(dp=4, tp=2, pp=3),
        together=Groups(dp=4, tp=2, pp=3),
    )
    for row in article_rows(others):
        assert row.published_bytes is None
        assert row.slipped_bytes is None
    found = {row.name: row.bytes for row in article_rows(others)}
    assert found["DP backward"] == 2 * 10 * 1e9 * 4 * 3
    assert found["FSDP forward"] == 2 * 10 * 1e9 * 3
    assert found["TP backward"] == 4 * 10 * 1e9 * 4 * 1
    assert found["TP forward"] == 4 * 4 * 1e6 * 64 * 1 * 2
    assert found["PP forward"] == 2 * 1e6 * 64 * 2
    assert found["3D"] == found["3D backward"] + found["3D forward"]


def test_rings_send_what_the_closed_forms_say() -> None:
    n, p = ARTICLE.batches, ARTICLE.parameters
    assert ROWS["DP backward"].ring_bytes == pytest.approx(2 * 7 * 2 * p * n)
    assert ROWS["DP backward"].ring_bytes == pytest.approx(349e15, rel=0.001)
    both = ROWS["FSDP forward"].ring_bytes + ROWS["FSDP backward"].ring_bytes
    assert both / ROWS["DP backward"].ring_bytes == pytest.approx(1.5)
    message = 2 * ARTICLE.tokens * ARTICLE.hidden_size
    assert ROWS["TP forward"].ring_bytes == pytest.approx(2 * 80 * 2 * 7 * message)
    assert ROWS["TP backward"].ring_bytes == ROWS["TP forward"].ring_bytes


def test_every_slip_is_computed() -> None:
    found = [(slip.factor, slip.article, slip.right) for slip in article_slips()]
    assert len(found) == 7
    assert found[0][0] == pytest.approx(2**20 / 1e6)
    assert found[1][0] == pytest.approx(4.0)
    assert found[2][0] == pytest.approx(6.0)
    assert found[4][0] == 70e9
    assert "1.6e+12 EB" in found[4][1]
    assert "19.2 days" in found[5][1]
    assert "153." in found[5][2]
    assert (found[6][1], found[6][2]) == ("20 switches", "154 switches")


def test_switches() -> None:
    assert switches_for(0) == 0
    assert switches_for(SWITCH_BITS_PER_SECOND) == 1
    assert switches_for(1.01 * SWITCH_BITS_PER_SECOND) == 2
