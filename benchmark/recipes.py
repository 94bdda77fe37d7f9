"""Which of the launch configurations in files of recipes are served: the page docs/recipes.md.

A FILE is JSON: a list of objects with `model`, `hardware`, `name` and `args`, the flags of `sglang.launch_server`, or
an object with a `date` and such a list as `recipes`. A recipe may have an `env`: environment variables, with values or
without. Each recipe is asked of `marconi check`, without a device and without the model. The page shows its model,
hardware, name and parallelism, and the answer: whether it is served, and whether KV and states share one pool. Below
each table it has the command of every recipe that is served. `--page` keeps what the page has of lists that are not
given.

    python benchmark/recipes.py FILE... [--page FILE] [--json FILE]
"""

import argparse
import json
import os
import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from marconi.engine.cpu_platform import choose_platform

choose_platform(os.environ)
warnings.filterwarnings("ignore", module="sglang")

from marconi.check.answer import answer  # noqa: E402 - SGLang takes its platform as it is imported
from marconi.check.line import CommandLine  # noqa: E402
from marconi.check.machine import Generation, Machine  # noqa: E402
from marconi.engine.launch import support  # noqa: E402
from marconi.engine.launch.flags import BACKEND  # noqa: E402
from marconi.engine.launch.model import Model  # noqa: E402
from marconi.engine.launch.policies import CHUNK_END  # noqa: E402
from marconi.engine.launch.split import ONE_POOL, TWO_POOLS  # noqa: E402
from marconi.model import catalog  # noqa: E402

_FIELDS: Final = ("model", "hardware", "name", "args")
_PARALLEL: Final = {"--tp-size": "tp", "--dp-size": "dp", "--attn-dp-size": "attention dp", "--ep-size": "ep"}
_CARDS: Final = {"A": Generation.AMPERE, "H": Generation.HOPPER, "B": Generation.BLACKWELL, "GB": Generation.BLACKWELL}
"""By what stands before the number in the name of NVIDIA's data centre cards; all others are checked as Hopper."""
_MODEL: Final = "model"
_UNDATED: Final = "May 2026"
"""The date of the list whose file has none."""
_PART: Final = "\n## "
_HUB: Final = "https://huggingface.co"
_WEIGHTS: Final = re.compile(r"-(BF16|FP8|NVFP4)$")


@dataclass(frozen=True, slots=True)
class Checked:
    """A recipe and its answer."""

    model: str
    hardware: str
    name: str
    parallel: str
    command: str
    """The line that starts it with this cache."""
    reasons: tuple[str, ...]
    admission: str | None = None
    split: str | None = None
    """How its memory is divided and why; None where a flag of its own divides it, or it has no prefix cache."""

    @property
    def memory(self) -> str:
        """The pools of its KV and states; nothing where it is refused."""
        if self.reasons:
            return ""
        return {ONE_POOL: "one pool", None: "its own"}.get(self.split, "two pools")

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subject of the refusal: an option, SGLang, or a missing fact of the model."""
        return tuple(dict.fromkeys(map(subject_of, self.reasons)))

    @property
    def verdict(self) -> str:
        """Whether it is served, and where states are kept if that is not at exact tokens."""
        if self.reasons:
            return "no"
        return "**yes**, states at chunk ends" if self.admission == CHUNK_END else "**yes**"

    @property
    def is_exact(self) -> bool:
        """True if it is served with a prefix cache that keeps states at exact tokens."""
        return not self.reasons and self.admission not in (None, CHUNK_END)


def subject_of(reason: str) -> str:
    """What a reason is about."""
    first = reason.split()[0].rstrip(":")
    return first if first.startswith("--") else "SGLang" if first == "sglang" else _MODEL


def read(path: Path) -> tuple[str, list[Mapping[str, str]]]:
    """The date and the recipes of a file; `ValueError` for anything else."""
    content, date = json.loads(path.read_text(encoding="utf-8")), _UNDATED
    if isinstance(content, dict) and isinstance(content.get("date"), str):
        date, content = content["date"], content.get("recipes")
    if not isinstance(content, list):
        raise ValueError(f"{path} must be a list of recipes, dated or not, got a JSON {type(content).__name__}")
    for index, recipe in enumerate(content):
        if not isinstance(recipe, dict) or not all(isinstance(recipe.get(field), str) for field in _FIELDS):
            raise ValueError(f"{path}: recipe {index} must have {', '.join(_FIELDS)}, each a text")
    return date, content


def check(recipe: Mapping[str, str]) -> Checked:
    """Ask whether a recipe would be served."""
    given: Mapping[str, Any] = {}
    admission = split = None
    argv = ["--model-path", recipe["model"], *shlex.split(recipe["args"])]
    try:
        line = CommandLine.parse(argv)
        given = line.given
        # A recipe's machine has the client of its store, whether this one does or not.
        with patch.object(support, "find_spec"):
            found = answer(line, Model.find(line.model_path, None), Machine(card=card_of(recipe["hardware"])))
        reasons, admission, split = found.reasons, found.admission, found.split
    except ValueError as error:
        reasons = (str(error),)
    parallel = ", ".join(f"{short} {given[option]}" for option, short in _PARALLEL.items() if option in given)
    command = command_of(argv, recipe.get("env", ""))
    return Checked(recipe["model"], recipe["hardware"], recipe["name"], parallel, command, reasons, admission, split)


def command_of(argv: Sequence[str], env: str) -> str:
    """The line that starts a server by `argv`; a variable of `env` without a value gets `FILE`."""
    variables = [name if "=" in name else f"{name}=FILE" for name in env.split()]
    server = ["python", "-m", "sglang.launch_server", *argv, "--radix-cache-backend", BACKEND]
    return " ".join([*variables, shlex.join(server)])


def card_of(hardware: str) -> Generation:
    """The generation of a recipe's card: B200, B300, GB200 and GB300 are Blackwell."""
    named = re.fullmatch(r"([A-Z]+)\d+", hardware)
    return Generation.HOPPER if named is None else _CARDS.get(named[1], Generation.HOPPER)


def page(parts: Mapping[str, str]) -> str:
    """The page, in Markdown, of the parts of lists by their date."""
    lines = [
        "# Recipes",
        "",
        "*Served* means that a server on CUDA would use this cache: neither this project nor SGLang refuses the",
        "flags, as far as can be checked without a device and weights, for a card of the generation that the recipe",
        "names, or of Hopper where that is not one of NVIDIA's data centre. No server was started, and the page does",
        "not say whether a model fits. No GPU has run any of them: one has run [small models](status.md#on-a-gpu).",
        "",
        "The page checks published launch configurations of hybrid models with [`marconi check`](check.md), each with",
        "`--radix-cache-backend marconi` added. It has a part for each list of them, by its date, and in it a section",
        "for each shape of model. `make recipes` writes it.",
        "",
        "**To launch one**, search the page for your model, find your card above a command, and copy the command. On",
        "several nodes, put the address of the first one for 127.0.0.1:5000, and each node's rank after `--node-rank`.",
        "`FILE` stands for your configuration of a store. A model's name in a table links to its card.",
    ]
    return "\n".join(lines) + "\n" + "".join(f"{_PART}{date}\n{part}" for date, part in parts.items())


def parts_of(text: str) -> dict[str, str]:
    """The parts of a page, by the date of their list."""
    return {date: rest for date, _, rest in (part.partition("\n") for part in text.split(_PART)[1:])}


def part_of(every: Sequence[Checked]) -> str:
    """What the page has of a list."""
    served = [each for each in every if not each.reasons]
    num_exact, num_without = sum(each.is_exact for each in every), sum(each.admission is None for each in served)
    lines = [
        "",
        f"**{len(served)} of {len(every)} are served**, {num_exact} with states at exact tokens; {num_without} have no "
        "prefix cache. Reasons against the others, counting a recipe once for each of its reasons:",
        "",
        "| number | what | reason |",
        "|---:|---|---|",
    ]
    counts = Counter((subject_of(reason), _general(reason)) for each in every for reason in each.reasons)
    lines += [f"| {number} | `{what}` | {reason} |" for (what, reason), number in counts.most_common()]
    num_joint = sum(each.split == ONE_POOL for each in served)
    lines += [
        "",
        f"**{num_joint} of {len(served)} share [one pool](serving.md#one-pool) for KV and states.** The others:",
        "",
    ]
    lines += ["| number | memory | why |", "|---:|---|---|"]
    apart = Counter((each.memory, _why(each.split)) for each in served if each.split != ONE_POOL)
    lines += [f"| {number} | {memory} | {why} |" for (memory, why), number in apart.most_common()]
    for family, members in _families(every):
        lines += ["", f"### {family}", "", "| recipe | parallel | model | hardware | served | memory | reason |"]
        lines += ["|---|---|---|---|---|---|---|", *_rows(members), *_block(members)]
    return "\n".join(lines) + "\n"


def _general(reason: str) -> str:
    """A reason without the value that was given."""
    _, found, rest = reason.partition(" on this model: ")
    return rest if found else reason


def _why(split: str | None) -> str:
    return (
        "a flag of the launch divides memory, or it has no prefix cache"
        if split is None
        else split.removeprefix(TWO_POOLS)
    )


def _families(every: Iterable[Checked]) -> Iterator[tuple[str, list[Checked]]]:
    by_family: dict[str, list[Checked]] = {}
    for each in every:
        by_family.setdefault(catalog.name_of(each.model) or _WEIGHTS.sub("", each.model), []).append(each)
    yield from sorted(by_family.items(), key=lambda item: item[0].lower())


def _rows(members: Iterable[Checked]) -> Iterator[str]:
    """A line for all that differ in their hardware alone, and of these for all that differ in their model alone."""
    hardware: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for each in members:
        against = ", ".join(f"`{subject}`" for subject in each.subjects)
        row = (each.name, each.parallel, each.verdict, each.memory, against)
        hardware.setdefault((each.model, row), []).append(each.hardware)
    models: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (model, row), cards in hardware.items():
        models.setdefault((row, tuple(cards)), []).append(f"[{model.rpartition('/')[2]}]({_HUB}/{model})")
    for ((name, parallel, verdict, memory, against), cards), names in models.items():
        yield f"| {name} | {parallel} | {', '.join(names)} | {', '.join(cards)} | {verdict} | {memory} | {against} |"


def _block(members: Iterable[Checked]) -> Iterator[str]:
    """The commands of those that are served, each once, below the recipes and cards that it is for."""
    commands: dict[str, dict[str, list[str]]] = {}
    for each in members:
        if not each.reasons:
            recipes = commands.setdefault(each.command, {})
            recipe = each.name if each.split is None else f"{each.name}, {each.memory}"
            recipes.setdefault(recipe, []).append(each.hardware)
    if commands:
        yield from ("", "```bash")
        for command, recipes in commands.items():
            yield "# " + "; ".join(f"{recipe}: {', '.join(cards)}" for recipe, cards in recipes.items())
            yield command
        yield "```"


def main(argv: Sequence[str] | None = None) -> int:
    """Check every recipe, print the sums, and write the page."""
    parser = argparse.ArgumentParser(description="Which recipes are served.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="with recipes, JSON")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer there")
    args = parser.parse_args(argv)
    try:
        lists = {date: [check(each) for each in recipes] for date, recipes in map(read, args.files)}
        kept = parts_of(args.page.read_text(encoding="utf-8")) if args.page is not None and args.page.exists() else {}
    except (ValueError, OSError) as error:
        print(f"recipes.py: error: {error}", file=sys.stderr)
        return 2
    if args.page is not None:
        parts = {date: part_of(every) for date, every in lists.items()}
        args.page.write_text(page(parts | {date: kept[date] for date in kept if date not in parts}), encoding="utf-8")
    if args.json is not None:
        fields = [
            {"list": date, **{name: getattr(each, name) for name in Checked.__slots__}}
            for date, every in lists.items()
            for each in every
        ]
        args.json.write_text(json.dumps({"benchmark": "recipes", "recipes": fields}, indent=1) + "\n", encoding="utf-8")
    for date, every in lists.items():
        print(f"{date}: {sum(not each.reasons for each in every)} of {len(every)} recipes are served")
        for subject, number in Counter(subject for each in every for subject in each.subjects).most_common():
            print(f"{number:4}  {subject}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
