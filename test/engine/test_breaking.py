"""A negative control that broke nothing fails by a line of its own."""

from pathlib import Path

import pytest

from .breaking import require_broken, tell


def test_a_control_that_broke_nothing_fails_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    tell(0)
    log.write_text(capsys.readouterr().out)
    with pytest.raises(AssertionError, match="the negative control broke nothing"):
        require_broken(log)


def test_what_ranks_broke_is_added_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    tell(2)
    print("a line of the server's")
    tell(10)
    log.write_text(capsys.readouterr().out)
    assert require_broken(log) == 12
