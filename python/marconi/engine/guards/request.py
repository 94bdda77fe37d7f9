"""A request that no model can answer is refused, instead of ending the scheduler and all that it serves.

SGLang looks a token outside the vocabulary up in the embedding as it is: an index error on a CPU, a device-side
assertion on a GPU, and every other request in flight is lost with it. The other fields that are looked at here end it
likewise (`docs/requests.md` lists them). What SGLang answers is answered here, too: stop tokens outside the
vocabulary, which end it beside a request with `min_new_tokens`, are left out, since none is ever generated.

Checkpoints that a request asks for (`http/hints.py`) are looked at here, too: what makes no sense is refused, and one
that only wants its prompt cached is made to ask.

Put in where a server with our backend resolves its arguments. With `--tokenizer-worker-num` above 1 the workers
validate in processes of their own, which are not guarded.
"""

from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final

from marconi.engine.http.hints import ask_for_end, require_hints
from marconi.engine.launch.flags import BACKEND

MAX_INT32: Final = 2**31 - 1
MAX_ANSWERS: Final = 2**14
"""Answers per body, prompts times `n`: SGLang prepares all before it sends the first, and answers no other request."""


def refuse_unanswerable(_result: None, manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """After upstream's own validation: raise ValueError, which becomes HTTP 400, naming what is wrong."""
    if manager.server_args.radix_cache_backend != BACKEND:
        return
    vocab_size = manager.model_config.vocab_size
    session = getattr(obj, "session_params", None) or {}
    require_session(obj, session)
    require_logprobs(obj, vocab_size)
    if isinstance(obj.sampling_params, dict):
        require_sampling(obj.sampling_params)
        leave_out_unreachable_stops(obj.sampling_params, vocab_size)
    ask_for_end(obj)
    if input_ids:
        # A session's prompt begins with what came before, which is not known here; requests for embeddings have none.
        require_hints(obj, manager.context_len if session else len(input_ids))
    require_prompt(manager, obj, input_ids, in_session=bool(session.get("id")))
    require_scoring(manager, obj, len(input_ids or ()))
    require_overrides(obj)


def require_prompt(manager: Any, obj: Any, input_ids: list[int] | None, *, in_session: bool) -> None:
    """Raise `ValueError` for a prompt without tokens, or with one that the model does not know.

    Ids of requests with images for a model that sees, or with an adapter, are let through: they may lie beyond the
    base vocabulary by design. In a session the whole prompt may have come before.
    """
    sees = manager.mm_processor is not None and obj.contains_mm_input()
    if sees or getattr(obj, "input_embeds", None) is not None:
        return
    if not input_ids:
        if in_session:
            return
        raise ValueError("the prompt must have at least one token, got none")
    vocab_size = manager.model_config.vocab_size
    if not getattr(obj, "lora_path", None) and (min(input_ids) < 0 or max(input_ids) >= vocab_size):
        index, token_id = next((i, t) for i, t in enumerate(input_ids) if not 0 <= t < vocab_size)
        raise ValueError(f"input_ids[{index}] must be a token id from 0 to {vocab_size - 1}, got {token_id}")


def require_ids(input_ids: object) -> None:
    """Raise `ValueError` for ids that are not integers, or lists of integers: not every endpoint looks."""
    if input_ids is None:
        return
    is_batch = isinstance(input_ids, list) and input_ids and not isinstance(input_ids[0], int)
    prompts: Any = input_ids if is_batch else [input_ids]
    for prompt in prompts:
        if not isinstance(prompt, list | array):
            raise ValueError(f"input_ids must hold lists of token ids, got {prompt!r:.80}")
        if not all(hasattr(kind, "__index__") for kind in set(map(type, prompt))):
            index, token = next((i, t) for i, t in enumerate(prompt) if not hasattr(t, "__index__"))
            raise ValueError(f"input_ids[{index}] must be a token id, an integer, got {token!r:.80}")


def require_logprobs(obj: Any, vocab_size: int) -> None:
    """Raise `ValueError` for log-probabilities that there are none of."""
    num_top = getattr(obj, "top_logprobs_num", 0) or 0
    if not isinstance(num_top, int) or not 0 <= num_top <= vocab_size:
        raise ValueError(f"top_logprobs_num must be 0 to {vocab_size}, the vocabulary's size, got {num_top}")
    if getattr(obj, "return_logprob", False):
        start = getattr(obj, "logprob_start_len", -1)
        if not isinstance(start, int) or start < -1:
            raise ValueError(f"logprob_start_len must be a position in the prompt, or -1 for its end, got {start}")


def require_sampling(params: Mapping[str, Any]) -> None:
    """Raise `ValueError` for what SGLang cannot hold in a tensor."""
    top_k = params.get("top_k")
    if isinstance(top_k, int) and top_k > MAX_INT32:
        raise ValueError(f"top_k must be at most {MAX_INT32}, or -1 for the whole vocabulary, got {top_k}")


def require_scoring(manager: Any, obj: Any, num_prompt_tokens: int) -> None:
    """Raise `ValueError` for positions to score at that are not computed at once, where nothing is generated.

    SGLang counts them from the first token of the pass that they are in, so the whole prompt must be: none of it from
    the cache, for which its own endpoint for scores asks for all log-probabilities, and not cut in two. A prompt that
    would fit is cut, too, beside others. Requests for embeddings ask for no log-probabilities.
    """
    positions = getattr(obj, "token_indices_to_pool", None)
    if positions is None or not hasattr(obj, "return_logprob") or obj.sampling_params.get("max_new_tokens") != 0:
        return
    chunk_tokens = manager.server_args.chunked_prefill_size
    if chunk_tokens is None or chunk_tokens > 0:
        raise ValueError(
            "the server's --chunked-prefill-size must be -1 for token_indices_to_pool, got "
            f"{chunk_tokens}: SGLang may cut the prompt"
        )
    if not positions or any(
        type(position) is not int or not 0 <= position < num_prompt_tokens for position in positions
    ):
        raise ValueError(
            f"token_indices_to_pool must be positions from 0 to {num_prompt_tokens - 1}, got {positions!r:.80}"
        )
    if not obj.return_logprob or obj.logprob_start_len != 0:
        raise ValueError(
            "token_indices_to_pool must have return_logprob and a logprob_start_len of 0, got "
            f"{obj.return_logprob!r:.80} and {obj.logprob_start_len!r:.80}"
        )


def require_overrides(obj: Any) -> None:
    """Raise `ValueError` for embeddings that are no tensors."""
    from sglang.srt.managers.embed_types import PositionalEmbeds

    overrides = getattr(obj, "positional_embed_overrides", None)
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError(f"positional_embed_overrides must be tensors, which no JSON holds, got {overrides!r:.80}")


def require_session(obj: Any, session: object) -> None:
    """Raise `ValueError` for a session or a priority that SGLang looks up, cuts at or sorts by, and cannot."""
    if not isinstance(session, dict):
        raise ValueError(f"session_params must be an object, got {session!r:.80}")
    turn = session.get("rid")
    named: tuple[tuple[str, object, type, str], ...] = (
        ("session_params.id", session.get("id"), str, "a string"),
        ("session_params.rid", turn, str, "a string"),
        ("session_params.offset", None if turn is None else session.get("offset"), int, "an integer"),
        ("session_id", getattr(obj, "session_id", None), str, "a string"),
        ("priority", getattr(obj, "priority", None), int, "an integer"),
    )
    for name, value, kind, expected in named:
        if not isinstance(value, kind | None):
            raise ValueError(f"{name} must be {expected}, got {value!r:.80}")


def leave_out_unreachable_stops(params: dict[str, Any], vocab_size: int) -> None:
    """Take stop tokens that no model generates out of `params`."""
    stops = params.get("stop_token_ids")
    if isinstance(stops, list | tuple | set):
        params["stop_token_ids"] = [t for t in stops if not isinstance(t, int) or 0 <= t < vocab_size]


def around_normalize(normalize: Callable[[Any], None], obj: Any) -> None:
    """Around `GenerateReqInput.normalize_batch_and_arguments`: raise `ValueError` for what it cannot write out.

    That is ids that are none, and more answers than one body gets: it writes every field out for each of them.
    """
    require_ids(obj.input_ids)
    params = obj.sampling_params
    first = params[0] if isinstance(params, list) and params else params
    num_samples = first.get("n") if isinstance(first, dict) else 1
    if isinstance(num_samples, int) and num_samples > 1:
        prompts = obj.text if obj.text is not None else obj.input_ids
        num_prompts = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        if num_samples * num_prompts > MAX_ANSWERS:
            raise ValueError(
                f"n must give at most {MAX_ANSWERS} answers a request, got {num_samples} for {num_prompts} prompt(s)"
            )
    normalize(obj)
