"""`marconi why URL [REQUEST]`: why requests of a server missed, in a terminal.

    URL              the latest requests of all ranks, the newest first: a bar of cached tokens, and the line
    URL REQUEST      those whose id begins with REQUEST: the line, and each part that was missed, with its cause
    --since OTHER    and what has changed in these chats since the one whose id begins with OTHER

Below is where to read on about each cause that is shown but the last token, which every request misses.

Asks `GET /marconi/requests` once. The server explains (`policy/misses.py`); this only lays out its answer.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from marconi.policy.causes import Cause
from marconi.view.top import address_of, ask

NUM_LATEST = 20
_BAR_CELLS = 10
_SHOWN: Final = {cause.value: (cause.words, cause.color) for cause in Cause}
"""A server of another release may name others."""


def show(url: str, rid: str | None, console: Console, api_key: str | None = None, since: str | None = None) -> int:
    """Print the latest requests, or those of `rid`; `ValueError` or `OSError`, one line, where there are none to show.

    A server that no request has reached has an empty list.
    """
    address = address_of(url)
    asked = "" if since is None else f"?{urlencode({'rid': rid or '', 'since': since})}"
    ranks = ask(address, api_key, f"/marconi/requests{asked}")
    requests = [request for rank in ranks for request in rank["requests"]]
    requests.sort(key=lambda request: request["seconds_ago"])
    if rid is None:
        latest = requests[:NUM_LATEST]
        console.print(_latest(latest))
        console.print(_read_on(latest))
        return 0
    found = [request for request in requests if request["rid"].startswith(rid)]
    if not found:
        raise ValueError(
            f"REQUEST must begin the id of one of the {len(requests)} latest requests of {address}, got {rid!r}"
        )
    for request in found:
        for part in _explained(request):
            console.print(part)
    console.print(_read_on(found))
    return 0


def _latest(requests: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ago", justify="right", no_wrap=True)
    table.add_column("request", max_width=12, overflow="ellipsis", no_wrap=True)
    table.add_column("cached", no_wrap=True)
    table.add_column("why", overflow="fold")
    for request in requests:
        table.add_row(f"{request['seconds_ago']:,.0f} s", Text(request["rid"]), _bar(request), Text(request["line"]))
    return table


def _bar(request: Mapping[str, Any]) -> str:
    """Ten cells, of which all are full only if every token but the last was cached."""
    num_full: int = _BAR_CELLS * request["num_hit_tokens"] // max(request["num_prompt_tokens"] - 1, 1)
    return "█" * num_full + "░" * (_BAR_CELLS - num_full)


def _explained(request: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"{request['rid']}, {request['seconds_ago']:,.0f} s ago", style="bold")
    yield Text(request["line"])
    if "hint" in (since := request.get("since", {})):
        yield Text(f"{since['hint']}.", style="italic")
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "from", "to"):
        table.add_column(name, justify="right")
    table.add_column("cause")
    table.add_row(f"{request['num_hit_tokens']:,}", "0", f"{request['num_hit_tokens']:,}", "cached")
    for miss in request["missed"]:
        start, end, cause = miss["start"], miss["end"], miss["cause"]
        ago = f", {miss['seconds_before']:,.0f} s before" if "seconds_before" in miss else ""
        table.add_row(f"{end - start:,}", f"{start:,}", f"{end:,}", Text.assemble(_SHOWN.get(cause, cause), ago))
    yield Padding(table, (0, 0, 1, 2))


def _read_on(requests: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    missed = {miss["cause"] for request in requests for miss in request["missed"]} - {Cause.LAST_TOKEN}
    for cause in Cause:
        if cause in missed:
            table.add_row(Text(cause.words, cause.color), Text(cause.page))
    return table
