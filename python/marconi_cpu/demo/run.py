"""The order of the demo: a model, the work against stock, the same work against this project, the comparison.

Each server runs alone, so neither is measured beside the other. Whatever ends the demo, an interrupt included,
the server that runs at that moment is stopped before the demo returns.
"""

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from marconi.engine.launch.flags import BACKEND, Time
from marconi.engine.version import Refusal, one_line
from marconi.replay.result import write
from marconi_cpu import tiny_model
from marconi_cpu.demo import program
from marconi_cpu.demo.comparison import (
    BACKENDS,
    MARCONI,
    STOCK,
    Compared,
    Sum,
    by_kind,
    compare,
    sentence_of,
    table_of,
)
from marconi_cpu.demo.endpoint import TimedAnswer
from marconi_cpu.demo.options import DemoOptions
from marconi_cpu.demo.server_args import require_readable
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess, environment, scratch_folder
from marconi_cpu.demo.size import NUM_STATES, Size
from marconi_cpu.demo.stream import REASONING_TEMPLATE

_START, _WORK = "about 40 s on two cores; minutes for a large model", "about a minute"
_SERVER_ARGS = ("--enable-cache-report", "--random-seed", "0", "--log-level", "info")


def run(options: DemoOptions, console: Console) -> bool:
    """Run the demo, print its table and what came of it; returns whether every answer was the same under both backends.

    Raises `Refusal` for a model that the demo has nothing to show on and for arguments that no server takes,
    `ServerFailed` for a server that ended.
    """
    # Our own requests, too, use the loopback device.
    os.environ.update(environment())
    require_readable(options.server_args)
    size = Size.of(options.num_context_chars, options.max_new_tokens, is_small_model=options.model_path is None)
    with scratch_folder() as scratch, _Steps(console) as steps:
        model_path = options.model_path or _build_model(options.family, scratch, steps)
        _require_hybrid(model_path)
        args = [*_SERVER_ARGS, *size.server_args]
        if options.model_path is None:
            args += ["--chat-template", str(REASONING_TEMPLATE)]
        args += options.server_args
        runs: dict[str, list[TimedAnswer]] = {}
        for name in BACKENDS:
            # Conversations continue with stock's answers.
            given = {answer.name: answer.text for answer in runs.get(STOCK, []) if answer.text}
            runs[name] = _run_against(name, model_path, args, size, given, scratch, steps)
    requests = compare(runs)
    device = device_name()
    name = options.model_path or f"tiny-{options.family}"
    memory = f"memory for {size.num_kv_tokens:,} tokens and {NUM_STATES} states"
    if options.server_args:
        memory += f" unless changed by {' '.join(options.server_args)}"
    console.print(table_of(requests, f"{name} on {device}, {memory}"))
    console.print(sentence_of(requests), highlight=False)
    if options.json_path is not None:
        write(options.json_path, to_json(name, device, requests))
    return all(request.equal for request in requests)


def to_json(model: str, device: str, requests: Sequence[Compared]) -> dict[str, Any]:
    """The demo's JSON document."""
    packages = ("sglang-marconi", "sgl-kernel-ext", "sglang", "torch", "transformers")
    return {
        "model": model,
        "device": device,
        "sum": Sum.of(requests).to_json(),
        "kinds": {kind: row.to_json() for kind, row in by_kind(requests).items()},
        "requests": [request.to_json() for request in requests],
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in packages},
        },
    }


def device_name() -> str:
    """The accelerator's own name, or `cpu`."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class _Steps(Progress):
    """A progress bar a step; a line a step where there is no terminal."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        super().__init__(*columns, console=console, disable=not console.is_terminal)

    def begin(self, description: str, total: int = 1) -> TaskID:
        """The next step."""
        if self.disable:
            self.console.print(description, highlight=False)
        return self.add_task(description, total=total)


def _build_model(family: tiny_model.Family, scratch: Path, steps: _Steps) -> str:
    task = steps.begin(f"build a small {family} model (some seconds)")
    path = scratch / f"tiny-{family}"
    tiny_model.write(family, path)
    steps.advance(task)
    return str(path)


def _require_hybrid(model_path: str) -> None:
    # Once the platform is chosen, which SGLang reads when it is imported.
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    try:
        config = ModelConfig(model_path)
    except Exception as error:
        # Whatever a configuration class or the hub raises: the model cannot be read.
        raise Refusal(f"model {model_path!r} cannot be read: {one_line(error)}") from error
    if not uses_ssm_state(config):
        raise Refusal(
            f"model {model_path!r} has no recurrent layers, so there is nothing to compare: "
            "give a hybrid model (Qwen3-Next, Nemotron-H, Falcon-H1, ...); it can still be served with the backend"
        )


def _run_against(
    backend: str,
    model_path: str,
    args: Sequence[str],
    size: Size,
    given: Mapping[str, str],
    scratch: Path,
    steps: _Steps,
) -> list[TimedAnswer]:
    # By seconds, a busy machine would make other states old.
    env = {"MARCONI_TIME": Time.REQUESTS.value} if backend == MARCONI else {}
    backend_args = ["--radix-cache-backend", BACKEND] if backend == MARCONI else []
    start = steps.begin(f"start the {backend} server ({_START})")
    with ServerProcess(model_path, [*args, *backend_args], log_path=scratch / f"{backend}.log", env=env) as server:
        steps.advance(start)
        work = steps.begin(f"ask it {program.NUM_REQUESTS} times ({_WORK})", total=program.NUM_REQUESTS)
        try:
            return program.run(server.url, lambda: steps.advance(work), size, given)
        except Exception as error:
            # Any client may fail in any way when a server goes down under it.
            raise ServerFailed(f"{backend} failed a request: {one_line(error)}{server.reason()}") from error
