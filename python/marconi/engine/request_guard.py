"""A request that no model can answer is refused, instead of ending the scheduler and all that it serves.

SGLang looks a token outside the vocabulary up in the embedding as it is: an index error on a CPU, a device-side
assertion on a GPU, and every other request in flight is lost with it. An empty prompt and more top log-probabilities
than there are tokens end it likewise. Checkpoints that a request asks for (`hints.py`) are looked at here, too: what
makes no sense is refused, and one that only wants its prompt cached is made to ask.

Put in where a server with our backend resolves its arguments. With `--tokenizer-worker-num` above 1 the workers
validate in processes of their own, which are not guarded.
"""

from typing import Any

from marconi.engine.flags import BACKEND
from marconi.engine.hints import ask_for_end, require_hints

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"


def refuse_unanswerable(_result: None, manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """After upstream's own validation: raise ValueError, which becomes HTTP 400, naming what is wrong.

    Token ids of requests with images or an adapter are let through: they may lie beyond the base vocabulary by
    design.
    """
    if manager.server_args.radix_cache_backend != BACKEND:
        return
    vocab_size = manager.model_config.vocab_size
    num_top_logprobs = getattr(obj, "top_logprobs_num", 0) or 0
    if not 0 <= num_top_logprobs <= vocab_size:
        raise ValueError(f"top_logprobs_num is {num_top_logprobs}, expected 0 to {vocab_size}, the vocabulary's size")
    ask_for_end(obj)
    if input_ids:
        # A session's prompt begins with what came before, which is not known here; requests for embeddings have none.
        in_session = getattr(obj, "session_params", None)
        require_hints(obj, manager.context_len if in_session else len(input_ids))
    if obj.contains_mm_input() or getattr(obj, "input_embeds", None) is not None:
        return
    if not input_ids:
        raise ValueError("the prompt is empty, expected at least one token")
    if getattr(obj, "lora_path", None) is None and (min(input_ids) < 0 or max(input_ids) >= vocab_size):
        index, token_id = next((i, t) for i, t in enumerate(input_ids) if not 0 <= t < vocab_size)
        raise ValueError(f"input_ids[{index}] is {token_id}, expected a token id from 0 to {vocab_size - 1}")
