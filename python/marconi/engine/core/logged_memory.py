"""Device memory that also logs what the tree holds, for the worker's events (`marconi.events`).

An append for each change, on the scheduler's thread; what is made of it is for the publisher's.
"""

import torch

from marconi.engine.core.memory import DeviceMemory
from marconi.events.tree_log import Tenant, TreeLog
from marconi.tree import Node


class LoggedMemory(DeviceMemory):
    """`DeviceMemory` with a log of its changes."""

    def __init__(self, device: torch.device | str, log: TreeLog) -> None:
        super().__init__(device)
        self._log = log

    def offer(self, indices: torch.Tensor, from_depth: int, tenant: Tenant) -> None:
        """Do so, and log it."""
        super().offer(indices, from_depth, tenant)
        self._log.tenant = tenant

    def keep_state(self, node: Node, slot: torch.Tensor) -> None:
        """Do so, and log it."""
        super().keep_state(node, slot)
        self._log.kept_state(node)

    def held(self, node: Node) -> None:
        """Do so, and log it."""
        super().held(node)
        self._log.held(node)

    def dropped(self, node: Node) -> None:
        """Do so, and log it."""
        super().dropped(node)
        self._log.dropped(node)

    def dropped_state(self, node: Node) -> None:
        """Do so, and log it."""
        super().dropped_state(node)
        self._log.dropped_state(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Do so, and log it."""
        super().split(upper, lower)
        self._log.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        """Do so, and log it."""
        super().joined(upper, lower)
        self._log.joined(upper, lower)
