"""A cache's states, saved when its server stops cleanly or is asked to, and loaded before the next one's first request.

    stop      the scheduler's last act (`release_host_resources`): the most valuable states first, within `SAVE_S`
    demand    the same while it serves, within `DEMAND_S`: between two steps states are copied to the host's memory for
              `SLICE_S`, or one that takes longer, and a thread writes them; nothing more is copied until it has
    start     once the cache is built: every file is checked, then as many states are loaded as the pools hold; with a
              host tier they are loaded there, while the server serves (`background.py`)

Saving changes nothing in the tree. What is evicted or flushed before its turn is left out (`policy/persistence.py`).

Pools are copied by SGLang's own functions (`stores.py`), so a state and its KV come back bit for bit. That they are
those of this model, the identity says: the model's configuration, a digest of its weights, the layout of the pools,
versions, device and kernels. A server that differs in any of it starts with an empty cache.

The digest of the weights is of what was loaded, not of files (`weights.py`). A thread takes it while the server starts
and serves; loading waits for it where there is something to load. Before saving, and after saving on demand, a look
tells whether weights were updated since. A folder is one server's (`lock.py`).

Owner: the scheduler's thread; the thread that writes has the copies and the folder.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sglang.version
import torch
from sglang.srt.arg_groups.overrides import resolved_view

from marconi import __version__
from marconi.engine.persistence.background import BackgroundLoad
from marconi.engine.persistence.files import (
    WEIGHTS,
    SavedFile,
    SavedFolder,
    Unusable,
    read_file,
    read_usable,
)
from marconi.engine.persistence.lock import FolderLock
from marconi.engine.persistence.stores import DeviceStore, SavedCache, Store, TierStore, lies_where_it_lay, store_of
from marconi.engine.persistence.weights import Weights
from marconi.engine.version import Refusal
from marconi.events.tree_log import Tenant
from marconi.policy.persistence import SAVE_S, SaveBudget, SavedPaths, SavedState

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

LOAD_S: Final = 60.0
"""Bound of what loading adds to a start; half of it is for the digest of the weights and for checking files."""
_DIGEST_S: Final = 2.0
"""How long a stop waits for the first digest."""
DEMAND_S: Final = 60.0
"""Bound of saving on demand: more would not be loaded either."""
SLICE_S: Final = 0.02
"""How long a step waits for copies, unless one state takes longer."""
_KERNELS: Final = (
    *("dtype", "quantization", "attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("mamba_backend", "linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend"),
)
"""Arguments of a server by which the same tokens give other bits."""
_UPDATED: Final = "weights were updated while the server ran: its states are not saved"
_FAILED: Final = "marconi: --marconi-save-dir %s: nothing was saved"


class Saved(NamedTuple):
    """The result of a pass."""

    num_states: int
    num_held: int
    """States that were held when saving began."""
    num_kv_tokens: int
    seconds: float


class _Copy(NamedTuple):
    """A state and its KV on the host."""

    state: SavedState
    is_end: bool
    copies: Any
    num_bytes: int
    began_s: float


class _Pass:
    """One pass over all states of a cache, into a folder."""

    def __init__(self, cache: SavedCache, store: Store, folder: SavedFolder, limit_s: float) -> None:
        """Rank the states; the pass ends `limit_s` seconds from now at the latest."""
        self._began_s = time.monotonic()
        self._cache = cache
        self.folder = folder
        self._budget = SaveBudget(self._began_s + limit_s)
        self._store = store
        held = [(ranked, store.places(ranked.node)) for ranked in store.ranked()]
        self._left, self._num_held = iter(held), len(held)
        self._paths = SavedPaths(cache.tree_core.hybrid.tree)
        self._num_states = self._num_kv_tokens = 0

    def copy(self) -> _Copy | None:
        """Copy the next state that has been held since the pass began; None after the last, or when time is over.

        So its KV is the same as what states before it brought.
        """
        cache, store, now_s = self._cache, self._store, time.monotonic()
        for ranked, places in self._left:
            node = ranked.node
            if not lies_where_it_lay(places, store.places(node)):
                continue
            state = self._paths.add(ranked)
            num_tokens = state.depth - state.start
            num_bytes = num_tokens * cache.costs.kv_bytes_per_token + cache.costs.state_bytes
            if not self._budget.has_time(num_bytes, now_s):
                self._left = iter(())
                return None
            return _Copy(state, store.is_end(node), store.copy(node, state.start), num_bytes, now_s)
        return None

    def write(self, copies: list[_Copy]) -> None:
        """Write what was copied."""
        for state, is_end, copied, _, _ in copies:
            self.folder.add(state, is_end=is_end, copies=copied)
            self._num_states += 1
            self._num_kv_tokens += state.depth - state.start
        self._budget.written(sum(copy.num_bytes for copy in copies), time.monotonic() - copies[0].began_s)

    def finish(self, identity: Mapping[str, str]) -> Saved:
        """Put the folder, of a server that is `identity`, in its place, unless nothing was saved."""
        if self._num_states:
            self.folder.finish(identity)
        else:
            self.folder.abandon()
        took_s = time.monotonic() - self._began_s
        return Saved(self._num_states, self._num_held, self._num_kv_tokens, round(took_s, 3))


class _Demand:
    """A pass that the scheduler makes between its steps, and what its thread looks at and writes meanwhile."""

    def __init__(self, saving: _Pass, identify: Callable[[Callable[[], bool]], Mapping[str, str]]) -> None:
        """`identify` says what the server is, as long as what it is given says so; `Unusable` where it changed."""
        self.saving = saving
        self._identify = partial(identify, self._is_going_on)
        self._has_ended = Event()
        self._thread = ThreadPoolExecutor(1, "marconi-save")
        self._first: Future[Any] = self._thread.submit(self._identify)
        self._writing: Future[Saved | None] | None = None

    def advance(self) -> Saved | None:
        """Copy on unless the thread still writes; returns what was saved once all is written.

        Raises what writing raised, and `Unusable` if the weights were updated before it began or until its end.
        """
        if self._writing is not None:
            if not self._writing.done():
                return None
            self._first.result()
            saved = self._writing.result()
            if saved is not None:
                return saved
        copies, deadline_s = list[_Copy](), time.monotonic() + SLICE_S
        while (not copies or time.monotonic() < deadline_s) and (copy := self.saving.copy()) is not None:
            copies.append(copy)
        if copies:
            self._writing = self._thread.submit(self.saving.write, copies)
        else:
            self._writing = self._thread.submit(lambda: self.saving.finish(self._identify()))
        return None

    def end(self) -> None:
        """Wait for the thread; what is not finished is removed."""
        self._has_ended.set()
        self._thread.shutdown()
        self.saving.folder.abandon()

    def _is_going_on(self) -> bool:
        return not self._has_ended.is_set()


class Saver:
    """Saves the states of a cache, and loads them into its successor."""

    def __init__(
        self,
        cache: SavedCache,
        folder: Path,
        identity: Mapping[str, str],
        weights: Weights,
        lock: FolderLock | None = None,
    ) -> None:
        """`folder` is this rank's, and `lock` is held until the states are saved.

        Raises `Refusal` for pools that SGLang cannot copy to the host.
        """
        self._cache = cache
        self._folder = folder
        self._weights = weights
        self._lock = lock
        self._demand: _Demand | None = None
        self._loading: BackgroundLoad | None = None
        try:
            self._store = store_of(cache)
        except (NotImplementedError, AssertionError, TypeError) as error:
            pool = type(cache.token_to_kv_pool_allocator.get_kvcache()).__name__
            raise Refusal(
                "--marconi-save-dir: the pools must be such as SGLang copies to the host, got "
                f"{pool}: {error or type(error).__name__}"
            ) from None
        self.identity = {**identity, "the layout of KV and states": self._store.layout}

    def save(self) -> None:
        """Save what is held, at the end of a server.

        An error is logged, and the states that were saved before stay; so they do while they are still being loaded.
        """
        try:
            if self._loading is not None:
                self._loading.end()
                self._loading = None
                logger.warning("marconi: %s was not loaded to its end, and stays as it is", self._folder)
                return
            if self._demand is not None:
                self._demand.end()
            self._save()
        except Unusable as error:
            logger.warning("marconi: %s", error)
        except Exception:
            logger.exception(_FAILED, self._folder)
        finally:
            self._weights.end()
            if self._lock is not None:
                self._lock.release()

    def advance(self) -> dict[str, Any] | None:
        """Save on demand, a slice at each call: None until it is done, then a `Saved` or an `error`, by name.

        The call after that begins anew. What is still being loaded is loaded first.
        """
        if self._loading is not None:
            return None
        try:
            if self._demand is None:
                self._demand = _Demand(self._pass(DEMAND_S), self._identified)
            saved = self._demand.advance()
            if saved is None:
                return None
            self._log(saved)
            answer = {"folder": str(self._folder), **saved._asdict()}
        except Unusable as error:
            logger.warning("marconi: %s", error)
            answer = {"error": str(error)}
        except Exception as error:
            logger.exception(_FAILED, self._folder)
            answer = {"error": f"nothing was saved: {type(error).__name__}: {error}"}
        if self._demand is not None:
            self._demand.end()
            self._demand = None
        return answer

    def _save(self) -> None:
        until_s = time.monotonic() + _DIGEST_S
        identity = self._identified(lambda: time.monotonic() < until_s)
        saving = self._pass(SAVE_S)
        try:
            while (copy := saving.copy()) is not None:
                saving.write([copy])
            self._log(saving.finish(identity))
        except BaseException:
            saving.folder.abandon()
            raise

    def _pass(self, limit_s: float) -> _Pass:
        return _Pass(self._cache, self._store, SavedFolder(self._folder), limit_s)

    def _identified(self, is_going_on: Callable[[], bool]) -> Mapping[str, str]:
        """The identity with that of the weights; `Unusable` if they are not those that the states were made by."""
        digest = self._weights.digest(is_going_on)
        if self._weights.were_updated():
            raise Unusable(_UPDATED)
        return {**self.identity, WEIGHTS: digest}

    def _log(self, saved: Saved) -> None:
        logger.info(
            "marconi: saved %d of %d states and %d KV tokens to %s in %.1f s",
            *(saved.num_states, saved.num_held, saved.num_kv_tokens, self._folder, saved.seconds),
        )

    def go_on_loading(self) -> None:
        """Between two steps: load another slice to the host tier, if there is more."""
        if self._loading is not None and not self._loading.advance():
            self._loading = None

    def flushed(self) -> None:
        """The cache was flushed: what is not loaded yet would have been flushed as well."""
        if self._loading is not None:
            self._loading.flushed()
            self._loading = None

    def load(self) -> None:
        """Load what the last server saved, into a cache that is empty; what cannot be used is named in the log.

        With a host tier, begin to.
        """
        if isinstance(self._store, TierStore):
            self._loading = BackgroundLoad(self._store, self._folder, self.identity, self._weights)
        else:
            self._load_all(self._store)

    def _load_all(self, store: DeviceStore) -> None:
        began_s = time.monotonic()

        def is_going_on() -> bool:
            return time.monotonic() <= began_s + LOAD_S / 2

        try:
            files = read_usable(
                self._folder,
                self.identity,
                lambda: self._weights.digest(is_going_on),
                (
                    self._cache.req_to_token_pool.mamba_allocator.available_size(),
                    self._cache.token_to_kv_pool_allocator.available_size(),
                ),
                is_going_on,
            )
        except Unusable as error:
            logger.warning("marconi: %s; the cache starts empty", error)
            return
        num_loaded = num_tokens = 0
        try:
            for file in files:
                if time.monotonic() - began_s > LOAD_S or not self._load(store, file):
                    break
                num_loaded, num_tokens = num_loaded + 1, num_tokens + file.depth - file.start
        except Exception:
            logger.exception("marconi: --marconi-save-dir %s: not all states were loaded", self._folder)
        logger.info(
            "marconi: loaded %d states and %d KV tokens from %s in %.1f s",
            *(num_loaded, num_tokens, self._folder, time.monotonic() - began_s),
        )

    def _load(self, store: DeviceStore, file: SavedFile) -> bool:
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
            store.load(copies, kv, slot)
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
