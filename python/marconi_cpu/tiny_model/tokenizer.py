"""A tokenizer with one token a byte: token `NUM_SPECIAL + b` is byte b, so every text has one tokenization.

There are no merges. The tokens of two texts put together are the tokens of the texts put together, which makes a
chat's rendering a prefix of its continuation in tokens because it is one in characters.
"""

from collections.abc import Sequence
from typing import Any, Final

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS: Final = (PAD, BOS, EOS, TURN_START, TURN_END)
NUM_SPECIAL: Final = len(SPECIAL_TOKENS)
VOCAB_SIZE: Final = NUM_SPECIAL + 256

# Printable ASCII without the space: what no client trims and no decoder replaces.
GENERATED_IDS: Final = range(NUM_SPECIAL + ord("!"), NUM_SPECIAL + ord("~") + 1)

# ChatML. A message is rendered as it stands and by itself: nothing is trimmed, and no message changes another's text.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    f"{TURN_START}{{{{ message['role'] }}}}\n{{{{ message['content'] or '' }}}}{TURN_END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN_START}assistant\n{{% endif %}}"
)


def token_ids() -> dict[str, int]:
    """The ids of the special tokens that a model's configuration names."""
    return {
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
    }


def tokenizer_config(max_length: int, chat_template: str = CHAT_TEMPLATE) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }


def tokenizer_json(more_special: Sequence[str] = ()) -> str:
    """The contents of `tokenizer.json`, where the tokens `more_special` have the ids behind those of the bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    characters = _byte_characters()
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters, *more_special))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (*SPECIAL_TOKENS, *more_special)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    text: str = tokenizer.to_str(pretty=True)
    return text + "\n"


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself if it shows, else one from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    codes = {byte: byte for byte in shown} | {byte: 256 + index for index, byte in enumerate(hidden)}
    return [chr(codes[byte]) for byte in range(256)]
