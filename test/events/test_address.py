"""Events are published where no other host can hear them, or behind keys."""

from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="the router extra is not installed: pip install '.[router]'")

import zmq.auth

from marconi.events.address import Keys, TcpAddress, require_private

KEYS = Keys(b"p" * 40, b"s" * 40)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5557", "tcp://127.8.0.1:1", "tcp://[::1]:5557", "tcp://localhost:5557", "ipc:///e"]
)
def test_loopback_needs_no_keys(endpoint: str) -> None:
    require_private(endpoint, None)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://worker-3:5557"])
def test_what_other_hosts_reach_needs_keys(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"must be tcp://127.0.0.1:5557, or have CURVE keys: other hosts reach it"):
        require_private(endpoint, None)
    require_private(endpoint, KEYS)


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp://", "tcp://:1", "tcp://h", "tcp://h:", "tcp://h:0", "tcp://h:65536", "http://h:1", "tcp://h:٣"],
)
def test_what_is_no_address_is_named(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"an address must be like tcp://127.0.0.1:5557, got"):
        require_private(endpoint, None)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://[::1]:5557", "tcp://127.0.0.1:65534"])
def test_an_address_is_spelt_as_it_was_read(endpoint: str) -> None:
    assert str(TcpAddress.parse(endpoint)) == endpoint


def test_ports_end() -> None:
    assert str(TcpAddress.parse("tcp://*:65534").offset(1)) == "tcp://*:65535"
    with pytest.raises(ValueError, match="the port must be at most 65535, got 65534 "):
        TcpAddress.parse("tcp://*:65534").offset(2)


def test_keys_are_read_from_a_secret_certificate_and_their_secret_is_not_shown(tmp_path: Path) -> None:
    public, secret = zmq.auth.create_certificates(tmp_path, "fleet")
    keys = Keys.read(Path(secret))
    assert len(keys.public) == len(keys.secret) == 40
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(ValueError, match=r"must be the .key_secret beside it, got a public key"):
        Keys.read(Path(public))


@pytest.mark.parametrize("text", [None, "nothing of the kind"])
def test_a_file_that_is_no_certificate_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}: must be a .key_secret of pyzmq, got no CURVE certificate"):
        Keys.read(path)


@pytest.mark.parametrize(
    ("bound", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "worker", "tcp://worker:5557"),
        ("tcp://[::]:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://10.0.0.8:5557", "10.0.0.7", "tcp://10.0.0.8:5557"),
    ],
)
def test_what_is_bound_to_every_address_is_reached_at_the_workers(bound: str, host: str, expected: str) -> None:
    assert str(TcpAddress.parse(bound).reached_at(host)) == expected
