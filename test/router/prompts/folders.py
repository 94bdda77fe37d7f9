"""Small model folders: of Qwen's kind, of Llama's, and one that SGLang loads otherwise than transformers does."""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

_CORPUS: Final = (
    "The quick brown fox's dogs couldn't jump over 12345 lazy hens; they're here, it's 3.14 and I'll see you there.",
    '{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}',
    "größe naïve e\u0301te\u0301 中文中文字符 日本語日本語 한국어 العربية עברית हिन्दी",
)
_PATTERN: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Parts or text, tools and calls as JSON, thinking switched off.
_THINKER: Final = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}"""

# Its own beginning of text, no parts, no thinking, strict turns after the system message.
_HEADERS: Final = """\
{{- bos_token }}{{ date_string }}
{%- for message in messages %}
    {%- if message.role == messages[loop.index0 - 1].role and not loop.first %}{{ raise_exception('turns') }}{% endif %}
<|header|>{{ message['role'] }}<|/header|>{{ message['content'] | trim }}<|eot|>
{%- endfor %}<|header|>assistant<|/header|>"""

_SPECIAL: Final = {
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama": ("<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"),
    "pieces": ("<unk>", "<s>", "</s>", "<|header|>", "<|/header|>"),
}
_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "qwen": {"tokenizer_class": "Qwen2Tokenizer", "chat_template": _THINKER, "eos_token": "<|im_end|>"},
    "llama": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _HEADERS, "bos_token": "<|begin|>"},
    # SGLang loads the class that is named; transformers, for this type of model, the file as it is.
    "pieces": {"tokenizer_class": "LlamaTokenizerFast", "chat_template": _HEADERS, "bos_token": "<s>"},
}
_MODEL_TYPES: Final = {"qwen": "qwen3_next", "llama": "llama", "pieces": "mistral"}
NAMES: Final = tuple(_CONFIGS)


def write(name: str, folder: Path) -> Path:
    """Write the folder of this name, and give it back."""
    folder.mkdir(parents=True)
    _tokenizer(name).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIGS[name]), encoding="utf-8")
    config = {"architectures": ["Tiny"], "model_type": _MODEL_TYPES[name]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _tokenizer(name: str) -> Tokenizer:
    if name == "pieces":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))  # noqa: S106
        tokenizer.pre_tokenizer, alphabet = pre_tokenizers.Metaspace(), []
    else:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL[name]]
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    if name == "qwen":
        tokenizer.normalizer = normalizers.NFC()
        return tokenizer
    if name == "pieces":
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Replace(" ", "▁"), None
    first = _CONFIGS[name]["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A",
        pair=f"{first} $A {first} $B",
        special_tokens=[(first, tokenizer.token_to_id(first))],
    )
    return tokenizer
