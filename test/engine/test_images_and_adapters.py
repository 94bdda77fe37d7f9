"""Prompts with images, and prompts for an adapter: what differs in either shares nothing, and what is equal is reused.

In a prompt SGLang writes ids of its own in the place of an image's tokens, made of a hash of the image and up to 63
bits wide (`MultimodalDataItem.padding_sequence`), and joins an adapter's id to the request's `extra_key`. Requests run
through the real cache, where each state and each token's KV carries a mark of all that came before it, the name space
included: a request that reads another's ends the test. The negative controls: paths that keep 32 bits of an id, which
two images share, and a name space without the adapter.
"""

import hashlib
from array import array
from collections.abc import Iterator

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.engine.cache import tree_core
from marconi.engine.launch.policies import PolicyChoice
from marconi.events.tree_log import Tenant, TreeLog
from rig.clock import TraceClock
from rig.events import EventCheck
from rig.pools import COSTS, HostPools, Strategy, marconi
from rig.scheduler import HostScheduler
from rig.workload import STOP, Origin, Script

pytestmark = pytest.mark.usefixtures("sglang_configuration")

IMAGE_TOKENS = 100
TEXT = array("q", range(STOP + 1, STOP + 41))
"""Before the image,"""
QUESTIONS = [array("q", range(1000 * number, 1000 * number + 30)) for number in range(1, 7)]
"""and behind it."""
SETTINGS = {
    "extra-buffer": HostPools(6000, 60, 2000, 1, Strategy.EXTRA_BUFFER, chunk_tokens=64, num_rows=2),
    "no-buffer": HostPools(6000, 60, 2000, 1, Strategy.NO_BUFFER, chunk_tokens=4096, num_rows=2),
    "page-16": HostPools(6400, 60, 2000, 16, Strategy.EXTRA_BUFFER, chunk_tokens=64, num_rows=2),
    "page-64": HostPools(6400, 60, 2000, 64, Strategy.EXTRA_BUFFER, chunk_tokens=128, num_rows=2),
}


def image(content: str) -> "array[int]":
    """What SGLang writes in the place of an image's tokens."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    item = MultimodalDataItem(modality=Modality.IMAGE)
    item.set_identity(hashlib.sha256(content.encode()).digest())
    ids = array("q", item.padding_sequence(IMAGE_TOKENS))
    assert min(ids) >= 0
    assert max(ids) > 1 << 32, "nothing is wide, so nothing is tested"
    return ids


def extra_keys() -> list[str]:
    """What SGLang makes of a tenant's `extra_key` without an adapter, and with either of two."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams()
    return [
        Req("", "", array("q", [1]), sampling, lora_id=lora_id, extra_key="tenant").extra_key
        for lora_id in (None, "1" * 32, "2" * 32)
    ]


class Asked:
    """A scheduler on a new cache, and how much of each prompt that cache had."""

    def __init__(self, host: HostPools) -> None:
        clock = TraceClock()
        self.cache = marconi(host, PolicyChoice("best"), COSTS, clock, TreeLog())
        self.page = host.page_tokens
        names = (Tenant(), *(Tenant(extra_key) for extra_key in extra_keys()))
        self.told = EventCheck(self.cache, names, self.page if self.page > 1 else 64)
        self._clock = clock
        self._scheduler = HostScheduler(self.cache, host)
        self._answers = iter(range(1 << 40, 1 << 41, 64))

    def hit(self, prompt: "array[int]", extra_key: str | None = None) -> int:
        """Tokens that came from the cache for `prompt`, once it has been answered."""
        before, first = self._scheduler.num_hit_tokens, next(self._answers)
        answer = array("q", range(first, first + 20))
        self._scheduler.submit(Script(Origin.NEW, prompt, answer, len(answer), (extra_key, None)))
        while self._scheduler.step():
            self._clock.now_s += 1
        self._clock.now_s += 10
        self.cache.sanity_check()
        return self._scheduler.num_hit_tokens - before

    def aligned(self, num_tokens: int) -> int:
        """As much of `num_tokens` as whole pages are."""
        return num_tokens // self.page * self.page


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def asked(request: pytest.FixtureRequest) -> Iterator[Asked]:
    """A new one; its events leave what its tree holds."""
    made = Asked(request.param)
    yield made
    made.told.check()


def test_two_images_behind_the_same_text_share_the_text_alone(asked: Asked) -> None:
    images = [image(content) for content in "abc"]
    for number, each in enumerate(images):
        hits = [asked.hit(TEXT + each + question) for question in QUESTIONS[:4]]
        # A first prompt shows that others go on from the text, a second that they do from the image.
        with_image = asked.aligned(len(TEXT) + IMAGE_TOKENS)
        assert hits[0] <= asked.aligned(len(TEXT)), "a state that has seen another image was reused"
        assert hits[2:] == [with_image] * 2
        if number == 2 and asked.page <= len(TEXT):
            assert hits[0] == asked.aligned(len(TEXT))


def test_an_image_that_comes_again_is_reused_with_all_behind_it(asked: Asked) -> None:
    prompt = TEXT + image("a") + QUESTIONS[0]
    assert asked.hit(prompt) == 0
    assert asked.hit(prompt) == asked.aligned(len(prompt) - 1)
    assert asked.hit(TEXT + image("b") + QUESTIONS[0]) <= asked.aligned(len(TEXT))


def test_a_second_image_may_differ_too(asked: Asked) -> None:
    first, second, other = map(image, "abc")
    both = TEXT + first + second
    assert asked.hit(both + QUESTIONS[0]) == 0
    asked.hit(both + QUESTIONS[1])
    assert asked.hit(both + QUESTIONS[2]) == asked.aligned(len(both))
    for exchanged in (first + other, second + first, other + second):
        shared = len(TEXT) + IMAGE_TOKENS * (exchanged[:IMAGE_TOKENS] == first)
        assert asked.hit(TEXT + exchanged + QUESTIONS[3]) <= asked.aligned(shared)


@pytest.mark.parametrize("shift", [0, 32], ids=["low", "high"])
def test_ids_that_differ_in_either_half_alone_are_different(shift: int) -> None:
    asked = Asked(SETTINGS["no-buffer"])
    images = [array("q", [(5 << 32) + 7 + (number << shift)] * IMAGE_TOKENS) for number in range(3)]
    for each in images:
        hits = [asked.hit(TEXT + each + question) for question in QUESTIONS[:3]]
        assert hits[0] <= len(TEXT)
        assert hits[2] == len(TEXT) + IMAGE_TOKENS


def test_negative_control_half_an_id_lets_two_images_share_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from marconi.engine.cache import radix_cache as cache
    from marconi.engine.cache import tree_core

    def narrow(token_ids: "array[int]", num_tokens: int, start: int = 0) -> bytes:
        return array("q", [token & 0xFFFFFFFF for token in token_ids[start:num_tokens]]).tobytes()

    for module in (cache, tree_core):
        monkeypatch.setattr(module, "path_of", narrow)
    asked = Asked(SETTINGS["no-buffer"])
    one, other = (TEXT + array("q", [(number << 32) + 7] * IMAGE_TOKENS) + QUESTIONS[0] for number in range(2))
    asked.hit(one)
    with pytest.raises(AssertionError, match="of another sequence"):
        asked.hit(other)


def test_the_same_prompt_for_another_adapter_shares_nothing(asked: Asked) -> None:
    prompt = TEXT + QUESTIONS[0] + QUESTIONS[1]
    for extra_key in extra_keys():
        hits = [asked.hit(prompt, extra_key) for _ in range(2)]
        assert hits == [0, asked.aligned(len(prompt) - 1)]


def test_negative_control_a_name_space_without_the_adapter_shares_states(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace_of = tree_core.namespace_of
    monkeypatch.setattr(
        tree_core, "namespace_of", lambda extra_key, salt: namespace_of((extra_key or "")[: len("tenant")], salt)
    )
    asked = Asked(SETTINGS["no-buffer"])
    _, one, other = extra_keys()
    prompt = TEXT + QUESTIONS[0]
    asked.hit(prompt, one)
    with pytest.raises(AssertionError, match="of another sequence"):
        asked.hit(prompt, other)
