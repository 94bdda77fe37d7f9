"""`marconi top URL`: what a server's cache holds and does, live in a terminal, or a router's fleet (`fleet.py`).

Asks `GET /marconi`, or a router's `GET /router`, again and again. Shows a server's totals, with rates over the time
since the last answer. Needs neither SGLang nor an accelerator: the server may be anywhere.
"""

import json
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marconi import __version__
from marconi.policy.causes import Cause
from marconi.process import fetch, from_json
from marconi.view import fleet

MAX_CAUSES = 5
"""Causes of misses that are shown, those of the most tokens, in the order in which they are shown everywhere."""


class RouterError(ValueError):
    """The address of a router, where a server's is required."""


def watch(url: str, interval_s: float, console: Console, api_key: str | None = None) -> int:
    """Show the server or router at `url` until interrupted; `ValueError` or `OSError`, one line, for what is none."""
    address = address_of(url)

    def pause() -> None:
        time.sleep(interval_s)

    pages: Iterator[RenderableType]
    if _is_router(address, api_key):
        pages = fleet.views(lambda: ask_router(address, api_key), pause)
    else:
        pages = views(lambda: ask(address, api_key), time.monotonic, pause)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for view in pages:
            live.update(view, refresh=True)
    return 0


def show_once(url: str, console: Console, api_key: str | None = None) -> int:
    """Print what the server or router at `url` says now."""
    address = address_of(url)
    try:
        console.print(page(ask(address, api_key), None, 0.0))
    except RouterError:
        console.print(fleet.page(ask_router(address, api_key)))
    return 0


def _is_router(address: str, api_key: str | None) -> bool:
    try:
        ask(address, api_key)
    except RouterError:
        return True
    return False


def ask_router(address: str, api_key: str | None = None) -> dict[str, Any]:
    """The answer of the router at `address` to `GET /router`; `ValueError` in one line without one."""
    endpoint = f"{address}/router"
    try:
        answer = from_json(endpoint, fetch(endpoint, api_key=api_key))
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            got = "none" if api_key is None else "another"
            raise ValueError(f"{address}: --api-key must be the token of that router, got {got}") from None
        raise ValueError(f"{endpoint} answers {error.code}: {_reason(error) or error.reason}") from None
    if not isinstance(answer, dict) or "traffic" not in answer:
        version = answer.get("version") if isinstance(answer, dict) else None
        raise ValueError(f"{address} must be a router of version {__version__}, got version {version}")
    return answer


def address_of(url: str) -> str:
    """The address of the server at `url`, without a path; `ValueError` for what is no HTTP address."""
    address = url if "//" in url else f"http://{url}"
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"the address of a server must be http://HOST:PORT, got {url!r}")
    return f"{parts.scheme}://{parts.netloc}"


def ask(address: str, api_key: str | None = None, path: str = "/marconi") -> list[dict[str, Any]]:
    """The answer of every rank at `path`; `NoAnswer`, or `ValueError` in one line for a server that has none."""
    endpoint = f"{address}{path}"
    try:
        answer = from_json(endpoint, fetch(endpoint, api_key=api_key))
    except urllib.error.HTTPError as error:
        reason = _reason(error)
        _refuse_router(address, api_key, error.code)
        if error.code == HTTPStatus.NOT_FOUND and reason is None:
            raise ValueError(
                f"{address} has no {path}: an SGLang server has it if started with --radix-cache-backend marconi "
                "and one tokenizer worker"
            ) from None
        raise ValueError(f"{endpoint} answers {error.code}: {reason or error.reason}") from None
    ranks = answer.get("ranks") if isinstance(answer, dict) else None
    if not isinstance(ranks, list) or not ranks:
        raise ValueError(f"{endpoint} lists no cache: it is no server of this project")
    return ranks


def _refuse_router(address: str, api_key: str | None, code: int) -> None:
    """Raise `RouterError` if what knows no `GET /marconi` is one of our routers, with its workers, to who may know."""
    if code != HTTPStatus.NOT_FOUND:
        return
    try:
        # A line for each data-parallel rank.
        ranks = json.loads(fetch(f"{address}/router", api_key=api_key))["workers"]
        workers = ", ".join(dict.fromkeys(rank["url"] for rank in ranks))
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.UNAUTHORIZED:
            return
        workers = "GET /router says which, given the administrator's token"
    except (OSError, ValueError, KeyError, TypeError):
        return
    raise RouterError(
        f"{address} is a router, which has no cache of its own: give one of its workers ({workers or 'it has none'})"
    ) from None


def views(
    fetch: Callable[[], list[dict[str, Any]]], clock: Callable[[], float], pause: Callable[[], None]
) -> Iterator[Group]:
    """A page for every answer, without end."""
    before: list[dict[str, Any]] | None = None
    then_s = clock()
    while True:
        ranks, now_s = fetch(), clock()
        yield page(ranks, before, now_s - then_s)
        before, then_s = ranks, now_s
        pause()


def page(ranks: list[dict[str, Any]], before: list[dict[str, Any]] | None, elapsed_s: float) -> Group:
    """Render every rank's contents and counts, and the rates since `before`."""
    earlier = before if before is not None and len(before) == len(ranks) else [None] * len(ranks)
    return Group(*(_of_rank(index, rank, earlier[index], elapsed_s) for index, rank in enumerate(ranks)))


def _of_rank(index: int, rank: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_s: float) -> Table:
    alpha = "" if rank["alpha"] is None else f", alpha {rank['alpha']:g}"
    table = Table(title=f"rank {index}: eviction {rank['eviction']}{alpha}", title_justify="left", box=None)
    table.add_column("")
    for name in ("now", "a second"):
        table.add_column(name, justify="right")

    def count(label: str | Text, name: str, key: str | None = None) -> None:
        now, then = ((side[name] if key is None else side[name][key]) if side else 0 for side in (rank, before))
        rate = f"{(now - then) / elapsed_s:,.1f}" if before is not None and elapsed_s > 0 else ""
        table.add_row(label, f"{now:,}", rate)

    joint = rank["joint_bytes"]
    pools = (("KV tokens", "kv_tokens"), ("state slots", "state_slots"))
    for label, name in pools if joint is None else (("bytes of KV and states", "joint_bytes"),):
        use = rank[name]
        table.add_row(
            label, f"{use['in_use']:,} in use, {use['cached']:,} cached, {use['free']:,} of {use['size']:,} free"
        )
    table.add_row("nodes, ghosts", f"{rank['num_nodes']:,}, {rank['num_ghosts']:,}")
    table.add_row("states", f"{rank['num_states']:,}")
    table.add_row("hit rate", f"{rank['hit_rate']:.1%}")
    count("requests", "num_requests")
    count("  uncached", "num_requests_uncached")
    count("  from an input prefix", "hits", "input_prefix")
    count("  from a conversation", "hits", "conversation")
    count("  from nothing", "hits", "none")
    count("health checks", "num_health_checks")
    count("prompt tokens", "num_prompt_tokens")
    count("prompt tokens saved", "num_hit_tokens")
    if rank["explain"] == "off":
        table.add_row("  missed", "no causes: --marconi-explain off")
    missed = rank["num_missed_tokens"] or {}
    most = sorted(missed, key=missed.__getitem__, reverse=True)[:MAX_CAUSES]
    for cause in Cause:
        if cause in most and missed[cause]:
            count(Text.assemble("  missed: ", (cause.words, cause.color)), "num_missed_tokens", cause)
    count("states written", "num_states_written")
    count("states not written", "num_states_not_written")
    count("ends not kept", "num_ends_not_kept")
    if rank["num_hook_faults"] or rank["why_not_planned"]:
        count("hook faults", "num_hook_faults")
        table.add_row("no longer planned", rank["why_not_planned"])
    if joint is None:
        count("victims for KV", "evictions", "kv")
        count("victims for a state", "evictions", "states")
    else:
        count("victims for bytes", "evictions", "bytes")
    return table


def _reason(error: urllib.error.HTTPError) -> str | None:
    """The reason that a server or router of this project gives; None in the answer of anything else."""
    try:
        told = json.load(error)["error"]
        return str(told["message"] if isinstance(told, dict) else told)
    except (ValueError, KeyError, TypeError):
        return None
