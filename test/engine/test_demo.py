"""`marconi demo` as a user runs it: a sentence and JSON, refusals of one line, nothing left behind by Ctrl-C."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template

from marconi import cli
from marconi.process import LAUNCH
from marconi_cpu.demo import forks, run
from marconi_cpu.demo.client import Client
from marconi_cpu.demo.comparison import by_kind, compare, sentence_of, table_of
from marconi_cpu.demo.endpoint import TimedAnswer
from marconi_cpu.demo.program import NUM_REQUESTS
from marconi_cpu.demo.server_process import environment
from marconi_cpu.demo.size import NUM_STATES, Size
from marconi_cpu.demo.stream import REASONING_TEMPLATE, WrongAnswer, generated
from marconi_cpu.demo.traffic import KINDS, Texts, parted

from .client import HTTP
from .conftest import EntryPoint
from .processes import is_gone

T = TypeVar("T")
MARCONI = (sys.executable, "-m", "marconi")
# A suite in the background of a shell ignores Ctrl-C, and so would what it starts.
WITH_CTRL_C = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
)


@pytest.fixture
def refused(loaded_plugins: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Gives `marconi demo` what it refuses; the single line of its error, of exit status 2 and before any work."""

    def of(*args: str) -> str:
        try:
            status: Any = cli.main(args)
        except SystemExit as ended:
            status = ended.code
        told = capsys.readouterr()
        assert status == 2, told.err
        assert "build" not in told.out
        (line,) = told.err.strip().splitlines()
        return line

    return of


@pytest.mark.slow
def test_the_demo_computes_less_than_stock_and_finds_every_answer_equal(
    preload: EntryPoint,
    loaded_plugins: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(run, "ServerProcess", partial(run.ServerProcess, entry_point=preload(LAUNCH)))
    out = tmp_path / "demo.json"
    size = ("--family", "mamba2", "--context-chars", "600", "--max-new-tokens", "8")
    assert cli.main(("demo", *size, "--json", str(out))) == 0, capsys.readouterr()
    document = json.loads(out.read_text())
    assert set(document) == {"model", "device", "sum", "kinds", "requests", "versions"}
    assert document["model"] == "tiny-mamba2"
    assert document["versions"]["sglang"] == "0.5.23"
    requests = document["requests"]
    assert len(requests) == document["sum"]["requests"] == NUM_REQUESTS
    for request in requests:
        assert set(request) == {"kind", "name", "prompt_tokens", "cached_tokens", "ttft_s", "equal"}
        assert request["equal"] is True
        assert all(0 < seconds < 60 for seconds in request["ttft_s"].values())
    branches = [request for request in requests if request["name"].startswith("branch")]
    assert all(request["cached_tokens"]["marconi"] > 0 for request in branches)

    assert {name: kind["requests"] for name, kind in document["kinds"].items()} == {
        kind.name: kind.num_requests for kind in KINDS
    }
    for kind in (*document["kinds"].values(), document["sum"]):
        assert set(kind) == {"requests", "prompt_tokens", "computed_tokens", "median_ttft_s", "different_answers"}
        assert kind["different_answers"] == 0
    computed = document["sum"]["computed_tokens"]
    assert computed["marconi"] < computed["stock"] < document["sum"]["prompt_tokens"]
    said = " ".join(capsys.readouterr().out.split())
    assert f"stock SGLang computed {computed['stock']:,}, Marconi {computed['marconi']:,}: " in said
    assert "% fewer, with the same answers." in said
    for awaited in ("start the stock server (about", "start the marconi server (about", f"ask it {NUM_REQUESTS} times"):
        assert awaited in said


@pytest.mark.slow
@pytest.mark.usefixtures("few_models")
@pytest.mark.parametrize("at_work", [False, True], ids=["while-a-server-starts", "while-requests-run"])
def test_ctrl_c_stops_every_process_that_the_demo_started(at_work: bool) -> None:
    demo = subprocess.Popen(
        [*WITH_CTRL_C, *MARCONI, "demo", "--max-new-tokens", "2000"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        server, port = wait_for(lambda: server_of(demo.pid), within_s=120)
        if at_work:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: is_answering(url), within_s=200)
            time.sleep(5)
        os.kill(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert errors.strip().splitlines()[-1] == "marconi: interrupted"
    assert "Traceback" not in errors
    assert is_gone(server.pid, within_s=5)


def server_of(demo_pid: int) -> tuple[psutil.Process, str] | None:
    """The first server that the demo started, and its port; imports start programs too, which end at once."""
    for child in psutil.Process(demo_pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            if words[1:3] == ["-m", "sglang.launch_server"]:
                return child, words[words.index("--port") + 1]
    return None


def wait_for(look: Callable[[], T | None], *, within_s: float) -> T:
    """What `look` finds, once it finds something."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if (found := look()) is not None:
            return found
        time.sleep(0.1)
    raise AssertionError(f"nothing came within {within_s} s")


def is_answering(url: str) -> bool | None:
    try:
        return HTTP.get(f"{url}/health", timeout=5.0).status_code == 200 or None
    except httpx.TransportError:
        return None


class FailingEndpoint:
    """A backend of the frontend that answers `num_answers` generations and then fails every one."""

    def __init__(self, num_answers: int):
        self._left = num_answers

    def __getattr__(self, name: str) -> Any:
        return getattr(BaseBackend(), name)

    def get_chat_template(self) -> Any:
        return get_chat_template("default")

    def generate(self, _s: Any, _sampling_params: Any = None, **_: Any) -> tuple[str, dict[str, Any]]:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the server is gone")
        return "answer", {}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_answers", [0, 3, 8, 9])
def test_a_request_that_fails_fails_the_demo_instead_of_being_waited_for(num_answers: int) -> None:
    with pytest.raises(RuntimeError, match="the server is gone"):
        forks.branches.run(context="context", num_answer_tokens=1, backend=FailingEndpoint(num_answers))


def test_bad_input_is_one_line(tmp_path: Path, attention_model: Path, refused: Callable[..., str]) -> None:
    assert "invalid choice: 'lstm'" in refused("demo", "--family", "lstm")
    assert "must be a whole number, 1 or more, got '0'" in refused("demo", "--context-chars", "0")
    gone = str(tmp_path / "gone")
    assert f"got {gone!r}, which does not exist" in refused("demo", "--model-path", gone)
    nowhere = str(tmp_path / "no" / "such.json")
    assert "--json must be in an existing folder" in refused("demo", "--json", nowhere)
    assert "has no recurrent layers" in refused("demo", "--model-path", str(attention_model))
    assert "--json must be a file, got the folder" in refused("demo", "--json", str(tmp_path))
    assert "invalid choice: 'rnn'" in refused("tiny-model", "--family", "rnn", "--out", gone)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--wrong-flag",), "SGLang's command line: unrecognized arguments: --wrong-flag"),
        (("--marconi-eviction", "fifo"), "--marconi-eviction: "),
        (("--port=1",), "--port behind `--`: the demo gives it to its servers itself"),
    ],
)
def test_what_no_server_takes_is_refused_before_a_model_is_built(
    args: tuple[str, ...], says: str, refused: Callable[..., str]
) -> None:
    assert refused("demo", "--", *args).startswith(f"marconi: error: {says}")


def answers(*token_lists: tuple[str, ...], num_cached_tokens: int = 5) -> list[TimedAnswer]:
    return [TimedAnswer("kind", f"request {i}", 10, num_cached_tokens, 0.1, each) for i, each in enumerate(token_lists)]


def test_an_answer_that_differs_is_said_to_differ() -> None:
    requests = compare({"stock": answers(("1", "2"), ("3",)), "marconi": answers(("1", "2"), ("4",))})
    assert [request.equal for request in requests] == [True, False]
    assert table_of(requests, "title").columns[-1].footer == "DIFFER"
    assert by_kind(requests)["kind"].num_different == 1
    assert sentence_of(requests).endswith("and 1 of 2 answers DIFFER.")


@pytest.mark.parametrize(
    ("num_cached_tokens", "says"),
    [
        (8, "stock SGLang computed 10, Marconi 4: 60% fewer, with the same answers."),
        (5, "stock SGLang computed 10, Marconi 10: as many, with the same answers."),
        (4, "stock SGLang computed 10, Marconi 12: 20% more, with the same answers."),
    ],
)
def test_the_sentence_says_what_each_computed_whoever_computed_less(num_cached_tokens: int, says: str) -> None:
    stock = answers(("1",), ("2",))
    ours = answers(("1",), ("2",), num_cached_tokens=num_cached_tokens)
    assert sentence_of(compare({"stock": stock, "marconi": ours})) == f"Of 20 prompt tokens {says}"


def test_runs_of_different_work_are_not_compared() -> None:
    with pytest.raises(ValueError, match="did different work"):
        compare({"stock": answers(("1",)), "marconi": answers(("1",), ("2",))})


def answering(*lines: str, status: int = 200) -> httpx.Client:
    """A client of a server that answers everything with these lines."""
    text = "".join(f"{line}\n\n" for line in lines)
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=text))
    return httpx.Client(transport=transport, base_url="http://server")


def test_answers_of_a_stream_are_told_apart_by_their_index() -> None:
    lines = [
        f"data: {json.dumps({'index': index, 'output_ids': ids})}" for index, ids in ((1, [5]), (0, [7]), (1, [6]))
    ]
    found = generated(answering(*lines, "data: [DONE]"), {}, 2)
    assert [each.last["output_ids"] for each in found] == [[7], [6]]
    assert all(each.first_s > 0 for each in found)


@pytest.mark.parametrize(
    ("client", "says"),
    [
        (answering("broken", status=500), "/generate: 500 b'broken"),
        (answering('data: {"error": "too long"}'), "/generate: too long"),
        (answering('data: {"index": 1}', "data: [DONE]"), "must answer 2 prompts, got 1 answers"),
    ],
)
def test_an_error_in_a_stream_and_an_answer_that_is_missing_are_raised(client: httpx.Client, says: str) -> None:
    with pytest.raises(WrongAnswer, match=says):
        generated(client, {}, 2)


class Recorder(Client):
    """A client whose server says the same to everything, and which keeps what it was asked."""

    def __init__(self, says: str, given: Mapping[str, str]) -> None:
        super().__init__("http://127.0.0.1:9", lambda: None, given)
        self.asked: list[Any] = []
        self._says = says

    def generate(self, kind: str, prompts: Mapping[str, str], num_tokens: int) -> None:
        self.asked += prompts.values()
        for name, prompt in prompts.items():
            self.note(TimedAnswer(kind, name, len(prompt), 0, 0.1, ("1",)))

    def chat(self, kind: str, name: str, messages: Sequence[Any], num_tokens: int) -> str:
        self.asked.append([dict(message) for message in messages])
        self.note(TimedAnswer(kind, name, 1, 0, 0.1, (), self._says))
        return self._given.get(name, self._says)


SIZE = Size.of(None, 32, is_small_model=True)


def asked_of(says: str, given: Mapping[str, str]) -> Recorder:
    """All kinds but the frontend's, one after the other."""
    client, texts = Recorder(says, given), Texts()
    for kind in KINDS[:-1]:
        before = len(client.answers)
        for _ in kind.ask(kind.name, client, texts, SIZE):
            pass
        assert len(client.answers) - before == kind.num_requests
    client.close()
    return client


def test_both_servers_are_asked_the_same_whatever_the_second_says() -> None:
    first = asked_of("what the first said", {})
    given = {answer.name: answer.text for answer in first.answers if answer.text}
    assert asked_of("something else", given).asked == first.asked
    assert asked_of("something else", {}).asked != first.asked


def test_no_two_requests_have_one_name_and_no_two_texts_begin_alike() -> None:
    names = [(answer.kind, answer.name) for answer in asked_of("said", {}).answers]
    assert len(set(names)) == len(names)
    texts = Texts()
    heads = [texts.take(100)[:8] for _ in range(200)]
    assert len(set(heads)) == len(heads)


def test_what_is_asked_does_not_fit_in_memory_but_each_request_does() -> None:
    prompts = [prompt for prompt in asked_of("x" * 64, {}).asked if isinstance(prompt, str)]
    distinct = sum(len(prompt) for prompt in set(prompts))
    assert max(map(len, prompts)) < SIZE.num_kv_tokens / 2
    assert distinct > 2 * SIZE.num_kv_tokens
    assert SIZE.server_args[:4] == (
        *("--max-total-tokens", str(SIZE.num_kv_tokens)),
        *("--max-mamba-cache-size", str(NUM_STATES)),
    )


def test_texts_for_a_model_with_longer_tokens_are_longer_and_memory_the_same() -> None:
    large = Size.of(None, 32, is_small_model=False)
    assert large.chars(1.0) == 4 * SIZE.chars(1.0)
    assert large.num_kv_tokens == SIZE.num_kv_tokens


def test_an_answer_is_parted_where_the_model_says_so() -> None:
    assert parted("<think>\nwhy\n</think>\n\nso") == ("why", "so")
    assert parted("abcdef") == ("abcd", "ef")


def test_the_small_models_template_drops_what_was_thought_in_earlier_turns() -> None:
    from jinja2 import Template

    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "why"},
        {"role": "user", "content": "c"},
    ]
    template = Template(REASONING_TEMPLATE.read_text(encoding="utf-8").rstrip("\n"))
    first, second = (template.render(messages=some, add_generation_prompt=True) for some in (turns[:1], turns))
    invitation = "<think>\n"
    assert first.endswith(invitation)
    assert second.startswith(first.removesuffix(invitation) + "b")
    within = template.render(messages=[*turns[:2], {"role": "tool", "content": "d"}])
    assert within.startswith(first + "why")
