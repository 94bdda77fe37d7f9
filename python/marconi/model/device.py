"""Devices: what rates a prefill reaches on them.

Arithmetic is half of the dense 16-bit peak of the data sheet and memory 80 % of its bandwidth, which is what prefill
of long prompts and reads of weights usually reach; a state is copied at 40 % of the bandwidth, one read and one write.
The link to the host is PCIe x16, 80 % of its data sheet: 25 GB/s of generation 4, 50 GB/s of generation 5.
The overhead is an estimate of scheduling and kernel launches. All of them are starting points: a measured table
(`measured_latency`) or a profile of your own takes their place.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One accelerator. `ValueError` for a rate that is not positive or a negative overhead."""

    name: str
    flops_per_s: float
    """FLOP/s that prefill reaches."""
    bytes_per_s: float
    """Bytes/s that reading weights and KV reaches."""
    state_bytes_per_s: float
    """Bytes/s at which a checkpoint becomes a running request's state; of a host link where checkpoints are there."""
    overhead_s: float
    """Seconds that every prefill costs, however short."""
    host_bytes_per_s: float = 25e9
    """Bytes/s at which KV and states come from the host's memory."""
    memory_bytes: float = 0.0
    """Its memory; 0 where that is not known."""

    def __post_init__(self) -> None:
        for what in ("flops_per_s", "bytes_per_s", "state_bytes_per_s", "host_bytes_per_s"):
            if not getattr(self, what) > 0:
                raise ValueError(f"device {self.name}: {what} must be more than 0, got {getattr(self, what)}")
        if not self.overhead_s >= 0:
            raise ValueError(f"device {self.name}: overhead_s must be at least 0, got {self.overhead_s}")


def _of_data_sheet(
    name: str, memory_gb: float, peak_tflops: float, bandwidth_gb_per_s: float, pcie: int = 5
) -> DeviceProfile:
    bytes_per_s = bandwidth_gb_per_s * 1e9
    rates = 0.5 * peak_tflops * 1e12, 0.8 * bytes_per_s, 0.4 * bytes_per_s
    host_bytes_per_s = 25e9 if pcie == 4 else 50e9
    return DeviceProfile(name, *rates, 0.005, host_bytes_per_s, memory_bytes=memory_gb * 1e9)


DEVICES: Final = MappingProxyType(
    {
        device.name: device
        for device in (
            _of_data_sheet("a100-40gb", 40, 312, 1555, pcie=4),
            _of_data_sheet("a100", 80, 312, 2039, pcie=4),
            _of_data_sheet("l40s", 48, 362, 864, pcie=4),
            _of_data_sheet("h20", 96, 148, 4000),
            _of_data_sheet("h100", 80, 989, 3350),
            _of_data_sheet("h200", 141, 989, 4800),
            _of_data_sheet("b200", 180, 2250, 8000),
        )
    }
)
"""By name; the SXM variant where there are several, and the 80 GB one of the A100 without a suffix."""


def device(name: str) -> DeviceProfile:
    """The device `name`; `ValueError`, with the known ones, if there is none."""
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise ValueError(f"a device must be one of {', '.join(DEVICES)}, got {name!r}") from None
