"""Which of the launch configurations in a file of recipes are served: the page docs/recipes.md.

FILE is a JSON list of objects with `model`, `hardware`, `name` and `args`, the flags of `sglang.launch_server`. Each is
asked of `marconi check`, without a device and without the model. What the page shows of a recipe is its model,
hardware, name and parallelism, and the answer: whether it is served, and whether KV and states share one pool.

    python benchmark/recipes.py FILE [--page FILE] [--json FILE]
"""

import argparse
import json
import os
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from marconi.engine.cpu_platform import choose_platform

choose_platform(os.environ)
warnings.filterwarnings("ignore", module="sglang")

from marconi.check.answer import answer  # noqa: E402 - SGLang takes its platform as it is imported
from marconi.check.line import CommandLine  # noqa: E402
from marconi.check.machine import Machine  # noqa: E402
from marconi.engine.launch.model import Model  # noqa: E402
from marconi.engine.launch.policies import CHUNK_END  # noqa: E402
from marconi.engine.launch.split import ONE_POOL, TWO_POOLS  # noqa: E402
from marconi.model import catalog  # noqa: E402

_FIELDS: Final = ("model", "hardware", "name", "args")
_PARALLEL: Final = {"--tp-size": "tp", "--dp-size": "dp", "--attn-dp-size": "attention dp", "--ep-size": "ep"}
_MODEL: Final = "model"


@dataclass(frozen=True, slots=True)
class Checked:
    """A recipe and its answer."""

    model: str
    hardware: str
    name: str
    parallel: str
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


def subject_of(reason: str) -> str:
    """What a reason is about."""
    first = reason.split()[0].rstrip(":")
    return first if first.startswith("--") else "SGLang" if first == "sglang" else _MODEL


def read(path: Path) -> list[Mapping[str, str]]:
    """The recipes of a file; `ValueError` for anything else."""
    recipes = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(recipes, list):
        raise ValueError(f"{path} must be a list of recipes, got a JSON {type(recipes).__name__}")
    for index, recipe in enumerate(recipes):
        if not isinstance(recipe, dict) or not all(isinstance(recipe.get(field), str) for field in _FIELDS):
            raise ValueError(f"{path}: recipe {index} must have {', '.join(_FIELDS)}, each a text")
    return recipes


def check(recipe: Mapping[str, str]) -> Checked:
    """Ask whether a recipe would be served."""
    given: Mapping[str, Any] = {}
    admission = split = None
    try:
        line = CommandLine.parse(["--model-path", recipe["model"], *shlex.split(recipe["args"])])
        given = line.given
        found = answer(line, Model.find(line.model_path, None), Machine())
        reasons, admission, split = found.reasons, found.admission, found.split
    except ValueError as error:
        reasons = (str(error),)
    parallel = ", ".join(f"{short} {given[option]}" for option, short in _PARALLEL.items() if option in given)
    return Checked(recipe["model"], recipe["hardware"], recipe["name"], parallel, reasons, admission, split)


def page(every: Sequence[Checked]) -> str:
    """The page, in Markdown."""
    served = [each for each in every if not each.reasons]
    lines = [
        "# Recipes",
        "",
        "*Served* means that a server on CUDA would use this cache: neither this project nor SGLang refuses the",
        "flags, as far as can be checked without a device and weights. No server was started, and the page does not",
        "say whether a model fits. No GPU has run any of them: one has run [small models](status.md#on-a-gpu).",
        "",
        "The page checks published launch configurations of hybrid models with [`marconi",
        "check`](check.md), each with `--radix-cache-backend marconi` added, in a section",
        "for each shape of model. `make recipes` writes it.",
        "",
        f"**{len(served)} of {len(every)} are served.** Reasons against the others, counting a recipe once "
        "for each of its reasons:",
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
        lines += ["", f"## {family}", "", "| recipe | parallel | model | hardware | served | memory | reason |"]
        lines += ["|---|---|---|---|---|---|---|", *_rows(members)]
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
        by_family.setdefault(catalog.name_of(each.model) or each.model, []).append(each)
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
        models.setdefault((row, tuple(cards)), []).append(model.rpartition("/")[2])
    for ((name, parallel, verdict, memory, against), cards), names in models.items():
        yield f"| {name} | {parallel} | {', '.join(names)} | {', '.join(cards)} | {verdict} | {memory} | {against} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Check every recipe, print the sums, and write the page."""
    parser = argparse.ArgumentParser(description="Which recipes are served.")
    parser.add_argument("file", type=Path, metavar="FILE", help="with the recipes, JSON")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer there")
    args = parser.parse_args(argv)
    try:
        every = [check(recipe) for recipe in read(args.file)]
    except (ValueError, OSError) as error:
        print(f"recipes.py: error: {error}", file=sys.stderr)
        return 2
    text = page(every)
    if args.page is not None:
        args.page.write_text(text, encoding="utf-8")
    if args.json is not None:
        fields = [{name: getattr(each, name) for name in Checked.__slots__} for each in every]
        args.json.write_text(json.dumps({"benchmark": "recipes", "recipes": fields}, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(not each.reasons for each in every)} of {len(every)} recipes are served")
    for subject, number in Counter(subject for each in every for subject in each.subjects).most_common():
        print(f"{number:4}  {subject}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
