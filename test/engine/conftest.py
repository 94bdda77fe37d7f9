"""Servers for the engine's tests: each started once for as long as tests need it, and stopped by its fixture."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.engine import tiny_model
from marconi.engine.server_process import ServerProcess

from .scenarios import CHUNKED_PREFILL_SIZE, MAX_KV_TOKENS, NO_BUFFER

StartServer = Callable[..., ServerProcess]

POOLS = (
    "--max-total-tokens",
    str(MAX_KV_TOKENS),
    "--max-mamba-cache-size",
    "48",
    "--max-running-requests",
    "8",
)
MARCONI = ("--radix-cache-backend", "marconi", "--marconi-check-invariants", "idle")
STRATEGY_ARGS = {
    "extra_buffer": ("--mamba-radix-cache-strategy", "extra_buffer"),
    "no_buffer": ("--mamba-radix-cache-strategy", NO_BUFFER, "--disable-overlap-schedule"),
}
BROKEN_STATE_SERVER = (str(Path(__file__).with_name("broken_state_server.py")),)


NEGATIVE_CONTROL = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(NEGATIVE_CONTROL, [])
    if lines:
        terminalreporter.section("negative control: the same scenarios on a server that breaks states")
        for line in lines:
            terminalreporter.line(line, red=True)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of each family, by its name."""
    root = tmp_path_factory.mktemp("models")
    for family in tiny_model.Family:
        tiny_model.write(family, root / family)
    return {str(family): root / family for family in tiny_model.Family}


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


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers that live as long as the module's tests."""
    logs = tmp_path_factory.mktemp("logs")
    numbers = count()
    with ExitStack() as running:

        def start(model: Path, args: Sequence[str], **options: object) -> ServerProcess:
            log_path = logs / f"{next(numbers)}.log"
            return running.enter_context(ServerProcess(model, args, log_path=log_path, **options))  # type: ignore[arg-type]

        yield start


def server_args(strategy: str) -> list[str]:
    """The arguments of a server under test."""
    return [*MARCONI, *POOLS, *STRATEGY_ARGS[strategy], "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE)]
