"""Affinity: which worker served a prefix or a group last, and how warm each worker is.

    seen     tokens of a prompt's beginning that a worker was the last to serve, whether it still holds them or not
    group    requests of one name space that their client calls akin: which worker was the last to serve one
    warm     tokens that a worker was the last to serve, weighed by age: sum of tokens x 2^(-age / half_life_s)

Positions are remembered at the blocks 1, 2, 4, .. 64 of a path, then at every 64th; a group is a place without tokens
beside them. A request writes its worker and the time there, and takes what it touches from the worker before. So a
conversation that continues counts on one worker alone and with all its tokens, however few of them it computes; one
that ended fades away. A request that its worker did not serve after all is taken back, and what it took from other
workers is given back to them.

Both are the router's own knowledge, in no worker's events. A worker that forgot a prefix may still know it as a ghost,
and only it will take the next occurrence for a second one. Above `max_places` the least recently used are forgotten.

Owner: `Dispatcher`. A request costs the positions of its prompt, one in 64 blocks.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from marconi.router.index import Chain

STEP_BLOCKS = 64
HALF_LIFE_S = 60.0
MAX_PLACES = 1_000_000

_Key = tuple[bytes, int | bytes]
"""Namespace, and the hash of a block or a group."""


@dataclass(slots=True, eq=False)
class _Place:
    """The worker that served a position last."""

    worker: str
    at_s: float
    num_tokens: int
    """Tokens from the position before."""
    num_prompt_tokens: int
    """Tokens of the whole path that passed here last, in whole blocks."""
    is_taken_back: bool = False


class Seen(NamedTuple):
    """The longest beginning of a prompt that any request had, at the positions that are remembered."""

    worker: str
    """The worker that served it last."""
    num_tokens: int
    num_prompt_tokens: int
    """Tokens, in whole blocks, of the last request that had this beginning: more where it diverges from the prompt."""


@dataclass(frozen=True, slots=True)
class Served:
    """The places that a request wrote, to be taken back if it was not served after all."""

    keys: list[_Key]
    places: list[_Place]
    before: list[_Place | None]
    """The places that were there before. Three lists are three objects for the garbage collector to walk."""


class Affinity:
    """The worker that served each prefix last; time is passed in and does not decrease."""

    def __init__(self, block_tokens: int, half_life_s: float = HALF_LIFE_S, max_places: int = MAX_PLACES) -> None:
        """`ValueError` for a half-life or a number of places that is not above 0."""
        for name, value in (("half_life_s", half_life_s), ("max_places", max_places)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        self._block_tokens = block_tokens
        self._half_life_s = half_life_s
        self._max_places = max_places
        self._places: dict[_Key, _Place] = {}
        """The least recently used first."""
        self._warm: dict[str, tuple[float, float]] = {}
        """Worker -> its warm tokens, and as of when."""

    def __len__(self) -> int:
        return len(self._places)

    def add_worker(self, worker: str) -> None:
        """Add a worker that has served nothing."""
        self._warm[worker] = (0.0, 0.0)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker; its places fade."""
        del self._warm[worker]

    def seen(self, chain: Chain) -> Seen | None:
        """The longest known beginning of a prompt; None if there is none, or its worker was removed."""
        for index in reversed(_positions(len(chain.hashes))):
            place = self._places.get((chain.namespace, chain.hashes[index]))
            if place is not None:
                found = Seen(place.worker, (index + 1) * self._block_tokens, place.num_prompt_tokens)
                return found if place.worker in self._warm else None
        return None

    def served_akin(self, chain: Chain, group: bytes | None) -> str | None:
        """The worker that was the last to serve one of a `group`; None if nobody was, or it was removed."""
        place = None if group is None else self._places.get((chain.namespace, group))
        return place.worker if place is not None and place.worker in self._warm else None

    def warm_tokens(self, worker: str, now_s: float) -> float:
        """Tokens of a worker that are warm now."""
        tokens, as_of_s = self._warm[worker]
        return tokens * self._decay(now_s - as_of_s)

    def serve(self, worker: str, chain: Chain, now_s: float, group: bytes | None = None) -> Served:
        """Note that a request, of a `group` if it has one, was given to a worker."""
        places, num_prompt_tokens = self._places, len(chain.hashes) * self._block_tokens
        served = Served([], [], [])
        taken: dict[str, float] = {worker: 0.0}
        written: list[tuple[int | bytes, int]] = [
            (chain.hashes[index], (index - last) * self._block_tokens)
            for last, index in pairwise((-1, *_positions(len(chain.hashes))))
        ]
        if group is not None:
            written.append((group, 0))
        for name, num_tokens in written:
            key = (chain.namespace, name)
            before = places.pop(key, None)
            if before is not None:
                taken[before.worker] = taken.get(before.worker, 0.0) - num_tokens * self._decay(now_s - before.at_s)
            place = places[key] = _Place(worker, now_s, num_tokens, num_prompt_tokens)
            served.keys.append(key)
            served.places.append(place)
            served.before.append(before)
            taken[worker] += num_tokens
        self._warm_up(taken, now_s)
        while len(places) > self._max_places:
            del places[next(iter(places))]
        return served

    def take_back(self, served: Served, now_s: float) -> None:
        """Undo `serve` for a request that was not served; places that another has written since stay as they are."""
        taken: dict[str, float] = {}
        for key, place, before in zip(served.keys, served.places, served.before, strict=True):
            place.is_taken_back = True
            if self._places.get(key) is not place:
                continue
            warmth = place.num_tokens * self._decay(now_s - place.at_s)
            taken[place.worker] = taken.get(place.worker, 0.0) - warmth
            if before is None or before.is_taken_back:
                del self._places[key]
                continue
            self._places[key] = before
            warmth = before.num_tokens * self._decay(now_s - before.at_s)
            taken[before.worker] = taken.get(before.worker, 0.0) + warmth
        self._warm_up(taken, now_s)

    def _warm_up(self, taken: dict[str, float], now_s: float) -> None:
        for name, num_tokens_more in taken.items():
            if name in self._warm:
                self._warm[name] = (max(self.warm_tokens(name, now_s) + num_tokens_more, 0.0), now_s)

    def check_invariants(self, now_s: float) -> None:
        """Raise `AssertionError` where a worker is not as warm as its places; only while none was forgotten."""
        for worker in self._warm:
            own = (place for place in self._places.values() if place.worker == worker)
            warm = sum(place.num_tokens * self._decay(now_s - place.at_s) for place in own)
            assert abs(warm - self.warm_tokens(worker, now_s)) <= 1e-6 * max(warm, 1.0)

    def _decay(self, age_s: float) -> float:
        return float(2.0 ** (-max(age_s, 0.0) / self._half_life_s))


def _positions(num_blocks: int) -> list[int]:
    """Indices of the blocks at whose ends a place is remembered, rising."""
    first = [(1 << power) - 1 for power in range(min(num_blocks, STEP_BLOCKS).bit_length())]
    return [*first, *range(2 * STEP_BLOCKS - 1, num_blocks, STEP_BLOCKS)]
