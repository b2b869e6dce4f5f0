"""The channel: mutual proof, framing, limits, deadlines; and connections that mean harm."""

import hmac
import socket
import struct
import threading
import time

import pytest

from megatron_kd.errors import AuthenticationFailed, ConfigError, TransferFailed, WireError, WireVersionMismatch
from megatron_kd.stream import channel as ch
from megatron_kd.stream.channel import Listener, connect, load_token, parse_address
from tests.stream_peers import TOKEN, Stage, block, check_rows


@pytest.fixture
def echo():
    """A listener that sends back what it gets."""
    def serve(channel):
        while (message := channel.receive(timeout_s=5)) is not None:
            channel.send(message)

    listener = Listener(("127.0.0.1", 0), TOKEN, serve, handshake_timeout_s=0.5, max_pending=4)
    yield listener
    listener.close()


def test_messages_and_blobs_come_back(echo):
    with connect(echo.address, TOKEN) as channel:
        for blobs in ([], [b""], [b"a" * 100_000, b"\0\1"]):
            channel.send({"t": "x", "n": 2**60, "blobs": blobs})
            assert channel.receive(timeout_s=5) == {"t": "x", "n": 2**60, "blobs": blobs}
        assert channel.receive(timeout_s=0.05) is None


def test_each_side_refuses_a_peer_without_the_token(echo):
    with pytest.raises(AuthenticationFailed, match="MEGATRON_KD_TOKEN"):
        connect(echo.address, b"another token 1234")
    impostor = socket.create_server(("127.0.0.1", 0))

    def serve():
        sock, _ = impostor.accept()
        sock.sendall(ch.MAGIC + struct.pack("<H", ch.WIRE_VERSION) + b"n" * 32)
        unread = len(ch.MAGIC) + 2 + 32 + 32  # all of it: a socket that closes with unread bytes takes back what it sent
        while unread:
            unread -= len(sock.recv(unread))
        sock.sendall(b"p" * 32)
        sock.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(AuthenticationFailed, match="must know the shared token"):
        connect(impostor.getsockname(), TOKEN)


def test_another_version_is_refused_before_a_proof_is_shown():
    listener = socket.create_server(("127.0.0.1", 0))
    got = []

    def serve():
        sock, _ = listener.accept()
        sock.sendall(ch.MAGIC + struct.pack("<H", 7))
        time.sleep(0.1)
        got.append(sock.recv(1000))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(WireVersionMismatch, match=f"= 7.*ours, {ch.WIRE_VERSION}"):
        connect(listener.getsockname(), TOKEN)
    thread.join(2)
    assert got == [ch.MAGIC + struct.pack("<H", ch.WIRE_VERSION)]


@pytest.mark.parametrize("tamper", ["flip", "replay", "reorder"])
def test_a_frame_that_was_changed_replayed_or_reordered_is_refused(tamper):
    left, right = socket.socketpair()
    key = b"k" * 32
    sender, receiver = ch.Channel(left, key, server=False), ch.Channel(right, key, server=True)
    sender.send({"n": 1})
    first = right.recv(10_000)
    sender.send({"n": 2})
    second = right.recv(10_000)
    flipped = bytearray(first)
    flipped[12] ^= 1
    left.sendall({"flip": bytes(flipped), "replay": first + first, "reorder": second}[tamper])
    with pytest.raises(AuthenticationFailed, match="wrong tag"):
        for _ in range(2):
            receiver.receive(timeout_s=1)


def test_a_peer_that_does_not_read_ends_the_send_at_its_deadline(echo):
    left, right = socket.socketpair()
    began = time.monotonic()
    with pytest.raises(TransferFailed):
        ch.Channel(left, b"k" * 32, server=False).send({"blobs": [b"x" * (8 << 20)]}, timeout_s=0.3)
    assert 0.2 < time.monotonic() - began < 2
    right.close()


def test_the_token_comes_from_a_private_file_or_the_environment_and_is_long_enough(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    assert load_token(str(path)) == b"0123456789abcdef"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_token(str(path))
    monkeypatch.setenv(ch.TOKEN_VARIABLE, "x" * 20)
    assert load_token(None) == b"x" * 20
    monkeypatch.setenv(ch.TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        load_token(None)
    with pytest.raises(ConfigError, match="must exist"):
        load_token(str(tmp_path / "none"))


@pytest.mark.parametrize("text", ["localhost", "host:", ":80", "host:99999", "host:x"])
def test_an_address_without_host_or_port_is_refused(text):
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(text)


def raw(address):
    return socket.create_connection(address, timeout=5)


def challenge(sock):
    """Go through the preamble; the server's nonce."""
    sock.sendall(ch.MAGIC + struct.pack("<H", ch.WIRE_VERSION))
    data = b""
    while len(data) < 6 + 32:
        data += sock.recv(100)
    return data[6:]


def expect_closed(sock, within_s):
    """The server hangs up in time, whatever it sent before."""
    sock.settimeout(within_s)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass


def garbage(address):
    sock = raw(address)
    sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    expect_closed(sock, 2)


def port_scan(address):
    raw(address).close()


def half_open(address):
    expect_closed(raw(address), 7)  # says nothing; the handshake's deadline ends it


def slow_sender(address):
    sock, began = raw(address), time.monotonic()
    try:
        for byte in ch.MAGIC + struct.pack("<H", 1) + b"n" * 64:
            sock.sendall(bytes([byte]))
            time.sleep(0.3)
    except OSError:
        pass
    expect_closed(sock, 2)
    assert time.monotonic() - began < 8, "a byte now and then must not extend the deadline"


def wrong_token(address):
    with pytest.raises(AuthenticationFailed):
        connect(address, b"not the token at all")


RECORDED = []


def replayed_challenge(address):
    """Show the answer that was right for another connection's challenge."""
    if not RECORDED:
        sock = raw(address)
        nonce = challenge(sock)
        RECORDED.append(b"c" * 32 + hmac.new(TOKEN, b"client" + nonce + b"c" * 32, "sha256").digest())
        sock.close()
    sock = raw(address)
    challenge(sock)
    sock.sendall(RECORDED[0])
    expect_closed(sock, 2)


def oversized_frame(address):
    with connect(address, TOKEN) as channel:
        channel._sock.sendall(struct.pack("<I", 2**32 - 1))
        expect_closed(channel._sock, 2)


def forged_frame(address):
    with connect(address, TOKEN) as channel:
        channel._sock.sendall(struct.pack("<I", 40) + b"f" * 40)
        expect_closed(channel._sock, 2)


def malformed_messages(address):
    """Authenticated, but what it says makes no sense."""
    for message in ({"t": "join"}, {"t": "join", "role": "king"}, {"t": "join", "role": "peer", "rank": 99}, {"t": "join", "role": "peer", "rank": "x"},
                    {"t": "join", "role": "teacher"}, {"t": "join", "role": "teacher", "name": "x", "agreement": [1]}):
        with connect(address, TOKEN) as channel:
            channel.send(message)
            try:
                answer = channel.receive(timeout_s=2)
                assert answer is None or answer["t"] == "refused"
            except WireError:
                pass


def joined_then_nonsense(address):
    """A teacher that is admitted, then breaks the protocol."""
    from tests.stream_peers import AGREED
    with connect(address, TOKEN) as channel:
        channel.send({"t": "join", "role": "teacher", "name": "evil", "incarnation": "1", "agreement": AGREED.as_dict(), "head_digest": "", "context_length": 99})
        assert channel.receive(timeout_s=2)["t"] == "welcome"
        channel.send({"t": "done", "lane": 7, "seq": "x"})
        try:
            while channel.receive(timeout_s=2) is not None:
                pass
        except WireError:
            pass


HOSTILE = [garbage, port_scan, half_open, slow_sender, wrong_token, replayed_challenge, oversized_frame, forged_frame, malformed_messages, joined_then_nonsense]


def test_ten_hostile_connections_at_once_are_refused_and_the_run_goes_on():
    with Stage(on_loss="reroute") as stage, stage.teacher():
        receiver, errors = stage.ranks[0], []
        receiver.wait_for_teachers(1)

        def attack(one):
            try:
                one(receiver._asker.address)
            except BaseException as e:  # noqa: BLE001 -- shown below
                errors.append((one.__name__, e))

        threads = [threading.Thread(target=attack, args=(one,)) for one in HOSTILE]
        for thread in threads:
            thread.start()
        step = 0
        while any(thread.is_alive() for thread in threads):
            b = block(step)
            receiver.post(b)
            check_rows(receiver.take(b), b)
            receiver.release(b)
            step += 1
            time.sleep(0.01)
        assert not errors, errors
        deadline = time.monotonic() + 5
        while receiver.refused < 13 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert step > 50 and receiver.refused >= 13, (step, receiver.refused)


def test_the_hub_survives_the_same_and_many_half_open_connections(echo):
    with Stage() as stage:
        for one in (garbage, wrong_token, oversized_frame, forged_frame, replayed_challenge):
            one(stage.hub.address)
        deadline = time.monotonic() + 5
        while stage.hub.refused < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stage.hub.refused >= 5
    idle = [raw(echo.address) for _ in range(12)]  # three times as many as may be pending
    time.sleep(0.8)
    with connect(echo.address, TOKEN) as channel:
        channel.send({"alive": True})
        assert channel.receive(timeout_s=2)["alive"]
    for sock in idle:
        sock.close()


def test_a_connection_to_oneself_is_no_listener(monkeypatch):
    def dial_own_port(address, timeout):
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        return sock

    monkeypatch.setattr(socket, "create_connection", dial_own_port)
    with pytest.raises(TransferFailed, match="nobody listens"):
        connect(("127.0.0.1", 1), TOKEN)
