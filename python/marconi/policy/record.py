"""Messages from a server to its shadow, over a pipe: the memory of its cache, then each request that it has served.

    frame      length of the payload (four bytes, little-endian), payload
    first      `ServerMemory` as JSON
    others     `ServedRequest`: a header, then eight bytes a token of prompt and output

The server writes (`engine/advice.py`) and the shadow reads (`replay/shadow.py`); neither imports the other.
"""

import json
import struct
from dataclasses import asdict, dataclass, fields
from typing import IO, Final

TOKEN_BYTES: Final = 8
MAX_FRAME_BYTES: Final = 1 << 28
_LENGTH: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<dddIII16s")


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """A server's memory for its cache, how it is divided, and the policy that evicts from it."""

    policy: str
    """In the syntax of `marconi replay --policy`."""
    kv_bytes_per_token: int
    state_bytes: int
    num_tokens: int
    """Size of the KV pool; 0 with one pool."""
    num_slots: int
    """Size of the state pool; 0 with one pool."""
    joint_bytes: int
    """Size of the one pool; 0 with two pools."""
    host_bytes: int
    """Size of the host tier; 0 without one."""
    may_join: bool
    """True if the server supports one pool, without a host tier."""
    may_add_host: bool
    """True if the server supports a host tier below two pools."""
    flops_per_token: float
    flops_per_squared_token: float
    """A prefix of n tokens saves `flops_per_token * n + flops_per_squared_token * n * n` FLOPs."""
    link_bytes_per_s: float = 0.0
    """Bandwidth from the host's memory; 0 if it was not measured."""
    given: tuple[str, ...] = ()
    """Flags of the command line that divide memory or make a host tier."""

    def to_bytes(self) -> bytes:
        """Convert to the payload of the first frame."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> "ServerMemory":
        """Read the payload of the first frame; `ValueError` for another one."""
        try:
            given = json.loads(payload)
        except ValueError:
            raise ValueError(f"the first message must be JSON, got {payload[:40]!r}") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or sorted(given) != sorted(names):
            raise ValueError(f"the first message must have {', '.join(names)}, got {payload[:40]!r}")
        if not isinstance(given["given"], list) or not all(isinstance(flag, str) for flag in given["given"]):
            raise ValueError(f"given must be a list of flags, got {given['given']!r}")
        for name in names[1:-1]:
            if not isinstance(given[name], int | float) or given[name] < 0:
                raise ValueError(f"{name} must be a number, at least 0, got {given[name]!r}")
        for name in ("kv_bytes_per_token", "state_bytes"):
            if given[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {given[name]!r}")
        return cls(**{**given, "given": tuple(given["given"])})


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that a server has served."""

    arrival_s: float
    """Seconds of the cache's clock."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the server had in its cache."""
    namespace: int
    """Prefixes are shared within a namespace only; below 2**128."""
    ids: bytes
    """Tokens of prompt and output, `TOKEN_BYTES` each."""
    overhead_s: float = 0.0
    s_per_flop: float = 0.0
    """The learned time of a prefill (`model/learned_latency.py`); 0 until it is known."""

    def to_bytes(self) -> bytes:
        """Convert to the payload of a frame."""
        namespace = self.namespace.to_bytes(16, "little")
        counts = (self.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens)
        return _HEADER.pack(self.arrival_s, self.overhead_s, self.s_per_flop, *counts, namespace) + self.ids

    @classmethod
    def from_bytes(cls, payload: bytes) -> "ServedRequest":
        """Read the payload of a frame; `ValueError` unless it has as many tokens as it says."""
        if len(payload) < _HEADER.size:
            raise ValueError(f"a record must have at least {_HEADER.size} bytes, got {len(payload)}")
        arrival_s, overhead_s, s_per_flop, num_prompt, num_output, num_cached, namespace = _HEADER.unpack_from(payload)
        ids = payload[_HEADER.size :]
        if len(ids) != (num_prompt + num_output) * TOKEN_BYTES or num_prompt < 1:
            raise ValueError(
                f"a record of {num_prompt} prompt tokens and {num_output} output tokens must have "
                f"{(num_prompt + num_output) * TOKEN_BYTES} bytes of tokens, got {len(ids)}"
            )
        counts = (num_prompt, num_output, num_cached)
        return cls(arrival_s, *counts, int.from_bytes(namespace, "little"), ids, overhead_s, s_per_flop)


def write_frame(stream: IO[bytes], payload: bytes) -> None:
    """Write one frame and flush it; `OSError` where nobody reads any more."""
    stream.write(_LENGTH.pack(len(payload)))
    stream.write(payload)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read the payload of one frame; None at the end of the stream, within a frame too; `ValueError` if too long."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (num_bytes,) = _LENGTH.unpack(head)
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame must have at most {MAX_FRAME_BYTES} bytes, got {num_bytes}")
    payload = stream.read(num_bytes)
    return payload if len(payload) == num_bytes else None
