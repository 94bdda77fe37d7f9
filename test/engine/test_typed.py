"""What pages tell a reader to type at a running server: every command of theirs is typed at one, and works."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from json import JSONDecoder
from pathlib import Path
from typing import Any, Final

import pytest

from marconi_cpu.demo.server_process import ServerProcess
from structure.pages import PAGES, page, shell

from .client import HTTP
from .conftest import STANDARD
from .scenarios import EXTRA_BUFFER

LAUNCHES = (STANDARD["gdn", EXTRA_BUFFER],)
TYPED: Final = r"curl |ask\b|marconi top http"
ANY_SERVER: Final = r"http://127\.0\.0\.1:3000\d"
OF_ANOTHER: Final = r"/router\b|/marconi/save\b"
"""Asked of a router, and of a server with a store (`test_store_server.py`)."""
STRICT: Final = f"""
set -eo pipefail
curl() {{ command curl --silent --show-error --fail "$@"; echo; }}
marconi() {{ {shlex.quote(sys.executable)} -m marconi "$@" --once; }}
"""
"""An answer that is an error ends the script, and what is live shows one look."""


def typed(path: Path) -> list[str]:
    """The commands of a page that ask a server."""
    return [each for each in shell(path) if re.match(TYPED, each) and not re.search(OF_ANOTHER, each)]


def run(commands: list[str], url: str) -> str:
    """What the commands print when they are typed one after the other, with 700 tokens where a page shows dots."""
    script = re.sub(ANY_SERVER, url, STRICT + "\n".join(commands)).replace("[...]", str(list(range(3, 203)) * 4))
    env = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    return done.stdout


def documents(text: str) -> Iterator[Any]:
    """The JSON documents of a text, one after the other."""
    while text := text.lstrip():
        document, end = JSONDecoder().raw_decode(text)
        yield document
        text = text[end:]


@pytest.fixture(autouse=True)
def tools() -> None:
    for name in ("curl", "jq"):
        if shutil.which(name) is None:
            pytest.skip(f"NEEDS {name}, not installed: this test did not run")


def test_the_second_question_of_the_quick_start_hits_as_it_says(server: ServerProcess) -> None:
    """But for the last tokens, which are the template's generation prompt."""
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    commands = typed(page("docs/quick-start.md"))
    assert [each.split()[0] for each in commands] == ["ask()", "ask;", "curl", "curl"]
    first, second, counts = documents(run(commands[:3], server.url))
    num_tokens = first["prompt_tokens"]
    assert (first["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"] == 0
    assert num_tokens - 20 < second["prompt_tokens_details"]["cached_tokens"] < num_tokens
    assert set(counts) == {"num_requests", "hits", "num_prompt_tokens", "num_hit_tokens", "num_missed_tokens"}
    assert all(counts.values())


@pytest.mark.parametrize("path", [path for path in PAGES if typed(path)], ids=lambda path: path.stem)
def test_every_command_that_asks_a_server_is_answered(path: Path, server: ServerProcess) -> None:
    assert run(typed(path), server.url).strip()


def test_a_route_and_a_field_that_are_not_there_are_found(server: ServerProcess) -> None:
    for command in (
        "curl http://127.0.0.1:30000/marconi/request",
        "curl http://127.0.0.1:30000/marconi | jq .ranks.hits",
    ):
        with pytest.raises(AssertionError):
            run([command], server.url)
