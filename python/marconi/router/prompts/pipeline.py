"""How a worker's tokenizer class reads `tokenizer.json`.

transformers 5 takes the file as it is for its general classes. Classes of model families take only the vocabulary, the
merges and the post-processor from it and build normalizer and pre-tokenizer anew, whatever the file says; so the ids
are those of the class, not those of the file:

    PreTrainedTokenizerFast, TokenizersBackend    the file
    Qwen2Tokenizer, Qwen3_5Tokenizer              BPE, NFC, the family's pattern, byte level
    GPT2Tokenizer                                 BPE, byte level with GPT-2's pattern

Which class it is: the one that `tokenizer_config.json` names, but for the model types whose published files name a
wrong one. Others than these are refused: their ids would be a guess.

Sources: transformers 5.19 `models/auto/tokenization_auto.py`, `models/{qwen2,qwen3_5,gpt2}/tokenization_*.py`,
`tokenization_utils_tokenizers.py:convert_to_native_format`; `srt/utils/hf_transformers/tokenizer.py`.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from marconi.router.prompts.files import ModelFolder

_LETTERS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS_AND_MARKS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END: Final = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a class puts in place of the file's."""

    pattern: str | None
    """Of its words; None for GPT-2's own."""
    is_composed: bool
    """Unicode's normal form C comes first."""
    names: dict[str, str] = field(default_factory=dict)
    """Of special tokens that a configuration leaves out."""
    renews_special: bool = False
    """Special tokens lose flags of their own."""


_FAMILY_NAMES: Final = {"unk_token": _END, "eos_token": _END, "pad_token": _END}
_CLASSES: Final[dict[str, Rebuilt | None]] = {
    "PreTrainedTokenizerFast": None,
    "TokenizersBackend": None,
    "Qwen2Tokenizer": Rebuilt(_LETTERS, True, _FAMILY_NAMES, True),
    "Qwen3_5Tokenizer": Rebuilt(_LETTERS_AND_MARKS, True, _FAMILY_NAMES),
    "GPT2Tokenizer": Rebuilt(None, False, {"unk_token": _END, "bos_token": _END, "eos_token": _END}),
}
_CLASS_OF_MODEL: Final = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
    "qwen4_exp": "Qwen3_5Tokenizer",
}


def class_of(folder: ModelFolder) -> Rebuilt | None:
    """What the worker's class rebuilds; None for nothing. `ValueError` for a class that is not known here."""
    config, of_model = folder.json("tokenizer_config.json"), folder.json("config.json")
    remote = config.get("auto_map")
    if isinstance(remote, list) or (isinstance(remote, dict) and remote.get("AutoTokenizer")):
        raise ValueError(f"{folder.path}: its tokenizer is Python code of its own, which a router does not run")
    for key in ("fast_tokenizer_files", "fix_mistral_regex"):
        if config.get(key):
            raise ValueError(f"{folder.path}/tokenizer_config.json: {key}, which is not known here")
    if folder.has("tekken.json"):
        raise ValueError(f"{folder.path}: tekken.json, so a worker may tokenize by mistral-common")
    declared = config.get("tokenizer_class") or of_model.get("tokenizer_class")
    of_kind = _CLASS_OF_MODEL.get(str(of_model.get("model_type")))
    name = str(declared or of_kind)
    if name not in _CLASSES:
        name = name.removesuffix("Fast")
    if name not in _CLASSES:
        known = ", ".join(sorted(_CLASSES))
        raise ValueError(f"{folder.path}: tokenizer class {declared} is not known here; {known} are")
    return _CLASSES[of_kind or name]


def built(folder: ModelFolder, rebuilt: Rebuilt | None) -> Tokenizer:
    """The worker's pipeline, before tokens are added to it."""
    path = folder.path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare exceptions.
        raise ValueError(f"{path}: no tokenizer ({error})") from None
    return tokenizer if rebuilt is None else _rebuilt(folder, tokenizer, rebuilt)


def _rebuilt(folder: ModelFolder, read: Tokenizer, rebuilt: Rebuilt) -> Tokenizer:
    model: dict[str, Any] = json.loads(folder.text("tokenizer.json"))["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"{folder.path}/tokenizer.json: model {model.get('type')}; its tokenizer class has BPE")
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    config = folder.json("tokenizer_config.json")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    )
    tokenizer.decoder = decoders.ByteLevel()
    has_prefix = bool(config.get("add_prefix_space"))
    if rebuilt.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    if rebuilt.pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    else:
        words = pre_tokenizers.Split(Regex(rebuilt.pattern), behavior="isolated", invert=False)
        level = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    # SGLang takes the file's pre-tokenizer where it is of another kind than the class's.
    if read.pre_tokenizer is not None and type(read.pre_tokenizer) is not type(tokenizer.pre_tokenizer):
        tokenizer.pre_tokenizer = read.pre_tokenizer
    if read.post_processor is not None:
        tokenizer.post_processor = read.post_processor
    return tokenizer
