"""`marconi view`: one file of everything, and errors of one line."""

import json
import re
from pathlib import Path

import pytest

from browsing import TRACE
from marconi.cli import main
from marconi.view.document import PageSource, document


def test_it_writes_one_file_with_as_many_frames_as_are_asked_for(html: Path) -> None:
    text = html.read_text(encoding="utf-8")
    frames = json.loads(text.partition('id="frames">')[2].partition("</script>")[0])["frames"]
    assert len(frames) == 12
    assert re.search(r"\{\{[a-z]+\}\}", text) is None
    assert re.search(r"""(?:src|href)=["'](?!#|data:,)|@import|https?:""", text) is None


def test_a_title_cannot_end_an_element_and_a_source_is_an_attribute() -> None:
    text = document("<b>&", source=PageSource('"><script>', "requests"))
    assert "<b>" not in text
    assert 'data-source="&quot;&gt;&lt;script&gt;" data-requests="requests" data-interval-s="1"' in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--policy", "best,lru", "--memory", "1GB"), "--policy must be one policy, got best,lru"),
        (("--policy", "shrub", "--memory", "1GB"), "shrub"),
        (("--policy", "lfu", "--memory", "1GB"), "--policy must be one policy with a tree, got 'lfu'"),
        (("--memory", "1GB,2GB"), "--memory must be one amount, got 1GB,2GB"),
        (("--memory", "1GB", "--frames", "0"), "must be a whole number, 1 or more, got '0'"),
    ],
)
def test_an_argument_that_cannot_be_is_one_line(
    argv: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    try:
        status = main(["view", *TRACE, *argv, "--html", str(path)])
    except SystemExit as ended:
        status = int(str(ended.code))
    captured = capsys.readouterr()
    assert status == 2
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_refused_before_the_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", *TRACE, "--memory", "1GB", "--html", str(tmp_path)]) == 2
    assert "--html" in capsys.readouterr().err
