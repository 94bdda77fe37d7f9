"""The page of recipes says what `marconi check` says of each, and of what is still refused."""

import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.engine.launch.support import UNSUPPORTED

from .scripts import load

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"
NOVEMBER = ROOT / "test" / "recipes" / "2026-11.json"
NEXT = "Qwen/Qwen3-Next-80B-A3B-Instruct"
MOONCAKE = "--enable-hierarchical-cache --hicache-storage-backend mooncake"


@pytest.fixture(scope="module")
def recipes() -> ModuleType:
    return load("recipes")


@pytest.mark.parametrize(
    ("hardware", "card"),
    [("B200", "blackwell"), ("GB300", "blackwell"), ("H20", "hopper"), ("A100", "ampere"), ("MI355X", "hopper")],
)
def test_a_recipe_is_checked_on_the_card_that_it_names(hardware: str, card: str, recipes: ModuleType) -> None:
    assert recipes.card_of(hardware) == card


def recipe(args: str, *, model: str = NEXT, hardware: str = "H100", name: str = "default") -> dict[str, str]:
    return {"model": model, "hardware": hardware, "name": name, "args": args, "source": "a page"}


def test_the_page_has_a_row_for_all_that_differ_in_their_card_or_their_weights_alone(
    recipes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "recipes.json", tmp_path / "recipes.md"
    every = [recipe("--tp-size 1", model=model, hardware=card) for model in (NEXT, f"{NEXT}-FP8") for card in "AB"]
    every += [
        recipe("--pp-size 2 --enable-streaming-session", name="two"),
        recipe("--polcy 3", name="wrong"),
        recipe("", model="nobody/nothing"),
        recipe("--mamba-radix-cache-strategy no_buffer", name="overlap"),
        recipe("--cuda-graph-backend-prefill breakable", model="moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    ]
    file.write_text(json.dumps(every))
    assert recipes.main([str(file), "--page", str(page), "--json", str(tmp_path / "answers.json")]) == 0
    assert "5 of 9 recipes are served" in capsys.readouterr().out
    text = page.read_text()
    link = f"[{NEXT.partition('/')[2]}](https://huggingface.co/{NEXT})"
    names = f"{link}, {link.replace('Instruct', 'Instruct-FP8')}"
    assert f"| default | tp 1 | {names} | A, B | **yes** | one pool |  |" in text
    assert "**4 of 5 share [one pool](serving.md#one-pool) for KV and states.** The others:" in text
    assert "| 1 | two pools | --enable-unified-memory is only supported with --marconi-admission judicious" in text
    assert f"| two |  | {link} | H100 | no |  | `--pp-size`, `--enable-streaming-session` |" in text
    assert f"| wrong |  | {link} | H100 | no |  | `SGLang` |" in text
    assert "| 1 | `SGLang` | sglang: unrecognized arguments: --polcy 3 |" in text
    assert "| H100 | no |  | `--model-path` |" in text
    assert "no configuration of nobody/nothing is known here" in text
    assert "**yes**, states at chunk ends" in text
    server = f"python -m sglang.launch_server --model-path {NEXT}"
    shown = re.findall(rf"^# (.*)\n{server}(.*) --radix-cache-backend marconi$", text, re.MULTILINE)
    assert shown[:2] == [("default, one pool: A, B", " --tp-size 1"), ("default, one pool: A, B", "-FP8 --tp-size 1")]
    assert "--pp-size 2" not in text, "a launch that is refused has no command"
    answers = json.loads((tmp_path / "answers.json").read_text())["recipes"]
    assert [len(each["reasons"]) for each in answers] == [0, 0, 0, 0, 2, 1, 1, 1, 0]

    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({"date": "June 2026", "recipes": [recipe(MOONCAKE)]}))
    assert recipes.main([str(newer), "--page", str(page)]) == 0
    parts = recipes.parts_of(page.read_text())
    assert list(parts) == ["June 2026", "May 2026"], "the page keeps a list that is not given"
    assert parts["May 2026"] == recipes.parts_of(text)["May 2026"]
    served = "**1 of 1 are served**, 1 with states at exact tokens; 0 have no prefix cache."
    assert served in parts["June 2026"], "its client is not asked for"


@pytest.mark.parametrize("content", ["{}", '[{"model": "x"}]', '{"date": "x", "recipes": 1}', "no JSON"])
def test_what_is_no_list_of_recipes_is_refused_in_one_line(
    recipes: ModuleType, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipes.json"
    file.write_text(content)
    assert recipes.main([str(file)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("recipes.py: error: ")


def test_the_page_names_nothing_that_is_no_longer_refused() -> None:
    """`make recipes` writes it anew."""
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| \d+ \| `([^`]+)` \|", text, re.MULTILINE))
    assert named
    above_a_host_tier = {"--dcp-size"}
    assert named <= {each.option for each in UNSUPPORTED} | above_a_host_tier | {"SGLang", "model"}


def test_the_pages_sums_are_those_of_their_reasons(recipes: ModuleType) -> None:
    parts = recipes.parts_of(PAGE.read_text(encoding="utf-8"))
    assert list(parts) == ["November 2026", "May 2026"]
    for part in parts.values():
        ((served, total),) = re.findall(r"\*\*(\d+) of (\d+) are served\*\*", part)
        counted = sum(int(number) for number in re.findall(r"^\| (\d+) \| `", part, re.MULTILINE))
        assert int(total) - int(served) <= counted


def test_each_recipe_of_november_is_one_launch_of_a_source(recipes: ModuleType) -> None:
    content = json.loads(NOVEMBER.read_text(encoding="utf-8"))
    date, every = recipes.read(NOVEMBER)
    assert date == content["date"]
    assert {each["source"] for each in every} == set(content["sources"])
    assert len({(each["model"], each["hardware"], each["args"]) for each in every}) == len(every)


def test_each_command_of_the_page_starts_what_was_checked(recipes: ModuleType) -> None:
    """Each parses, and those of November are recipes of that list."""
    parts = recipes.parts_of(PAGE.read_text(encoding="utf-8"))
    commands = {date: re.findall(r"^# .*\n(.*)$", part, re.MULTILINE) for date, part in parts.items()}
    assert [len(set(each)) for each in commands.values()] == [len(each) for each in commands.values()] != [0, 0]
    for command in (each for every in commands.values() for each in every):
        variables, _, arguments = command.partition("python -m sglang.launch_server ")
        assert all(re.fullmatch(r"[A-Z0-9_]+=\w+", each) for each in variables.split())
        recipes.CommandLine.parse(shlex.split(arguments))
    date, every = recipes.read(NOVEMBER)
    asked = {
        recipes.command_of(["--model-path", each["model"], *shlex.split(each["args"])], each.get("env", ""))
        for each in every
    }
    assert set(commands[date]) <= asked


def test_a_command_has_the_variables_of_its_recipe_and_can_be_copied(recipes: ModuleType) -> None:
    argv = ["--model-path", "a/b", "--hicache-storage-backend-extra-config", '{"x": true}']
    command = recipes.command_of(argv, "SGLANG_A=1 SGLANG_B")
    server = """--model-path a/b --hicache-storage-backend-extra-config '{"x": true}' --radix-cache-backend marconi"""
    assert command == f"SGLANG_A=1 SGLANG_B=FILE python -m sglang.launch_server {server}"


@pytest.mark.slow
def test_the_page_says_of_november_what_the_check_says(recipes: ModuleType) -> None:
    """`make recipes` writes it anew."""
    date, every = recipes.read(NOVEMBER)
    shown = recipes.parts_of(PAGE.read_text(encoding="utf-8"))[date]
    assert recipes.part_of([recipes.check(each) for each in every]).rstrip() == shown.rstrip()
