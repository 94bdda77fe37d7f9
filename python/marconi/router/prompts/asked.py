"""A request's body as it is dispatched: its prompt in block hashes, or what stands for one that nobody can know.

A prompt without known tokens (images, `input_embeds`, a body that its worker will refuse) is placed by how it begins
and weighed by its length; it has a hit nowhere.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from marconi.events.hashes import HashSpace
from marconi.router.dispatch.base import Prompt
from marconi.router.dispatch.hashing import prompt_of
from marconi.router.index.base import Chain
from marconi.router.prompts.base import Reading, Unreadable

QUICK_BYTES: Final = 16 << 10
"""A body up to which handing it to a thread would take longer than reading it."""
_CHARACTERS_PER_TOKEN: Final = 4
_KEY_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is dispatched."""

    prompt: Prompt
    is_known: bool
    """Whether the prompt's tokens are; else its length is a guess."""
    is_stream: bool


def known(reading: Reading, space: HashSpace, block_tokens: int, key: bytes | None = None) -> Asked:
    """Of a reading with ids; `key` is of its session, if there is one. `Unreadable` for a prompt without tokens."""
    assert reading.ids is not None
    if not len(reading.ids):
        raise Unreadable("the prompt has no tokens; at least 1 is right")
    return Asked(prompt_of(reading.ids, space, block_tokens, key), True, reading.is_stream)


def unknown(content: bytes, namespace: bytes, is_stream: bool, key: bytes | None = None) -> Asked:
    """Of what a body says, where that is all that is known."""
    if key is None:
        key = blake2b(namespace + content[:_KEY_BYTES], digest_size=16).digest()
    return Asked(Prompt(Chain(namespace, ()), max(len(content) // _CHARACTERS_PER_TOKEN, 1), key), False, is_stream)
