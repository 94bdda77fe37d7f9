"""The options of `marconi demo`, checked before SGLang is loaded."""

from dataclasses import dataclass
from pathlib import Path

from marconi.engine.version import Refusal
from marconi.replay.result import require_writable
from marconi_cpu.tiny_model import Family


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line of the demo.

    `model_path` None builds the small model of `family`; `json_path` None writes no file; `num_context_chars` None is
    as many as about 1,000 tokens have; `server_args` go to both servers.
    """

    model_path: str | None
    family: Family
    json_path: Path | None
    num_context_chars: int | None
    max_new_tokens: int
    server_args: tuple[str, ...]

    def require_possible(self) -> None:
        """Raise `ValueError` for a model that is not there or a file that cannot be written."""
        require_writable(self.json_path)
        path = self.model_path
        if path is not None and path.startswith(("/", ".")) and not Path(path).exists():
            raise Refusal(f"--model-path must be a checkpoint folder or a hub name, got {path!r}, which does not exist")
