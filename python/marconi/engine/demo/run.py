"""The order of the demo: a model, the work against stock, the same work against this project, the comparison.

Each server runs alone, so neither is measured beside the other. Whatever ends the demo, an interrupt included,
the server that runs at that moment is stopped before the demo returns.
"""

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from marconi.engine import tiny_model
from marconi.engine.demo import program
from marconi.engine.demo.comparison import BACKENDS, MARCONI, Compared, compare, table_of
from marconi.engine.demo.endpoint import Answer
from marconi.engine.demo.options import DemoOptions
from marconi.engine.demo.server_args import require_readable
from marconi.engine.flags import BACKEND
from marconi.engine.server_process import ServerFailed, ServerProcess, environment, scratch_folder
from marconi.engine.version import Refusal, one_line

_SERVER_ARGS = ("--enable-cache-report", "--random-seed", "0", "--log-level", "info")


def run(options: DemoOptions, console: Console) -> bool:
    """Run the demo and print its table; returns whether every answer was the same under both backends.

    Raises `Refusal` for a model that the demo has nothing to show on and for arguments that no server takes,
    `ServerFailed` for a server that ended.
    """
    # Our own requests, too, go to the loopback device.
    os.environ.update(environment())
    require_readable(options.server_args)
    with scratch_folder() as scratch, _progress(console) as progress:
        model_path = options.model_path or _build_model(options.family, scratch, progress)
        _require_hybrid(model_path)
        runs = {name: _run_against(name, model_path, options, scratch, progress) for name in BACKENDS}
    requests = compare(runs)
    device = device_name()
    name = options.model_path or f"tiny-{options.family}"
    console.print(table_of(requests, f"{name} on {device}"))
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(to_json(name, device, requests), indent=2) + "\n", encoding="utf-8")
        console.print(f"written to {options.json_path}")
    return all(request.equal for request in requests)


def to_json(model: str, device: str, requests: Sequence[Compared]) -> dict[str, Any]:
    """The demo's JSON document."""
    packages = ("sglang-marconi", "sgl-kernel-ext", "sglang", "torch", "transformers")
    return {
        "model": model,
        "device": device,
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


def _progress(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def _build_model(family: tiny_model.Family, scratch: Path, progress: Progress) -> str:
    task = progress.add_task(f"build a small {family} model", total=1)
    path = scratch / f"tiny-{family}"
    tiny_model.write(family, path)
    progress.advance(task)
    return str(path)


def _require_hybrid(model_path: str) -> None:
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
    backend: str, model_path: str, options: DemoOptions, scratch: Path, progress: Progress
) -> list[Answer]:
    args = [*_SERVER_ARGS, *options.server_args]
    if backend == MARCONI:
        args += ["--radix-cache-backend", BACKEND]
    start = progress.add_task(f"start {backend}", total=1)
    with ServerProcess(model_path, args, log_path=scratch / f"{backend}.log") as server:
        progress.advance(start)
        work = progress.add_task(f"work against {backend}", total=program.NUM_REQUESTS)
        size = program.Size(options.num_context_chars, options.max_new_tokens)
        try:
            return program.run(server.url, lambda: progress.advance(work), size)
        except Exception as error:
            # Any client may fail in any way when a server goes down under it.
            raise ServerFailed(f"{backend} failed a request: {one_line(error)}{server.reason()}") from error
