"""SGLang's flags as its source declares them: what is wrong with a command line, known before SGLang is imported.

    arg_groups/fields/*.py    name: A[TYPE, "help"] or A[TYPE, Arg(aliases=[...], ...)]      `--name`, and its aliases
    server_args.py            parser.add_argument("--name", ...)                             the others

An import takes ten seconds, and to read these files less than a tenth of one. Names are read whole; of values only
those that are a number or a text by their type alone: the rest is left to SGLang's parser (`line.py`), which reads
every command line that passes here.
"""

import argparse
import ast
import difflib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from marconi.engine.launch import flags

_UNREAD: Final = {"nargs": "*"}
"""Any number of values, as far as is known here."""
_TYPES: Final[dict[str, type]] = {"int": int, "float": float, "str": str}
_LEFT_TO_SGLANG: Final = {"action", "nargs", "type_parser", "const"}
"""Fields of an `Arg` that decide how its values are read."""


class _DeclaredParser(argparse.ArgumentParser):
    """A parser whose errors are one line, in the words of SGLang's."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"sglang: {message}")


def read(argv: Sequence[str], others: Sequence[str] = ()) -> argparse.Namespace | None:
    """The arguments of `argv`; None where SGLang declares its flags otherwise.

    `ValueError` for what SGLang's parser refuses. `others` are options that a misspelt one may have meant as well.
    """
    parser = declared_parser()
    if parser is None:
        return None
    args, rest = parser.parse_known_args(argv)
    if rest:
        close = difflib.get_close_matches(rest[0].partition("=")[0], [*others, *parser._option_string_actions], 1, 0.8)
        meant = f"; did you mean {close[0]}?" if close else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
    if args.model_path is None and args.config is None:
        parser.error("the following arguments are required: --model-path/--model")
    return args


def declared_parser() -> argparse.ArgumentParser | None:
    """A parser of SGLang's flags and ours, from the source; None where no `--model-path` is declared there."""
    parser = _DeclaredParser(add_help=False, argument_default=None)
    for names, settings in _flags(_package()):
        parser.add_argument(*names, **settings)
    if "--model-path" not in parser._option_string_actions:
        return None
    flags.add_to(parser)
    return parser


def _package() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "not installed"
    return Path((spec.submodule_search_locations or [""])[0]) / "srt"


def _flags(package: Path) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The names of each flag, and the settings with which a parser reads it."""
    for path in sorted(package.glob("arg_groups/fields/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.AnnAssign(
                    target=ast.Name(id=name),
                    annotation=ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[kind, declared, *_])),
                ):
                    yield from _field(name, ast.unparse(kind), declared)
    for path in package.glob("server_args.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="add_argument"), args=[*names]):
                    yield [ast.literal_eval(each) for each in names], _UNREAD


def _field(name: str, kind: str, declared: ast.expr) -> Iterator[tuple[list[str], dict[str, Any]]]:
    keywords = {each.arg: each.value for each in declared.keywords} if isinstance(declared, ast.Call) else {}
    given = {key: ast.literal_eval(keywords[key]) for key in ("no_cli", "cli_name", "aliases") if key in keywords}
    if given.get("no_cli"):
        return
    names = [given.get("cli_name") or "--" + name.replace("_", "-"), *(given.get("aliases") or ())]
    inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    action = ast.unparse(keywords["action"]) if "action" in keywords else ""
    if action.endswith("BooleanOptionalAction"):
        settings: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    elif keywords.keys() & _LEFT_TO_SGLANG:
        settings = _UNREAD
    elif inner == "bool":
        settings = {"action": "store_true"}
    else:
        settings = {"type": _TYPES[inner]} if inner in _TYPES else _UNREAD
    yield names, {"dest": name, **settings}
