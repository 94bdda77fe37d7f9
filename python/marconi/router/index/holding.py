"""What one life of a worker holds: the reverse index, worker -> blocks.

A holding has a number, and its bit in a mask stands for it wherever holders of a block are written down. A restart
takes a new number: the old one is answered for no more from that moment on, and is swept away when there is time.
Dictionaries of numbers only, so that the garbage collector has nothing to walk.
"""


class Holding:
    """Owned by `FleetIndex`; changed by `Blocks`."""

    __slots__ = ("bit", "kv", "num_loose", "number", "old_kv", "old_states", "states", "worker")

    def __init__(self, worker: str, number: int) -> None:
        self.worker = worker
        self.number = number
        self.bit = 1 << number
        self.kv: dict[int, int] = {}
        """Hash -> row of the blocks whose KV is held."""
        self.states: dict[int, int] = {}
        """Hash -> row of the blocks after which a state stands."""
        self.old_kv: dict[int, int] = {}
        """Held, but not yet found in the snapshot that is being applied."""
        self.old_states: dict[int, int] = {}
        self.num_loose = 0
        """Blocks of KV that are held while one before them is not."""

    @property
    def num_entries(self) -> int:
        """Blocks of KV and states."""
        return len(self.kv) + len(self.states) + len(self.old_kv) + len(self.old_states)
