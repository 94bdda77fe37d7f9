"""`marconi top ROUTER_URL`: the fleet that `GET /router` describes, in a terminal, as `GET /router/ui` shows it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

NUM_DECISIONS: Final = 10
"""The latest decisions that are shown."""
_NONE: Final = "-"


def views(fetch: Callable[[], Mapping[str, Any]], pause: Callable[[], None]) -> Iterator[Group]:
    """A page for every answer, without end."""
    while True:
        yield page(fetch())
        pause()


def page(state: Mapping[str, Any]) -> Group:
    """Render the hit rates, the workers, and the latest decisions."""
    absent = [_absence(worker) for worker in state["workers"] if worker["condition"] != "up"]
    return Group(_summary(state), *absent, _workers(state["workers"]), _decisions(state["recent"], state["time_s"]))


def _summary(state: Mapping[str, Any]) -> Text:
    workers, traffic = state["workers"], state["traffic"]
    num_up = sum(worker["condition"] == "up" for worker in workers)
    since_s = state["time_s"] - traffic["num_steps"] * traffic["step_s"]
    steps = [step for step in traffic["steps"] if step["at_s"] > since_s]
    prompt, expected, reported, cached = (
        sum(step[f"num_{name}_tokens"] for step in steps) for name in ("prompt", "expected", "reported", "cached")
    )
    return Text(
        f"routing {state['routing']['rule']}: {num_up} of {len(workers)} up; hit rate of the last hour "
        f"{_share(cached, reported)} seen, {_share(expected, prompt)} expected"
    )


def _absence(worker: Mapping[str, Any]) -> Text:
    """Render why a worker takes no requests."""
    name, condition, why = (worker[name] for name in ("name", "condition", "why"))
    said = {"down": "is down", "refused": "is refused", "unknown": "is not in use yet"}.get(condition, condition)
    return Text(f"{name} {said}{f': {why}' if why else ''}", "bold red")


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("\nworker", overflow="fold")
    table.add_column("\ncondition", no_wrap=True)
    for name in ("hits\nexpected", "\nseen", "TTFT\nexpected", "\nseen", "\nrunning", "work\nahead", "\nturnover"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        latest = worker.get("latest") or {"cached_tokens": None, "ttft_s": None}
        hits, first = latest["cached_tokens"], latest["ttft_s"]
        table.add_row(
            Text(worker["name"]),
            worker["condition"],
            *(_share(hits[name]["mean"], hits["prompt"]["mean"]) if hits else _NONE for name in ("expected", "seen")),
            *(_seconds(first[name]["median"]) if first else _NONE for name in ("expected", "seen")),
            f"{worker['num_running']:,}",
            _seconds(worker["work_ahead_s"]) if worker["condition"] == "up" else _NONE,
            f"{worker['turnover']:.0%}" if "turnover" in worker else _NONE,
        )
    return table


def _decisions(recent: list[dict[str, Any]], now_s: float) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ago", justify="right", no_wrap=True)
    table.add_column("worker", overflow="fold")
    table.add_column("reason")
    for name in ("prompt", "expected", "seen", "answer"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in recent[:NUM_DECISIONS]:
        table.add_row(
            f"{max(now_s - each['at_s'], 0):,.0f} s",
            *(Text(each[name] or _NONE) for name in ("worker", "reason")),
            *(_count(each[f"num_{name}_tokens"]) for name in ("prompt", "hit", "cached")),
            _NONE if each["status"] is None else str(each["status"]),
        )
    return table


def _share(part: float, all_of_it: float) -> str:
    return f"{part / all_of_it:.1%}" if all_of_it else "none"


def _seconds(value_s: float) -> str:
    return f"{1000 * value_s:,.0f} ms" if value_s < 1 else f"{value_s:,.1f} s"


def _count(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"
