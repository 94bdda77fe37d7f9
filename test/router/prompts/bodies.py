"""Random bodies: what clients send, and what none should."""

import json
from typing import Any, Final

from hypothesis import strategies as st

_PIECES: Final = (
    *("", " ", "\r\n\t", "a", "The quick brown", " couldn't", "12345", "<think>", "<|im_end|> ", "<|eot|>", "</s>"),
    *("größe", "e\u0301", "\u1e9b\u0323", "中文", "한국어", "עברית \u200f", "\U0001f469\u200d\U0001f469", "\u0000"),
    *("\ufeff", "{{ messages }}", "&<>'\""),
)
_TEXTS: Final = st.lists(st.sampled_from(_PIECES), max_size=5).map("".join) | st.text(max_size=9)
_WORDS: Final = _TEXTS.filter(bool)
_PARTS: Final = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _TEXTS}), max_size=3)
_CONTENT: Final = _TEXTS | _TEXTS | _PARTS
_FUNCTION: Final = st.fixed_dictionaries(
    {"name": st.just("f")}, optional={"description": st.none() | _TEXTS, "parameters": st.just({"type": "object"})}
)
_TOOLS: Final = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": _FUNCTION}), max_size=2)
_CALL: Final = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_SYSTEM: Final = st.fixed_dictionaries(
    {"role": st.sampled_from(("system", "developer", "System")), "content": _CONTENT}
)
_USER: Final = st.fixed_dictionaries({"role": st.just("user"), "content": _CONTENT}, optional={"name": _TEXTS})
_ASSISTANT: Final = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | _CONTENT},
    optional={"reasoning_content": _TEXTS, "tool_calls": st.none() | st.just([_CALL])},
)
_RESULT: Final = st.fixed_dictionaries({"role": st.just("tool"), "content": _CONTENT, "tool_call_id": st.just("1")})
_PLAIN: Final = st.lists(_CONTENT, min_size=1, max_size=5).map(
    lambda contents: [
        {"role": ("assistant", "user")[(len(contents) - index) % 2], "content": content}
        for index, content in enumerate(contents)
    ]
)
_MIXED: Final = st.lists(_USER | _USER | _ASSISTANT | _RESULT, min_size=1, max_size=4)
_SPACE: Final = {
    "extra_key": st.sampled_from((None, "", "k")),
    "cache_salt": st.sampled_from((None, "", "s")),
    "lora_path": st.sampled_from((None, "ada")),
}
_NAMED: Final = {**_SPACE, "model": st.sampled_from(("served", "served:ada", "other"))}
CHATS: Final = st.fixed_dictionaries(
    {
        "messages": st.tuples(st.lists(_SYSTEM, max_size=1), _PLAIN | _PLAIN | _MIXED).map(
            lambda both: both[0] + both[1]
        )
    },
    optional=_NAMED,
).flatmap(
    lambda plain: (
        st.fixed_dictionaries(
            {name: st.just(value) for name, value in plain.items()},
            optional={
                "chat_template_kwargs": st.dictionaries(st.sampled_from(("enable_thinking", "x")), st.booleans())
            },
        )
        | st.fixed_dictionaries(
            {name: st.just(value) for name, value in plain.items()},
            optional={
                "tools": st.none() | _TOOLS,
                "tool_choice": st.sampled_from((None, "auto", "none", "required")),
                "reasoning_effort": st.sampled_from((None, "none", "high")),
                "continue_final_message": st.booleans(),
            },
        )
    )
)
_VALUES: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from((0, (1 << 64) - 1, 1 << 64, -(1 << 63) - 1))
    | st.floats(allow_nan=False)
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=2),
    max_leaves=4,
)
_ARGUMENTS: Final = st.tuples(
    st.dictionaries(_TEXTS, _VALUES, max_size=3), st.booleans(), st.sampled_from(((", ", ": "), (",", ":")))
).map(lambda drawn: json.dumps(drawn[0], ensure_ascii=drawn[1], separators=drawn[2]))
_SCHEMAS: Final = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={
        "properties": st.dictionaries(
            _TEXTS | st.just("type"),
            st.fixed_dictionaries(
                {"type": st.sampled_from(("string", "integer", ["array", "null"], "varchar", ["string", "string"]))},
                optional={"description": _TEXTS, "default": _VALUES, "enum": st.lists(_TEXTS, max_size=2)},
            ),
            max_size=2,
        ),
        "required": st.lists(st.just("x"), max_size=1),
    },
)


def _in_any_order(fields: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return fields.flatmap(lambda drawn: st.permutations(list(drawn.items())).map(dict))


_USUAL_TOOLS: Final = st.lists(
    _in_any_order(
        st.fixed_dictionaries(
            {
                "type": st.just("function"),
                "function": _in_any_order(
                    st.fixed_dictionaries(
                        {"name": st.sampled_from(("f", "look_up")), "description": _TEXTS, "parameters": _SCHEMAS},
                        optional={"strict": st.booleans()},
                    )
                ),
            },
        )
    ),
    min_size=1,
    max_size=2,
)


@st.composite
def _round(draw: st.DrawFn) -> list[dict[str, Any]]:
    """An assistant's calls, and their results in any order."""
    calls = [
        draw(
            _in_any_order(
                st.fixed_dictionaries(
                    {
                        "id": st.just(name),
                        "type": st.just("function"),
                        "function": _in_any_order(
                            st.fixed_dictionaries({"name": st.just("f"), "arguments": _ARGUMENTS})
                        ),
                    },
                    optional={"index": st.none() | st.integers(0, 3)},
                )
            )
        )
        for name in ("1", "2")[: draw(st.integers(1, 2))]
    ]
    said = {"role": "assistant", "content": draw(st.none() | _TEXTS), "tool_calls": calls}
    results = [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": draw(_TEXTS),
            **draw(st.sampled_from(({}, {"name": "f"}))),
        }
        for call in draw(st.permutations(calls))
    ]
    return [draw(_in_any_order(st.just(message))) for message in (said, *results)]


AGENTS: Final = st.fixed_dictionaries(
    {
        "messages": st.tuples(
            st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": _WORDS}), max_size=1),
            st.fixed_dictionaries({"role": st.just("user"), "content": _WORDS}),
            st.lists(_round(), max_size=2),
        ).map(lambda drawn: [*drawn[0], drawn[1], *(message for each in drawn[2] for message in each)])
    },
    optional={"tools": _USUAL_TOOLS, "tool_choice": st.sampled_from((None, "auto")), **_NAMED},
)
"""Chats with tools, calls and their results."""
_MARK: Final = {"cache_control": st.just({"type": "ephemeral"})}
_BLOCK: Final = st.fixed_dictionaries({"type": st.just("text"), "text": _TEXTS}, optional=_MARK)
_BLOCKS: Final = _TEXTS | st.lists(_BLOCK, max_size=3)
_USE: Final = st.fixed_dictionaries(
    {
        "type": st.just("tool_use"),
        "id": st.sampled_from(("1", "2")),
        "name": st.just("f"),
        "input": st.dictionaries(_TEXTS, _VALUES, max_size=2),
    }
)
_USED: Final = st.fixed_dictionaries(
    {"type": st.just("tool_result"), "tool_use_id": st.sampled_from(("1", "2"))},
    optional={"content": _BLOCKS, "is_error": st.booleans(), **_MARK},
)
_TURN: Final = st.tuples(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.lists(_BLOCK | _USE, max_size=3) | _BLOCKS}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(_USED | _BLOCK, max_size=3) | _BLOCKS}),
)
MESSAGES: Final = st.fixed_dictionaries(
    {
        "model": st.sampled_from(("served", "served:ada", "other")),
        "max_tokens": st.just(4),
        "messages": st.tuples(_BLOCKS, st.lists(_TURN, max_size=2)).map(
            lambda drawn: [{"role": "user", "content": drawn[0]}, *(each for turn in drawn[1] for each in turn)]
        ),
    },
    optional={
        "system": _BLOCKS,
        "tools": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(("f", "look_up")), "input_schema": _SCHEMAS},
                optional={"description": _TEXTS, "type": st.just("custom"), **_MARK},
            ),
            max_size=2,
        ),
        "tool_choice": st.sampled_from(({"type": "auto"}, {"type": "any"}, {"type": "none"})),
        "thinking": st.sampled_from(({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024})),
        "metadata": st.just({"user_id": "a"}),
        "stream": st.booleans(),
        "cache_salt": st.just("s"),
    },
)
"""Anthropic's chats; a worker drops the salt."""
_IDS: Final = st.lists(st.integers(0, 400), min_size=1, max_size=5)
COMPLETIONS: Final = st.fixed_dictionaries(
    {"prompt": _WORDS | st.lists(_WORDS, min_size=1, max_size=3) | _IDS | st.lists(_IDS, min_size=1, max_size=3)},
    optional=_NAMED,
)
GENERATIONS: Final = st.fixed_dictionaries(
    {"text": _TEXTS | st.lists(_TEXTS, min_size=1, max_size=3)}, optional=_SPACE
) | st.fixed_dictionaries({"input_ids": _IDS | st.lists(_IDS, min_size=1, max_size=3)}, optional=_SPACE)


@st.composite
def twisted(draw: st.DrawFn, bodies: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """A body of which one value, anywhere, is another one or gone."""
    body: dict[str, Any] = json.loads(json.dumps(draw(bodies)))
    places: list[tuple[Any, Any]] = []
    _walk(body, places)
    holder, key = draw(st.sampled_from(places))
    if draw(st.booleans()) and isinstance(holder, dict):
        del holder[key]
    else:
        odd = (None, True, 0, -1, 1.5, "", "1", "on", [], {}, [1, "a"], [[]], {"type": "image_url"}, 1 << 65)
        holder[key] = draw(st.sampled_from(odd) | _TEXTS)
    return body


def _walk(value: Any, places: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        places.append((value, key))
        _walk(inner, places)
