"""How an application's servers tokenize, read off their own options, and whether one of them does."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from marconi.router.command import add_prompt_flags
from marconi.router.gateway.model import reader_of
from marconi.router.prompts.check import TOKENIZE, probes, verify
from marconi.router.prompts.reader import TokenizingReader
from marconi.router.ray_serve.options import Options


def reader_for(options: Options) -> TokenizingReader:
    """What reads prompts as the servers do; `ValueError`, one line, where that cannot be done exactly."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_prompt_flags(parser)
    try:
        given, _ = parser.parse_known_args(options.server_args)
    except argparse.ArgumentError as wrong:
        raise ValueError(f"server_args: {wrong}") from None
    reader = reader_of(options.model, given)
    if reader.why_not:
        raise ValueError(reader.why_not)
    return reader


def require_alike(reader: TokenizingReader, ask: Callable[[str, Mapping[str, Any]], Any], server: str) -> None:
    """Raise `ValueError`, one line, where a server makes other ids; `ask` posts a body to a path of it."""
    for probe in probes(reader):
        verify(probe, ask(TOKENIZE, probe.body), server)
