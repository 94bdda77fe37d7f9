"""What would end a scheduler is refused in one line that names it, and what SGLang answers is let through."""

import re
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from marconi.engine.guards.request import MAX_ANSWERS, around_normalize, refuse_unanswerable

VOCABULARY_SIZE = 100
MANAGER: Any = SimpleNamespace(
    server_args=SimpleNamespace(radix_cache_backend="marconi", chunked_prefill_size=-1),
    model_config=SimpleNamespace(vocab_size=VOCABULARY_SIZE),
    context_len=64,
    mm_processor=None,
)
SEES: Any = SimpleNamespace(**{**vars(MANAGER), "mm_processor": object()})

SCORED: dict[str, Any] = {
    "sampling_params": {"max_new_tokens": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
    "token_ids_logprob": [5],
}
"""What SGLang's endpoint for scores asks for."""


def request_of(**fields: Any) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    obj = GenerateReqInput(**{"input_ids": [5, 6, 7], **fields})
    obj.normalize_batch_and_arguments()
    return obj


def validate(manager: Any = MANAGER, **fields: Any) -> dict[str, Any]:
    """The sampling parameters that are left of a request that is let through."""
    obj = request_of(**fields)
    refuse_unanswerable(None, manager, obj, obj.input_ids)
    params: dict[str, Any] = obj.sampling_params
    return params


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"input_ids": [5, 100]}, "input_ids[1] must be a token id from 0 to 99, got 100"),
        ({"input_ids": [-1]}, "input_ids[0] must be a token id from 0 to 99, got -1"),
        # A model that sees nothing leaves an image out, and looks its prompt up as it is.
        ({"input_ids": [100], "image_data": "x"}, "input_ids[0] must be a token id from 0 to 99, got 100"),
        ({"input_ids": [100], "lora_path": ""}, "input_ids[0] must be a token id from 0 to 99, got 100"),
        (
            {"return_logprob": True, "logprob_start_len": -5},
            "logprob_start_len must be a position in the prompt, or -1 for its end, got -5",
        ),
        (
            {"return_logprob": True, "logprob_start_len": [0]},
            "logprob_start_len must be a position in the prompt, or -1 for its end, got [0]",
        ),
        ({"top_logprobs_num": [1]}, "top_logprobs_num must be 0 to 100, the vocabulary's size, got [1]"),
        ({"top_logprobs_num": 101}, "top_logprobs_num must be 0 to 100, the vocabulary's size, got 101"),
        (
            {"sampling_params": {"top_k": 10**12}},
            "top_k must be at most 2147483647, or -1 for the whole vocabulary, got 1000000000000",
        ),
        (
            {**SCORED, "token_indices_to_pool": [1, 3]},
            "token_indices_to_pool must be positions from 0 to 2, got [1, 3]",
        ),
        ({**SCORED, "token_indices_to_pool": []}, "token_indices_to_pool must be positions from 0 to 2, got []"),
        (
            {**SCORED, "token_indices_to_pool": [1], "logprob_start_len": -1},
            "token_indices_to_pool must have return_logprob and a logprob_start_len of 0, got True and -1",
        ),
        *(
            (
                {"positional_embed_overrides": value},
                f"positional_embed_overrides must be tensors, which no JSON holds, got {value}",
            )
            for value in (5, [], {"embeds": [[1.0]], "positions": [0]})
        ),
        ({"session_params": [1]}, "session_params must be an object, got [1]"),
        ({"session_params": {"id": ["s"]}}, "session_params.id must be a string, got ['s']"),
        ({"session_params": {"id": "s", "rid": {}}}, "session_params.rid must be a string, got {}"),
        (
            {"session_params": {"id": "s", "rid": "r", "offset": 1.5}},
            "session_params.offset must be an integer, got 1.5",
        ),
        ({"session_id": ["s"]}, "session_id must be a string, got ['s']"),
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
    ],
)
def test_what_would_end_the_scheduler_is_refused_in_a_line_that_names_it(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        validate(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprob_start_len": -5},
        {**SCORED, "token_indices_to_pool": [0, 2]},
        {"token_indices_to_pool": [100], "sampling_params": {"max_new_tokens": 3}},
        {"return_logprob": True, "logprob_start_len": -1},
        {"sampling_params": {"top_k": 2**31 - 1}},
        {"sampling_params": {"top_k": -1}},
        {"input_ids": [], "session_params": {"id": "s", "rid": "r"}},
        {"session_id": "s", "priority": -3},
        {"session_params": {"id": "s", "offset": 1.5}},
        {"session_params": {"id": "s", "rid": "r", "offset": -2, "replace": 1}},
    ],
)
def test_what_sglang_answers_is_let_through(fields: dict[str, Any]) -> None:
    validate(**fields)


def test_a_token_beyond_the_vocabulary_may_stand_for_an_image_where_the_model_sees() -> None:
    validate(SEES, input_ids=[100], image_data="x")
    with pytest.raises(ValueError, match=r"^input_ids"):
        validate(SEES, input_ids=[100])


@pytest.mark.parametrize("chunk_tokens", [None, 8192])
def test_a_prompt_that_may_be_cut_is_not_scored_at_positions(chunk_tokens: int | None) -> None:
    """Two at a time are enough for it in SGLang, however short: the second is cut where the first one's tokens end."""
    server_args = SimpleNamespace(radix_cache_backend="marconi", chunked_prefill_size=chunk_tokens)
    cuts = SimpleNamespace(**{**vars(MANAGER), "server_args": server_args})
    wrong = f"^the server's --chunked-prefill-size must be -1 for token_indices_to_pool, got {chunk_tokens}:"
    with pytest.raises(ValueError, match=wrong):
        validate(cuts, **SCORED, token_indices_to_pool=[0])
    validate(cuts, token_indices_to_pool=[0], sampling_params={"max_new_tokens": 3})


def test_an_empty_prompt_is_refused_outside_a_session() -> None:
    obj = request_of()
    with pytest.raises(ValueError, match=r"^the prompt must have at least one token, got none$"):
        refuse_unanswerable(None, MANAGER, obj, [])


def test_stop_tokens_that_no_model_generates_are_left_out() -> None:
    assert validate(sampling_params={"stop_token_ids": [5, -1, 99, 100, None]})["stop_token_ids"] == [5, 99, None]
    assert "stop_token_ids" not in validate(sampling_params={})


@pytest.mark.parametrize(
    ("fields", "num_prompts"),
    [
        ({"text": "a"}, 1),
        ({"text": ["a", "b", "c"]}, 3),
        ({"input_ids": [5, 6, 7]}, 1),
        ({"input_ids": [[5], [6]]}, 2),
    ],
)
def test_more_answers_than_one_body_gets_are_refused_before_they_are_written_out(
    fields: dict[str, Any], num_prompts: int
) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    normalized: list[Any] = []
    most = MAX_ANSWERS // num_prompts
    for wrap in (lambda params: params, lambda params: [params] * num_prompts):
        around_normalize(normalized.append, GenerateReqInput(**fields, sampling_params=wrap({"n": most})))
        line = f"n must give at most {MAX_ANSWERS} answers a request, got {most + 1} for {num_prompts} prompt(s)"
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            around_normalize(normalized.append, GenerateReqInput(**fields, sampling_params=wrap({"n": most + 1})))
    assert len(normalized) == 2


@pytest.mark.parametrize(
    ("input_ids", "line"),
    [
        ([[[1]]], "input_ids[0] must be a token id, an integer, got [1]"),
        ([[5, 6], [7, [8]]], "input_ids[1] must be a token id, an integer, got [8]"),
        ([5, [6]], "input_ids[1] must be a token id, an integer, got [6]"),
        ([[5, 1.5]], "input_ids[1] must be a token id, an integer, got 1.5"),
        ([[None]], "input_ids[0] must be a token id, an integer, got None"),
        ([[5], 6], "input_ids must hold lists of token ids, got 6"),
        (["ab"], "input_ids must hold lists of token ids, got 'ab'"),
        ({"5": 6}, "input_ids must hold lists of token ids, got {'5': 6}"),
    ],
)
def test_ids_that_are_no_integers_are_refused_in_a_line_that_names_them(input_ids: Any, line: str) -> None:
    """`/generate` looks at them itself, `/vertex_generate` and an `Engine` do not."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    normalized: list[Any] = []
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        around_normalize(normalized.append, GenerateReqInput(input_ids=input_ids))
    assert not normalized


@pytest.mark.parametrize(
    "input_ids", [None, [], [5], [[5], []], array("q", [5]), [[5], array("q", [6])], [[np.int64(5)]]], ids=repr
)
def test_ids_that_are_integers_are_let_through(input_ids: Any) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    normalized: list[Any] = []
    around_normalize(normalized.append, GenerateReqInput(text="a", input_ids=input_ids))
    assert len(normalized) == 1


@pytest.mark.parametrize("params", [None, {}, [], {"n": None}, {"n": "2"}, {"n": 0}, [{}], [5]])
def test_a_number_of_samples_that_says_nothing_is_sglangs_own_affair(params: Any) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    normalized: list[Any] = []
    around_normalize(normalized.append, GenerateReqInput(text="a", sampling_params=params))
    assert len(normalized) == 1
