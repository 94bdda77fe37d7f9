"""The plan of a prefill: the positions at which a request leaves recurrent states.

    prompt of a request:

    0 ------------ hit -------- step ------ branch ------- shared --- guard -- turn -- 1 --| answer ------ end
                    |                          |              |          |       |     |   |                |
       the state it resumes from     known prompts         waiting    learned   next turns          the next turn
                                     diverge here          prompts    distance  diverge here        resumes here

All but the end are known before the prefill starts, so that it writes them as it passes (`PrefillPlan`):

    asked for      what the program names (`hints.py`), at the prompt's very end if it says so
    shared         where requests that wait leave this prompt (`waiting.py`), the two deepest such places
    rule           the branch point, and a guard                                  (`Judicious`, `Guarded`)
    system         where the system prompt of a chat ends, if at least `MIN_SYSTEM_TOKENS` up to there are new; of a
                   prompt that is known further, the rule's branch point is enough
    next turn      where later prompts are likely to leave this one (`forecast/turns.py`); if that is not known, one
                   token before the prompt's end, which serves a repeat and every continuation of the prompt: the last
                   token is always computed anew for its logits, so a state after it serves no repeat. On a server that
                   has seen little, a little further back as well
    steps          on the way of a long prefill
    chunk ends     the last before each place where prompts part: shared, a known branch point, system
    on trial       over what is new of a prompt that continues no conversation, while memory is idle    (`trials.py`)
    the end        of the answer, when the request finishes

Of shared, rule, system and next turn at most `MAX_STATES` in all are planned, the first of them.

The rule is Marconi's (section 4.1), judicious admission: at most two states a request, where reuse is likely.

- Prefixes of inputs are discovered by speculative insertion: if the prompt, from its second occurrence on, diverges
  from the known prefixes in the middle of an edge or at a node with a child, others will branch there too, and the
  state at that point is kept. A prompt known as a whole has its branch point at most one token before its end.
- A conversation's next turn resumes from its last decoded token, so the state there is kept.
- A guard is added to these a learned distance before the end (`forecast/turns.py`), as long as guards are worth
  their memory: a guard takes one state, and has to save, a request, at least `MIN_GAIN` of the tokens whose KV would
  take as much. It is a low bar on purpose, for eviction weighs each guard by itself.

A long stretch leaves *steps* as well, one every `STEP_TOKENS` back from its end. Few requests start from a step; it is
there for when KV gets short. KV is of use only before a state, so a path that ends in its only state is evicted all at
once, however few tokens are wanted; with steps it is trimmed one step at a time, and the rest of it still serves.
Stock SGLang has this from its state every prefill chunk; what steps win, and at which distance, is in
`docs/hit-rate.md`. A step is a state like any other: the eviction rule says what it is worth. In two pools slots are
often spare where KV is short: each step is then divided in `SPARE_STEPS`, by states for which nothing is evicted
(`HybridCache.deserves`). In one pool a spare slot is KV's memory as well, and from a host tier KV comes back: there
they win nothing.

A prompt that leaves the others a few tokens before they part cannot start from their state. Stock's states stand at
chunk ends, where it can; so the last chunk end before such a place has a state, too, while memory is spare.

Where slots run out, the least valuable state is dropped. The next turn's states are *speculative*, and so are the end
of a system prompt, which may be nobody else's, and a branch
point where a conversation leaves its last prompt, as its template always does: each takes a slot only if it is worth
more than the victim for it, by the rule that evicts (`Eviction.outranks`), in the role that it is to have. All others
get a slot before them, those that more requests share, the shallower, first:

    asked for, shared, the rule's, steps   ->   speculative, by decreasing saving   ->   those if spare, on trial

Invariant: depths rise, lie beyond the hit and, but for those asked for, before the prompt's last token, on the grid.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple

from marconi.policy.admission.base import LEAST_GAIN_TOKENS, Admission
from marconi.policy.admission.trials import CHUNK_TOKENS, trial_depths
from marconi.policy.base import Costs, Role
from marconi.policy.forecast.turns import DivergenceWindow
from marconi.policy.request import Lease, Request
from marconi.tree import Match

STEP_TOKENS: Final = 24_576
"""Three of SGLang's default prefill chunks: nearly all that a state a chunk wins, with a third of the states."""
SPARE_STEPS: Final = 3
"""Such that a step where slots are spare is one of SGLang's chunks: with half of it nothing more is won."""
MAX_STATES: Final = 4
MAX_SHARED: Final = 2
MIN_GAIN: Final = 0.02
MIN_SYSTEM_TOKENS: Final = CHUNK_TOKENS
"""System prompts that differ in their last lines, as in a date, leave no state each."""


@dataclass(frozen=True, slots=True)
class Judicious:
    """The branch point, if the tree or a ghost knows one, and the last decoded token; `grid_tokens` 1 is exact."""

    grid_tokens: int = 1
    least_tokens: int = LEAST_GAIN_TOKENS
    """How far beyond the hit a branch point has to lie."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a grid below one token."""
        if self.grid_tokens < 1:
            raise ValueError(f"grid_tokens must be 1 or more, got {self.grid_tokens}")

    plans_ahead: ClassVar[bool] = True

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """The branch point and the end, as far as they lie beyond the hit."""
        grid, hit = self.grid_tokens, match.checkpoint.depth
        num_processed = request.num_prompt_tokens + max(request.num_output_tokens, 1) - 1
        end = min(num_processed, request.num_known_tokens) // grid * grid
        seen = match.num_seen_tokens
        if seen > hit and (match.diverges or seen >= request.num_prompt_tokens):
            branch = min(seen, request.num_prompt_tokens - 1) // grid * grid
            if hit + self.least_tokens <= branch < end:
                return (branch, end)
        return (end,) if end > hit else ()


@dataclass(frozen=True, slots=True)
class Guarded:
    """The branch point, the guard and the last decoded token."""

    judicious: Judicious
    divergence: DivergenceWindow
    costs: Costs

    plans_ahead: ClassVar[bool] = True

    @property
    def grid_tokens(self) -> int:
        """That of `judicious`."""
        return self.judicious.grid_tokens

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """Add a guard to the depths of `judicious`, where there is room for one."""
        depths = self.judicious.depths(request, match)
        distance = self.divergence.distance_tokens
        if not depths or not distance:
            return depths
        if self.divergence.gain_tokens * self.costs.kv_bytes_per_token < MIN_GAIN * self.costs.state_bytes:
            return depths
        grid = self.judicious.grid_tokens
        guard = (depths[-1] - distance) // grid * grid
        above = depths[-2] if len(depths) > 1 else match.checkpoint.depth
        return (*depths[:-1], guard, depths[-1]) if guard > above else depths


@dataclass(frozen=True, slots=True)
class Wishes:
    """Facts about a request that is planned, beside its match; positions and distances are in tokens."""

    asked: Sequence[int] = ()
    """Positions within the prompt that the program named."""
    shared: Sequence[int] = ()
    """Positions within the prompt where requests that wait leave it, the deepest first."""
    next_turn: Sequence[int] = (1,)
    """Distances in tokens before the prompt's end at which later prompts may diverge, by decreasing saving."""
    system_end: int = 0
    """Where a chat's system prompt ends, in tokens; 0 if it has none, or that is not known."""
    is_passing: bool = False
    """Whether the request continues a prompt where its template's next turn does, so that few will branch there."""
    fills_spare: bool = False
    """Whether slots that are spare may hold states between steps."""
    num_trials: int = 0
    """Number of states that may be left on trial."""


class PrefillPlan(NamedTuple):
    """Depths in tokens, rising, beyond the hit and within the prompt."""

    depths: Sequence[int]
    roles: Mapping[int, Role] = MappingProxyType({})
    """Roles of those that are speculative, the first to get a slot first."""
    trials: Collection[int] = ()
    """Those that are left on trial."""

    def precedence(self, depth: int) -> tuple[int, int]:
        """Order planned depths: the first gets a slot first."""
        if depth in self.trials:
            return 2, depth
        return (1, [*self.roles].index(depth)) if depth in self.roles else (0, depth)

    def is_spare(self, depth: int) -> bool:
        """True if a state at `depth` is there to fill a spare slot, so that nobody misses one that has none."""
        return depth in self.trials or self.roles.get(depth) is Role.WAYPOINT


NO_PLAN: Final = PrefillPlan(())


def prefill_plan(
    admission: Admission,
    lease: Lease,
    grid_tokens: int,
    step_tokens: int = STEP_TOKENS,
    wishes: Wishes = Wishes(),
) -> PrefillPlan:
    """The plan of a request that has just been looked up; positions are multiples of `grid_tokens`."""
    request, match = lease
    num_prompt_tokens, start = request.num_prompt_tokens, match.checkpoint.depth
    last = (num_prompt_tokens - 1) // grid_tokens * grid_tokens
    asked = _on_grid(wishes.asked, grid_tokens, start, num_prompt_tokens) if wishes.asked else []
    if last <= start:
        return PrefillPlan(sorted(asked))
    shared = _on_grid(wishes.shared, grid_tokens, start, last)[:MAX_SHARED] if wishes.shared else []
    by_rule = [depth for depth in admission.depths(request, match) if depth <= last]
    before_end = [num_prompt_tokens - distance for distance in wishes.next_turn]
    next_turn = _on_grid(before_end, grid_tokens, start, last)
    system = _system(wishes, match, grid_tokens, last) if wishes.system_end else []
    states = list(dict.fromkeys([*shared, *by_rule, *system, *next_turn]))[:MAX_STATES]
    steps = set(_on_grid(range(last - step_tokens, start, -step_tokens), grid_tokens, start, last))
    roles = dict.fromkeys(by_rule, Role.PASSED) if wishes.is_passing else {}
    roles |= dict.fromkeys([depth for depth in next_turn if depth in states and depth not in by_rule], Role.END)
    # A conversation runs on from it, as from one that it has passed, until another begins there.
    for depth in system:
        if depth in states and depth not in by_rule:
            roles.setdefault(depth, Role.PASSED)
    for depth in (*asked, *shared, *steps):
        roles.pop(depth, None)
    planned = steps.union(states, asked)
    parting = [*shared, *(depth for depth in by_rule if depth <= match.num_seen_tokens), *system]
    spare = [(depth - 1) // CHUNK_TOKENS * CHUNK_TOKENS for depth in parting]
    if wishes.fills_spare and last - step_tokens > start:
        between = max(step_tokens // SPARE_STEPS, 1)
        spare += range(last - between, start, -between)
    if spare:
        spare = [depth for depth in _on_grid(spare, grid_tokens, start, last) if depth not in planned]
        roles |= dict.fromkeys(spare, Role.WAYPOINT)
    planned.update(roles)
    trials = trial_depths(max(match.num_seen_tokens, start), min(next_turn, default=last), wishes.num_trials)
    on_trial = tuple(depth for depth in _on_grid(trials, grid_tokens, start, last) if depth not in planned)
    return PrefillPlan(sorted(planned.union(on_trial)), roles, on_trial)


def _system(wishes: Wishes, match: Match, grid_tokens: int, last: int) -> list[int]:
    """Where the system prompt ends, if it is new; none where the program names a position close before it."""
    end = wishes.system_end
    known = max([match.num_seen_tokens, *(position for position in wishes.asked if position <= end)])
    return _on_grid([end], grid_tokens, match.checkpoint.depth, last) if end - known >= MIN_SYSTEM_TOKENS else []


def _on_grid(positions: Sequence[int], grid_tokens: int, start: int, end: int) -> list[int]:
    """`positions` cut to the grid, those beyond `start` and up to `end`, each once, in their order."""
    found: list[int] = []
    for position in positions:
        depth = (position if position < end else end) // grid_tokens * grid_tokens
        if depth > start and depth not in found:
            found.append(depth)
    return found
