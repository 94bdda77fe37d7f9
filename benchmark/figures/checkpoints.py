"""Figures 3a and 3b: what a state at every block costs, and how few of those states are ever used.

A token block is the KV of its tokens and a state at its end. A hit at a state uses that one state, and the KV of every
block before it. A block counts each time it is admitted, and as reused if it was used before it was evicted.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from marconi.model import paper
from marconi.policy.base import NodeView
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease, Trace
from marconi.replay.admission.every_block import EveryBlock
from marconi.replay.pools import JointPool
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.joint_lru import JointLru

from .base import Claim, Figure, Numbers, Scale
from .canvas import Canvas
from .cells import Cell, Host, Sample
from .setups import hybrid_host, session_scene, seven_billion

_BLOCKS: Final = (32, 64, 128)
_MEMORY_GB: Final = 700
"""So much that KV is reused about as the paper shows: a state at every block is most of it."""
_LENGTHS: Final = (1000, 2000, 4000, 6000, 8000, 10000)


class _Watched(JointLru):
    """vLLM+'s eviction, which notes what is used of each admitted block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_states_used = self.num_kv_used = 0
        self._states: set[NodeView] = set()
        self._kv: set[NodeView] = set()

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Blocks begin anew."""
        self._states.difference_update(nodes)
        self._kv.difference_update(nodes)

    def arrived(self, lease: Lease, now_s: float) -> None:
        """One state, and the KV of the whole path."""
        node = lease.match.source
        if node is None:
            return
        self.num_states_used += node not in self._states
        self._states.add(node)
        above: NodeView | None = node
        while above is not None and above not in self._kv:
            assert isinstance(above, Node)
            if above.has_state:
                self._kv.add(above)
                self.num_kv_used += 1
            above = above.parent


def reuse(trace: Trace, host: Host, block_tokens: int, memory_bytes: int) -> tuple[float, float]:
    """Shares of the admitted blocks whose KV, and whose state, was used."""
    watched = _Watched()
    costs = host.inputs(trace).costs
    admission = EveryBlock(block_tokens)
    hybrid = HybridCache(RadixTree(1), admission, Order(watched))
    memory = JointPool(memory_bytes, costs.kv_bytes_per_token, costs.state_bytes)
    server = ServerReplay(hybrid, memory, Scheduling.of(admission))
    for request in trace.requests:
        server.serve(request)
    num_blocks = max(1, server.counters.num_states_written)
    return watched.num_kv_used / num_blocks, watched.num_states_used / num_blocks


class BlockReuse(Figure):
    """Figure 3a."""

    id = "3a"
    title = "Marconi, figure 3a: how many token blocks are used again"
    shows = (
        "Of the blocks that vLLM+ admits, the share whose KV and the share whose state a later request uses, by block "
        f"size: workload `agent-append`, 100 sessions at 1 a second, {_MEMORY_GB} GB. The paper does not name the "
        "experiment behind its figure: the amount is chosen so that about its share of KV is used at 32 tokens."
    )

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Both shares by block size."""
        trace = session_scene("agent-append", 1.0, 5.0, scale.num_sessions, scale.seed).trace()
        host, memory_bytes = hybrid_host(), scale.memory_bytes(_MEMORY_GB)
        shares = [reuse(trace, host, block, memory_bytes) for block in _BLOCKS]
        return {
            "block_tokens": list(_BLOCKS),
            "kv_reused": [round(kv, 4) for kv, _ in shares],
            "states_reused": [round(state, 4) for _, state in shares],
        }

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """Two bars a block size."""
        panel = canvas.panels[0]
        shares = {
            name: [100 * share for share in numbers[key]]
            for name, key in (("KV", "kv_reused"), ("SSM states", "states_reused"))
        }
        panel.bars([str(block) for block in numbers["block_tokens"]], shares)
        panel.name("block, tokens", "blocks used again, %")

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """KV against states."""
        kv, states = numbers["kv_reused"], numbers["states_reused"]
        ratio = kv[0] / max(states[0], 1e-4)
        return (
            Claim(
                "states are reused far less than KV at a block of 32 tokens",
                "0.4 % against 25.0 %, 65 times less",
                f"{100 * states[0]:.1f} % against {100 * kv[0]:.1f} %, {ratio:.0f} times less",
                ratio > 10,
            ),
            Claim(
                "larger blocks help states, yet only so far",
                "3.3 % at 128 tokens",
                f"{100 * states[-1]:.1f} %",
                states[-1] > states[0],
            ),
        )


class StateMemory(Figure):
    """Figure 3b."""

    id = "3b"
    title = "Marconi, figure 3b: memory of one sequence"
    shows = (
        "Gigabytes that a sequence holds in a hybrid 7B model with a state at every block, by block size, and in a "
        "Transformer of the same size, which keeps KV alone. Nothing is replayed."
    )

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Gigabytes (1e9 bytes) by model and length."""
        hybrid, transformer = seven_billion(paper.hybrid()), seven_billion(paper.hybrid(32, 0, 32))
        held = {
            f"hybrid, block {block}": [
                round((length * hybrid.kv_bytes_per_token + length // block * hybrid.state_bytes) / 1e9, 3)
                for length in _LENGTHS
            ]
            for block in (16, *_BLOCKS)
        }
        held["Transformer"] = [round(length * transformer.kv_bytes_per_token / 1e9, 3) for length in _LENGTHS]
        return {"length_tokens": list(_LENGTHS), "gigabytes": held}

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """A line a block size."""
        panel = canvas.panels[0]
        panel.lines(numbers["length_tokens"], numbers["gigabytes"])
        panel.name("sequence, tokens", "states and KV, GB")

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """The paper's example."""
        hybrid, transformer = numbers["gigabytes"]["hybrid, block 16"][-1], numbers["gigabytes"]["Transformer"][-1]
        return (
            Claim(
                "10,000 tokens take several times a Transformer's memory at a block of 16 tokens",
                "17.4 GB, 3.3 times",
                f"{hybrid:.1f} GB, {hybrid / transformer:.1f} times",
                round(hybrid, 1) == 17.4 and round(hybrid / transformer, 1) == 3.3,
            ),
        )
