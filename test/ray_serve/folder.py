"""As much of a model's folder as a router reads."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models

PROFILE = "qwen3-next-80b-a3b"


def write(folder: Path) -> Path:
    """A tokenizer that knows no word."""
    Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))  # noqa: S106
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
