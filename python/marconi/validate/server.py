"""A running server over HTTP: the configuration of its cache, and its answers."""

import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, Final
from urllib.parse import quote

import msgspec

from marconi.engine.launch.policies import JUDICIOUS
from marconi.engine.reports.explain import EXPLAIN
from marconi.engine.reports.moments import Steps
from marconi.engine.reports.status import CacheSettings, Use
from marconi.process import fetch, from_json
from marconi.view.top import address_of, ask

FLUSH_TIMEOUT_S: Final = 30
RECENT_S: Final = 60
OWN: Final = "validate-"
"""How the ids of this command's requests begin."""
_ANSWER_TIMEOUT_S: Final = 1800.0
_WORKING: Final = "its working slot"
_TRACKED: Final = "what SGLang tracked last"


class RequestRefused(Exception):
    """The server refuses a request; the message is its own."""


@dataclass(frozen=True, slots=True)
class ServedCache:
    """The cache of a server, as a replay is made of it: of its status what decides which states it keeps."""

    eviction: str
    alpha: float | None
    kv_bytes_per_token: int
    state_bytes: int
    kv_tokens: Use
    state_slots: Use
    joint_bytes: Use | None
    settings: CacheSettings
    max_prompt_tokens: int | None = None
    """Tokens of the longest prompt that it serves; None if it does not say."""

    @property
    def track_tokens(self) -> int | None:
        """Tokens between two states of an answer of which one is kept; None where its last state is."""
        return self.settings.track_tokens if self.settings.ends == _TRACKED else None

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> "ServedCache":
        """Read `GET /marconi` and `GET /server_info`; `ValueError`, in one line, for what no replay stands for."""
        if len(ranks) != 1:
            raise ValueError(f"the server must have one data-parallel rank, got {len(ranks)}")
        (rank,) = ranks
        try:
            cache = msgspec.convert({**rank, "max_prompt_tokens": _max_prompt_tokens(info)}, cls)
        except msgspec.ValidationError:
            raise ValueError(
                "the server does not say the settings of its cache: it runs another version of marconi"
            ) from None
        why = _why_not(rank, cache.settings, info)
        if why is not None:
            raise ValueError(f"the replay does not stand for this server: {why}")
        return cache


def _max_prompt_tokens(info: Mapping[str, Any]) -> int | None:
    limit = info.get("max_req_input_len")
    return limit - 1 if isinstance(limit, int) else None


def _why_not(rank: Mapping[str, Any], settings: CacheSettings, info: Mapping[str, Any]) -> str | None:
    if rank["why_not_planned"] is not None:
        return f"it plans no states ({rank['why_not_planned']})"
    if settings.admission != JUDICIOUS:
        return f"--marconi-admission {settings.admission} keeps states where SGLang does"
    if rank["eviction"] == "tail":
        return "--marconi-eviction tail depends on prefill times that it learns"
    if rank["host"] is not None:
        return "loads from a host tier depend on prefill times that it learns, and copies take time"
    if info.get("speculative_algorithm") is not None or settings.ends not in (_WORKING, _TRACKED):
        return "it decodes by accepting drafts, or does not decode"
    if info.get("enable_int8_mamba_checkpoint"):
        return "--enable-int8-mamba-checkpoint gives states of the tree a pool of their own"
    if info.get("mamba_radix_cache_strategy") == "extra_buffer_lazy":
        return "--mamba-radix-cache-strategy extra_buffer_lazy takes slots as it decodes"
    return None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a request."""

    output: tuple[int, ...]
    num_cached_tokens: int
    line: str
    """Why the prompt's other tokens were computed."""
    steps: Steps
    """The scheduler's steps with it; it has begun and ended."""

    @classmethod
    def of(cls, output: Sequence[int], num_cached_tokens: int, explained: Mapping[str, Any]) -> "Completion":
        """Read what `marconi_explain` gave; `TypeError`, `KeyError` or `ValueError` for another version's."""
        return cls(tuple(output), num_cached_tokens, explained["line"], Steps.of(explained["steps"]))


class ServerClient:
    """A client of one server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raise `ValueError` unless it is an HTTP address."""
        self.address = address_of(url)
        self._api_key = api_key

    def ranks(self) -> list[dict[str, Any]]:
        """Ask `GET /marconi`; `NoAnswer`, or `ValueError` in one line, where it is none of ours."""
        return ask(self.address, self._api_key)

    def info(self) -> dict[str, Any]:
        """Ask `GET /server_info`."""
        return self._described("/server_info")

    def others(self) -> tuple[int, int]:
        """Requests that run or wait, and those that have begun within `RECENT_S`, without those of `OWN`."""
        loads = self._described("/v1/loads?include=core").get("loads", ())
        latest = chain.from_iterable(rank["requests"] for rank in ask(self.address, self._api_key, "/marconi/requests"))
        return (
            sum(load.get(name, 0) for load in loads for name in ("num_running_reqs", "num_waiting_reqs")),
            sum(each["seconds_ago"] < RECENT_S and not each["rid"].startswith(OWN) for each in latest),
        )

    def flush(self) -> None:
        """Drop all that is cached; `ValueError` where the server does not, as while other requests run."""
        try:
            self._read(f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", {})
        except RequestRefused as error:
            raise ValueError(f"{self.address} does not flush its cache: {error}") from None

    def generate(self, rid: str, prompt: Sequence[int], num_output_tokens: int, namespace: int = 0) -> Completion:
        """Generate exactly `num_output_tokens`. Raises `RequestRefused`, or `ValueError` for an unexplained answer."""
        sampling = {
            "temperature": 0,
            "max_new_tokens": num_output_tokens,
            "ignore_eos": True,
            "custom_params": {EXPLAIN: True},
        }
        body = {"rid": rid, "input_ids": list(prompt), "sampling_params": sampling}
        if namespace:
            body["extra_key"] = f"validate-{namespace}"
        answer = self._json("/generate", body)
        try:
            meta = answer["meta_info"]
            return Completion.of(answer["output_ids"], int(meta["cached_tokens"]), meta[EXPLAIN])
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{self.address}/generate does not explain {quote(rid)}: it was started with "
                "--marconi-explain off, runs another version of marconi, or aborted the request"
            ) from None

    def _described(self, path: str) -> dict[str, Any]:
        try:
            found = self._json(path, None)
        except RequestRefused as error:
            raise ValueError(f"{self.address}{path}: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{self.address}{path} describes no server")
        return found

    def _json(self, path: str, body: Mapping[str, Any] | None) -> Any:
        return from_json(f"{self.address}{path}", self._read(path, body))

    def _read(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        try:
            return fetch(f"{self.address}{path}", body, api_key=self._api_key, timeout_s=_ANSWER_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(1000).decode(errors="replace").split())
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise RequestRefused(f"{error.code}: {said}") from None
            raise ValueError(f"{self.address}{path} fails with {error.code}: {said}") from None
