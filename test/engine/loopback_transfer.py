"""A transfer of KV and states from a prefill server to a decode server, through a socket on loopback.

    decode server                           prefill server
    where a request's memory is to go  -->  the request may be sent
    writes                             <--  KV, states and the first token, read where they lie, in order
    ready                              <--  SGLang's status message, behind them

In the place of Mooncake (`disaggregated_server.py`), under the names of its classes. SGLang's own base classes do the
handshake. Ranks pair up: both servers have as many.
"""

import ctypes
import json
import os
import threading
from dataclasses import dataclass
from typing import Any

import breaking
import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

ROOM, PART, STATUS = b"ROOM", b"PART", b"STATUS"
KV, AUX = "kv", "aux"
IS_BROKEN = "FAULT" in os.environ
"""True if the state of another slot is sent: the negative control."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of this process, as equal items."""

    pointer: int
    num_bytes: int
    item_bytes: int

    @property
    def items(self) -> NDArray[np.uint8]:
        """(num_items, item_bytes), the memory itself."""
        # The one pool of KV and states may end in a part of an item.
        num_bytes = self.num_bytes // self.item_bytes * self.item_bytes
        memory = (ctypes.c_uint8 * num_bytes).from_address(self.pointer)
        return np.frombuffer(memory, np.uint8).reshape(-1, self.item_bytes)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a decode server's rank wants a request's memory, by its indices there."""

    endpoint: str
    dst_port: int
    indices: dict[str, list[int]]
    """Those of KV pages, of each kind of state, and of the buffer of the first token."""
    is_dummy: bool = False


class MooncakeKVManager(CommonKVManager):
    """The transfer of one rank."""

    kv_status_msg_tag = STATUS
    kv_status_msg_carries_reason = True

    def __init__(self, args: Any, disaggregation_mode: DisaggregationMode, *more: Any) -> None:
        super().__init__(args, disaggregation_mode, *more)
        self.buffers = {
            KV: _buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens),
            AUX: _buffers(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens),
        }
        states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
        self.buffers |= {str(index): _buffers(*state) for index, state in enumerate(states)}
        is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        threading.Thread(target=self._serve, args=(self._told if is_prefill else self._sent,), daemon=True).start()
        if not is_prefill:
            self._start_heartbeat_checker_thread()

    def _serve(self, take: Any) -> None:
        while True:
            take(self.server_socket.recv_multipart())

    # The decode server

    def build_receiver_registration_message(self) -> list[bytes]:
        """Nobody else writes to this memory."""
        return [b"REGISTER"]

    def build_receiver_metadata_message(self, *, bootstrap_room: int, kv_indices: Any, **more: Any) -> list[bytes]:
        """Where a request's memory is to go."""
        states = more["state_indices"] or ()
        indices = {KV: kv_indices, AUX: [more["aux_index"]]} | {str(index): each for index, each in enumerate(states)}
        told = {
            "room": bootstrap_room,
            "endpoint": self.local_ip,
            "dst_port": self.rank_port,
            "num_ranks": more["required_dst_info_num"],
            "prefix_tokens": more["decode_prefix_len"] or 0,
            "indices": {name: np.asarray(each).tolist() for name, each in indices.items() if each is not None},
        }
        return [ROOM, json.dumps(told).encode()]

    def _sent(self, message: list[bytes]) -> None:
        if message[0] == PART:
            told = json.loads(message[1])
            if told["room"] in self.request_status:
                for buffer, data in zip(self.buffers[told["name"]], message[2:], strict=True):
                    items = buffer.items
                    items[told["indices"]] = np.frombuffer(data, np.uint8).reshape(-1, buffer.item_bytes)
            return
        parsed = self.parse_kv_status_message(message)
        if parsed is not None:
            room, status, rank, reason = parsed
            self.apply_prefill_status(bootstrap_room=room, status=status, prefill_rank=rank, failure_reason=reason)

    # The prefill server

    def _told(self, message: list[bytes]) -> None:
        if message[0] == ABORT_TAG:
            room = int(message[1])
            if room in self.request_status and self.request_status[room] != KVPoll.Success:
                self.record_failure(room, "Aborted by the decode server")
                self.update_status(room, KVPoll.Failed)
        if message[0] != ROOM:
            return
        told = json.loads(message[1])
        destination = Destination(told["endpoint"], told["dst_port"], told["indices"])
        infos = self.transfer_infos.setdefault(told["room"], {})
        infos[destination.endpoint, destination.dst_port] = destination
        if len(infos) == told["num_ranks"]:
            self.req_to_decode_prefix_len[told["room"]] = told["prefix_tokens"]
            self.update_status(told["room"], KVPoll.WaitingForInput)

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: NDArray[np.int32],
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        **_more: Any,
    ) -> None:
        """Send what has been computed; behind the last of it, its states and the first token."""
        if self.request_status.get(bootstrap_room) in (None, KVPoll.Failed):
            return
        for destination in list(self.transfer_infos[bootstrap_room].values()):
            self._send(bootstrap_room, destination, KV, kv_indices, destination.indices[KV][index_slice])
            if is_last_chunk:
                for name, indices in enumerate(state_indices or ()):
                    if indices is not None:
                        source = np.asarray(indices) + IS_BROKEN
                        buffers = self.buffers[str(name)]
                        breaking.tell(int(any((each.items[source] != each.items[indices]).any() for each in buffers)))
                        self._send(bootstrap_room, destination, str(name), source, destination.indices[str(name)])
                self._send(bootstrap_room, destination, AUX, [aux_index], destination.indices[AUX])
        if is_last_chunk:
            self.conclude_transfer(bootstrap_room=bootstrap_room, status=KVPoll.Success)

    def _send(self, room: int, destination: Destination, name: str, source: Any, target: list[int]) -> None:
        source = np.asarray(source).reshape(-1)
        assert len(source) == len(target), f"{len(source)} items of {name} for {len(target)} places"
        told = json.dumps({"room": room, "name": name, "indices": target}).encode()
        data = [buffer.items[source].tobytes() for buffer in self.buffers[name]]
        address = NetworkAddress(destination.endpoint, destination.dst_port)
        self._send_multipart_locked(address.to_tcp(), [PART, told, *data], is_ipv6=address.is_ipv6)


class MooncakeKVSender(CommonKVSender):
    """A request of the prefill server."""


class MooncakeKVReceiver(CommonKVReceiver):
    """A request of the decode server."""


class MooncakeKVBootstrapServer(CommonKVBootstrapServer):
    """Tells decode servers where the ranks of a prefill server are."""


def _buffers(pointers: Any, num_bytes: Any, item_bytes: Any) -> list[Buffer]:
    return [Buffer(*each) for each in zip(pointers, num_bytes, item_bytes, strict=True)]
