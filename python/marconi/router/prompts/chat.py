"""`/v1/chat/completions`: a chat to the ids of its prompt.

    variables = the named tokens < `reasoning_effort` < `chat_template_kwargs`             the later one wins
    last message of the assistant:  continue_final_message   it is cut off, and its ids follow the prompt
                                    otherwise                it is shown as a message of the user

`reasoning` and `reasoning_effort` also set `thinking` and `enable_thinking`, unless the body does.

Sources: `srt/entrypoints/openai/serving_chat.py:_convert_to_internal_request,_process_messages,_apply_jinja_template`,
`srt/entrypoints/openai/protocol.py:normalize_reasoning_inputs`.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from marconi.router.prompts.base import Unknowable, Unreadable
from marconi.router.prompts.chat_template import ChatTemplate
from marconi.router.prompts.fields import flag, ids_of, optional_list, shown
from marconi.router.prompts.messages import messages_of
from marconi.router.prompts.tokenizer import TextTokenizer
from marconi.router.prompts.tools import chosen, tools_of

_EFFORTS: Final = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_MAX_EFFORT: Final = 0.99
_RESERVED: Final = frozenset(
    (
        *("conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "self"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "compiled_template"),
    )
)
_YES: Final = frozenset({"1", "true", "yes", "y", "on"})


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Of one model."""

    tokenizer: TextTokenizer
    template: ChatTemplate | None
    defaults: Mapping[str, Any]
    """What `--default-chat-template-kwargs` says."""
    is_plain: bool
    """Its prompts of text go to the model as the ids that the chat has."""
    may_open_answers: bool
    """A reasoning parser may put text before an answer that is continued."""

    def ids(self, body: Mapping[str, Any]) -> "array[int]":
        """Of a body's prompt; `Unreadable` or `Unknowable` where there are none."""
        effort, variables = _variables(body)
        template = self.template
        messages, brought = messages_of(body.get("messages"), template is not None and template.takes_parts)
        own = optional_list(body, "tools")
        tools = chosen(body, None if own is None else tools_of(own), brought)
        is_continued = flag(body, "continue_final_message")
        if "chat_template" in variables:
            raise Unknowable("a chat template of the request")
        given = optional_list(body, "input_ids")
        if given is not None:
            return ids_of(given, "input_ids")
        if template is None:
            raise Unknowable("a chat, of a model without a chat template")
        if not self.is_plain:
            raise Unknowable("a chat of a model that tokenizes it a second time")
        for name, value in self.defaults.items():
            variables.setdefault(name, value)
        if effort is None:
            effort = variables.get("reasoning_effort")
        if effort == "low" and "low_effort" in template.source:
            raise Unknowable("a low effort, which such a template may be told by another variable")
        if not _RESERVED.isdisjoint(variables):
            raise Unknowable("chat_template_kwargs that name what is no variable")
        if effort is not None:
            variables.setdefault("reasoning_effort", effort)
        messages, beginning = _last_of_assistant(messages, is_continued)
        if beginning and self.may_open_answers:
            raise Unknowable("an answer that is continued after an opening")
        text = template.render(messages, tools, {**self.tokenizer.special, **variables})
        ids = self.tokenizer.encode_chat(text)
        if beginning:
            ids.extend(self.tokenizer.encode_continuation(beginning))
        return ids


def _last_of_assistant(messages: list[dict[str, Any]], is_continued: bool) -> tuple[list[dict[str, Any]], str | None]:
    content = messages[-1]["content"]
    if messages[-1]["role"] != "assistant" or not isinstance(content, str):
        return messages, None
    if not is_continued:
        return [*messages[:-1], {"role": "user", "content": content}], None
    if len(messages) == 1:
        raise Unknowable("a chat that is only an answer to continue")
    return messages[:-1], content


def _variables(body: Mapping[str, Any]) -> tuple[str | float | None, dict[str, Any]]:
    """The effort, and `chat_template_kwargs` with what reasoning adds to them."""
    effort = body.get("reasoning_effort")
    thinking: bool | None = None
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict):
        asked = reasoning.get("effort")
        if asked is None:
            asked = reasoning.get("reasoning_effort")
        if asked is not None:
            effort = _asked(asked)
        enabled = reasoning.get("enabled")
        if enabled is None:
            enabled = reasoning.get("enable", False)
        if isinstance(enabled, str):
            enabled = enabled.strip().lower() in _YES
        if enabled:
            thinking = True
    if effort is not None:
        thinking = effort != "none"
    variables = body.get("chat_template_kwargs")
    if thinking is not None:
        variables = {"thinking": thinking, "enable_thinking": thinking} | (
            variables if isinstance(variables, dict) else {}
        )
    if not isinstance(variables, dict | None):
        raise Unreadable(f"chat_template_kwargs: {shown(variables)} is no object")
    variables = dict(variables or {})
    effort = _effort(effort)
    asked = variables.pop("reasoning_effort", None)
    return effort if asked is None else asked, variables


def _asked(value: Any) -> Any:
    if isinstance(value, bool | list | dict):
        raise Unreadable(f"reasoning.effort: {shown(value)}; none, low, medium or high is right")
    try:
        return value if isinstance(value, str) else float(value)
    except OverflowError:
        raise Unreadable(f"reasoning.effort: {shown(value)}; none, low, medium or high is right") from None


def _effort(value: Any) -> str | float | None:
    if value is None or (isinstance(value, str) and value in _EFFORTS):
        return value
    if isinstance(value, bool | list | dict):
        raise Unreadable(f"reasoning_effort: {shown(value)}; none, low, medium or high is right")
    if isinstance(value, int | float) and 0 <= value <= _MAX_EFFORT:
        return float(value)
    raise Unknowable(f"the effort {shown(value)}")
