"""The arguments behind `--` of the demo, read by SGLang's own parser before anything is built or started.

A server would report the same error a minute later, in its log. Values that the model or the machine does not support
only the server can reject.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Final, NoReturn

from marconi.engine.launch import flags
from marconi.engine.version import Refusal

_OWN: Final = ("--model-path", "--model", "--host", "--port", "--radix-cache-backend")
"""Given by the demo."""
_FILE: Final = "--config"
"""Names a file of more, which SGLang merges before it parses."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(f"SGLang's command line: {message}")


def require_readable(server_args: Sequence[str]) -> None:
    """Raise `Refusal` for arguments that SGLang's command line, with the flags of its plugins, does not take."""
    options = [word.partition("=")[0] for word in server_args]
    for option in options:
        if option in _OWN:
            raise Refusal(f"{option} behind `--`: the demo gives it to its servers itself")
    if not server_args or _FILE in options:
        return
    # Once the demo has chosen the platform, which SGLang reads when it is imported.
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = _Parser(prog="marconi demo")
    ServerArgs.add_cli_args(parser)
    read = parser.parse_args(["--model-path", "any", *server_args])
    flags.take_from(read, dict(os.environ))
