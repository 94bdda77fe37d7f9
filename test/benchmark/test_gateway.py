"""The gateway's benchmark at a tiny size: its figures' shape, what is lost, and bad input; never its times."""

import asyncio
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router extra is not installed: pip install '.[router]'")
pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from aiohttp import web

from .scripts import FOLDER, load

PACKAGE = load("gateway").__name__
command, clients = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("command", "load"))
TINY = ["--requests", "1", "--streams", "5", "--pieces", "3", "--gap-s", "0.01"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = command._tiny_model(tmp_path_factory.mktemp("gateway") / "model")
    return folder


@pytest.fixture
def only_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what takes long."""
    shapes = command.shapes
    monkeypatch.setattr(command, "shapes", lambda number: shapes(number)[:2])


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a program in the worker's place."""

    def put(source: str) -> None:
        path = tmp_path / "worker.py"
        path.write_text(source)
        monkeypatch.setattr(command, "WORKER", path)

    return put


@pytest.mark.slow
def test_each_shape_and_the_streams_get_their_figures(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.json"
    assert command.main([*TINY, "--model", str(model), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [row["shape"] for row in written["overhead"]] == [shape.name for shape in command.shapes(1)]
    for row in written["overhead"]:
        assert row["num_requests"] == 1
        assert row["direct_p50_ms"] > 0
        assert row["routed_p50_ms"] > 0
        assert row["overhead_p50_ms"] == pytest.approx(row["routed_p50_ms"] - row["direct_p50_ms"])
    streams = written["streams"]
    assert streams["num_streams"] == 5
    assert 1 <= streams["num_at_once"] <= 5
    assert 0 < streams["first_piece_p50_ms"] <= streams["first_piece_max_ms"]
    assert "5 streams, " in capsys.readouterr().out


LIAR = """
import runpy
from aiohttp import web

write = web.StreamResponse.write
web.StreamResponse.write = lambda self, piece: write(self, piece.replace(b'"stream-3"', b'"stream-4"'))
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("only_chat")
def test_a_stream_that_got_anothers_answer_is_named_and_there_are_no_figures(
    model: Path, worker: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.json"
    worker(LIAR.format(path=str(command.WORKER)))
    assert command.main([*TINY, "--model", str(model), "--json", str(path)]) == 1
    told = capsys.readouterr()
    assert told.err == "benchmark/gateway: lost: stream-3: 0 right of 4 pieces, 4 were sent\n"
    assert told.out == ""
    assert not path.exists()


@pytest.mark.slow
def test_a_worker_that_does_not_start_is_named_with_its_last_words(
    model: Path, worker: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    worker("raise SystemExit('first\\nno luck today')")
    assert command.main([*TINY, "--model", str(model)]) == 1
    line = "benchmark/gateway: error: the server exited with status 1: no luck today; its log is .*/worker-0.log\n"
    assert re.fullmatch(line, capsys.readouterr().err)


# What the clients take for lost

WHOLE = '{"id":"ID"}'
STREAM = 'data: {"id":"ID","piece":0}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("right", [WHOLE, STREAM])
def test_a_request_that_got_its_own_answer_is_timed(right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (pair,) = asked(monkeypatch, right, right)
    assert pair.direct_s > 0
    assert pair.routed_s > 0


@pytest.mark.parametrize(
    ("right", "sent"),
    [
        (WHOLE, '{"id":"ID0"}'),  # this one's name stands in it
        (WHOLE, ""),
        (STREAM, STREAM.replace("ID", "another")),
        (STREAM, STREAM.removesuffix("data: [DONE]\n\n")),
        (STREAM, STREAM + STREAM),
        (STREAM, STREAM.replace("0}", "1}")),
    ],
)
def test_a_request_that_got_another_answer_is_lost(right: str, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(clients.Lost, match="a-shape-0: 200"):
        asked(monkeypatch, right, sent)


def test_a_refusal_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(clients.Lost, match="a-shape-0: 503"):
        asked(monkeypatch, WHOLE, WHOLE, 503)
    with pytest.raises(clients.Lost, match=r"stream-\d: 503"):
        streamed(("0", "1", "[DONE]"), 503)


def test_streams_that_are_whole_are_all_held() -> None:
    held = streamed(("0", "1", "[DONE]"))
    assert (held.num_streams, len(held.first_piece_s)) == (3, 3)


@pytest.mark.parametrize(
    ("sent", "num_right"),
    [
        (("0", "1"), 2),
        (("0", "[DONE]"), 1),
        (("1", "0", "[DONE]"), 0),
        (("0", "0", "1", "[DONE]"), 1),
        (("0", "1", "[DONE]", "2"), 3),
        ((), 0),
    ],
)
def test_a_stream_that_lacks_a_piece_or_has_one_too_many_is_lost(sent: tuple[str, ...], num_right: int) -> None:
    with pytest.raises(clients.Lost, match=rf"stream-\d: {num_right} right of {len(sent)} pieces, 3 were sent"):
        streamed(sent)


def asked(monkeypatch: pytest.MonkeyPatch, right: str, sent: str, status: int = 200) -> Any:
    """One request where `sent` comes and `right` would be right."""
    monkeypatch.setattr(clients, "NUM_WARM", 0)
    shape = clients.Shape("a-shape", "/", {"stream": right is STREAM}, 1)
    return before(lambda rid: sent.replace("ID", rid), status, lambda url: clients.alternate(url, url, shape))


def streamed(sent: tuple[str, ...], status: int = 200) -> Any:
    """Three streams of two pieces where `sent` comes."""

    def answer(rid: str) -> str:
        pieces = (each if each == "[DONE]" else f'{{"id":"{rid}","piece":{each}}}' for each in sent)
        return "".join(f"data: {each}\n\n" for each in pieces)

    return before(answer, status, lambda url: clients.hold(url, clients.Shape("a-shape", "/", {}, 1), 3, 0.0, 2))


def before(answer: Callable[[str], str], status: int, run: Callable[[str], Coroutine[Any, Any, Any]]) -> Any:
    """What `run` comes to before a server that answers a request by its name."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(text=answer((await request.json())["rid"]), status=status)

    async def story() -> Any:
        app = web.Application()
        app.router.add_post("/", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return await run("http://{}:{}".format(*runner.addresses[0][:2]))
        finally:
            await runner.cleanup()

    return asyncio.run(story())


# Bad input


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--requests", "0"], "--requests 0: give 1 or more"),
        (["--streams", "-1"], "--streams -1: give 1 or more"),
        (["--pieces", "0"], "--pieces 0: give 1 or more"),
        (["--pieces", "many"], "argument --pieces: invalid int value: 'many'"),
        (["--gap-s", "-0.5"], "--gap-s -0.5: give 0 or more seconds"),
        (["--gap-s", "nan"], "--gap-s nan: give 0 or more seconds"),
        (["--model", "no/where"], "the tokenizer must be a model's folder, got no/where"),
        (["--json", "no/where.json"], "--json must be in an existing folder, got no/where.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"benchmark/gateway: error: {line}"


def test_the_folder_is_a_program() -> None:
    run = subprocess.run([sys.executable, FOLDER / "gateway", "--help"], capture_output=True, text=True, check=True)
    assert "--pieces N" in run.stdout
