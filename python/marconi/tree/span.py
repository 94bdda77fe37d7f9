"""Spans of packed ids: comparing prefixes is comparing bytes."""

import numpy as np

ID_BYTES = 4
"""Bytes of one packed id, little-endian and unsigned."""


def common_bytes(left: bytes, right: bytes) -> int:
    """Length in bytes of the longest common prefix of whole ids."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    num_ids = size // ID_BYTES
    differs = np.frombuffer(left, np.uint32, num_ids) != np.frombuffer(right, np.uint32, num_ids)
    return int(differs.argmax()) * ID_BYTES
