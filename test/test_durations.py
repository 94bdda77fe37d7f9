"""A whole green run that is far over a folder's budget fails, and no other does; the longest of a run are printed."""

from pathlib import Path

import pytest

import durations

pytest_plugins = ["pytester"]

JUNIT = """\
<testsuites><testsuite>
<testcase classname="test.tree.test_evict" name="test_one[a]" time="2.5" />
<testcase classname="test.tree.test_match" name="test_two" time="0.75" />
<testcase classname="test.test_process" name="test_three" time="0.25"><skipped message="no" /></testcase>
</testsuite></testsuites>
"""


def run(pytester: pytest.Pytester, budgets: str, args: str = "", body: str = "pass") -> pytest.RunResult:
    """What becomes of a suite of one test, in a folder that has these budgets."""
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\ntestpaths = ['test']")
    folder = pytester.mkdir("test") / "tree"
    folder.mkdir()
    (folder / "test_one.py").write_text(f"def test_one(): {body}")
    (folder.parent / "budgets.toml").write_text(f"[quick]\n{budgets}")
    return pytester.runpytest_inprocess("-m", "not slow", *args.split(), plugins=[durations.Budgets()])


@pytest.mark.parametrize("budgets", ["tree = 0\nrest = 1e6", "rest = 0"])
def test_a_whole_run_over_a_budget_fails_and_names_the_folder(pytester: pytest.Pytester, budgets: str) -> None:
    result = run(pytester, budgets)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["OVER BUDGET: test/tree must take at most 0 worker-seconds *"])


def test_within_its_budget_it_passes(pytester: pytest.Pytester) -> None:
    result = run(pytester, "tree = 1e6\nrest = 0")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*BUDGET*")


@pytest.mark.parametrize("args", ["-k one", "test/tree", "test/tree/test_one.py", "-m one"])
def test_a_part_of_a_suite_has_no_budget(pytester: pytest.Pytester, args: str) -> None:
    run(pytester, "rest = 0", args).stdout.no_fnmatch_line("*BUDGET*")


def test_a_red_run_is_told_for_its_failure_alone(pytester: pytest.Pytester) -> None:
    run(pytester, "rest = 0", body="assert False").stdout.no_fnmatch_line("*BUDGET*")


def test_half_as_much_again_is_let_pass() -> None:
    assert not tuple(durations.exceeded({"tree": 15.0}, {"rest": 10}, 1.0))
    assert len(tuple(durations.exceeded({"tree": 15.1}, {"rest": 10}, 1.0))) == 1


@pytest.mark.parametrize(("slowness", "status"), [(1e9, 0), (0.5, 1)])
def test_on_a_slow_machine_a_suite_may_take_longer(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, slowness: float, status: int
) -> None:
    monkeypatch.setattr(durations, "steps_s", lambda: slowness * durations.STEPS_S)
    assert run(pytester, "rest = 1e-8").ret == status


def test_the_longest_are_printed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow.xml").write_text(JUNIT)
    assert durations.main(tmp_path) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        ["4", "s", "in", "2", "folders,", "the", "longest:"],
        ["3.2", "s", "tree"],
        ["0.2", "s", "rest"],
    ]
    assert lines[5][2] == "test/tree/test_evict.py"
    assert lines[9] == ["2.5", "s", "test/tree/test_evict.py::test_one[a]"]


def test_where_no_run_is_kept_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert durations.main(tmp_path) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
