"""A replica's server is started on ports of its own, says what a router needs, and is gone when it is stopped."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="the router extra is not installed: pip install '.[router]'")

import psutil

from marconi.process import free_ports
from marconi.router.description import Description, describe
from marconi.router.prompts import PromptKind
from marconi_ray import server as module
from marconi_ray.options import Options
from marconi_ray.server import Server, kinds_alike

from . import folder

SERVER = str(Path(__file__).with_name("stand_in_server.py"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder.write(tmp_path_factory.mktemp("model"))


def options(model: Path, *server_args: str, **more: Any) -> Options:
    return Options(str(model), server_args, entry_point=(SERVER,), profile=folder.PROFILE, **more)


def started(asked: Options) -> Server:
    return Server(asked, "127.0.0.1")


def told(server: Server) -> Description:
    said = server.description()
    return describe(server.url, said["model_info"], said["marconi"], None)


def test_two_of_them_share_a_host_and_say_what_a_router_needs(model: Path) -> None:
    with started(options(model)) as one, started(options(model)) as other:
        described = told(one), told(other)
    assert [each.model for each in described] == [str(model)] * 2
    sockets = [events.sockets for each in described for events in each.events]
    assert len({address for each in sockets for address in (each.events, each.replay)}) == 4


def test_another_server_at_its_port_is_not_taken_for_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(options(model)) as one:
        # The other one cannot listen there, and what answers there is the first.
        monkeypatch.setattr(module, "free_ports", lambda num, *host: one.port if num == 1 else free_ports(num, *host))
        with pytest.raises(RuntimeError, match="exited with status 1: its log is above"), started(options(model)):
            pass


def test_nothing_is_left_of_one_that_was_stopped(model: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with started(options(model)) as server:
        processes = set(psutil.Process().children(recursive=True)) - before
        assert len(processes) == 2
        server.require_running()
    server.stop()
    assert not psutil.wait_procs(list(processes), timeout=30)[1]
    with pytest.raises(RuntimeError, match="the server exited with status"):
        server.require_running()


def test_one_that_never_serves_is_named_in_a_line(model: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="exited with status 2: its log is above"),
        started(options(model, "--no-such")),
    ):
        pass
    asked = options(model, ready_timeout_s=0.1)
    with pytest.raises(RuntimeError, match=r"was not ready after 0\.1 s"), started(asked):
        pass


def test_one_that_tokenizes_otherwise_is_told_from_one_that_does_not(model: Path) -> None:
    with started(options(model)) as server:
        assert kinds_alike(options(model).reader(), server.post_json, server.url) == {PromptKind.TEXTS}, (
            "it has no template to render chats with"
        )
    asked = options(model, "--other-tokenizer")
    with started(asked) as server, pytest.raises(ValueError, match="its tokenizer is not this router's"):
        kinds_alike(asked.reader(), server.post_json, server.url)


@pytest.mark.parametrize(
    ("server_args", "words"),
    [
        (("--chat-template",), "server_args: argument --chat-template: expected one argument"),
        (("--default-chat-template-kwargs", "[]"), "--default-chat-template-kwargs must be a JSON object, got '[]'"),
    ],
)
def test_options_that_change_prompts_are_read_off_the_servers_own(
    model: Path, server_args: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=r"must be|expected") as wrong:
        options(model, *server_args).reader()
    assert str(wrong.value) == words
    template = model / "a.jinja"
    template.write_text("{{ messages[0].content }}")
    reader = options(model, "--tp-size", "2", "--chat-template", str(template)).reader()
    assert reader.template == template.read_text()
