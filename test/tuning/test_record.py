"""Records of requests: what is equal stays equal, what differs stays apart, and nothing of the text is in them."""

import io

import numpy as np
import pytest

from marconi.policy.request import Request
from marconi.tuning.record import Encoder, Record, forget, read

RNG = np.random.default_rng(3)


def tokens(num: int) -> np.ndarray:
    return RNG.integers(150_000, size=num).astype(np.int64)


def test_records_come_back_as_they_were_made() -> None:
    encoder = Encoder(4)
    first, second = tokens(10), tokens(3)
    stream = io.BytesIO(encoder.encode(first, 7, 5, 1.5, (0.25, 0.5)) + forget() + encoder.encode(second, 3, 0, 2.0))
    assert list(read(stream, 4)) == [
        Record(Request(encoder.hashes(first).tobytes(), 7, 3, 8, 1.5, namespace=5), 0.25, 0.5),
        None,
        Record(Request(encoder.hashes(second).tobytes(), 3, 0, 0, 2.0), 0.0, 0.0),
    ]


@pytest.mark.parametrize("num_common", [0, 1, 63, 64, 65, 200, 299])
def test_prefixes_agree_in_exactly_the_blocks_that_agree(num_common: int) -> None:
    encoder = Encoder(64)
    first = tokens(300)
    second = first.copy()
    second[num_common] += 1
    same = encoder.hashes(first) == encoder.hashes(second)
    assert same.tolist() == [block != num_common // 64 for block in range(5)]


def test_the_order_of_tokens_counts() -> None:
    encoder = Encoder(8)
    assert encoder.hashes(np.array([1, 2, 3], np.int64)) != encoder.hashes(np.array([2, 1, 3], np.int64))


def test_hashes_are_the_same_in_every_process() -> None:
    """A fixed value: the server and its tuner are two processes, perhaps of two versions."""
    assert Encoder(2).hashes(np.array([1, 0, 0, 1], np.int64)).tolist() == Encoder(2)._weights.tolist()


def test_random_blocks_do_not_collide() -> None:
    hashes = Encoder(64).hashes(tokens(64 * 20_000))
    assert len(np.unique(hashes)) == 20_000


def test_ids_of_63_bits_are_taken() -> None:
    large = np.array([(1 << 63) - 1] * 5, np.int64)
    assert len(Encoder(4).hashes(large)) == 2


def test_a_name_space_of_128_bits_keeps_its_lower_63() -> None:
    (record,) = read(io.BytesIO(Encoder().encode(tokens(5), 5, (1 << 127) + 12345, 0.0)), 64)
    assert record is not None
    assert record.request.namespace == 12345


@pytest.mark.parametrize("num_bytes", [1, 55, 60])
def test_a_stream_that_ends_within_a_record_says_so(num_bytes: int) -> None:
    whole = Encoder(4).encode(tokens(8), 8, 0, 0.0)
    with pytest.raises(EOFError, match=r"must be [0-9]+ bytes, got"):
        list(read(io.BytesIO(whole[:num_bytes]), 4))


def test_a_block_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="a block must be 1 token or more, got 0"):
        Encoder(0)
