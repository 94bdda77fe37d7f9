"""`marconi top` and `marconi why` show what a server answers, and say in one line why they cannot."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from marconi import cli
from marconi.engine.reports.status import Status, Use
from marconi.view import top


def status(**changed: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "eviction": "marconi",
        "alpha": 1.0,
        "kv_tokens": Use(1000, 100, 850),
        "joint_bytes": None,
        "state_slots": Use(10, 2, 7),
        "kv_bytes_per_token": 16,
        "state_bytes": 1024,
        "num_nodes": 7,
        "num_ghosts": 3,
        "num_states": 7,
        "num_requests": 40,
        "num_requests_uncached": 6,
        "num_health_checks": 5,
        "num_prompt_tokens": 4000,
        "num_hit_tokens": 1000,
        "num_missed_tokens": {"evicted_for_kv": 1200, "first_seen": 1760, "last_token": 40, "no_slot": 0},
        "missed_s": {"evicted_for_kv": 1.2, "first_seen": 1.7, "last_token": 0.1, "no_slot": 0.0},
        "saved_s": 0.8,
        "hits": {"input_prefix": 10, "conversation": 5, "none": 25},
        "num_states_written": 60,
        "num_states_not_written": 1,
        "num_ends_not_kept": 0,
        "evictions": {"kv": 4, "states": 9, "unused": 8},
        "num_evicted_tokens": 900,
    }
    return Status(**{**values, **changed}).as_dict()


def shown(view: Any) -> str:
    out = StringIO()
    Console(width=100, file=out).print(view)
    return out.getvalue()


class Server(BaseHTTPRequestHandler):
    """Answers what the test has put there."""

    answers: tuple[int, bytes] = (200, b"")
    beside: dict[str, tuple[int, bytes]]
    """What other paths answer."""
    keys: list[str | None]

    def do_GET(self) -> None:
        self.keys.append(self.headers.get("Authorization"))
        code, body = self.beside.get(self.path, self.answers)
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[type[Server], str]]:
    handler = type("Handler", (Server,), {"keys": [], "beside": {}})
    with HTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield handler, f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_a_pool_is_what_is_free_cached_and_in_use() -> None:
    use = Use(1000, 100, 850)
    assert use.in_use == 50
    assert status()["kv_tokens"] == {"size": 1000, "free": 100, "cached": 850, "in_use": 50}
    assert status()["hit_rate"] == 0.25


def test_a_page_shows_totals_and_what_came_since() -> None:
    later = status(num_requests=60, num_prompt_tokens=6000)
    page = shown(top.page([later], [status()], 4.0))
    assert "rank 0: eviction marconi, alpha 1" in page
    assert ["requests", "60", "5.0"] in [line.split() for line in page.splitlines()]
    assert ["health", "checks", "5", "0.0"] in [line.split() for line in page.splitlines()]
    assert ["prompt", "tokens", "6,000", "500.0"] in [line.split() for line in page.splitlines()]
    assert ["missed:", "first", "seen", "1,760", "0.0"] in [line.split() for line in page.splitlines()]
    assert page.index("missed: evicted for kv") < page.index("missed: first seen"), "the order of the table"
    assert "no slot" not in page, "no token was"
    assert "50 in use, 850 cached, 100 of 1,000 free" in page


def test_a_page_says_why_states_are_no_longer_planned() -> None:
    assert "no longer planned" not in shown(top.page([status()], None, 0.0))
    page = shown(top.page([status(num_hook_faults=3, why_not_planned="a hook failed")], None, 0.0))
    assert "a hook failed" in page


def test_a_page_of_one_pool_shows_its_bytes() -> None:
    evictions = {"bytes": 7, "kv": 0, "states": 0, "unused": 0}
    page = shown(top.page([status(joint_bytes=Use(5000, 1000, 3000), evictions=evictions)], None, 0.0))
    assert "1,000 in use, 3,000 cached, 1,000 of 5,000 free" in page
    assert ["victims", "for", "bytes", "7"] in [line.split() for line in page.splitlines()]
    assert "state slots" not in page


def test_the_first_page_has_no_rates_and_every_rank_has_a_table() -> None:
    views = top.views(lambda: [status(), status(alpha=None, eviction="lru")], lambda: 0.0, lambda: None)
    page = shown(next(views))
    assert "rank 0: eviction marconi, alpha 1" in page
    assert "rank 1: eviction lru" in [line.strip() for line in page.splitlines()]
    assert "0.0" not in page


def test_once_prints_what_the_server_says(server: tuple[type[Server], str], capsys: pytest.CaptureFixture[str]) -> None:
    handler, url = server
    handler.answers = (200, json.dumps({"ranks": [status()]}).encode())
    assert cli.main(["top", url, "--once", "--api-key", "secret"]) == 0
    assert "hit rate" in capsys.readouterr().out
    assert handler.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("code", "body", "says"),
    [
        (404, b'{"error": "no recurrent layers"}', "answers 404: no recurrent layers"),
        (404, b'{"detail": "Not Found"}', "has no /marconi: an SGLang server has it if started with --radix-cache-"),
        (404, b"<html>", "has no /marconi"),
        (500, b"oops", "answers 500: Internal Server Error"),
        (200, b"<html>", "does not answer in JSON: it is no server of this project"),
        (200, b"[1]", "lists no cache"),
        (200, b'{"ranks": []}', "lists no cache"),
    ],
)
def test_a_server_that_has_no_cache_of_ours_gets_one_line(
    server: tuple[type[Server], str], capsys: pytest.CaptureFixture[str], code: int, body: bytes, says: str
) -> None:
    handler, url = server
    handler.answers = (code, body)
    assert cli.main(["top", url, "--once"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("code", "body", "says"),
    [
        (200, {"workers": [{"url": "http://a:1"}, {"url": "http://b:2"}]}, "(http://a:1, http://b:2)"),
        (200, {"workers": []}, "(it has none)"),
        (401, {"object": "error"}, "(GET /router says which, given the administrator's token)"),
    ],
)
def test_why_tells_a_router_from_a_server_and_says_where_to_look(
    server: tuple[type[Server], str], capsys: pytest.CaptureFixture[str], code: int, body: dict[str, Any], says: str
) -> None:
    handler, url = server
    error = {"object": "error", "error": {"message": "GET /marconi/requests: Not Found", "code": 404}}
    handler.answers = (404, json.dumps(error).encode())
    handler.beside["/router"] = (code, json.dumps(body).encode())
    assert cli.main(["why", url]) == 2
    told = f"{url} is a router, which has no cache of its own: give one of its workers {says}"
    assert capsys.readouterr().err == f"marconi: error: {told}\n"
    handler.beside["/router"] = (404, b"")
    assert cli.main(["why", url]) == 2
    assert (
        capsys.readouterr().err
        == f"marconi: error: {url}/marconi/requests answers 404: GET /marconi/requests: Not Found\n"
    )


def test_a_port_where_something_else_than_http_answers_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert cli.main(["top", f"127.0.0.1:{listening.getsockname()[1]}", "--once"]) == 2
        thread.join()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "does not answer in HTTP" in line


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ftp://host"], "the address of a server must be http://HOST:PORT, got 'ftp://host'"),
        (["http://"], "must be http://HOST:PORT, got 'http://'"),
        (["http://127.0.0.1:port", "--once"], "http://127.0.0.1:port/marconi"),
        (["127.0.0.1:1", "--once"], "http://127.0.0.1:1/marconi does not answer"),
    ],
)
def test_an_address_that_cannot_be_asked_gets_one_line(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", *args]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "soon"])
def test_an_interval_that_is_none_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["top", "http://127.0.0.1", "--interval-s", interval])
    assert "must be a number of seconds above 0" in capsys.readouterr().err


def explained(rid: str, seconds_ago: float, num_hit_tokens: int, missed: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rid": rid,
        "seconds_ago": seconds_ago,
        "num_prompt_tokens": 4674,
        "num_hit_tokens": num_hit_tokens,
        "line": f"hit {num_hit_tokens:,} of 4,674; and why not more",
        "missed": missed,
    }


LAST = {"cause": "last_token", "start": 4673, "end": 4674}
EVICTED = {"cause": "evicted_for_kv", "start": 2336, "end": 4673, "seconds_before": 93.2}
OF_TWO_RANKS = [
    {"dp_rank": 0, "requests": [explained("chat-3", 2.0, 4673, [LAST]), explained("chat-1", 41.0, 0, [])]},
    {"dp_rank": 1, "requests": [explained("agent-2", 12.4, 2336, [EVICTED, LAST])]},
]


def test_why_lists_the_latest_requests_of_all_ranks_with_a_bar_of_what_was_cached(
    server: tuple[type[Server], str], capsys: pytest.CaptureFixture[str]
) -> None:
    handler, url = server
    handler.beside = {"/marconi/requests": (200, json.dumps({"ranks": OF_TWO_RANKS}).encode())}
    assert cli.main(["why", url, "--api-key", "secret"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["ago", "request", "cached", "why"]
    shown = [row.split(maxsplit=4) for row in rows if "chat" in row or "agent" in row]
    assert [row[:4] for row in shown] == [
        ["2", "s", "chat-3", "█" * 10],
        ["12", "s", "agent-2", "█" * 4 + "░" * 6],
        ["41", "s", "chat-1", "░" * 10],
    ]
    assert shown[1][4].startswith("hit 2,336 of 4,674;")
    assert handler.keys == ["Bearer secret"]


def test_why_says_of_one_request_which_tokens_were_missed_and_for_what(
    server: tuple[type[Server], str], capsys: pytest.CaptureFixture[str]
) -> None:
    handler, url = server
    handler.beside = {"/marconi/requests": (200, json.dumps({"ranks": OF_TWO_RANKS}).encode())}
    assert cli.main(["why", url, "agent"]) == 0
    title, line, _, *parts, _, read_on = capsys.readouterr().out.splitlines()
    assert title == "agent-2, 12 s ago"
    assert line == "hit 2,336 of 4,674; and why not more"
    assert [" ".join(part.split()) for part in parts] == [
        "2,336 0 2,336 cached",
        "2,337 2,336 4,673 evicted for kv, 93 s before",
        "1 4,673 4,674 last token",
    ]
    assert read_on.split("  ") == ["evicted for kv", "docs/why-a-miss.md#evicted-for-kv"]


def test_why_says_what_to_do_about_what_has_changed_since_another_request(
    server: tuple[type[Server], str], capsys: pytest.CaptureFixture[str]
) -> None:
    handler, url = server
    told = {"request": "chat-1", "num_common_tokens": 41, "changed": "system", "hint": "keep it"}
    path, answer = (
        "/marconi/requests?rid=chat-3&since=chat+1",
        [{"requests": [OF_TWO_RANKS[0]["requests"][0] | {"since": told}]}],
    )
    handler.beside = {path: (200, json.dumps({"ranks": answer}).encode())}
    assert cli.main(["why", url, "chat-3", "--since", "chat 1"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "keep it."
    assert cli.main(["why", url, "--since", "chat-1"]) == 2
    assert "--since chat-1: REQUEST must be given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rid", "body", "says"),
    [
        ("chat-9", {"ranks": OF_TWO_RANKS}, "must begin the id of one of the 3 latest requests of URL, got 'chat-9'"),
        (None, {"error": "requests are not explained"}, "URL/marconi/requests answers 404: requests are not explained"),
    ],
)
def test_why_says_in_one_line_that_there_is_nothing_to_show(
    rid: str | None,
    body: dict[str, Any],
    says: str,
    server: tuple[type[Server], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler, url = server
    handler.beside = {"/marconi/requests": (200 if "ranks" in body else 404, json.dumps(body).encode())}
    handler.answers = (404, b"")
    assert cli.main(["why", url, *([rid] if rid else [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says.replace("URL", url) in line
