"""All shapes, by name."""

from functools import partial

from . import chats, mixed, prefixes
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
        "the same over /v1/chat/completions, one request after the other",
        partial(chats.chats, thinking=Thinking.IN_THE_LAST_TURN, num_chats=2, way=Way.CHAT),
    ),
    Shape("reasoning-kept", "chats that think, all thinking kept", partial(chats.chats, thinking=Thinking.ALL)),
    Shape("chats", "chats that do not think", partial(chats.chats, thinking=Thinking.NONE)),
    Shape("agents", "agents whose tools' results come within a turn, earlier thinking dropped", chats.agents),
    Shape("agents-forgetting", "agents whose prompts leave out old observations", chats.forgetful_agents),
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
    Shape("documents", "documents asked several times, in another order each round", prefixes.documents),
    Shape(
        "documents-in-turn",
        "documents asked several times, in the same order each round",
        partial(prefixes.documents, in_turn=True),
    ),
    Shape("retrieved", "two of a few documents a prompt, either first", prefixes.retrieved),
    Shape("few-shot", "the same examples but for the last", prefixes.few_shot),
    Shape("samples", "several answers to a prompt (n > 1), and to what follows the first", prefixes.samples),
    Shape("forks", "SGLang's frontend: s.fork without s.sync()", partial(prefixes.forks, syncs=False)),
    Shape("forks-synced", "SGLang's frontend: s.fork after s.sync()", partial(prefixes.forks, syncs=True)),
    Shape("retries", "the same prompt again, and twice at once", prefixes.retries),
    Shape("retries-late", "all prompts, then all of them again", prefixes.late_retries),
    Shape("extensions", "prompts that come again with a little more at their end", prefixes.extensions),
    Shape("random", "prompts that share nothing", prefixes.unrelated),
    Shape("mixed", "seven of these at the same time, a wave of each in turn", mixed.mixed),
)
BY_NAME = {shape.name: shape for shape in SHAPES}
