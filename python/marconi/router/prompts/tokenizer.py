"""A worker's tokenizer: the one that transformers loads, mended as SGLang mends it; without torch.

    tekken.json without a tokenizer.json             mistral-common
    any other folder                                 AutoTokenizer
    where that is the generic class                  the class that tokenizer_config.json names
    a class that replaced the file's pre-tokenizer   the file's, where it is of another kind
    Llama, Gemma, Cohere                             `add_bos_token` as the configuration has it

Code that a folder brings is not run. Nothing is truncated or padded. Other threads run while a long text is encoded.

Source: `srt/utils/hf_transformers/tokenizer.py:get_tokenizer`.
"""

import contextlib
import json
import os
import sys
from array import array
from pathlib import Path
from typing import Any, Final, Self

from marconi.router.prompts.base import Unknowable

_ABSTRACT: Final = ("PreTrainedTokenizer", "PreTrainedTokenizerBase")
_MAY_BEGIN: Final = (
    *("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"),
    *("GemmaTokenizer", "GemmaTokenizerFast", "CohereTokenizerFast"),
)
"""Classes whose configuration says whether a text begins with a token of its own."""


def leave_out_torch() -> None:
    """Keep torch out of this process, which makes no model: transformers would load it (0.8 GB) and use none of it."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class TextTokenizer:
    """One model's; one object for all threads."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self.hf = tokenizer
        self._pipeline = None
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            pipeline = self._pipeline = tokenizer.backend_tokenizer
            pipeline.no_truncation()
            pipeline.no_padding()
            pipeline.encode_special_tokens = bool(tokenizer.split_special_tokens)
        self.adds_special = len(self.encode("")) > 0
        """It puts tokens around a text."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The tokenizer that a worker makes of a folder; `ValueError` with one line where it cannot be made here."""
        if not folder.is_dir():
            raise ValueError(f"{folder}: must be a model's folder")
        try:
            return cls(_mended(_loaded(folder), folder))
        except Exception as error:  # Whatever a folder's files and the code for them bring about.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"{folder}: its tokenizer cannot be loaded here ({reason[0]})") from None

    @property
    def added_texts(self) -> list[str]:
        """Texts that are one token wherever they stand."""
        return sorted(getattr(self.hf, "get_added_vocab", dict)())

    def encode(self, text: str, *, adds_special: bool = True) -> "array[int]":
        """A text's ids, with what the tokenizer puts around a text or, for a rendered chat, without."""
        try:
            if self._pipeline is None:
                return array("q", self.hf.encode(text, add_special_tokens=adds_special))
            # Unlike `encode`, it lets other threads run, and changes no state that they share.
            (encoding,) = self._pipeline.encode_batch_fast([text], add_special_tokens=adds_special)
            return array("q", encoding.ids)
        except (UnicodeError, TypeError):
            raise Unknowable("a text with half of a surrogate pair") from None

    def encode_continuation(self, text: str) -> "array[int]":
        """The ids of an answer's beginning, which follows a chat."""
        ids = self.encode(text)
        if ids and ids[0] == self.hf.bos_token_id:
            del ids[0]
        return ids


def _loaded(folder: Path) -> Any:
    import transformers

    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        from transformers.tokenization_mistral_common import MistralCommonTokenizer

        return MistralCommonTokenizer.from_pretrained(str(folder))
    options = {"trust_remote_code": False, "clean_up_tokenization_spaces": False}
    found = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
    name = _configuration(folder).get("tokenizer_class")
    if type(found).__name__ == "TokenizersBackend" and name not in (None, "", *_ABSTRACT):
        declared = getattr(transformers, name, None)
        # Where that fails a worker has the generic class, too.
        with contextlib.suppress(OSError, ValueError, TypeError, ImportError):
            found = found if declared is None else declared.from_pretrained(str(folder), **options)
    return found


def _mended(tokenizer: Any, folder: Path) -> Any:
    from tokenizers import Tokenizer

    pipeline = getattr(tokenizer, "_tokenizer", None)
    if pipeline is not None and (folder / "tokenizer.json").is_file():
        own = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
        if own and pipeline.pre_tokenizer and type(own) is not type(pipeline.pre_tokenizer):
            pipeline.pre_tokenizer = own
    configuration = _configuration(folder)
    if configuration.get("tokenizer_class") in _MAY_BEGIN:
        begins = configuration.get("add_bos_token")
        wanted = {"add_bos_token": True if begins is None else begins, "add_eos_token": False}
        unlike = {name: value for name, value in wanted.items() if getattr(tokenizer, name, None) != value}
        for name, value in unlike.items():
            setattr(tokenizer, f"_{name}", value)
        if unlike and hasattr(tokenizer, "update_post_processor"):
            tokenizer.update_post_processor()
    return tokenizer


def _configuration(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
