"""What a server records of a request that has ended, and nothing of one that was aborted; no fault reaches it."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.reports.record import ended
from marconi.record import TraceRecorder
from marconi.replay.trace import read
from test_record import FLAG, lines

from .host_replays import agents, on_marconi
from .test_host_replay import SETTINGS

pytestmark = pytest.mark.usefixtures("sglang_configuration")


def request(prompt: Sequence[int], reason: str, input_embeds: Any = None) -> Any:
    return SimpleNamespace(
        origin_input_ids=array("q", prompt),
        output_ids=array("q", [7]),
        cached_tokens=0,
        finished_reason=SimpleNamespace(to_json=lambda: {"type": reason}),
        input_embeds=input_embeds,
    )


def test_a_request_that_cannot_be_read_ends_the_record_and_not_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TraceRecorder(tmp_path / "served", 0.0, FLAG)
    for _ in range(2):
        recorder.add(lambda: ended(SimpleNamespace(), 0.0, 0))  # type: ignore[arg-type]
    recorder.close()
    assert len(caplog.messages) == 1


def test_aborted_requests_and_embeddings_are_left_out() -> None:
    assert ended(request(range(10), "abort"), 0.0, 0) is None
    assert ended(request(range(11), "stop", [[0.5]] * 11), 0.0, 0) is None
    told = ended(request(range(12), "stop"), 0.0, 0)
    assert told is not None
    assert (told.num_prompt_tokens, told.num_output_tokens) == (12, 1)


def test_a_cache_records_what_it_served_and_what_it_had(tmp_path: Path) -> None:
    replay = on_marconi(SETTINGS["little-kv"], PolicyChoice("best"))
    requests = [request for request in agents(seed=3) if replay.fits(request)]
    replay.cache.recorder = TraceRecorder(tmp_path / "served", started_s=0.0, flag=FLAG)
    hits = [replay.serve(request) for request in requests]
    replay.cache.release_host_resources()
    found = lines(tmp_path / "served")
    assert sum(filter(None, hits)) > 0
    assert [line["cached_tokens"] for line in found] == hits
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in read(tmp_path / "served").requests] == [
        (request.num_prompt_tokens, request.num_output_tokens) for request in requests
    ]
