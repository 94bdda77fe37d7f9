"""Random bodies: what clients send, and what none should."""

import json
from typing import Any, Final

from hypothesis import strategies as st

_PIECES: Final = (
    *(
        "",
        " ",
        "\n",
        "\r\n\t",
        "a",
        "The quick brown",
        " couldn't",
        "12345",
        "It's 3.14!",
        "</think>",
        "<think>",
        "\\n",
    ),
    *(
        "<|im_start|>",
        "<|im_end|>",
        " <|im_end|> ",
        "<|eot|>",
        "<|begin|>",
        "<s>",
        "</s>",
        "[INST]",
        "[TOOLS]",
        "<|new|>",
    ),
    *("größe", "e\u0301", "\u1e9b\u0323", "中文", "日本語", "한국어", "العربية", "עברית", "हिन्दी", "ไทย"),
    *("\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308", "\u200f", "\u00a0", "\u2028"),
    *(
        "\u0000",
        "\u0007",
        "\ufeff",
        "\ufb01",
        "½",
        "\U0001d518",
        "\ud7ff",
        "\uffff",
        "{{ messages }}",
        "{% raw %}",
        "&<>'\"",
    ),
)
TEXTS: Final = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join) | st.text(max_size=12)
_VALUES: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 65), 1 << 65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
_NAMES: Final = st.sampled_from(("look_up", "größe", "f"))


def _record(required: dict[str, st.SearchStrategy[Any]], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object whose keys come in any order."""
    objects = st.fixed_dictionaries(required, optional=optional)
    return objects.flatmap(lambda found: st.permutations(list(found.items())).map(dict))


_SCHEMAS: Final = st.recursive(
    _record(
        {}, type=st.sampled_from(("string", "integer", "boolean")), description=TEXTS, enum=st.lists(TEXTS, max_size=2)
    ),
    lambda inner: _record({"type": st.just("object")}, properties=st.dictionaries(_NAMES, inner, max_size=2)),
    max_leaves=3,
)
_FUNCTIONS: Final = _record(
    {"name": _NAMES},
    description=st.none() | TEXTS,
    parameters=st.none() | _SCHEMAS,
    strict=st.none() | st.booleans(),
    defer_loading=st.none() | st.booleans(),
    another=TEXTS,
)
TOOLS: Final = st.lists(
    _record({"function": _FUNCTIONS}, type=st.just("function"), defer_loading=st.none() | st.booleans()), max_size=2
)
_ARGUMENTS: Final = st.dictionaries(_NAMES, _VALUES, max_size=3)
_CALLS: Final = _record(
    {"function": _record({"name": _NAMES}, arguments=_ARGUMENTS | _ARGUMENTS.map(json.dumps))},
    id=st.none() | TEXTS,
    index=st.none() | st.integers(0, 2),
    type=st.just("function"),
)
_PARTS: Final = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
_CONTENT: Final = TEXTS | _PARTS
_THOUGHTS: Final = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(("thinking", "reasoning")), "thinking": TEXTS})
    | st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}),
    max_size=3,
)
_SYSTEM: Final = _record({"role": st.sampled_from(("system", "developer", "System")), "content": _CONTENT}, name=TEXTS)
_USER: Final = _record({"role": st.just("user"), "content": _CONTENT}, name=TEXTS)
_ASSISTANT: Final = _record(
    {"role": st.just("assistant")},
    content=st.none() | _CONTENT | _THOUGHTS,
    tool_calls=st.none() | st.lists(_CALLS, max_size=2),
    reasoning_content=st.none() | TEXTS,
    refusal=st.none(),
)
_RESULT: Final = _record({"role": st.sampled_from(("tool", "function")), "content": _CONTENT}, tool_call_id=TEXTS)
_MESSAGES: Final = st.builds(
    lambda head, tail: [*head, *tail],
    st.lists(_SYSTEM, max_size=1),
    st.lists(_USER | _USER | _ASSISTANT | _RESULT, min_size=1, max_size=5),
)
SPACE: Final = {
    "extra_key": st.none() | st.sampled_from(("", "k")),
    "cache_salt": st.none() | st.sampled_from(("", "s")),
    "lora_path": st.none() | st.just("ada"),
    "model": st.sampled_from(("served", "served:ada", "other", "default:ada")),
    "stream": st.booleans(),
}
CHATS: Final = st.fixed_dictionaries(
    {"messages": _MESSAGES},
    optional={
        "tools": st.none() | TOOLS,
        "tool_choice": st.sampled_from((None, "auto", "none", "required"))
        | st.builds(lambda name: {"type": "function", "function": {"name": name}}, _NAMES),
        "reasoning_effort": st.none() | st.sampled_from(("none", "medium", "high", 0, 0.5)),
        "reasoning": st.fixed_dictionaries(
            {},
            optional={
                "effort": st.sampled_from((None, "none", "high", 0.25)),
                "enabled": st.sampled_from((None, True, "on")),
            },
        ),
        "chat_template_kwargs": st.none()
        | _record(
            {}, enable_thinking=st.booleans(), date_string=TEXTS, bos_token=TEXTS, reasoning_effort=st.just("high")
        ),
        "continue_final_message": st.booleans(),
        **SPACE,
    },
)
IDS: Final = st.lists(st.integers(0, 400), min_size=1, max_size=5)
COMPLETIONS: Final = st.fixed_dictionaries(
    {
        "prompt": TEXTS.filter(bool)
        | st.lists(TEXTS.filter(bool), min_size=1, max_size=3)
        | IDS
        | st.lists(IDS, min_size=1, max_size=3)
    },
    optional={"echo": st.booleans(), **SPACE},
)
GENERATIONS: Final = st.fixed_dictionaries(
    {"sampling_params": st.just({"max_new_tokens": 1})},
    optional={key: SPACE[key] for key in ("extra_key", "cache_salt", "lora_path", "stream")},
).flatmap(
    lambda body: st.builds(
        lambda prompt: body | prompt,
        st.fixed_dictionaries({"text": TEXTS | st.lists(TEXTS, min_size=1, max_size=3)})
        | st.fixed_dictionaries({"input_ids": IDS | st.lists(IDS, min_size=1, max_size=3)}),
    )
)


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
        other = st.sampled_from(
            (None, True, 0, 1, -1, 1.0, "", "1", "on", "varchar", [], {}, [1, "a"], [[]], {"type": "image_url"})
        )
        holder[key] = draw(other | _VALUES)
    return body


def _walk(value: Any, places: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        places.append((value, key))
        _walk(inner, places)
