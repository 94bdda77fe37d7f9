"""All shapes, by name."""

from functools import partial

from . import chats, prefixes
from .program import Shape, Way
from .text import Thinking

SHAPES = (
    Shape(
        "reasoning-dropped",
        "chats that think, earlier thinking dropped by the template",
        partial(chats.chats, thinking=Thinking.IN_THE_LAST_TURN),
    ),
    Shape(
        "reasoning-dropped-api",
        "the same over /v1/chat/completions",
        partial(chats.chats, thinking=Thinking.IN_THE_LAST_TURN, way=Way.CHAT),
    ),
    Shape("reasoning-kept", "chats that think, all thinking kept", partial(chats.chats, thinking=Thinking.ALL)),
    Shape("chats", "chats that do not think", partial(chats.chats, thinking=Thinking.NONE)),
    Shape(
        "system-at-once",
        "groups under one system prompt, all prompts at once, twice",
        partial(prefixes.system_prompts, at_once=True),
    ),
    Shape(
        "system-spread",
        "groups under one system prompt, one prompt after the other",
        partial(prefixes.system_prompts, at_once=False),
    ),
)
BY_NAME = {shape.name: shape for shape in SHAPES}
