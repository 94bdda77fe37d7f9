"""SGLang's queue as the cache knows it: what waits shares, what it starts from, and who waits (`policy/waiting.py`).

Owner: the scheduler's thread.
"""

from itertools import islice
from typing import TYPE_CHECKING

from marconi.engine.core.key import IDS_PER_TOKEN
from marconi.engine.core.tree_core import MarconiTreeCore
from marconi.engine.run import last_match, run_of
from marconi.policy.admission.plan import PrefillPlan
from marconi.policy.request import Lease
from marconi.policy.waiting import WaitingPrompts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class WaitingRequests:
    """The requests of one scheduler, while they wait and while they are prefilled."""

    def __init__(self, core: MarconiTreeCore) -> None:
        self._core = core
        self._prompts = WaitingPrompts(core.page_size, core.page_size * IDS_PER_TOKEN)

    def note(self, queue: "list[Req]") -> None:
        """What waits now, in SGLang's order."""
        prompts = self._prompts
        if not prompts and len(queue) < 2:
            return
        # Every pass of the scheduler comes here with the whole queue: whoever stays costs a look into a table or two,
        # and whoever is new is looked for from the end.
        awaited = self._core.served.awaited
        current, known = set(queue), prompts.keys()
        for req in known - current:
            prompts.remove(req)
            awaited.remove(req)
        num_new = len(current) - len(known)
        if not num_new or prompts.is_full:
            self._core.served.tell()
            return
        new = [*islice((req for req in reversed(queue) if req not in known), num_new)]
        for req in reversed(new):
            if prompts.is_full:
                break
            # What has not run yet has no answer, and copying its prompt once more is half of what this costs.
            ids = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
            request = self._core.request_of(ids, req.extra_key, req.cache_salt)
            prompts.add(req, request)
            awaited.put(req, self._core.served.match(request).checkpoint)
        self._core.served.tell()

    def matched(self, req: "Req", lease: Lease) -> None:
        """What a request would start from, when SGLang has looked: while it waits, that may change."""
        served = self._core.served
        if req in served.awaited:
            served.awaited.put(req, lease.match.checkpoint)
            served.tell()

    def waits(self, req: "Req") -> bool:
        """Whether a request that has been matched is better computed once a state that is under way is there."""
        lease = last_match(req)
        return lease is not None and not req.skip_radix_cache_insert and self._prompts.waits(*lease)

    def begins(self, req: "Req") -> Lease | None:
        """What was found of a request that is taken for the first time and shares more of its prompt with others.

        None for others, and for what stays out: nobody could wait for what it leaves.
        """
        if run_of(req) is not None or req.skip_radix_cache_insert:
            return None
        lease = last_match(req)
        if lease is None or not self._prompts.is_shared(req, lease.match.checkpoint.depth):
            return None
        return lease

    def shared(self, req: "Req", lease: Lease) -> list[int]:
        """Where others that wait leave the prompt of one, beyond its hit, the deepest first."""
        return self._prompts.shared(req, lease.match.checkpoint.depth)

    def expect(self, req: "Req", lease: Lease, plan: PrefillPlan) -> None:
        """The states of `plan` are under way."""
        self._prompts.expect(req, lease.request, plan.depths)

    def arrived(self, req: "Req", depth: int) -> None:
        """The state at `depth` has come, or will not."""
        self._prompts.arrived(req, depth)

    def expect_nothing(self, req: "Req") -> None:
        """A request leaves nothing more."""
        self._prompts.expect_nothing(req)
