"""A context that SGLang's frontend forks eight ways, and two of the branches, which continue as conversations."""

from typing import Any

import sglang as sgl

from marconi_cpu.demo.endpoint import TimedEndpoint, answer_of

INSTRUCTION = "Answer from the text above.\n"
# No two begin with the same letter: what the branches share ends with the instruction, whatever the tokenizer.
QUESTIONS = (
    "What is a recurrent state?",
    "Can it be rolled back?",
    "How is a prefix found again?",
    "Does the answer change?",
    "Name every touch of upstream.",
    "List the two commands.",
    "Give the licence.",
    "Explain the ledger.",
)
NUM_CHAT_BRANCHES = 2
FOLLOW_UPS = ("And what follows from that?", "Thank you. In one sentence?")
NUM_REQUESTS = 1 + len(QUESTIONS) + NUM_CHAT_BRANCHES * len(FOLLOW_UPS)


@sgl.function  # type: ignore[untyped-decorator]
def branches(s: Any, context: str, num_answer_tokens: int) -> None:
    """Eight questions to one context; the first two branches continue as conversations."""
    s += sgl.system(context)
    s += sgl.user_begin()
    s += INSTRUCTION
    # A fork prefills its shared prefix only if that prefix is already there when it is asked for.
    s.sync()
    forks = list(s.fork(len(QUESTIONS)))
    for fork, question in zip(forks, QUESTIONS, strict=True):
        fork += question
        fork += sgl.user_end()
        fork += sgl.assistant(sgl.gen("answer", max_tokens=num_answer_tokens, temperature=0))
    for fork in forks:
        _finish(fork)
    for turn, follow_up in enumerate(FOLLOW_UPS, start=2):
        for fork in forks[:NUM_CHAT_BRANCHES]:
            fork += sgl.user(follow_up)
            fork += sgl.assistant(sgl.gen(f"turn {turn}", max_tokens=num_answer_tokens, temperature=0))
            _finish(fork)
    s["forks"] = forks


def _finish(fork: Any) -> None:
    # After an error the fork's worker is gone, and whatever is asked of it next would be waited for without end.
    fork.sync()
    if fork.error() is not None:
        raise fork.error()


def run(endpoint: TimedEndpoint, context: str, num_tokens: int) -> None:
    """Do it all, and note the answers in an order of their own, whatever order they came in."""
    state = branches.run(context=context, num_answer_tokens=num_tokens, backend=endpoint)
    if state.error() is not None:
        raise state.error()
    forks, kind = state["forks"], endpoint.kind
    endpoint.answers += [
        answer_of(kind, f"branch {i}", fork.get_meta_info("answer")) for i, fork in enumerate(forks, start=1)
    ]
    endpoint.answers += [
        answer_of(kind, f"branch {i}.{turn}", fork.get_meta_info(f"turn {turn}"))
        for i, fork in enumerate(forks[:NUM_CHAT_BRANCHES], start=1)
        for turn in range(2, 2 + len(FOLLOW_UPS))
    ]
