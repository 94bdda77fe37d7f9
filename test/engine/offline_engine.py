"""Two requests through an offline `sglang.Engine`, then an engine with a second cache; prints what happened."""

import sys

import sglang

from marconi.engine.version import Refusal


def main(model: str) -> None:
    engine = sglang.Engine(model_path=model, radix_cache_backend="marconi")
    prompt = list(range(3, 203))
    for input_ids in (prompt, prompt + [50] * 40):
        answer = engine.generate(input_ids=input_ids, sampling_params={"max_new_tokens": 4, "temperature": 0})
        print("cached", answer["meta_info"]["cached_tokens"], flush=True)
    engine.shutdown()
    try:
        sglang.Engine(model_path=model, radix_cache_backend="marconi", enable_lmcache=True)
    except Refusal as refusal:
        print(f"Refusal: {refusal}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
