"""Servers for the engine's tests: each started once for as long as tests need it, and stopped by its fixture.

A module's `LAUNCHES` are the servers that its tests get as `server`, one after the other. Modules that list the same
launch share its server, whose tests run together: they may leave anything in its cache, and change nothing else.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.engine.cpu_platform import has_accelerator
from marconi.engine.launch import flags
from marconi.process import LAUNCH
from marconi_cpu import tiny_model
from marconi_cpu.demo.server_process import ServerProcess

from .breaking import BREAKS, SWITCH, require_broken
from .preloaded import DISABLED_MODELS, Bindings, disabled_models, preloaded
from .reference import Reference, digest_of
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, MAX_KV_TOKENS, NO_BUFFER

if TYPE_CHECKING:
    from .disaggregated import Pair
    from .matrix import Choice

StartServer = Callable[..., ServerProcess]
EntryPoint = Callable[[Sequence[str]], tuple[str, ...]]

# Every server of the tests checks itself when it is idle, and says at once what it did.
os.environ |= {"SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1", "MARCONI_REPORT_INTERVAL_S": "0.1"}

POOLS = (
    "--max-total-tokens",
    str(MAX_KV_TOKENS),
    "--max-mamba-cache-size",
    "48",
    "--max-running-requests",
    "8",
)
MARCONI = ("--radix-cache-backend", "marconi")
STRATEGY_ARGS = {
    EXTRA_BUFFER: ("--mamba-radix-cache-strategy", EXTRA_BUFFER),
    NO_BUFFER: ("--mamba-radix-cache-strategy", NO_BUFFER, "--disable-overlap-schedule"),
}
BROKEN_STATE_SERVER = (str(Path(__file__).with_name("broken_state_server.py")),)


FAULT = "fault"
"""Files beside the log of a server of the matrix: while the first exists states break, the second says what raises."""
MATRIX_SERVER = (str(Path(__file__).with_name("matrix_server.py")),)
NEGATIVE_CONTROL = "negative control"
MAX_REFERENCES = 2
KEPT = Path(sys.prefix) / ".references"
"""Answers without a prefix cache, by what they hang on; a new environment has none."""
MTP = "-mtp"
VISION = "vision"


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started; `args` are all of its flags, those of `strategy` among them.

    What SGLang reads of `env` when it is imported does not reach a preloaded server.
    """

    name: str
    family: str
    args: tuple[str, ...]
    strategy: str = EXTRA_BUFFER
    env: tuple[tuple[str, str], ...] = ()
    entry_point: tuple[str, ...] = LAUNCH
    choice: "Choice | None" = None
    """Of the matrix."""

    def process(self, models: dict[str, Path], log_path: Path, **options: Any) -> ServerProcess:
        """The server, not yet started."""
        return ServerProcess(models[self.family], self.args, log_path=log_path, env=dict(self.env), **options)


def server_args(strategy: str) -> tuple[str, ...]:
    """The arguments of a server under test."""
    return (*MARCONI, *POOLS, *STRATEGY_ARGS[strategy], "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE))


TWO_RANKS = ("--tp-size", "2")
CONSENSUS = (("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1"),)
"""SGLang's checker ends a server whose ranks decide differently."""
BY_REQUESTS = (("MARCONI_TIME", "requests"),)
"""The cache's contents age by requests, however busy the machine is."""
REPORTING = ("--enable-cache-report", "--enable-metrics", "--decode-log-interval", "8")
"""Each eighth step of a rank counts its drafts."""
STANDARD = {
    (family, strategy): Launch(f"{family}-{strategy}", family, (*server_args(strategy), *REPORTING), strategy)
    for family in ("gdn", "mamba2")
    for strategy in (EXTRA_BUFFER, NO_BUFFER)
}
"""What most modules share."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    launches = getattr(metafunc.module, "LAUNCHES", None)
    if launches is not None and "server" in metafunc.fixturenames:
        metafunc.parametrize("server", launches, indirect=True, ids=lambda launch: launch.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what a module's `is_asked(launch, name, scenario)` leaves out, where a test has a server."""
    items[:] = [item for item in items if _is_asked(item)]


def _is_asked(item: pytest.Item) -> bool:
    is_asked = getattr(getattr(item, "module", None), "is_asked", None)
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if is_asked is None or "server" not in params:
        return True
    return bool(is_asked(params["server"], item.originalname, params.get("scenario")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    lines = [text for report in reports for name, text in report.user_properties if name == NEGATIVE_CONTROL]
    if lines:
        terminalreporter.section("negative control: the same scenarios on a server that breaks states")
        for line in lines:
            terminalreporter.line(str(line), red=True)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of each family, by its name, and with a head for one more token, by its name and `MTP`.

    `VISION` is that of `gdn` which takes images.
    """
    root = tmp_path_factory.mktemp("models")
    made = {}
    for family in tiny_model.Family:
        for has_mtp in (False, True)[: 1 + family.can_have_mtp]:
            name = family + MTP * has_mtp
            made[name] = root / name
            tiny_model.write(family, made[name], has_mtp=has_mtp)
    made[VISION] = root / VISION
    tiny_model.write(tiny_model.Family.GDN, made[VISION], has_vision=True)
    return made


@pytest.fixture
def few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real servers import the models alone that tests serve."""
    monkeypatch.setenv(DISABLED_MODELS, disabled_models())


@pytest.fixture(scope="session")
def attention_model(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of attention alone, with the tokenizer of the hybrid ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("attention")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=json.loads((models["gdn"] / "config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((models["gdn"] / name).read_bytes())
    return path


@pytest.fixture(scope="session")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EntryPoint]:
    """Makes an entry point one that starts at once, `preloaded.py`; not on an accelerator, which no fork may use."""
    if has_accelerator():
        yield tuple
        return
    with preloaded(tmp_path_factory.mktemp("preloaded")) as start:
        yield lambda entry_point: (*start, *entry_point)


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest,
    preload: EntryPoint,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator["ServerProcess | Pair"]:
    """The server of a module's `LAUNCHES`, or the two of one with a role; `broken_states` makes it its own control."""
    is_broken = request.config.getoption("--broken-states")
    launch: Launch = request.param
    folder = tmp_path_factory.mktemp("server")
    (folder / FAULT).touch()
    if is_broken:
        (folder / BREAKS).touch()
    if (is_broken and launch.entry_point != MATRIX_SERVER) or launch.entry_point == LAUNCH:
        launch = replace(launch, entry_point=BROKEN_STATE_SERVER)
    files = (SWITCH, str(folder / BREAKS)), ("MARCONI_TEST_FAULT_FILE", str(folder / FAULT))
    launch = replace(launch, env=(*launch.env, *files))
    with serving(launch, models, preload, folder) as running:
        yield running
        if is_broken:
            require_broken(running.log_path)


def serving(
    launch: Launch, models: dict[str, Path], preload: EntryPoint, folder: Path
) -> AbstractContextManager["ServerProcess | Pair"]:
    """The server of `launch`, or its two."""
    from .disaggregated import disaggregated

    if launch.choice is not None and launch.choice.is_prefill:
        return disaggregated(launch, models, preload, folder, launch.choice.prefill_flags)
    return launch.process(models, folder / "log", entry_point=preload(launch.entry_point))


@pytest.fixture(autouse=True)
def _one_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks with caches of their own one is asked, the last: the scenarios count on what they left."""
    launch = getattr(request.node, "callspec", None) and request.node.callspec.params.get("server")
    if not isinstance(launch, Launch) or "--dp-size" not in launch.args:
        return
    url, post = request.getfixturevalue("server").url, httpx.post

    def to_the_last(asked: str, **options: Any) -> httpx.Response:
        if asked == f"{url}/generate":
            options["json"] = {**options["json"], "routed_dp_rank": 1}
        return post(asked, **options)

    monkeypatch.setattr(httpx, "post", to_the_last)


@pytest.fixture(scope="module")
def one_thread(sglang_configuration: None) -> None:
    """Operations on indices are small: threads that wait for each other take longer."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _plugins() -> None:
    from sglang.srt.plugins import hook_registry, load_plugins

    hook_registry._propagate_patch = Bindings().replace
    load_plugins()


@pytest.fixture
def loaded_plugins(_plugins: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang with its plugins loaded and no flag of ours in the environment; what a command line leaves there goes."""
    before = dict(os.environ)
    for spec in flags.SPECS:
        monkeypatch.delenv(spec.env, raising=False)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def launch(request: pytest.FixtureRequest) -> Launch:
    """What `server` was started by."""
    found: Launch = request.node.callspec.params["server"]
    return found


@pytest.fixture(scope="session")
def references(
    preload: EntryPoint, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Reference]]:
    """The reference of a family; of several whose answers are missing the latest two have a server."""
    known: dict[str, Reference] = {}
    running: dict[str, tuple[str, ExitStack]] = {}

    def start(family: str) -> str:
        if family in running:
            running[family] = running.pop(family)
        else:
            # Each takes over a gigabyte.
            if len(running) == MAX_REFERENCES:
                running.pop(next(iter(running)))[1].close()
            log_path = tmp_path_factory.mktemp("reference") / "log"
            args = ["--disable-radix-cache"]
            process = ServerProcess(models[family], args, log_path=log_path, entry_point=preload(LAUNCH))
            server = ExitStack()
            running[family] = server.enter_context(process).url, server
        return running[family][0]

    def of(family: str) -> Reference:
        if family not in known:
            known[family] = Reference(partial(start, family), KEPT / digest_of(models[family]))
        return known[family]

    try:
        yield of
    finally:
        for _, server in running.values():
            server.close()


@pytest.fixture(scope="module")
def start_server(preload: EntryPoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers that live as long as the module's tests."""
    logs = tmp_path_factory.mktemp("logs")
    numbers = count()
    with ExitStack() as running:

        def start(model: Path, args: Sequence[str], **options: Any) -> ServerProcess:
            options = {"log_path": logs / f"{next(numbers)}.log", "entry_point": preload(LAUNCH), **options}
            return running.enter_context(ServerProcess(model, args, **options))

        yield start
