"""A chat template: messages to text, as Hugging Face's templates are rendered.

Jinja in an immutable sandbox, blocks trimmed, loop controls, `tojson` that leaves characters as they are,
`raise_exception`, `strftime_now` (by this machine's clock) and `{% generation %}` blocks. Compiled once.

A template that loops over a message's content is given parts, another one a text; one that speaks of images, audio or
video anywhere is taken for the first kind, as SGLang does.

Sources: transformers 5.19 `utils/chat_template_utils.py`; `srt/parser/jinja_template_utils.py`.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from marconi.router.prompts.base import Unknowable, Unreadable
from marconi.router.prompts.tools import without_wrapper

_MEDIA: Final = ("image", "audio", "video", "vision")
_MESSAGES: Final = ("message", "msg", "m")


class ChatTemplate:
    """One template."""

    def __init__(self, source: str, template: jinja2.Template, takes_parts: bool) -> None:
        self.source = source
        self.takes_parts = takes_parts
        self._template = template

    @classmethod
    def of(cls, source: str) -> Self:
        """`ValueError` with the line where `source` is no template."""
        environment = _environment()
        try:
            template = environment.from_string(source)
            takes_parts = any(word in source for word in _MEDIA) or _loops_over_parts(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template: line {error.lineno}: {error.message}") from None
        return cls(source, template, takes_parts)

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        """The text up to where the answer begins; `Unreadable` where the template refuses the chat."""
        try:
            return self._render(messages, tools, variables)
        except Exception:  # Whatever it was, a worker tries again with bare functions.
            try:
                return self._render(messages, without_wrapper(tools), variables)
            except (jinja2.TemplateError, TypeError) as error:
                reason = str(error).splitlines() or [type(error).__name__]
                raise Unreadable(f"the chat template refuses this chat: {reason[0]}") from None
            except Exception as error:
                raise Unknowable(f"a chat that its template fails on: {error}") from None

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        return self._template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=True, **variables
        )


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks an answer for training; here only its text counts."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it of instances)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> str:
        return str(caller())


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _loops_over_parts(template: nodes.Template) -> bool:
    return any(_is_content(loop.iter) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        return _is_message(node.node) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Getattr) and _is_message(node.node) and node.attr == "content"


def _is_message(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in _MESSAGES
