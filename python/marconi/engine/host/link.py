"""How fast the link between the host's memory and the device's is, as copies show it at the start of a server."""

import time
from typing import Final, NamedTuple

import torch

NUM_BYTES: Final = 64 << 20
NUM_COPIES: Final = 3


class LinkSpeed(NamedTuple):
    """Bytes per second."""

    load: float
    """From the host to the device."""
    copy: float
    """From the device to the host."""


def link_speed(device: str) -> LinkSpeed:
    """The speed of the link to `device`, each way in the fastest of `NUM_COPIES` copies of `NUM_BYTES`.

    Waits for the device. The host's side is pinned, as SGLang's host pools are.
    """
    on_host = torch.empty(NUM_BYTES, dtype=torch.uint8, pin_memory=torch.device(device).type != "cpu")
    on_device = torch.empty(NUM_BYTES, dtype=torch.uint8, device=device)
    return LinkSpeed(_bytes_per_s(on_host, on_device, device), _bytes_per_s(on_device, on_host, device))


def _bytes_per_s(source: torch.Tensor, target: torch.Tensor, device: str) -> float:
    synchronize = torch.get_device_module(device).synchronize
    target.copy_(source)
    fastest_s = float("inf")
    for _ in range(NUM_COPIES):
        synchronize()
        start_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize()
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return NUM_BYTES / fastest_s
