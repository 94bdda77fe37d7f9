"""How far before its end a chat's prompt is left by the next turn, asked of templates as they are."""

from types import SimpleNamespace
from typing import Any

import jinja2
import pytest

from marconi.engine.cache.scheduler import distance_known_by
from marconi.engine.http.chat_template import add_distance
from marconi.engine.http.hints import NEXT_TURN
from marconi.policy.forecast.turns import MAX_DISTANCE

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PLAIN = "{% for m in messages %}" + _TURN + "{% endfor %}{% if invites %}<|im_start|>assistant\n{% endif %}"
THINKS = PLAIN.replace("assistant\n{%", "assistant\n<think>\n{%")
ASKED_TO_THINK = PLAIN.replace(
    "assistant\n{%", "assistant\n{% if thinking %}<think>\n{% else %}<think></think>\n{% endif %}{%"
)
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ messages[0].no.such }}{% endif %}" + PLAIN


class Chat(SimpleNamespace):
    """A request as SGLang's models are: copied with other fields, and its messages validated."""

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> "Chat":
        return cls(messages=[SimpleNamespace(**message) for message in fields["messages"]])

    def model_copy(self, update: dict[str, Any]) -> "Chat":
        return Chat(**{**vars(self), **update})


class Serving(SimpleNamespace):
    """The part of SGLang's server of chats that renders; a token is a character. Counts how often it does."""

    num_rendered = 0

    def _process_messages(self, request: Any, _is_multimodal: bool) -> Any:
        self.num_rendered += 1
        text = jinja2.Template(self.template, undefined=jinja2.StrictUndefined).render(
            messages=request.messages,
            invites=request._format_add_generation_prompt is not False,
            **{"thinking": True, **(request.chat_template_kwargs or {})},
        )
        return SimpleNamespace(prompt_ids=text if self.renders_text else [ord(character) for character in text])


def serving(template: str, *, renders_text: bool = False) -> Serving:
    manager = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=False))
    return Serving(template=template, renders_text=renders_text, tokenizer_manager=manager)


def chat(**fields: Any) -> Chat:
    given = {"chat_template_kwargs": None, "reasoning_effort": None, "continue_final_message": False, "input_ids": None}
    return Chat(messages=[], **{**given, **fields})


def distance(of: Serving, request: Chat) -> Any:
    sampling_params: dict[str, Any] = {}
    add_distance(of, request, sampling_params)
    return sampling_params.get("custom_params", {}).get(NEXT_TURN)


def test_a_template_whose_invitation_stays_is_left_at_its_end() -> None:
    assert distance(serving(PLAIN), chat()) == 0


def test_an_invitation_to_think_that_is_dropped_is_as_long_as_it_is() -> None:
    assert distance(serving(THINKS), chat()) == len("<think>\n")


def test_each_setting_of_the_template_is_asked_once() -> None:
    of = serving(ASKED_TO_THINK)
    asked = [distance(of, chat(chat_template_kwargs={"thinking": on})) for on in (True, False, True, False)]
    assert asked == [len("<think>\n"), len("<think></think>\n")] * 2
    assert of.num_rendered == 4


@pytest.mark.parametrize(
    ("of", "request_of"),
    [
        (serving(NEEDS_SYSTEM), chat()),
        (serving(THINKS, renders_text=True), chat()),
        (serving(PLAIN.replace("assistant\n{%", "assistant\n" + "x" * (MAX_DISTANCE + 1) + "{%")), chat()),
        (serving(THINKS), chat(continue_final_message=True)),
        (serving(THINKS), chat(input_ids=[1, 2])),
    ],
    ids=["refuses the conversation", "prompt is text", "too far", "goes on from its last message", "ids of its own"],
)
def test_where_the_template_does_not_say_it_is_left_to_be_learned(of: Serving, request_of: Chat) -> None:
    assert distance(of, request_of) is None


def test_what_a_client_sends_in_its_custom_params_stays() -> None:
    sampling_params: dict[str, Any] = {"custom_params": {"mine": 1}}
    add_distance(serving(THINKS), chat(), sampling_params)
    assert sampling_params["custom_params"] == {NEXT_TURN: 8, "mine": 1}
    other: dict[str, Any] = {"custom_params": 5}
    add_distance(serving(THINKS), chat(), other)
    assert other == {"custom_params": 5}


@pytest.mark.parametrize(
    ("custom_params", "known"),
    [
        *(({NEXT_TURN: distance}, distance) for distance in (0, 2, MAX_DISTANCE)),
        *(({NEXT_TURN: wrong}, None) for wrong in (-1, True, MAX_DISTANCE + 1, "2")),
        *((wrong, None) for wrong in (None, 5, [NEXT_TURN])),
    ],
    ids=repr,
)
def test_a_distance_that_makes_no_sense_is_none(custom_params: Any, known: int | None) -> None:
    req = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom_params))
    assert distance_known_by(req) == known
