"""A model's tokenizer and chat template as transformers loads them: `AutoTokenizer` and its `apply_chat_template`.

Nothing of SGLang's is added: where a worker changes a tokenizer, or renders a chat in another way, its answers to the
router's probes differ, and it is asked. Code that a folder brings is not run; templates run in transformers' sandbox.
Nothing is truncated or padded. Other threads run while a long text is encoded.

transformers is imported when a tokenizer is loaded: it takes torch along where that is installed (2 s, 0.6 GB), and no
id needs that. `marconi router` keeps torch out of its process.
"""

import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer


class TextTokenizer:
    """The tokenizer of one model; one object for all threads."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self.hf = tokenizer
        self.pipeline: Tokenizer | None = None
        """The fast tokenizer's own; None for one that is written in Python."""
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            pipeline = self.pipeline = tokenizer.backend_tokenizer
            pipeline.no_truncation()
            pipeline.no_padding()
        self.adds_special = len(self.encode("")) > 0
        """Whether it adds tokens around a text."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a folder; `ValueError`, one line, where there is none or it fails here."""
        if not folder.is_dir():
            raise ValueError(f"the tokenizer must be a model's folder, got {folder}")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            from transformers import AutoTokenizer

            return cls(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True))
        except Exception as error:  # A folder's files, and the code for them, may raise anything.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"{folder}: its tokenizer cannot be loaded here ({reason[0]})") from None

    @property
    def added_texts(self) -> list[str]:
        """Texts that are one token wherever they stand."""
        return sorted(getattr(self.hf, "get_added_vocab", dict)())

    def encode(self, text: str, *, adds_special: bool = True) -> "array[int]":
        """Encode a text, with the tokens that the tokenizer adds around it or, for a rendered chat, without."""
        if self.pipeline is None:
            return array("q", self.hf.encode(text, add_special_tokens=adds_special))
        # Unlike `encode`, it lets other threads run, and changes no state that they share.
        (encoding,) = self.pipeline.encode_batch_fast([text], add_special_tokens=adds_special)
        return array("q", encoding.ids)

    def template(self, name: str | None = None) -> str | None:
        """The chat template of this name, or the one that transformers chooses; None where there is none."""
        found = getattr(self.hf, "chat_template", None)
        if isinstance(found, dict):
            if name is not None and name not in found:
                raise ValueError(f"--hf-chat-template-name must be one of {', '.join(sorted(found))}, got {name!r}")
            found = found.get("default" if name is None else name)
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template: str,
        variables: Mapping[str, Any],
        *,
        is_answered: bool = False,
    ) -> str:
        """Render a chat up to where the answer begins, or to its end; any error where its template refuses it."""
        text: str = self.hf.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=not is_answered,
            **variables,
        )
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template: str,
        variables: Mapping[str, Any],
    ) -> "array[int]":
        """Encode a chat up to where the answer begins; any error where its template refuses it."""
        return self.encode(self.render(messages, tools, template, variables), adds_special=False)
