"""A cache's states, saved when its server stops cleanly and loaded before the first request of the next one.

    stop     the scheduler's last act (`release_host_resources`): the most valuable states first, within `SAVE_S`
    start    once the cache is built: every file is checked, then as many states are loaded as the pools hold

Pools are copied by SGLang's own `get_cpu_copy` and `load_cpu_copy`, so a state and its KV come back bit for bit. That
they are those of this model, the identity says: the model's configuration, a digest of its weights, the layout
of the pools, versions, device and kernels. A server that differs in any of it starts with an empty cache.

The digest of the weights is of what was loaded, not of files: names, types and shapes of all parameters, and the sum of
each one's words as integers. It is taken again before saving, since weights may have been updated in between.

Owner: the scheduler's thread.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import sglang.version
import torch
from sglang.srt.arg_groups.overrides import resolved_view

from marconi import __version__
from marconi.engine.core.tree_core import MarconiTreeCore
from marconi.engine.persistence.files import (
    SavedFile,
    SavedFolder,
    Unusable,
    layout_of,
    read_file,
    read_index,
    require_whole,
)
from marconi.engine.version import Refusal
from marconi.events.tree_log import Tenant
from marconi.policy.base import Costs
from marconi.policy.persistence import SAVE_S, SaveBudget, SavedState, least_valuable_first

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

LOAD_S: Final = 60.0
"""Bound of what loading adds to a start; half of it is for checking files."""
_KERNELS: Final = (
    *("dtype", "quantization", "attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("mamba_backend", "linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend"),
)
"""Arguments of a server by which the same tokens give other bits."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SavedCache(Protocol):
    """A cache of one rank, with two pools."""

    costs: Costs
    tree_core: MarconiTreeCore
    page_size: int
    token_to_kv_pool_allocator: Any
    req_to_token_pool: Any

    def clock(self) -> float:
        """Seconds."""


class _Located(NamedTuple):
    """A state, and where it lies in the pools."""

    state: SavedState
    kv: torch.Tensor
    """Indices of the KV that is saved with it."""
    slot: torch.Tensor
    is_end: bool


class Saver:
    """Saves the states of a cache, and loads them into its successor."""

    def __init__(
        self, cache: SavedCache, folder: Path, identity: Mapping[str, str], weights: Callable[[], str]
    ) -> None:
        """`folder` is this rank's; `weights` digests what the model consists of now.

        Raises `Refusal` for pools that SGLang cannot copy to the host.
        """
        self._cache = cache
        self._folder = folder
        self._weights = weights
        self._pool = cache.token_to_kv_pool_allocator.get_kvcache()
        page = torch.arange(cache.page_size, device=cache.tree_core.device)
        try:
            layout = layout_of(self._pool.get_cpu_copy(page, page[:1]))
        except (NotImplementedError, AssertionError, TypeError) as error:
            raise Refusal(
                "--marconi-save-dir: the pools must be such as SGLang copies to the host, got "
                f"{type(self._pool).__name__}: {error or type(error).__name__}"
            ) from None
        self.identity = {**identity, "the layout of KV and states": layout, "the weights": weights()}

    def save(self) -> None:
        """Save what is held, at the end of a server: the cache is empty afterwards, and its memory is not given back.

        An error is logged, and the states that were saved before stay.
        """
        try:
            self._save()
        except Exception:
            logger.exception("marconi: --marconi-save-dir %s: nothing was saved", self._folder)

    def _save(self) -> None:
        began_s = time.monotonic()
        cache = self._cache
        if not cache.tree_core.hybrid.tree.num_states:
            logger.info("marconi: there are no states to save")
            return
        if self._weights() != self.identity["the weights"]:
            logger.warning("marconi: weights were updated while the server ran: its states are not saved")
            return
        located, costs = self._located(), cache.costs
        budget, num_tokens, num_saved = SaveBudget(began_s + SAVE_S), 0, 0
        folder = SavedFolder(self._folder, self.identity)
        try:
            for state, kv, slot, is_end in reversed(located):
                num_bytes, now_s = len(kv) * costs.kv_bytes_per_token + costs.state_bytes, time.monotonic()
                if not budget.has_time(num_bytes, now_s):
                    break
                folder.add(state, is_end=is_end, copies=self._pool.get_cpu_copy(kv, slot))
                budget.written(num_bytes, time.monotonic() - now_s)
                num_saved, num_tokens = num_saved + 1, num_tokens + len(kv)
            folder.finish()
        except BaseException:
            folder.abandon()
            raise
        logger.info(
            "marconi: saved %d of %d states and %d KV tokens to %s in %.1f s",
            *(num_saved, len(located), num_tokens, self._folder, time.monotonic() - began_s),
        )

    def _located(self) -> list[_Located]:
        """All states, the least valuable first, taken out of the tree; their memory stays as it is."""
        core, found = self._cache.tree_core, []
        memory = core.memory
        for node, state in least_valuable_first(core.hybrid, self._cache.costs, self._cache.clock()):
            above = node
            while above.parent is not None and above.depth > state.start:
                above = above.parent
            kv = memory.path_indices(node, above)
            found.append(_Located(state, kv, memory.states[node], node in memory.ends))
        return found

    def load(self) -> None:
        """Load what the last server saved, into a cache that is empty; what cannot be used is named in the log."""
        began_s = time.monotonic()
        try:
            files = self._usable(began_s + LOAD_S / 2)
        except Unusable as error:
            logger.warning("marconi: %s; the cache starts empty", error)
            return
        num_loaded = num_tokens = 0
        try:
            for file in files:
                if time.monotonic() - began_s > LOAD_S or not self._load(file):
                    break
                num_loaded, num_tokens = num_loaded + 1, num_tokens + file.depth - file.start
        except Exception:
            logger.exception("marconi: --marconi-save-dir %s: not all states were loaded", self._folder)
        logger.info(
            "marconi: loaded %d states and %d KV tokens from %s in %.1f s",
            *(num_loaded, num_tokens, self._folder, time.monotonic() - began_s),
        )

    def _usable(self, deadline_s: float) -> list[SavedFile]:
        """The files that fit and are whole, as far as there is time to check them; `Unusable` if one is damaged."""
        cache = self._cache
        num_tokens = cache.token_to_kv_pool_allocator.available_size()
        num_slots = cache.req_to_token_pool.mamba_allocator.available_size()
        files: list[SavedFile] = []
        for file in read_index(self._folder, self.identity)[:num_slots]:
            num_tokens -= file.depth - file.start
            if num_tokens < 0 or time.monotonic() > deadline_s:
                break
            require_whole(self._folder, file)
            files.append(file)
        return files

    def _load(self, file: SavedFile) -> bool:
        """Load a state; false if the pools are full, or KV before it is missing."""
        cache, core = self._cache, self._cache.tree_core
        path, copies = read_file(self._folder, file)
        match = core.hybrid.tree.match(path, file.depth, file.namespace)
        if match.num_live_tokens != file.start:
            return False
        kv_allocator, slots = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator
        num_tokens = file.depth - file.start
        kv = kv_allocator.alloc(num_tokens) if num_tokens else torch.empty(0, dtype=torch.int64, device=core.device)
        slot = None if kv is None else slots.alloc(1)
        is_loaded = False
        try:
            if kv is None or slot is None:
                return False
            self._pool.load_cpu_copy(copies, kv, slot)
            is_loaded = True
        finally:
            if not is_loaded:
                for allocator, taken in ((kv_allocator, kv), (slots, slot)):
                    if taken is not None and len(taken):
                        allocator.free(taken)
        adopt = partial(core.hybrid.adopt, path, file.namespace, file.depth, file.facts, cache.clock())
        node = core.insert(kv, file.start, Tenant(None, None), adopt)
        core.memory.keep_state(node, slot)
        if file.is_end:
            core.memory.ends.add(node)
        return True


def identity_of(ctx: "TreeCacheBuildContext") -> dict[str, str]:
    """The facts on which the states of a server depend beside its weights and pools, by name."""
    config = ctx.model_config.hf_config.to_dict()
    config.pop("_name_or_path", None)
    text = json.dumps(config, sort_keys=True, default=str)
    arguments, device = resolved_view(ctx.server_args), torch.device(ctx.params.token_to_kv_pool_allocator.device)
    return {
        "the digest of the model's configuration": blake2b(text.encode(), digest_size=16).hexdigest(),
        "the version of SGLang": sglang.version.__version__,
        "the version of marconi": __version__,
        "the device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "the number of ranks": str(ctx.tp_size),
        "the page": str(ctx.params.page_size),
        **{"--" + name.replace("_", "-"): str(getattr(arguments, name, None)) for name in _KERNELS},
    }


def digest_of_weights(model: torch.nn.Module) -> str:
    """Digest names, types, shapes and sums of the parameters of `model`, on whichever device they are."""
    digest, sums = blake2b(digest_size=16), []
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)}\n".encode())
        sums.append(data.view(_WORDS[data.element_size()]).sum(dtype=torch.int64))
    for total in torch.stack(sums).tolist() if sums else ():
        digest.update(total.to_bytes(8, "little", signed=True))
    return digest.hexdigest()
