"""Small model folders, each with what makes tokenizers part: classes that rebuild, flags of tokens, a beginning."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from .templates import BRACKETS, HEADERS, MARKUP, THINKER

CORPUS: Final = (
    "The quick brown fox's dogs couldn't jump over 12345 lazy hens; they're here, it's 3.14 and I'll see you there.",
    "def look_up(what: str, count: int = 2) -> dict: return {'what': what, 'count': count}",
    '{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}',
    "größe naïve e\u0301te\u0301 中文中文字符 日本語日本語 한국어 العربية العربية עברית हिन्दी हिन्दी",
    "<think>\n\n</think>\n\nassistant user system tool_call tool_response\n\n  \t\n",
)
PATTERN: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class FamilyFolder:
    """What a folder is written from."""

    name: str
    template: str
    tokenizer_class: str
    model_type: str
    special: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    hf_config: dict[str, Any] = field(default_factory=dict)
    composes: bool = False
    begins: bool = False
    """The post-processor puts the first special token before a text."""
    has_template_file: bool = False
    lists_tokens: bool = False
    """`added_tokens_decoder` in tokenizer_config.json, with flags of its own."""

    def write(self, folder: Path) -> Path:
        """Write it, and give it back."""
        folder.mkdir(parents=True)
        tokenizer = self._tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        said = {"tokenizer_class": self.tokenizer_class, **self.config}
        if self.lists_tokens:
            said["added_tokens_decoder"] = {
                str(index): {
                    "content": token.content,
                    "lstrip": token.content.startswith("<|im_end"),
                    "rstrip": False,
                    "single_word": False,
                    "normalized": False,
                    "special": token.special,
                }
                for index, token in tokenizer.get_added_tokens_decoder().items()
            }
        if self.has_template_file:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        else:
            said["chat_template"] = self.template
        (folder / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(self.model_config), encoding="utf-8")
        return folder

    @property
    def model_config(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return {"architectures": ["Tiny"], "model_type": self.model_type, **self.hf_config}

    def _tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(ignore_merges=self.begins))
        if self.composes:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=sorted(alphabet), show_progress=False)
        tokenizer.train_from_iterator(CORPUS * 4, trainer)
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self.special])
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>")])
        if self.begins:
            first = self.special[0]
            around = processors.TemplateProcessing(
                single=f"{first} $A",
                pair=f"{first} $A {first} $B",
                special_tokens=[(first, tokenizer.token_to_id(first))],
            )
            tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
        else:
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer


_CHATML: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>")
FAMILIES: Final = (
    FamilyFolder(
        "composed",
        THINKER,
        "Qwen2Tokenizer",
        "qwen3_next",
        _CHATML,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_prefix_space": False, "add_bos_token": False},
        composes=True,
        lists_tokens=True,
    ),
    FamilyFolder(
        "marks",
        THINKER,
        "Qwen2Tokenizer",
        "qwen3_5",
        _CHATML,
        {"eos_token": "<|im_end|>", "extra_special_tokens": ["<|image|>", "<|new|>"], "image_token": "<|image|>"},
        composes=True,
        has_template_file=True,
    ),
    FamilyFolder(
        "headers",
        HEADERS,
        "PreTrainedTokenizerFast",
        "llama",
        ("<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"),
        {"bos_token": "<|begin|>", "eos_token": "<|eot|>"},
        begins=True,
        lists_tokens=True,
    ),
    FamilyFolder(
        "markup",
        MARKUP,
        "PreTrainedTokenizerFast",
        "nemotron_h",
        ("<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>"),
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}},
    ),
    FamilyFolder(
        "brackets",
        BRACKETS,
        "GPT2Tokenizer",
        "granitemoehybrid",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "additional_special_tokens": ["[TOOLS]"]},
    ),
)
