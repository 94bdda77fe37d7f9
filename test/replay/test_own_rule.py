"""A rule in a file of one's own replays beside those that have names, and what is no rule is said in a line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from marconi import cli
from marconi.policy.catalog import PolicySpec, parse_list

RULE = '''
"""A rule of one's own."""

from marconi.policy.eviction.ranked import RankedEviction


class Rank(RankedEviction):
    """{summary}."""

    def __init__(self, costs, needs):
        super().__init__(needs)

    def worth(self, node):
        return {worth}


class Bare(RankedEviction):
    def worth(self, node):
        return 0.0


NUMBER = 3
'''
TRACE = ("replay", "generate:chat-short", "--model", "nemotron-h-8b", "--memory", "0.1x")


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    """The most recently used is evicted last."""
    path = tmp_path / "own.py"
    path.write_text(RULE.format(summary="Least recently used", worth="node.last_hit_s"))
    return path


def hits(tmp_path: Path, policies: str, num_processes: int) -> dict[str, int]:
    """Hit tokens by policy, in a process of its own: a replay forks others, and the suite's has threads."""
    out = tmp_path / "out.json"
    argv = [sys.executable, "-m", "marconi", *TRACE, "--policy", policies, "--jobs", str(num_processes)]
    subprocess.run([*argv, "--json", str(out)], check=True, capture_output=True, timeout=120)
    return {each["policy"]: each["hit_tokens"] for each in json.loads(out.read_text())["runs"]}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("./own.py:Rank", ("./own.py:Rank", None, None)),
        ("a/b.py:Rank@judicious:64", ("a/b.py:Rank", None, "judicious:64")),
        ("marconi:0.5@judicious", ("marconi", "0.5", "judicious")),
        ("own.py:Rank:3", ("own.py:Rank", "3", None)),
    ],
)
def test_a_name_says_which_class_of_which_file(text: str, parts: tuple[str, str | None, str | None]) -> None:
    spec = PolicySpec.parse(text)
    assert (spec.name, spec.parameter, spec.admission) == parts
    assert str(spec) == text
    assert parse_list(f"lru,{text}")[1] == spec


def test_a_rule_of_ones_own_replays_beside_others_and_in_processes(rule: Path, tmp_path: Path) -> None:
    """Ranked by time it evicts others than ranked by depth, and the same in another process."""
    deep = tmp_path / "deep.py"
    deep.write_text(RULE.format(summary="The deepest last", worth="float(node.depth)"))
    policies = f"best,{rule}:Rank,{deep}:Rank"
    found = hits(tmp_path, policies, 1)
    assert [*found] == ["best", f"{rule}:Rank", f"{deep}:Rank"]
    assert len({*found.values()}) == 3
    assert hits(tmp_path, policies, 2) == found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("{folder}/none.py:Rank", "none.py must be a file of Python, got [Errno 2] No such file"),
        ("{folder}/own.py:Rang", "Rang must be a class of {folder}/own.py that extends Eviction, got None"),
        ("{folder}/own.py:NUMBER", "NUMBER must be a class of {folder}/own.py that extends Eviction, got 3"),
        ("{folder}/own.py:Bare", "Bare must be made from costs and needs, got "),
        ("{folder}/own.py:Rank:4", "the policy must be {folder}/own.py:Rank, without a number"),
        ("{folder}/own.py:", "a policy must be NAME, NAME:NUMBER or FILE.py:RULE"),
    ],
)
def test_what_is_no_rule_is_said_in_a_line(
    name: str, says: str, rule: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = rule.parent
    assert cli.main([*TRACE, "--jobs", "1", "--policy", name.format(folder=folder)]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error" in each]
    assert says.format(folder=folder) in line
