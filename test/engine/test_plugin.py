"""The plugin: flags on SGLang's own command line, refusals of one line, hooks that are known to have taken effect."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang.version
import zmq.auth
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from marconi.engine.cpu_platform import is_active
from marconi.engine.events.sockets import sockets_of
from marconi.engine.launch import flags
from marconi.engine.launch.flags import BACKEND
from marconi.engine.plugin import upstream
from marconi.engine.plugin.touch import Group, Kind, Touch, is_hooked, require_hooked
from marconi.engine.version import OVERRIDE_ENV, Refusal, require_verified
from marconi.events.address import Keys, TcpAddress
from marconi.policy.catalog import PolicySpec
from marconi.policy.eviction.utility import ALPHA

from .processes import free_ports

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang with its plugins loaded, and an environment without our flags."""
    load_plugins()
    for spec in flags.SPECS:
        monkeypatch.delenv(spec.env, raising=False)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def parse(*args: str) -> object:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(list(args))


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a command line is refused with."""
    with pytest.raises(SystemExit) as stopped:
        parse(*args)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_help_shows_every_flag_with_its_default_and_environment_twin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for spec in flags.FLAGS:
        assert spec.option in shown
        assert f"Environment: {spec.env}." in shown
    assert "tail:SECONDS" in shown
    assert not [option for option in flags.REPLACED if f"{option} " in shown]


def test_a_flag_travels_to_child_processes_as_its_environment_twin(models: dict[str, Path]) -> None:
    parse(
        *("--model-path", str(models["gdn"]), "--radix-cache-backend", BACKEND, "--port", free_port()),
        *("--marconi-ghost-tokens", "25", "--marconi-eviction", "marconi:2", "--marconi-explain"),
    )
    given = flags.Flags(PolicySpec("marconi", "2"), ghost_tokens=25, explanations=flags.Explain.ON)
    assert flags.from_environ(os.environ) == given


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--marconi-admission", "often"), "--marconi-admission: must be one of judicious, chunk-end, got 'often'"),
        *(
            (
                ("--marconi-eviction", name),
                "--marconi-eviction: must be one of lru, marconi[:ALPHA], tail:SECONDS, best, got "
                f"'{name}'; all others run only in marconi replay",
            )
            for name in ("lru-joint", "seglen", "coverage", "gdsf")
        ),
        (("--marconi-ghost-tokens", "-1"), "--marconi-ghost-tokens: must be a number of tokens, at least 0, got '-1'"),
        *(
            (("--marconi-eviction", text), f"--marconi-eviction: must be {form}, got '{text}'")
            for text, form in (
                ("marconi:-1", "marconi[:ALPHA], a number, 0 or more"),
                ("marconi:nan", "marconi[:ALPHA], a number, 0 or more"),
                ("lru:2", "lru"),
                ("tail", "tail:SECONDS, a number above 0"),
                ("tail:0", "tail:SECONDS, a number above 0"),
                ("tail:soon", "tail:SECONDS, a number above 0"),
            )
        ),
        (("--marconi-alpha", "2"), "--marconi-alpha is gone: use --marconi-eviction marconi:ALPHA"),
        (("--marconi-ttft-budget-ms", "100"), "--marconi-ttft-budget-ms is gone: use --marconi-eviction tail:SECONDS"),
        (("--marconi-explain-text",), "--marconi-explain-text is gone: use --marconi-explain text"),
        (("--marconi-time", "requests"), "--marconi-time is gone: use the environment variable MARCONI_TIME"),
        (("--enable-lmcache",), "--enable-lmcache and --radix-cache-backend marconi are two caches"),
        (
            ("--marconi-events", "tcp://*:5557"),
            "--marconi-events tcp://*:5557 must be tcp://127.0.0.1:5557, or have CURVE keys: other hosts reach it "
            "(--marconi-events-keys)",
        ),
        (("--marconi-events", "5557"), "--marconi-events: an address must be like tcp://127.0.0.1:5557, got '5557'"),
        (
            ("--marconi-events", "tcp://127.0.0.1:65535"),
            "--marconi-events: the port must be at most 65535, got 65535 + 1 of tcp://127.0.0.1:65535",
        ),
        (
            ("--marconi-events-keys", "/no/keys"),
            "--marconi-events-keys: /no/keys: must be a .key_secret of pyzmq, got no CURVE certificate (Invalid",
        ),
        (("--marconi-events-tokens",), "--marconi-events-tokens is gone: use the environment variable MARCONI_EVENTS_"),
        (
            ("--marconi-record", "/no/folder/served"),
            "--marconi-record: must be a file in a folder that the server can write to, got '/no/folder/served'",
        ),
        (("--marconi-record", "/dev/null"), "--marconi-record: must be a file in a folder that the server can write"),
        (("--marconi-advice",), "--marconi-advice is gone: use --marconi-record FILE, and `marconi plan FILE` of"),
        (("--marconi-save-dir", "/x"), "--marconi-save-dir is gone: use --enable-hierarchical-cache --hicache-storage"),
        (("--marconi-explain", "yes"), "--marconi-explain: must be one of off, on, text, got 'yes'"),
        (
            ("--marconi-explain", "text", "--tokenizer-worker-num", "2"),
            "--marconi-explain text: --tokenizer-worker-num must be 1, got 2: processes without this plugin would log",
        ),
        (
            ("--marconi-events", "tcp://127.0.0.1:5557", "--disable-radix-cache"),
            "--disable-radix-cache leaves --radix-cache-backend marconi nothing to do: give one of them",
        ),
    ],
)
def test_a_bad_flag_is_refused_in_one_line_that_names_it(
    args: tuple[str, ...], says: str, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model-path", str(models["gdn"]), "--radix-cache-backend", BACKEND, "--port", free_port())
    assert says in refusal(capsys, *model, *args)


@pytest.mark.parametrize(("replicas", "taken_offset", "says"), [(1, 1, ""), (2, 3, " (4 ports from "), (2, 0, " (4 ")])
def test_events_on_a_port_in_use_are_refused_in_one_line_whichever_of_the_ports_it_is(
    replicas: int, taken_offset: int, says: str, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first = free_ports(4)
    port = first + taken_offset
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        line = refusal(
            capsys,
            *("--model-path", str(models["gdn"]), "--radix-cache-backend", BACKEND, "--port", free_port()),
            *("--marconi-events", f"tcp://127.0.0.1:{first}", "--dp-size", str(replicas)),
        )
    assert f"--marconi-events: cannot listen on tcp://127.0.0.1:{port} (Address already in use){says}" in line


def test_events_on_the_servers_own_port_are_refused_in_one_line(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    line = refusal(
        capsys,
        *("--model-path", str(models["gdn"]), "--radix-cache-backend", BACKEND, "--port", port),
        *("--marconi-events", f"tcp://127.0.0.1:{port}"),
    )
    assert f"--marconi-events: a port must differ from the server's own --port, got tcp://127.0.0.1:{port}" in line


def test_a_bad_certificate_is_refused_and_a_fleets_keys_open_every_address(tmp_path: Path) -> None:
    public, secret = map(Path, zmq.auth.create_certificates(tmp_path, "fleet"))
    given = {"MARCONI_EVENTS": "tcp://*:5557", "MARCONI_EVENTS_KEYS": str(secret), "MARCONI_EVENTS_TOKENS": "on"}
    read = flags.from_environ(given)
    assert (str(read.events), read.events_keys, read.events_tokens) == ("tcp://*:5557", Keys.read(secret), True)
    assert read.events_keys is not None
    assert read.events_keys.secret.decode() not in repr(read)
    with pytest.raises(
        Refusal, match=r"MARCONI_EVENTS_KEYS: .*fleet\.key: must be the \.key_secret beside it, got a public key"
    ):
        flags.from_environ({**given, "MARCONI_EVENTS_KEYS": str(public)})


@pytest.mark.parametrize(("rank", "expected"), [(0, (5557, 5560)), (2, (5559, 5562))])
def test_events_of_replicas_come_first_and_their_replays_behind_them(rank: int, expected: tuple[int, int]) -> None:
    events, replay = sockets_of(TcpAddress("127.0.0.1", 5557), rank, 3)
    assert (events.port, replay.port) == expected


@pytest.mark.parametrize(
    ("environ", "eviction", "alpha"),
    [
        ({}, "best", ALPHA),
        ({"MARCONI_EVICTION": "marconi:0.5"}, "marconi", 0.5),
        ({"MARCONI_EVICTION": "marconi"}, "marconi", ALPHA),
        ({"MARCONI_EVICTION": "tail:0.25"}, "tail", ALPHA),
    ],
)
def test_a_rules_number_stands_behind_its_name(environ: dict[str, str], eviction: str, alpha: float) -> None:
    policy = flags.from_environ(environ).policy
    assert (policy.eviction, policy.alpha) == (eviction, alpha)
    assert policy.ttft_budget_s == (0.25 if eviction == "tail" else None)


def test_a_bad_environment_twin_is_refused_in_one_line(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MARCONI_REPORT_INTERVAL_S", "soon")
    line = refusal(capsys, "--model-path", str(models["gdn"]), "--radix-cache-backend", BACKEND, "--port", free_port())
    assert "MARCONI_REPORT_INTERVAL_S: must be a number of seconds, at least 0, got 'soon'" in line


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--marconi-evicton", "lru"), "error: unrecognized arguments: --marconi-evicton lru"),
        (("--marconi-eviction",), "error: argument --marconi-eviction: expected one argument"),
    ],
)
def test_a_flag_that_cannot_be_parsed_is_named_by_sglangs_parser(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--model-path", "marconi/model", "--radix-cache-backend", BACKEND, *args)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_an_unverified_sglang_is_refused_and_the_override_lets_it_run() -> None:
    with pytest.raises(Refusal, match=r"verified on SGLang 0\.5\.23, found 9\.9\.9: install sglang==0\.5\.23"):
        require_verified("9.9.9", {})
    require_verified("9.9.9", {OVERRIDE_ENV: "1"})
    require_verified(sglang.version.__version__, {})


def test_an_unverified_sglang_is_refused_on_the_command_line(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sglang.version.__version__", "9.9.9")
    monkeypatch.delenv(OVERRIDE_ENV, raising=False)
    line = refusal(capsys, "--model-path", str(models["gdn"]), "--radix-cache-backend", BACKEND, "--port", free_port())
    assert "found 9.9.9" in line


def test_every_hook_took_effect() -> None:
    require_hooked(*upstream.of_every_process(is_active()))
    assert sum(len(group.hooks) for group in upstream.of_every_process(is_active())) >= 3


@pytest.mark.parametrize("name", ["kill_process_tree", "a_function_that_never_was"])
def test_a_hook_that_did_not_take_effect_is_refused_by_name(name: str) -> None:
    lost = Touch(Kind.AFTER, f"sglang.srt.utils.common.{name}", "", "reports.idle.after_idle_metrics")
    assert not is_hooked(lost)
    with pytest.raises(Refusal, match=rf"1 hook\(s\) did not take effect: sglang\.srt\.utils\.common\.{name}; "):
        require_hooked(*upstream.of_every_process(is_active()), Group("", "", "", (lost,)))


def test_without_the_backend_a_command_line_is_parsed_as_by_stock(models: dict[str, Path]) -> None:
    from sglang.srt.server_args import ServerArgs

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        parsed = parse("--model-path", str(models["gdn"]), "--port", str(taken.getsockname()[1]))
    assert parsed.radix_cache_backend is None  # type: ignore[attr-defined]
    assert isinstance(parsed, ServerArgs)
    assert not [name for name in vars(parsed) if "marconi" in name]


def test_without_the_backend_our_flags_are_refused(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "--model-path", str(models["gdn"]), "--marconi-eviction", "best")
    assert line == (
        "marconi: error: --marconi-eviction best has no effect without --radix-cache-backend marconi: "
        "give both or neither"
    )
    assert "MARCONI_EVICTION" not in os.environ


def test_without_the_backend_our_variables_are_not_read(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARCONI_REPORT_INTERVAL_S", "soon")
    parse("--model-path", str(models["gdn"]), "--port", free_port())


def test_the_plugin_hooks_nothing_but_the_ledger() -> None:
    ours = {
        target
        for target, hooks in HookRegistry._hooks.items()
        for _, _, source in hooks
        if source is not None and source.dist_name == "sglang-marconi"
    }
    hooked = {touch.target for group in upstream.of_every_process(is_active()) for touch in group.hooks}
    guarded = {touch.target for touch in upstream.REQUESTS.hooks}
    assert hooked <= ours <= hooked | guarded


def test_servers_of_tests_check_their_trees_whenever_they_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """By SGLang's own variable, which `conftest.py` sets and `docs/serving.md` names, and SGLang's own checker."""
    from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker

    checked: list[str] = []
    cache = SimpleNamespace(
        supports_prefix_sharing=lambda: True, supports_mamba=lambda: True, sanity_check=lambda: checked.append("tree")
    )
    scheduler = SimpleNamespace(is_hybrid_swa=False, is_hybrid_ssm=True, tree_cache=cache)
    SchedulerInvariantChecker._check_tree_cache(scheduler)
    monkeypatch.setenv("SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK", "0")
    SchedulerInvariantChecker._check_tree_cache(scheduler)
    assert checked == ["tree"], "checked as in tests, and not where the variable is off"
