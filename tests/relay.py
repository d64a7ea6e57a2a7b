"""A relay between clients and a server on loopback, which may be slow, cut, or speak TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time


class Relay:
    """Listens on a port of its own and passes on to `port`, each way after `delay_s`.

    With `tls` it is the TLS end of a server that knows none.
    """

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.delay_s = 0.0
        self._target, self._tls = port, tls
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def end(self) -> None:
        """Cut all connections and take no more."""
        for one in (self._listener, *tuple(self._open)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open |= {client, server}
            back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
            back.start()
            self._pump(client, server)
            back.join()
            self._open -= {client, server}
            server.close()
        client.close()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay_s)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
