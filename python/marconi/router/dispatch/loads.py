"""What each worker was given and has not finished.

    work ahead of the next request on a worker  =  sum of the prefills that it was given and has not answered
                                                   - what it has done of the first of them

A worker prefills in the order of arrival, so what runs first has run since it was dispatched, or since the one before
it was answered; it is never counted as more than done. Decoding is not in it: it runs beside, and is the same wherever
a request goes.

Owner: `Dispatcher`.
"""

from marconi.router.dispatch.base import Ticket


class Load:
    """The load of one worker."""

    __slots__ = ("_prefilling", "_since_s", "_work_s", "num_running")

    def __init__(self) -> None:
        self.num_running = 0
        self._prefilling: dict[Ticket, None] = {}
        """Tickets in order of dispatch."""
        self._work_s = 0.0
        self._since_s = 0.0
        """When the first of them became the first."""

    def work_ahead_s(self, now_s: float) -> float:
        """Seconds until a request that is dispatched now is begun."""
        if not self._prefilling:
            return 0.0
        first = next(iter(self._prefilling))
        return max(self._work_s - min(max(now_s - self._since_s, 0.0), first.prefill_s), 0.0)

    def begin(self, ticket: Ticket, now_s: float) -> None:
        """Add a request."""
        if not self._prefilling:
            self._since_s = now_s
        self._prefilling[ticket] = None
        self._work_s += ticket.prefill_s
        self.num_running += 1

    def answer(self, ticket: Ticket, now_s: float) -> None:
        """Note the first token of a request; a second time does nothing."""
        if ticket not in self._prefilling:
            return
        if ticket is next(iter(self._prefilling)):
            self._since_s = now_s
        del self._prefilling[ticket]
        # Sums of floats drift: nothing left is exactly nothing.
        self._work_s = self._work_s - ticket.prefill_s if self._prefilling else 0.0

    def end(self, ticket: Ticket, now_s: float) -> None:
        """End a request, answered or not."""
        self.answer(ticket, now_s)
        self.num_running -= 1

    def check_invariants(self) -> None:
        """Raise `AssertionError` where counts disagree."""
        assert self.num_running >= len(self._prefilling)
        total_s = sum(ticket.prefill_s for ticket in self._prefilling)
        assert abs(total_s - self._work_s) <= 1e-6 * max(total_s, 1.0), (total_s, self._work_s)
