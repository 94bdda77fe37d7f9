"""A request's tools, as a chat template sees them.

A tool is shown with the keys in the order its client gave them and what it left out (but `strict` and `defer_loading`)
as null, after them. A worker rewrites types that JSON Schema does not have (`varchar`, `int32`); a tool with such is
`Unknowable`.

Sources: `srt/entrypoints/openai/protocol.py:Function,Tool,ToolChoice`,
`srt/entrypoints/openai/serving_chat.py:_validate_request,_process_messages`,
`srt/function_call/utils.py:normalize_json_schema_types`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from marconi.router.prompts.base import Unknowable, Unreadable
from marconi.router.prompts.fields import optional_flag, optional_text, shown

_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS: Final = (
    *("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)


def tools_of(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools as templates see them."""
    return [_tool(value) for value in values]


def chosen(
    body: Mapping[str, Any], own: list[dict[str, Any]] | None, of_messages: list[dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """The tools that are shown, of the request's `own` and those its messages bring, which show theirs themselves."""
    choice = body.get("tool_choice")
    if choice is None:
        choice = "auto" if own is not None or of_messages else "none"
    usable = [*(own or ()), *of_messages]
    names = [tool["function"]["name"] for tool in usable]
    if of_messages and len(names) != len(set(names)):
        raise Unreadable("two tools of one name, in tools and in messages")
    if isinstance(choice, str):
        if choice not in ("auto", "required", "none"):
            raise Unreadable(f"tool_choice: {shown(choice)}; auto, required, none or a function is right")
        if choice == "required" and not usable:
            raise Unreadable("tool_choice: required, without tools")
        return own or None if choice != "none" else None
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or choice.get("type", "function") != "function":
        raise Unreadable(f"tool_choice: {shown(choice)}; auto, required, none or a function is right")
    name = optional_text(function, "name", "tool_choice.function.")
    if name not in names:
        raise Unreadable(f"tool_choice: no tool is named {shown(name)}")
    return [tool for tool in own or () if tool["function"]["name"] == name] or None


def without_wrapper(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Bare functions, which a worker tries where a template takes no wrapped ones."""
    return [tool["function"] for tool in tools] if tools else None


def _tool(value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unreadable(f"tools: {shown(value)} has no function with a name")
    kind = value.get("type", "function")
    if not isinstance(kind, str):
        raise Unreadable(f"tools: type {shown(kind)} is no text")
    is_deferred = optional_flag(value, "defer_loading")
    of_function = optional_flag(function, "defer_loading")
    known = {
        "description": optional_text(function, "description", "tools: "),
        "name": function["name"],
        "parameters": function.get("parameters"),
        "strict": optional_flag(function, "strict"),
        "defer_loading": is_deferred if of_function is None else of_function,
    }
    _require_standard(known["parameters"])
    for name in ("strict", "defer_loading"):
        if known[name] is None:
            del known[name]
    order = [name for name in function if name in known]
    order += [name for name in known if name not in function]
    return {"type": kind, "function": {name: known[name] for name in order}, "defer_loading": is_deferred}


def _require_standard(schema: Any) -> None:
    if isinstance(schema, list):
        for item in schema:
            _require_standard(item)
    if not isinstance(schema, dict):
        return
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds] if isinstance(kinds, str) else []
    texts = [kind for kind in listed if isinstance(kind, str)]
    if not _TYPES.issuperset(texts) or len(texts) != len(set(texts)) or len(texts) != len(listed):
        raise Unknowable(f"a schema's type {shown(kinds)}")
    for name in _SCHEMAS_BY_NAME:
        if isinstance(nested := schema.get(name), dict):
            for item in nested.values():
                _require_standard(item)
    for name in _SCHEMAS:
        _require_standard(schema.get(name))
