"""The table of causes is what every place shows: its colours can be seen, and what is drawn or linked is of it."""

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from marconi.policy.causes import Cause, Cure
from marconi.view.document import document, hatchings

ROOT = Path(__file__).parents[2]
GROUNDS = ("#ffffff", "#171c24")
"""The cards of the page, light and dark (`page/style.css`)."""


def luminance(color: str) -> float:
    """As WCAG defines it, 0 to 1."""
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def headings(level: int) -> list[str]:
    """Titles of the page's headings of that level between cause and cure."""
    text = (ROOT / "docs/why-a-miss.md").read_text(encoding="utf-8")
    part = text.partition("\n## From cause to cure\n")[2].partition("\n## ")[0]
    return re.findall(rf"^{'#' * level} (.*)$", part, re.MULTILINE)


def test_causes_stand_by_their_cures_each_with_its_own_colour_and_hatching() -> None:
    assert [cure for cure, _ in groupby(cause.cure for cause in Cause)] == [*Cure]
    assert len({cause.color for cause in Cause}) == len(Cause)
    lines = hatchings()
    assert [*lines] == [cause.words for cause in Cause]
    assert len({(each["angle"], each["gap"]) for each in lines.values()}) == len(Cause)


@pytest.mark.parametrize("cause", Cause)
def test_a_colour_is_seen_on_light_and_dark(cause: Cause) -> None:
    style = (ROOT / "python/marconi/page/style.css").read_text(encoding="utf-8")
    assert tuple(re.findall(r"--card: (#\w{6})", style)) == GROUNDS
    assert all(contrast(cause.color, ground) >= 3 for ground in GROUNDS)


def test_a_grey_that_is_too_near_to_white_is_found() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#b0b0b0", "#ffffff") < 3


def test_the_page_has_a_heading_for_each_cure_and_cause_in_the_tables_order() -> None:
    assert [title.lower() for title in headings(3)] == [cure.value for cure in Cure]
    assert [title.lower() for title in headings(4)] == [cause.words for cause in Cause]


@pytest.mark.parametrize("cause", Cause)
def test_where_to_read_on_about_a_cause_is_there(cause: Cause) -> None:
    path, _, anchor = cause.page.partition("#")
    assert (ROOT / path).exists()
    assert anchor in {title.lower().replace(" ", "-") for title in headings(4)}


def test_the_page_in_a_browser_draws_by_the_table() -> None:
    text = document("a server")
    _, _, rest = text.partition('<script type="application/json" id="causes">')
    assert json.loads(rest.partition("</script>")[0]) == hatchings()
    drawn = text.replace(rest.partition("</script>")[0], "")
    assert not [cause for cause in Cause if cause.color in drawn or f'"{cause.words}"' in drawn]


def test_the_board_colours_causes_as_the_table() -> None:
    board: dict[str, Any] = json.loads((ROOT / "docs/examples/grafana-marconi.json").read_text(encoding="utf-8"))
    of_causes = [
        panel for panel in board["panels"] for each in panel.get("targets", ()) if each["legendFormat"] == "{{cause}}"
    ]
    assert len(of_causes) == 2
    for panel in of_causes:
        overrides = panel["fieldConfig"]["overrides"]
        colors = {each["matcher"]["options"]: each["properties"][0]["value"]["fixedColor"] for each in overrides}
        assert [*colors.items()] == [(cause.value, cause.color) for cause in Cause]


def test_an_alert_about_causes_leads_to_one_of_them() -> None:
    rules = (ROOT / "docs/examples/prometheus-alerts.yml").read_text(encoding="utf-8").split("- alert: ")[1:]
    about = [rule for rule in rules if "cause=" in rule]
    assert len(about) == 2
    for rule in about:
        (causes,) = re.findall(r'cause=~"([^"]+)"', rule)
        (link,) = re.findall(r"runbook_url: (\S+)", rule)
        assert link in {Cause(name).page for name in causes.split("|")}
    assert all("runbook_url" not in rule for rule in rules if rule not in about)
