"""The trace's time in place of the machine's, so that a replay gives the same hits on every machine."""


class TraceClock:
    """Stands where the last request to arrive put it, in seconds from the start of the trace."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s
