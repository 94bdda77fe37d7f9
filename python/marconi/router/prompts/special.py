"""Which tokens a worker adds to a pipeline, and what its templates call them.

    added_tokens_decoder of tokenizer_config.json, by id; without it, those of tokenizer.json and the older
    special_tokens_map.json and added_tokens.json
    then named tokens (bos, eos, unk, sep, pad, cls, mask, and any "..._token"), then the unnamed special ones

Each replaces the one of the same text in the pipeline with its flags; one that is new takes the next id.

Source: transformers 5.19 `tokenization_utils_base.py:_from_pretrained`, `tokenization_utils_tokenizers.py:__init__`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from marconi.router.prompts.files import ModelFolder

_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Token = str | AddedToken


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What a configuration says of tokens."""

    named: dict[str, Token]
    unnamed: tuple[Token, ...]
    listed: tuple[AddedToken, ...]
    """By id."""

    @property
    def texts(self) -> dict[str, str]:
        """By name, as templates see them."""
        return {name: _text(token) for name, token in self.named.items()}

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Bring a pipeline to the worker's."""
        held = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        held |= {token.content for token in self.listed}
        added: list[AddedToken] = list(self.listed)
        for token in (*self.named.values(), *self.unnamed):
            if _text(token) not in held:
                held.add(_text(token))
                added.append(AddedToken(token, special=True) if isinstance(token, str) else token)
        names = {_text(token) for token in self.named.values()}
        for token in added:
            if not token.special and token.content in names:
                token.special = True
        tokenizer.add_tokens(added)

    def renew(self, tokenizer: Tokenizer) -> None:
        """Add the special ones again, without flags of their own."""
        texts = dict.fromkeys(map(_text, (*self.named.values(), *self.unnamed)))
        tokenizer.add_tokens([AddedToken(text, special=True) for text in texts])


def special_tokens(folder: ModelFolder, defaults: Mapping[str, str]) -> SpecialTokens:
    """Those of a folder; `defaults` are names that its tokenizer class has where nothing else is said."""
    said = {**defaults, **folder.json("tokenizer_config.json")}
    if "additional_special_tokens" in said and not said.get("extra_special_tokens"):
        said["extra_special_tokens"] = said.pop("additional_special_tokens")
    if "added_tokens_decoder" in said:
        listed = {int(index): _added(token) for index, token in said.pop("added_tokens_decoder").items()}
    else:
        listed = _older(folder, said)
    by_text = {token.content: token for token in listed.values()}
    extra = said.pop("extra_special_tokens", None) or ()
    if isinstance(extra, Mapping):
        said.update(extra)
        others = tuple(extra)
        extra = ()
    else:
        others = ()
    others += tuple(name for name in said if name.endswith("_token") and name not in _NAMES and name not in others)
    named: dict[str, Token] = {}
    for name in (*_NAMES, *others):
        token = _given(said.get(name))
        if token is not None:
            named[name] = by_text.get(_text(token), token) if name in _NAMES else token
    unnamed = tuple(token for each in extra if (token := _given(each)) is not None)
    return SpecialTokens(named, unnamed, tuple(token for _, token in sorted(listed.items())))


def _older(folder: ModelFolder, said: dict[str, Any]) -> dict[int, AddedToken]:
    for name, value in folder.json("special_tokens_map.json").items():
        if name in ("extra_special_tokens", "additional_special_tokens"):
            raise ValueError(f"{folder.path}/special_tokens_map.json: {name} without added_tokens_decoder")
        said[name] = {**value, "special": True, "__type": "AddedToken"} if isinstance(value, dict) else value
    if folder.has("added_tokens.json"):
        raise ValueError(f"{folder.path}/added_tokens.json without added_tokens_decoder in tokenizer_config.json")
    listed: Iterable[dict[str, Any]] = folder.json("tokenizer.json").get("added_tokens") or ()
    return {int(token["id"]): _added({k: v for k, v in token.items() if k != "id"}) for token in listed}


def _added(value: Mapping[str, Any]) -> AddedToken:
    return AddedToken(**{name: part for name, part in value.items() if name != "__type"})


def _given(value: Any) -> Token | None:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value.get("__type") == "AddedToken":
        return _added(value)
    return None


def _text(token: Token) -> str:
    return token if isinstance(token, str) else token.content
