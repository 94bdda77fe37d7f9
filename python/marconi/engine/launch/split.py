"""How memory is divided between KV and states where no flag of the operator's divides it.

    the operator's    `--mamba-full-memory-ratio`, `--max-mamba-cache-size` or `--enable-unified-memory` is given
    one pool          SGLang and this cache would serve this launch with `--enable-unified-memory`
    two pools         they would not: at SGLang's ratio

One pool lends bytes to whichever side is short, so no ratio can be wrong for the traffic, which no launch knows
(`docs/hit-rate.md`). As many requests may run as in two pools: SGLang limits both by the same ratio.

Whether SGLang serves one pool depends on backends, formats and parallelism that it resolves itself. So a copy of the
arguments is resolved with the flag, and held against this cache's own reasons (`support.py`), by the facts that the
model's configuration gives (`model.py`).
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any, Final

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import resolved_view

from marconi.engine.cpu_platform import is_active
from marconi.engine.launch import flags, support
from marconi.engine.launch.model import Model
from marconi.engine.version import one_line

DIVIDING: Final = ("mamba_full_memory_ratio", "max_mamba_cache_size", "enable_unified_memory")
"""Settings of SGLang by which an operator divides memory."""
REFUSED: Final = (ValueError, AssertionError, NotImplementedError, RuntimeError, ImportError)
"""Errors with which SGLang refuses arguments."""
ONE_POOL: Final = (
    "KV and states share one pool (--enable-unified-memory), as no flag divides memory; "
    "--mamba-full-memory-ratio 0.9 keeps SGLang's two"
)
TWO_POOLS: Final = "KV and states have a pool each, at SGLang's ratio, as one pool is not chosen here: "
"""Begins the line for two pools; its reason follows."""
ONE_BRANCH: Final = (
    "; --speculative-eagle-topk 1 shares one pool, which computes 0.78 of stock's tokens on recorded traces "
    "without drafts, where two pools compute 0.94"
)
"""Ends the line for two pools where drafts in a tree are the only reason for them."""
_SAID: Final = "_marconi_split"
"""On the record of SGLang's arguments, which takes it to every process."""


def is_open(server_args: Any) -> bool:
    """True if no flag of the operator's divides memory."""
    return not any(getattr(server_args, name) for name in DIVIDING)


def choose(server_args: Any) -> None:
    """Before `server_args` are resolved: choose one pool where no flag divides memory and one pool is served."""
    if is_open(server_args):
        divided = why_two_pools(server_args)
        server_args.enable_unified_memory = divided is None
        setattr(server_args, _SAID, divided or ONE_POOL)


def memory_note(server_args: Any) -> str | None:
    """How memory was divided and why, in a line; None where the operator divided it."""
    line: str | None = getattr(server_args, _SAID, None)
    return line


def in_one_pool(server_args: Any, *, of_a_chain: bool = False) -> Any:
    """A copy of `server_args`, not resolved yet, with one pool, and `of_a_chain` with one branch of drafts."""
    record = copy.copy(server_args)
    record.enable_unified_memory = True
    if of_a_chain:
        record.speculative_eagle_topk = 1
    return record


def two_pools(server_args: Any, refusal: str | None, refusal_of: Callable[[Any], str | None]) -> str | None:
    """The line for two pools at SGLang's ratio; None where one pool is chosen for `server_args`, not resolved yet.

    `refusal` is the first reason for which they are not served with one pool, `refusal_of` that of any launch. Only
    where there is none, an operator could choose it.
    """
    role = server_args.disaggregation_mode
    if refusal is None and role == "null":
        return None
    if refusal and role == "null" and server_args.speculative_eagle_topk not in (None, 1):
        shares = refusal_of(in_one_pool(server_args, of_a_chain=True)) is None
        return TWO_POOLS + refusal + (ONE_BRANCH if shares else "")
    reason = refusal or (
        f"--disaggregation-mode {role}, where the servers of both roles must have one pool or neither; "
        "--enable-unified-memory chooses it"
    )
    return TWO_POOLS + reason


def why_two_pools(server_args: Any) -> str | None:
    """The line for two pools where `server_args`, not resolved yet, have those; None where they have one."""
    return two_pools(server_args, _refusal(in_one_pool(server_args)), _refusal)


def _refusal(record: Any) -> str | None:
    """Why `record`, which it resolves, is not served, in a line; None if it is."""
    with unnoticed():
        try:
            record.resolve_once()
            model = Model(record.model_path, model_config_of(record).hf_config)
        except Exception as error:  # What ends this launch ends it in two pools as well.
            return words_of(error)
    facts = model.facts(record, resolved_view(record), is_on_cpu=is_active())
    if not facts.has_own_cache:
        return "the cache is SGLang's own"
    given = flags.from_environ(os.environ)
    return next(support.against_cache(record, given, facts), None)


def words_of(error: BaseException) -> str:
    """The words in which SGLang refuses arguments, in a line; the condition where it says none."""
    if isinstance(error, AssertionError) and not error.args:
        return str(extract_tb(error.__traceback__)[-1].line)
    return one_line(error).removeprefix("AssertionError: ").removeprefix("ValueError: ")


@contextmanager
def unnoticed() -> Iterator[None]:
    """Resolve arguments without a word in the log and without a trace in the environment."""
    before = dict(os.environ)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
