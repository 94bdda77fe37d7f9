"""Spans of packed ids: comparing prefixes is comparing bytes."""

import numpy as np

ID_BYTES = 4
"""Bytes of one packed id, little-endian and unsigned."""


def common_bytes(left: bytes, right: bytes, unit_bytes: int = ID_BYTES) -> int:
    """Length in bytes of the longest common prefix of whole units; both are whole units long."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    num_ids = size // ID_BYTES
    differs = np.frombuffer(left, np.uint32, num_ids) != np.frombuffer(right, np.uint32, num_ids)
    return int(differs.argmax()) * ID_BYTES // unit_bytes * unit_bytes
