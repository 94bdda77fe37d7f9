"""The page in a browser: its controls work, nothing is fetched from elsewhere, and axe finds nothing wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from browsing import Visit, frames_of

from .serving import serving

pytestmark = pytest.mark.browser


@pytest.fixture
def page(visit: Callable[..., Visit], html: Path) -> Visit:
    return visit(html.as_uri())


def test_it_draws_without_a_complaint_and_without_a_request(page: Visit, html: Path) -> None:
    assert page.requests == [html.as_uri()]
    assert page.complaints == []
    num_colors = page.page.evaluate(
        "new Set(new Uint32Array($('tree').getContext('2d').getImageData(0, 0, 900, 400).data.buffer)).size"
    )
    assert num_colors > 4
    assert page.step == 11
    assert f"{frames_of(html)[-1]['num_requests']} requests so far" in page.text("summary")
    assert not page.page.locator("#requests").is_visible(), "a replay's page has no list of requests"


def test_a_complaint_would_be_seen(page: Visit) -> None:
    """The control of the listeners."""
    page.page.evaluate("console.error('wrong'); setTimeout(() => { throw new Error('thrown'); })")
    # Playwright hands over what it heard while it waits.
    for _ in range(600):
        if len(page.complaints) == 2:
            break
        page.page.wait_for_timeout(50)
    assert [each.split(":")[-1].strip() for each in page.complaints] == ["wrong", "thrown"]


def test_the_slider_the_buttons_and_the_arrow_keys_move_through_time(page: Visit, html: Path) -> None:
    frames = frames_of(html)
    page.page.locator("#time").focus()
    page.page.keyboard.press("ArrowLeft")
    assert page.step == 10
    page.page.keyboard.press("Home")
    assert f"{frames[0]['num_requests']} requests so far" in page.text("summary")
    page.page.get_by_role("button", name="Next step").click()
    assert page.step == 1
    page.page.locator("body").click(position={"x": 3, "y": 3})
    page.page.evaluate("document.activeElement.blur()")
    page.page.keyboard.press("ArrowRight")
    assert page.step == 2
    page.page.keyboard.press("End")
    assert page.step == 11
    assert "step 12 of 12" in page.text("when")


def test_play_goes_through_the_steps_and_stops(page: Visit) -> None:
    page.page.get_by_role("button", name="Play").click()
    page.page.wait_for_function("$('time').value === '2'")
    page.page.get_by_role("button", name="Stop").click()
    step = page.step
    page.page.wait_for_timeout(600)
    assert page.step == step


def test_wheel_keys_and_buttons_zoom_and_the_whole_tree_comes_back(page: Visit) -> None:
    x0, x1, y0, y1 = whole = page.view
    page.page.locator("#tree").hover()
    page.page.mouse.wheel(0, -200)
    page.page.wait_for_function(f"view.x1 - view.x0 < {x1 - x0}")
    assert page.view[3] - page.view[2] < y1 - y0
    page.page.locator("#tree").focus()
    page.page.keyboard.press("Escape")
    assert page.view == whole
    page.page.keyboard.press("+")
    nearer = page.view
    assert nearer[1] - nearer[0] == pytest.approx(0.6 * (x1 - x0))
    page.page.keyboard.press("-")
    assert page.view == pytest.approx(whole)
    page.page.get_by_role("button", name="Zoom in").click()
    assert page.view != whole
    page.page.get_by_role("button", name="Whole tree").click()
    assert page.view == whole


def test_arrow_keys_select_nodes_and_enter_focuses_a_subtree(page: Visit) -> None:
    page.page.locator("#tree").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.page.keyboard.press(key)
    assert page.step == 11, "the slider stays"
    selected = page.page.evaluate("look.selected")
    assert page.page.evaluate("layout.nodes.parent[look.selected]") == 0
    assert selected > 1
    assert page.text("node").startswith("Prefix ")
    page.page.keyboard.press("Enter")
    assert page.view[2:] == tuple(page.page.evaluate("[layout.y0[look.selected], layout.y1[look.selected]]"))
    page.page.keyboard.press("ArrowUp")
    assert page.page.evaluate("look.selected") < selected
    page.page.keyboard.press("ArrowLeft")
    assert page.page.evaluate("look.selected") == 0


def test_a_click_focuses_the_subtree_under_it_and_follows_it_through_time(page: Visit) -> None:
    box = page.page.locator("#tree").bounding_box()
    assert box is not None
    page.page.mouse.click(box["x"] + 30, box["y"] + box["height"] / 2)
    selected = page.page.evaluate("layout.nodes.hash[look.selected]")
    before = page.view
    assert before[3] - before[2] < page.page.evaluate("layout.height")
    assert page.page.evaluate(f"layout.find({selected})") == page.page.evaluate("look.selected")
    # The same tree at another time: the subtree is still looked at, and at a step without it, the whole tree is.
    page.page.evaluate("frames[10].nodes = frames[11].nodes; follow(10)")
    assert page.page.evaluate("layout.nodes.hash[look.selected]") == selected
    assert page.view == before
    page.page.evaluate("frames[9].nodes = NO_NODES; follow(9)")
    assert page.page.evaluate("look.selected") == -1
    assert page.text("node") == "No node is selected."


def test_search_finds_a_prefix_and_says_where_there_is_none(page: Visit, html: Path) -> None:
    frames = frames_of(html)
    nodes = frames[-1]["nodes"]
    wanted = f"{nodes['hash'][-1]:08x}"
    page.page.get_by_label("Prefix hash").fill(wanted)
    page.page.keyboard.press("Enter")
    assert page.page.evaluate("look.selected") == nodes["hash"].index(nodes["hash"][-1])
    assert page.text("node").startswith(f"Prefix {wanted}: ")
    gone = next(each for each in frames[0]["nodes"]["hash"] if each not in nodes["hash"])
    for text, said in {
        f"{gone:08x}": "the nearest with one is step",
        "ffffffff": "at any step",
        "a word": "up to 8 hexadecimal digits",
    }.items():
        page.page.get_by_label("Prefix hash").fill(text)
        page.page.get_by_role("button", name="Find", exact=True).click()
        assert said in page.text("node")


def test_an_evicted_prefix_is_found_from_the_list(page: Visit) -> None:
    page.page.locator("#evicted button").first.click()
    assert "refix" in page.text("node")
    assert page.page.locator("#query").input_value() == page.page.locator("#evicted button").first.inner_text()


def test_the_width_of_a_span_is_tokens_or_bytes(page: Visit, html: Path) -> None:
    frame = frames_of(html)[-1]
    at = next(i for i, kind in enumerate(frame["nodes"]["kind"]) if kind & 2)
    length = f"layout.x1[{at}] - layout.x0[{at}]"
    assert page.page.evaluate(length) == frame["nodes"]["tokens"][at]
    page.page.get_by_label("Width").select_option("bytes")
    num_bytes = frame["nodes"]["tokens"][at] * frame["kv_bytes_per_token"] + frame["state_bytes"]
    assert page.page.evaluate(length) == num_bytes


def test_the_table_has_the_numbers_of_the_step(page: Visit, html: Path) -> None:
    page.page.locator("details summary").click()
    rows = dict(row.split("\t")[:2] for row in page.page.locator("#numbers tbody tr").all_inner_texts())
    frame = frames_of(html)[-1]
    assert rows["Prompt tokens cached"] == f"{frame['hit_tokens']:,}"
    for cause, num_tokens in frame["missed_tokens"].items():
        assert rows[f"Prompt tokens computed: {cause}"] == f"{num_tokens:,}"
    assert rows["Evictions"] == f"{frame['num_evicted']:,}"
    assert rows["States"] == f"{sum(1 for kind in frame['nodes']['kind'] if kind & 2):,}"
    assert rows["Pool KV and states: free"] == f"{frame['pools'][0]['free']:,}"


def test_causes_of_misses_are_stacked_under_the_names_that_come(page: Visit) -> None:
    before = page.page.locator("#series-legend li").all_inner_texts()
    page.page.evaluate("frames[3].missed_tokens = { 'never seen': 5, evicted: 7 }; show(3)")
    assert page.page.locator("#series-legend li").all_inner_texts() == [*before, "never seen", "evicted"]
    assert page.page.evaluate("seriesOf(frames).evicted") == [0, 0, 0, 7] + [0] * 8


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_axe_finds_no_violation(visit: Callable[..., Visit], html: Path, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = visit(html.as_uri(), scheme, width).page
    page.locator("details summary").click()
    found = Axe().run(page).response["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_axe_would_find_one(page: Visit) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.page.evaluate("document.querySelector('label[for=query]').remove(); $('query').placeholder = ''")
    assert "label" in [each["id"] for each in Axe().run(page.page).response["violations"]]


def test_every_control_is_reached_by_the_tab_key(page: Visit) -> None:
    reached = []
    for _ in range(30):
        page.page.keyboard.press("Tab")
        reached.append(page.page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {
        "previous",
        "play",
        "next",
        "time",
        "unit",
        "mark",
        "zoom-out",
        "zoom-in",
        "whole",
        "query",
        "Find",
        "tree",
    } <= {*reached}


# Frames from a server


@pytest.fixture
def server(html: Path) -> Iterator[str]:
    """Serves the page, an empty list of requests, and frame after frame."""
    with serving(frames_of(html), lambda: (200, {"ranks": [{"requests": []}]})) as url:
        yield url


def test_a_page_with_a_source_shows_frames_as_they_come_until_it_is_paused(
    visit: Callable[..., Visit], server: str
) -> None:
    found = visit(server)
    found.page.wait_for_function("frames.length >= 3 && current === frames.length - 1")
    found.page.get_by_role("button", name="Pause updates").click()
    num_frames = found.page.evaluate("frames.length")
    found.page.wait_for_timeout(500)
    # One may have been on its way; without a pause there would be ten.
    assert found.page.evaluate("frames.length") <= num_frames + 1
    num_frames = found.page.evaluate("frames.length")
    found.page.evaluate("follow(0)")
    found.page.get_by_role("button", name="Resume updates").click()
    found.page.wait_for_function(f"frames.length > {num_frames}")
    assert found.step == 0, "who looks at an earlier step stays there"
    assert found.complaints == []
    assert {*found.requests} == {server, f"{server}frame", f"{server}requests"}


def test_states_are_coloured_by_role_age_or_worth_and_a_state_says_its_worth(page: Visit, html: Path) -> None:
    nodes = frames_of(html)[-1]["nodes"]
    image = "$('tree').toDataURL()"
    by_role, images = page.page.locator("#tree-legend li").all_inner_texts(), {page.page.evaluate(image)}
    switch = page.page.get_by_label("States by")
    switch.focus()
    for said in ("state used in the last 10 s", "state evicted next"):
        page.page.keyboard.press("ArrowDown")
        assert said in page.text("tree-legend")
        images.add(page.page.evaluate(image))
    assert len(images) == 3
    # The legend names a class for every state, and the first class is that of the next victim alone.
    classes = page.page.evaluate("layout.nodes.worth.map((_, i) => MARKS.worth.of(layout.nodes, i))")
    assert all(1 <= each <= 6 for each in classes)
    assert [i for i, each in enumerate(classes) if each == 1] == [nodes["worth"].index(0)]
    assert page.page.evaluate("MARKS.worth.names.every((name) => /^#[0-9a-f]{6}$/.test(look.color(name)))")
    for worth, said in {0: "; next to be evicted.", 100: "; in the last tenth to be evicted."}.items():
        page.page.evaluate(f"select({nodes['worth'].index(worth)})")
        assert page.text("node").endswith(said)
    page.page.evaluate(f"select({nodes['worth'].index(-1, 1)})")
    assert "evicted" not in page.text("node")
    switch.select_option("role")
    assert page.page.locator("#tree-legend li").all_inner_texts() == by_role
    assert page.complaints == []
