"""Channel: authenticated, length-prefixed byte frames between two processes of one run.

Owns the preamble (magic and wire version, before anything else), the mutual HMAC challenge, frame limits and deadlines. Used by
the rendezvous, by teachers and by the ranks of one student replica for control messages; teacher rows never pass through here.

Preamble   both sides: b"MKDS" + version u16. Another magic or version is refused before a secret is used.
Challenge  server: nonce_s[32]; client: nonce_c[32] + HMAC(token, "client" nonce_s nonce_c); server: HMAC(token, "server" nonce_c nonce_s).
Frame      length u32 | header length u32 | JSON header | blobs | tag[16]; tag = HMAC(session key, direction, counter, body), so
           that a frame can be neither forged, replayed nor reordered. JSON and raw bytes only; nothing is ever unpickled.

A message is a dict of JSON values and, under "blobs", byte strings. What is not kept secret is the content: tokens travel in the
clear, so a run over a network that others can read belongs into a tunnel.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_kd.errors import AuthenticationFailed, ConfigError, TransferFailed, WireError, WireVersionMismatch, rule

WIRE_VERSION = 2
MAGIC = b"MKDS"
MAX_FRAME_BYTES = 256 << 20
_NONCE_BYTES, _TAG_BYTES = 32, 16
TOKEN_VARIABLE = "MEGATRON_KD_TOKEN"


def load_token(token_file: str | None) -> bytes:
    """The shared secret: the stripped contents of `token_file`, else of the environment variable MEGATRON_KD_TOKEN.

    Errors: ConfigError where neither holds at least 16 bytes, or others may read the file.
    """
    if token_file:
        path = Path(token_file)
        if not path.is_file():
            raise ConfigError(rule("stream.token_file", token_file, "must exist", "Write a random secret of 16 bytes or more to it, mode 600"))
        if path.stat().st_mode & 0o077:
            raise ConfigError(rule("stream.token_file", token_file, "must not be readable by others", f"chmod 600 {token_file}"))
        token, source = path.read_bytes().strip(), token_file
    else:
        token, source = os.environ.get(TOKEN_VARIABLE, "").encode(), f"${TOKEN_VARIABLE}"
    if len(token) < 16:
        raise ConfigError(rule(source, f"{len(token)} bytes", "the shared token needs at least 16 bytes",
                               f"Set {TOKEN_VARIABLE} on every side, for example to `openssl rand -hex 32`, or stream.token_file"))
    return token


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of `host:port`. Errors: ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ConfigError(rule("address", text, "must read host:port", "For example 127.0.0.1:29600"))
    return host, int(port)


class PeerClosed(TransferFailed):
    """The peer's end is closed: its process ended or hung up (a cut network or a stopped process looks different: silence)."""


class Channel:
    """One authenticated connection. `send` is safe from several threads; `receive` belongs to one.

    Errors of both: TransferFailed where the peer closed, the deadline passed or the socket broke; WireError for a frame that
    breaks the protocol; AuthenticationFailed for a frame with a wrong tag.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, server: bool):
        self._sock, self._key = sock, key
        self._send_sock = sock.dup()  # a timeout belongs to a socket object: sender and receiver must not share one
        self._names = (b"s", b"c") if server else (b"c", b"s")
        self._sent = self._received = 0
        self._send_lock = threading.Lock()
        self.peer = "%s:%s" % sock.getpeername()[:2] if sock.family != socket.AF_UNIX else "local"
        self.last_received_s = time.monotonic()

    def send(self, message: dict, *, timeout_s: float = 30.0) -> None:
        """Send one message. A peer that does not read for `timeout_s` breaks the channel."""
        body = pack_message(message)
        if len(body) + _TAG_BYTES > MAX_FRAME_BYTES:
            raise WireError(rule("frame", len(body), f"must be at most {MAX_FRAME_BYTES} bytes", "Make the micro-batch smaller"))
        with self._send_lock:
            tag = _tag(self._key, self._names[0], self._sent, body)
            self._sent += 1
            _send_all(self._send_sock, struct.pack("<I", len(body) + _TAG_BYTES) + body + tag, time.monotonic() + timeout_s)

    def receive(self, *, timeout_s: float) -> dict | None:
        """The next message, or None where none began within `timeout_s`; a frame that has begun gets as long again to end."""
        first = _receive_exact(self._sock, 4, time.monotonic() + timeout_s, partial_ok=True)
        if first is None:
            return None
        (length,) = struct.unpack("<I", first)
        if not 4 + _TAG_BYTES <= length <= MAX_FRAME_BYTES:
            raise WireError(rule(f"frame length from {self.peer}", length, f"must be in [{4 + _TAG_BYTES}, {MAX_FRAME_BYTES}]", "The peer does not speak this protocol"))
        frame = _receive_exact(self._sock, length, time.monotonic() + max(timeout_s, 5.0))
        body, tag = frame[:-_TAG_BYTES], frame[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self._key, self._names[1], self._received, body)):
            raise AuthenticationFailed(rule(f"frame {self._received} from {self.peer}", "wrong tag", "must be signed with the session's key", "Someone else wrote to this connection"))
        self._received += 1
        self.last_received_s = time.monotonic()
        return unpack_message(body, self.peer)

    def close(self) -> None:
        """Close the socket; a thread that waits in `receive` gets TransferFailed."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()
        self._send_sock.close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def connect(address: tuple[str, int], token: bytes, *, timeout_s: float = 10.0) -> Channel:
    """An authenticated channel to a Listener. Errors: WireVersionMismatch, AuthenticationFailed, TransferFailed (all within `timeout_s`)."""
    deadline = time.monotonic() + timeout_s
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as e:
        raise TransferFailed(f"no connection to {address[0]}:{address[1]}: {e}") from e
    if sock.getsockname() == sock.getpeername():  # nobody listens, and the kernel gave this end the very port that it dials
        sock.close()
        raise TransferFailed(f"no connection to {address[0]}:{address[1]}: nobody listens")
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _preamble(sock, deadline)
        nonce_s = _receive_exact(sock, _NONCE_BYTES, deadline)
        nonce_c = secrets.token_bytes(_NONCE_BYTES)
        _send_all(sock, nonce_c + _mac(token, b"client", nonce_s, nonce_c), deadline)
        try:
            proof = _receive_exact(sock, 32, deadline)
        except TransferFailed as e:
            raise AuthenticationFailed(rule(f"token shown to {address[0]}:{address[1]}", "refused", "must equal the server's", f"Give both sides the same {TOKEN_VARIABLE}")) from e
        if not hmac.compare_digest(proof, _mac(token, b"server", nonce_c, nonce_s)):
            raise AuthenticationFailed(rule(f"server {address[0]}:{address[1]}", "wrong proof", "must know the shared token", f"Give both sides the same {TOKEN_VARIABLE}"))
        return Channel(sock, _mac(token, b"session", nonce_s, nonce_c), server=False)
    except BaseException:
        sock.close()
        raise


def accept(sock: socket.socket, token: bytes, *, timeout_s: float = 5.0) -> Channel:
    """The server's half of the handshake on an accepted socket. `timeout_s` bounds all of it, however slowly the peer sends."""
    deadline = time.monotonic() + timeout_s
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _preamble(sock, deadline)
        nonce_s = secrets.token_bytes(_NONCE_BYTES)
        _send_all(sock, nonce_s, deadline)
        answer = _receive_exact(sock, _NONCE_BYTES + 32, deadline)
        nonce_c, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _mac(token, b"client", nonce_s, nonce_c)):
            raise AuthenticationFailed(rule("client's proof", "wrong", "must answer this connection's challenge with the shared token", f"Give both sides the same {TOKEN_VARIABLE}"))
        _send_all(sock, _mac(token, b"server", nonce_c, nonce_s), deadline)
        return Channel(sock, _mac(token, b"session", nonce_s, nonce_c), server=True)
    except BaseException:
        sock.close()
        raise


class Listener:
    """Accepts connections on an explicit address, authenticates each on a thread of its own and hands the channel to `serve`.

    At most `max_pending` connections may be unauthenticated at a time; more are closed at once, so half-open peers cannot pile up.
    `refused` counts connections that failed the preamble or the challenge; `last_refusal` is the newest reason.
    """

    def __init__(self, bind: tuple[str, int], token: bytes, serve: Callable[[Channel], None], *, handshake_timeout_s: float = 5.0, max_pending: int = 32):
        self._token, self._serve, self._timeout_s = token, serve, handshake_timeout_s
        self._pending = threading.BoundedSemaphore(max_pending)
        self._channels: set[Channel] = set()
        self._lock = threading.Lock()
        self.refused, self.last_refusal = 0, ""
        try:
            self._sock = socket.create_server(bind, backlog=64)
        except OSError as e:
            raise ConfigError(rule("listen address", f"{bind[0]}:{bind[1]}", f"must be free and local ({e})", "Choose another port, or stop the other run")) from e
        self.address = self._sock.getsockname()[:2]
        self._closed = False
        threading.Thread(target=self._accept_loop, name="kd-listen", daemon=True).start()

    def _accept_loop(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            if not self._pending.acquire(blocking=False):
                self._refuse("too many unauthenticated connections")
                sock.close()
                continue
            threading.Thread(target=self._welcome, args=(sock,), name="kd-welcome", daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            channel = accept(sock, self._token, timeout_s=self._timeout_s)
        except (WireError, OSError) as e:
            self._refuse(str(e))
            return
        finally:
            self._pending.release()
        with self._lock:
            if self._closed:
                channel.close()
                return
            self._channels.add(channel)
        try:
            self._serve(channel)
        except WireError as e:
            self._refuse(str(e))
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self.refused += 1
            self.last_refusal = reason

    def close(self) -> None:
        """Stop listening and close every channel."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()
        for channel in channels:
            channel.close()


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _tag(key: bytes, direction: bytes, counter: int, body: bytes) -> bytes:
    return _mac(key, direction, struct.pack("<Q", counter), body)[:_TAG_BYTES]


def _preamble(sock: socket.socket, deadline_s: float) -> None:
    _send_all(sock, MAGIC + struct.pack("<H", WIRE_VERSION), deadline_s)
    theirs = _receive_exact(sock, 6, deadline_s)
    if theirs[:4] != MAGIC:
        raise WireError(rule("first bytes", theirs, f"must be {MAGIC!r}", "The peer is not megatron_kd"))
    (version,) = struct.unpack("<H", theirs[4:])
    if version != WIRE_VERSION:
        raise WireVersionMismatch(rule("peer's wire version", version, f"must be ours, {WIRE_VERSION}", "Install the same megatron_kd on both sides"))


def pack_message(message: dict) -> bytes:
    """A message as the body of a frame: header length u32, JSON header, blobs."""
    blobs = [bytes(blob) for blob in message.get("blobs", ())]
    header = json.dumps({**message, "blobs": [len(blob) for blob in blobs]}, separators=(",", ":")).encode()
    return struct.pack("<I", len(header)) + header + b"".join(blobs)


def unpack_message(body: bytes, peer: str) -> dict:
    """The message of a body. Errors: WireError where it is malformed."""
    try:
        (size,) = struct.unpack_from("<I", body)
        message = json.loads(body[4:4 + size])
        sizes, blobs, start = message["blobs"], [], 4 + size
        for n in sizes:
            blobs.append(body[start:start + n])
            start += n
        if start != len(body) or any(not isinstance(n, int) or n < 0 for n in sizes):
            raise ValueError("blob sizes do not add up")
        message["blobs"] = blobs
        return message
    except (ValueError, KeyError, TypeError, struct.error) as e:
        raise WireError(f"malformed frame from {peer}: {e}") from e


def _send_all(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    view = memoryview(data)
    try:
        while view:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            view = view[sock.send(view):]
            if view and time.monotonic() >= deadline_s:
                raise TimeoutError("deadline passed")
    except (OSError, ValueError) as e:
        raise TransferFailed(f"sending failed: {e}") from e


def _receive_exact(sock: socket.socket, size: int, deadline_s: float, *, partial_ok: bool = False) -> bytes | None:
    """`size` bytes. With `partial_ok`, None where not a single byte came before the deadline."""
    data = bytearray()
    try:
        while len(data) < size:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                chunk = sock.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                if partial_ok and not data:
                    return None
                raise
            if not chunk:
                raise PeerClosed("the peer closed the connection")
            data += chunk
            if len(data) < size and time.monotonic() >= deadline_s:
                raise TimeoutError(f"{len(data)} of {size} bytes before the deadline")
    except ConnectionResetError as e:
        raise PeerClosed("the peer reset the connection") from e
    except (OSError, ValueError) as e:
        raise TransferFailed(f"receiving failed: {e}") from e
    return bytes(data)
