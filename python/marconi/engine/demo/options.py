"""What `marconi demo` was asked for, and whether it can be done at all: known before SGLang is loaded."""

from dataclasses import dataclass
from pathlib import Path

from marconi.engine.model_files import require_loadable
from marconi.engine.tiny_model import Family
from marconi.engine.version import Refusal


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
        """Raise `Refusal` for a model that cannot be loaded or a file that cannot be written."""
        if self.json_path is not None:
            if not self.json_path.parent.is_dir():
                raise Refusal(f"--json {self.json_path}: the folder {self.json_path.parent} does not exist")
            if self.json_path.is_dir():
                raise Refusal(f"--json {self.json_path} is a folder: give a file")
        if self.model_path is not None:
            require_loadable(self.model_path)
