"""A request that names a token outside the vocabulary is refused, instead of ending the scheduler and all it serves.

SGLang looks such a token up in the embedding as it is: an index error on a CPU, a device-side assertion on a GPU,
and every other request in flight is lost with it. Put in where a server with our backend resolves its arguments.
With `--tokenizer-worker-num` above 1 the workers validate in processes of their own, which are not guarded.
"""

from typing import Any

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"


def refuse_unknown_tokens(_result: None, manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """After upstream's own validation: raise ValueError, which becomes HTTP 400, naming the first bad token.

    Requests with images or an adapter are let through: their ids may lie beyond the base vocabulary by design.
    """
    if manager.server_args.radix_cache_backend != "marconi" or not input_ids:
        return
    if obj.contains_mm_input() or getattr(obj, "lora_path", None) is not None:
        return
    vocab_size = manager.model_config.vocab_size
    if min(input_ids) >= 0 and max(input_ids) < vocab_size:
        return
    index, token_id = next((i, t) for i, t in enumerate(input_ids) if not 0 <= t < vocab_size)
    raise ValueError(f"input_ids[{index}] is {token_id}, expected a token id from 0 to {vocab_size - 1}")
