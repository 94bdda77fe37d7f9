"""How fast the link between the host's memory and the device's is, as copies show it at the start of a server."""

import time
from typing import Final

import torch

NUM_BYTES: Final = 64 << 20
NUM_COPIES: Final = 3


def link_bytes_per_s(device: str) -> float:
    """Bytes per second from the host to `device`, in the fastest of `NUM_COPIES` copies of `NUM_BYTES`.

    Waits for the device. The host's side is pinned, as SGLang's host pools are.
    """
    on_host = torch.empty(NUM_BYTES, dtype=torch.uint8, pin_memory=torch.device(device).type != "cpu")
    on_device = torch.empty(NUM_BYTES, dtype=torch.uint8, device=device)
    synchronize = torch.get_device_module(device).synchronize
    on_device.copy_(on_host)
    fastest_s = float("inf")
    for _ in range(NUM_COPIES):
        synchronize()
        start_s = time.perf_counter()
        on_device.copy_(on_host, non_blocking=True)
        synchronize()
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return NUM_BYTES / fastest_s
