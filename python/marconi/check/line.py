"""A command line of `launch_server`, read by SGLang's own parser with this project's flags in it."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from marconi.check.question import require_backend
from marconi.engine.launch import flags

_NO_MODEL = "dummy"
"""The model path with which SGLang checks the arguments that need no model."""

_ABSENT = object()


class _Parser(argparse.ArgumentParser):
    """SGLang's parser, whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"sglang: {message}")


@cache
def _parser() -> tuple[_Parser, Mapping[str, Any]]:
    """SGLang's parser with our flags, of which an argument that is not given is absent; and the defaults."""
    parser = _Parser(prog="sglang serve", add_help=False)
    ServerArgs.add_cli_args(parser)
    # Where SGLang's plugins are loaded, they are there already.
    if "--marconi-eviction" not in parser.format_usage():
        flags.add_to(parser)
    defaults = vars(parser.parse_args(["--model-path", _NO_MODEL]))
    # An action that appends copies its default.
    parser.set_defaults(**{name: _ABSENT for name, each in defaults.items() if each is not None})
    return parser, defaults


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The flags that were asked for."""

    model_path: str
    given: Mapping[str, Any]
    """Each option that the command line names, as SGLang spells it, and its value."""
    args: argparse.Namespace

    @classmethod
    def parse(cls, argv: Sequence[str]) -> "CommandLine":
        """Read `argv`; `ValueError` with SGLang's own word for what it does not know."""
        parser, defaults = _parser()
        if "--config" in argv:
            argv = ConfigArgumentMerger(parser).merge_config_with_args(list(argv))
        given = {name: each for name, each in vars(parser.parse_args(argv)).items() if each not in (None, _ABSENT)}
        require_backend(given.pop("radix_cache_backend", None))
        model_path = given.pop("model_path")
        args = argparse.Namespace(**{**defaults, **given})
        options = {"--" + name.replace("_", "-"): each for name, each in given.items()}
        return cls(model_path, options, args)

    def over(self, num_ranks: int) -> "CommandLine":
        """The same over `num_ranks` ranks."""
        return replace(self, args=argparse.Namespace(**{**vars(self.args), "tp_size": num_ranks}))

    def make_record(self) -> Any:
        """SGLang's record of it, without the model, to be resolved once."""
        # Where plugins are loaded, our flags without our backend are refused, and this record names none.
        theirs = {name: each for name, each in vars(self.args).items() if not name.startswith("marconi_")}
        return ServerArgs.from_cli_args(argparse.Namespace(**theirs))
