"""A program that listens on a port as if it were Kafka, to learn passwords: it answers the login, and keeps all that clients send."""

from __future__ import annotations

import base64
import socket
import struct
import threading
from types import TracebackType
from typing import Final, Self

SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE = 17, 18, 36
UNSUPPORTED_VERSION: Final = 35
#: Requests that the false Kafka says it knows: key, lowest and highest version.
KNOWN: Final = ((3, 0, 1), (SASL_HANDSHAKE, 0, 1), (API_VERSIONS, 0, 0), (SASL_AUTHENTICATE, 0, 0))


def _text(value: bytes) -> bytes:
    return struct.pack(">h", len(value)) + value


def _versions(error: int) -> bytes:
    return struct.pack(">hi", error, len(KNOWN)) + b"".join(struct.pack(">hhh", *each) for each in KNOWN)


class FalseKafka:
    """Listens on a free port of loopback. It offers ``mechanisms``, and answers SCRAM without knowing the password."""

    def __init__(self, *mechanisms: str) -> None:
        self._mechanisms = [mechanism.encode() for mechanism in mechanisms]
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.said: list[bytes] = []
        self.proofs: list[bytes] = []

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as input_:
            while len(size := input_.read(4)) == 4:
                request = input_.read(struct.unpack(">i", size)[0])
                self.said.append(request)
                answer = request[4:8] + self._answer(request)
                peer.sendall(struct.pack(">i", len(answer)) + answer)

    def _answer(self, request: bytes) -> bytes:
        key, version = struct.unpack(">hh", request[:4])
        behind = 10 + max(0, struct.unpack(">h", request[8:10])[0])
        if key == API_VERSIONS:
            return _versions(UNSUPPORTED_VERSION if version else 0)
        if key == SASL_HANDSHAKE:
            return struct.pack(">hi", 0, len(self._mechanisms)) + b"".join(map(_text, self._mechanisms))
        return struct.pack(">hh", 0, -1) + self._challenge(request[behind + 4 :])

    def _challenge(self, said: bytes) -> bytes:
        """Answer a message of SCRAM: with a nonce, a salt and iterations, or with a signature that is not valid."""
        if said.startswith(b"n,"):
            nonce = said.partition(b",r=")[2]
            answer = b"r=" + nonce + b"x,s=" + base64.b64encode(b"salt") + b",i=4096"
        else:
            self.proofs.append(said)
            answer = b"v=" + base64.b64encode(bytes(32))
        return struct.pack(">i", len(answer)) + answer
