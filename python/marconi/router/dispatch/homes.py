"""Where prefixes were last served, remembered when their workers hold them no more, and how warm each worker is.

    seen     of a prompt, how much of its beginning a worker was the last to serve
    warm     tokens that a worker was the last to serve, half as many after `half_life_s`: sum of tokens 2^(-age / h)

What was seen is remembered at few positions of a path, in blocks: 1, 2, 4, .. 64, then every 64th. A request writes
its worker and the time there, and takes what it touches from the worker before. So a conversation that goes on counts
on one worker alone and with all its tokens, however few of them it computes; one that ended fades away.

Both are of the router's own doing: no worker tells them. A worker that forgot a prefix may still know it as a ghost,
and only it will take the next occurrence for a second one. Beyond `max_places` the ones longest unused are forgotten.

Owner: `Dispatcher`. Costs: the positions of a prompt, one in 64 blocks.
"""

from collections.abc import Iterator

from marconi.router.index.base import Chain

STEP_BLOCKS = 64
HALF_LIFE_S = 60.0
MAX_PLACES = 1_000_000

_Place = tuple[bytes, int]
"""Namespace, hash."""


class Homes:
    """Owned by `Dispatcher`; time is passed in and does not go back."""

    def __init__(self, block_tokens: int, half_life_s: float = HALF_LIFE_S, max_places: int = MAX_PLACES) -> None:
        """`ValueError` for a half-life or a number of places that is not above 0."""
        for name, value in (("half_life_s", half_life_s), ("max_places", max_places)):
            if not value > 0:
                raise ValueError(f"{name}={value}: give more than 0")
        self._block_tokens = block_tokens
        self._half_life_s = half_life_s
        self._max_places = max_places
        self._places: dict[_Place, tuple[str, float, int]] = {}
        """Worker, when, and the tokens from the position before; the one longest unused first."""
        self._warm: dict[str, tuple[float, float]] = {}
        """Of each worker, tokens and as of when."""

    def __len__(self) -> int:
        return len(self._places)

    def add_worker(self, worker: str) -> None:
        """One that has served nothing."""
        self._warm[worker] = (0.0, 0.0)

    def remove_worker(self, worker: str) -> None:
        """Its places find nobody from now on, and fade."""
        del self._warm[worker]

    def seen(self, chain: Chain) -> tuple[str, int] | None:
        """Who served the longest known beginning of a prompt last, and its tokens; None if nobody known did."""
        for index in reversed(list(_positions(len(chain.hashes)))):
            place = self._places.get((chain.namespace, chain.hashes[index]))
            if place is not None:
                return (place[0], (index + 1) * self._block_tokens) if place[0] in self._warm else None
        return None

    def warm_tokens(self, worker: str, now_s: float) -> float:
        """How warm it is."""
        tokens, as_of_s = self._warm[worker]
        return tokens * self._decay(now_s - as_of_s)

    def serve(self, worker: str, chain: Chain, now_s: float) -> None:
        """A request was given to a worker."""
        places, end = self._places, 0
        taken: dict[str, float] = {worker: 0.0}
        for index in _positions(len(chain.hashes)):
            key = (chain.namespace, chain.hashes[index])
            num_tokens, end = (index + 1 - end) * self._block_tokens, index + 1
            before = places.pop(key, None)
            if before is not None:
                taken[before[0]] = taken.get(before[0], 0.0) - num_tokens * self._decay(now_s - before[1])
            places[key] = (worker, now_s, num_tokens)
            taken[worker] += num_tokens
        for name, num_tokens_more in taken.items():
            if name in self._warm:
                self._warm[name] = (max(self.warm_tokens(name, now_s) + num_tokens_more, 0.0), now_s)
        while len(places) > self._max_places:
            del places[next(iter(places))]

    def check_invariants(self, now_s: float) -> None:
        """Raise `AssertionError` where a worker is not as warm as its places; only while none was forgotten."""
        for worker in self._warm:
            warm = sum(size * self._decay(now_s - at_s) for name, at_s, size in self._places.values() if name == worker)
            assert abs(warm - self.warm_tokens(worker, now_s)) <= 1e-6 * max(warm, 1.0)

    def _decay(self, age_s: float) -> float:
        return float(2.0 ** (-max(age_s, 0.0) / self._half_life_s))


def _positions(num_blocks: int) -> Iterator[int]:
    """Indices of the blocks at whose ends is remembered who served a path, rising."""
    end = 1
    while end <= num_blocks:
        yield end - 1
        end += min(end, STEP_BLOCKS)
