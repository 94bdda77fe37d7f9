"""Small folders of Llama's, Gemma's and Mistral's kind: pieces of words with bytes to fall back on, and tekken."""

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from .families import CORPUS
from .templates import BRACKETS, HEADERS, TURNS

_BYTES: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True)
class PiecesFolder:
    """What a folder is written from, as SentencePiece's models were converted."""

    name: str
    template: str
    tokenizer_class: str
    model_type: str
    special: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    prepends: bool = False
    """The file puts a space before a text."""

    @property
    def model_config(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return {"architectures": ["Tiny"], "model_type": self.model_type}

    def write(self, folder: Path) -> Path:
        """Write it, and give it back."""
        folder.mkdir(parents=True)
        self._tokenizer().save(str(folder / "tokenizer.json"))
        said = {"tokenizer_class": self.tokenizer_class, "chat_template": self.template, **self.config}
        (folder / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(self.model_config), encoding="utf-8")
        return folder

    def _tokenizer(self) -> Tokenizer:
        learned = Tokenizer(models.BPE())
        learned.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
        learned.train_from_iterator(CORPUS * 4, trainer)
        model = json.loads(learned.to_str())["model"]
        pieces = (*self.special, *_BYTES, *sorted(model["vocab"], key=model["vocab"].get))
        tokenizer = Tokenizer(
            models.BPE(
                vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))},
                merges=[tuple(merge) for merge in model["merges"]],
                unk_token="<unk>",  # noqa: S106
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if self.prepends else spaces
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self.special])
        first = self.config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first} $B",
            special_tokens=[(first, tokenizer.token_to_id(first))],
        )
        return tokenizer


@dataclass(frozen=True, slots=True)
class TekkenFolder:
    """A folder with tekken.json alone: mistral-common tokenizes, and writes chats without a template."""

    name: str

    @property
    def model_config(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}

    def write(self, folder: Path) -> Path:
        """Write it, and give it back."""
        folder.mkdir(parents=True)
        pieces = [bytes([byte]) for byte in range(256)]
        pieces += [text.encode() for text in (" the", "qu", "ick", " fox", "größe", "中", "文", "中文", " jump", "12")]
        told = {
            "config": {
                "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
                "num_vocab_tokens": len(pieces),
                "default_vocab_size": len(pieces) + 100,
                "default_num_special_tokens": 100,
                "version": "v3",
            },
            "vocab": [
                {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
                for rank, piece in enumerate(pieces)
            ],
        }
        (folder / "tekken.json").write_text(json.dumps(told), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(self.model_config), encoding="utf-8")
        return folder


_LLAMA: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GEMMA: Final = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
PIECES: Final = (
    PiecesFolder(
        "llama", HEADERS, "LlamaTokenizer", "llama", ("<unk>", "<s>", "</s>", "<|header|>", "<|/header|>"), _LLAMA
    ),
    PiecesFolder(
        "llama, old",
        BRACKETS,
        "LlamaTokenizerFast",
        "llama",
        ("<unk>", "<s>", "</s>"),
        {**_LLAMA, "add_bos_token": False, "legacy": True},
        prepends=True,
    ),
    PiecesFolder(
        "mistral", BRACKETS, "LlamaTokenizerFast", "mistral", ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), _LLAMA
    ),
    PiecesFolder(
        "gemma",
        TURNS,
        "GemmaTokenizer",
        "gemma2",
        ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
        {**_GEMMA, "add_bos_token": True},
    ),
    TekkenFolder("tekken"),
)
