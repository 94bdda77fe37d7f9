"""The list of requests in a browser: bars, filters, links, and the path of a request in the tree."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import Visit, frames_of
from marconi.engine.reports.explain import OFF, Explained
from marconi.policy.causes import Cause
from marconi.policy.misses import Explanation
from marconi.view.document import hatchings

from .serving import serving

pytestmark = pytest.mark.browser

NOW_S = 100.0
ODD = "a b&c=#/%é+"
"""An id that an address has to encode."""
IDS = "[...document.querySelectorAll('#requests li:not([hidden]) code')].map((each) => each.textContent)"


def listed(rid: str, hit: int, *parts: tuple[int, Cause, float | None], prefix: int | None = None) -> dict[str, Any]:
    """A request as the server lists it: `hit` tokens were cached, then each part was missed up to its end."""
    end = parts[-1][0] + 1
    misses = [(*part, None) for part in parts] + [(end, Cause.LAST_TOKEN, None, None)]
    explained = Explained(rid, NOW_S - 3.0, Explanation(end, hit, parts[-1][0], misses))
    return explained.as_dict(NOW_S) | {"prefix": None if prefix is None else f"{prefix:08x}"}


class Served:
    """What the server has: one tree, and a list of requests that a test may change."""

    def __init__(self, html: Path) -> None:
        self.frame = frames_of(html)[-1]
        nodes = self.frame["nodes"]
        self.end = max((i for i, parent in enumerate(nodes["parent"]) if parent > 0), key=nodes["depth"].__getitem__)
        self.hit, depth = nodes["depth"][nodes["parent"][self.end]], nodes["depth"][self.end]
        self.hash = nodes["hash"][self.end]
        self.middle = (self.hit + depth) // 2
        evicted = (self.middle, Cause.EVICTED_FOR_KV, 7.0)
        self.requests = [
            listed("chat-3", self.hit, evicted, (depth - 1, Cause.FIRST_SEEN, None), prefix=self.hash),
            listed(ODD, 0, (400, Cause.FIRST_SEEN, None)),
            listed("chat-1", 90, (120, Cause.NO_STATE, None)),
        ]
        self.status, self.num_asked = 200, 0

    def answer(self) -> tuple[int, Any]:
        self.num_asked += 1
        return self.status, {"ranks": [{"dp_rank": 0, "requests": self.requests}]} if self.status == 200 else {
            "error": OFF
        }


@pytest.fixture
def served(html: Path) -> Served:
    return Served(html)


@pytest.fixture
def url(served: Served) -> Iterator[str]:
    with serving([served.frame], served.answer) as address:
        yield address


@pytest.fixture
def opened(visit: Callable[..., Visit], url: str) -> Callable[..., Visit]:
    """Opens the page at a part of its address, and waits for its tree and its list."""

    def page(part: str = "", *view: Any) -> Visit:
        found = visit(url + part, *view)
        found.page.wait_for_function("layout !== null && latest.latest.length > 0")
        return found

    return page


def test_each_request_has_a_bar_of_its_parts_in_the_colours_of_the_table_and_its_sentence(
    opened: Callable[..., Visit], served: Served
) -> None:
    found = opened()
    assert found.page.evaluate(IDS) == ["chat-3", ODD, "chat-1"]
    for request, row in zip(served.requests, found.page.locator("#requests a").all(), strict=True):
        assert request["line"] in row.inner_text()
        assert "3.0 s ago" in row.inner_text()
        parts = row.locator(".track span").evaluate_all(
            "(all) => all.map((each) => [parseFloat(each.style.width), each.style.background])"
        )
        misses = request["missed"]
        tokens = [request["num_hit_tokens"], *(miss["end"] - miss["start"] for miss in misses)]
        assert [width for width, _ in parts] == pytest.approx(
            [100 * each / request["num_prompt_tokens"] for each in tokens], rel=1e-3
        )
        assert parts[0][1] == "var(--hit)"
        for miss, (_, background) in zip(misses, parts[1:], strict=True):
            drawn = hatchings()[Cause(miss["cause"]).words]
            assert f"({drawn['angle']}deg, {drawn['color']} 0 {drawn['gap']}px, var(--card) 0 " in background
    cached, prompt = (sum(each[name] for each in served.requests) for name in ("num_hit_tokens", "num_prompt_tokens"))
    assert found.text("requests-summary") == (
        f"3 latest requests: {100 * cached / prompt:.1f} % of {prompt:,} prompt tokens were cached."
    )
    assert found.complaints == []


def test_a_cause_or_an_id_narrows_the_list_and_the_sum_is_of_the_rest(
    opened: Callable[..., Visit], served: Served
) -> None:
    found = opened()
    causes = found.page.locator("#causes-filter button:visible")
    prompts = [each["num_prompt_tokens"] for each in served.requests]
    first = prompts[0] - 1 - served.middle + 400
    assert [each.strip() for each in causes.all_inner_texts()] == [
        f"evicted for kv {served.middle - served.hit:,}",
        "no state 30",
        f"first seen {first:,}",
        "last token 3",
    ]
    button = found.page.get_by_role("button", name="first seen")
    button.focus()
    found.page.keyboard.press("Enter")
    assert found.page.evaluate(IDS) == ["chat-3", ODD]
    assert button.get_attribute("aria-pressed") == "true"
    assert found.text("requests-summary") == (
        f"2 of the 3 latest requests missed {first:,} of {sum(prompts[:2]):,} prompt tokens: first seen. "
        f"Cure: {Cause.FIRST_SEEN.cure.value}."
    )
    found.page.get_by_label("Request id").fill("chat")
    assert found.page.evaluate(IDS) == ["chat-3"]
    found.page.keyboard.press("Tab")
    button.click()
    assert found.page.evaluate(IDS) == ["chat-3", "chat-1"]
    found.page.get_by_label("Request id").fill("nobody's")
    assert found.text("requests-summary") == "None of the 3 latest requests is of this kind."


STRIP = """(tokens) => {
  const canvas = $('tree'), top = AXIS * picture.ratio;
  const sx = canvas.width / (view.x1 - view.x0), sy = (canvas.height - top) / (view.y1 - view.y0);
  const row = new OffscreenCanvas(canvas.width, 1).getContext('2d', { willReadFrequently: true });
  row.drawImage(canvas, 0, -Math.round(top + (layout.y1[END] - view.y0) * sy - 6 * picture.ratio));
  return tokens.map((token) => {
    const [[, x]] = layout.pieces(END, token - 1, token);
    const color = row.getImageData((x - view.x0) * sx - 2, 0, 1, 1).data.slice(0, 3);
    return '#' + [...color].map((each) => each.toString(16).padStart(2, '0')).join('');
  });
}"""
"""The colours where the bar of a request has these tokens."""


def test_a_click_draws_the_bar_along_the_path_with_the_sentence_beside_it(
    opened: Callable[..., Visit], served: Served
) -> None:
    found = opened()
    strip = STRIP.replace("END", str(served.end))
    hit = found.page.evaluate("look.color('hit')")
    assert found.page.evaluate(strip, [served.hit // 2]) != [hit], "the control: nothing is drawn yet"
    found.page.locator("#requests a").first.click()
    found.page.wait_for_function(f"look.end === {served.end} && look.selected === {served.end}")
    assert found.text("request") == f"Request chat-3: {served.requests[0]['line']}."
    assert found.text("node").startswith(f"Prefix {served.hash:08x}: ")
    assert found.page.evaluate("location.hash") == "#rid=chat-3"
    assert found.page.locator("#requests [aria-current=true] code").all_inner_texts() == ["chat-3"]
    # The path is seen from the root to its end, and its bar is that of the list, to scale.
    x0, x1, y0, y1 = found.view
    assert (x0, True, True) == (
        0,
        *found.page.evaluate(f"[layout.x1[{served.end}] <= {x1}, {y0} <= layout.y0[{served.end}]]"),
    )
    assert found.page.evaluate(strip, [served.hit // 2]) == [hit]
    # A line of hatching may be where it is looked at.
    drawn = found.page.evaluate(strip, [*range(served.hit + 10, served.middle, 7)])
    assert Cause.EVICTED_FOR_KV.color in drawn
    assert Cause.FIRST_SEEN.color not in drawn
    lengths = "layout.pieces(look.end, 5, layout.nodes.depth[look.end] - 3).map(([a, b]) => b - a)"
    assert sum(found.page.evaluate(lengths)) == served.frame["nodes"]["depth"][served.end] - 8
    # Whoever has looked elsewhere comes back with another click.
    found.page.get_by_role("button", name="Zoom in").click()
    assert found.view != (x0, x1, y0, y1)
    found.page.locator("#requests a").first.click()
    assert found.view == (x0, x1, y0, y1)
    found.page.get_by_role("button", name="Close request").click()
    found.page.wait_for_function("look.end === -1")
    assert found.text("request") == ""
    assert found.page.locator("#requests [aria-current]").count() == 0
    assert found.page.evaluate("document.activeElement.id") == "tree"
    assert found.complaints == []


def test_a_path_is_seen_among_its_siblings_as_long_as_each_is_high_enough_to_be_read(
    opened: Callable[..., Visit],
) -> None:
    # Below the root, a node with five leaves, and thirty leaves beside it.
    nodes = {"parent": [-1, 0, *[1] * 5, *[0] * 30], "tokens": [0, 10, *[4] * 35], "kind": [1] * 37}
    around = """([nodes, i]) => {
      const { x0, x1, y0, y1 } = new Layout({ nodes }, 'tokens').around(i);
      return [x0, x1, y0, y1];
    }"""
    evaluate = opened().page.evaluate
    assert evaluate(around, [nodes, 4]) == pytest.approx([0, 14 + 0.02 * 14, 0, 5])
    assert evaluate(around, [nodes, 9]) == pytest.approx([0, 4 + 0.02 * 4, 7, 8]), "the root has too many"


def test_an_address_opens_its_request_and_the_link_of_each_is_its_address(
    opened: Callable[..., Visit], served: Served
) -> None:
    found = opened("#rid=chat-3")
    found.page.wait_for_function(f"look.end === {served.end}")
    assert found.text("request").startswith("Request chat-3: hit ")
    found.page.locator("#requests a").nth(1).click()
    said = f"Request {ODD}: {served.requests[1]['line']}. The tree has no state that it resumed from or left."
    found.page.wait_for_function("(said) => $('request').textContent === said", arg=said)
    found = opened(found.page.evaluate("location.hash"))
    found.page.wait_for_function("(said) => $('request').textContent === said", arg=said)
    found.page.evaluate("location.hash = '#rid=of-yesterday'")
    found.page.wait_for_function("$('request').textContent !== ''")
    found.page.wait_for_function(
        "$('request').textContent === 'None of the latest 3 requests has the id of-yesterday.'"
    )


def test_the_path_of_a_request_that_runs_is_drawn_once_it_has_left_a_state(
    opened: Callable[..., Visit], served: Served
) -> None:
    served.requests[0]["prefix"] = None
    found = opened("#rid=chat-3")
    found.page.wait_for_function("$('request').textContent.endsWith('resumed from or left.')")
    assert found.page.evaluate("[look.end, look.selected]") == [-1, -1]
    served.requests = [served.requests[0] | {"prefix": "ffffffff"}]
    found.page.wait_for_function("$('request').textContent.endsWith('ffffffff is not in the tree at this step.')")
    served.requests = [served.requests[0] | {"prefix": f"{served.hash:08x}"}]
    found.page.wait_for_function(f"look.end === {served.end} && look.selected === {served.end}")
    assert found.text("request") == f"Request chat-3: {served.requests[0]['line']}."
    assert found.view[0] == 0
    assert found.view[3] - found.view[2] <= found.page.evaluate("layout.height")


def test_the_tab_key_reaches_one_row_arrows_the_others_and_new_requests_leave_the_focus(
    opened: Callable[..., Visit], served: Served
) -> None:
    found = opened()
    assert found.page.locator("#requests a[tabindex='0']").count() == 1
    found.page.locator("#causes-filter button:visible").last.focus()
    focused = "document.activeElement.querySelector('code')?.textContent"
    for key, rid in {"Tab": "chat-3", "ArrowDown": ODD, "End": "chat-1", "ArrowUp": ODD}.items():
        found.page.keyboard.press(key)
        assert found.page.evaluate(focused) == rid
    # The same id again is another request, and what is no longer listed leaves.
    served.requests = [listed("chat-3", 1, (9, Cause.FIRST_SEEN, None)), *served.requests[:2]]
    found.page.wait_for_function(f"{IDS}.length === 3 && {IDS}[2] !== 'chat-1'")
    assert found.page.evaluate(IDS) == ["chat-3", "chat-3", ODD]
    assert found.page.evaluate(focused) == ODD
    assert found.page.locator("#requests a[tabindex='0'] code").all_inner_texts() == [ODD]
    found.page.keyboard.press("Enter")
    found.page.wait_for_function("latest.rid !== null")
    assert found.text("request").startswith(f"Request {ODD}: ")
    assert found.page.evaluate(focused) == ODD
    found.page.keyboard.press("Tab")
    assert found.page.evaluate("document.activeElement.id") == "previous"


def test_a_server_that_explains_nothing_says_how_it_would_and_is_asked_once(
    visit: Callable[..., Visit], served: Served, url: str
) -> None:
    served.status = 404
    found = visit(url)
    found.page.wait_for_function("$('requests-summary').textContent.startsWith('No update')")
    assert found.text("requests-summary") == f"No update: {OFF}"
    found.page.wait_for_function("layout !== null")
    found.page.wait_for_timeout(400)
    assert served.num_asked == 1
    served.status = 503
    found = visit(url)
    found.page.wait_for_function("$('requests-summary').textContent.startsWith('No update')")
    served.status = 200
    found.page.wait_for_function("latest.latest.length === 3")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400, 2560])
def test_axe_finds_no_violation_and_nothing_is_wider_than_the_page(
    opened: Callable[..., Visit], scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = opened("#rid=chat-3", scheme, width).page
    page.get_by_role("button", name="evicted for kv").click()
    page.wait_for_function("look.end >= 0")
    found = Axe().run(page).response["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sides = [page.locator(each).bounding_box() for each in (".requests", ".tree")]
    assert all(side is not None and side["width"] > 340 for side in sides)


def test_the_last_hour_is_drawn_from_what_the_server_noted_before_the_page_was_opened(
    served: Served, visit: Callable[..., Visit]
) -> None:
    hour = {
        "step_s": 10,
        "saved_s": 42.0,
        "at_s": [1000, 1010, 1040, 1044],
        "num_prompt_tokens": [100, 200, 400, 500],
        "num_hit_tokens": [50, 100, 200, 250],
        "num_evictions": [0, 1, 4, 4],
        "held": {"KV": [0, 10, 20, 20], "states": [0, 10, 20, 20], "in use": [0, 0, 10, 0], "free": [100, 80, 50, 60]},
    }
    with serving([served.frame], served.answer, hour) as address:
        found = visit(address)
        found.page.wait_for_function("hour.latest !== null")
        assert (
            found.text("overall") == "Hit rate since the start: 50.0 % of 500 prompt tokens; 42.0 s of prefill saved."
        )
        assert "50.0 % of 400 prompt tokens were cached and 4 states were evicted." in found.text("hour-text")
        assert found.page.evaluate("stepsOf(hour.latest)") == {
            "hits": [50, 0, 0, 50, 50],
            "evicted": [1, 0, 0, 3, 0],
            "shares": {"KV": [10, 20, 20, 20, 20], "states": [10, 20, 20, 20, 20], "in use": [0, 10, 10, 10, 0]},
        }
        assert found.complaints == []


def test_a_page_without_an_hour_shows_none(opened: Callable[..., Visit]) -> None:
    assert not opened().page.locator("#hour-text").is_visible()
