"""A small HTTP(S) server for metrics and health. Knows no metric and no run.

`prometheus_client`'s own `start_http_server` was left aside for three faults that matter here:
it shakes hands in the accept loop, so that one client that connects to a TLS port and says nothing
stops all others; its connections have no timeout; it never reads a renewed certificate.
"""

from __future__ import annotations

import errno
import gzip
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import gzip_accepted

from sgt_ds.errors import UserError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

log = logging.getLogger("sgt_ds")

CONNECTION_TIMEOUT_SECONDS = 10.0
MOST_CONNECTIONS = 256

Render = Callable[[str], tuple[str, bytes]]
"""Accept header in, content type and body out."""


class Endpoint(Protocol):
    """Where to listen; `sgt_ds.config.TelemetryConfig` is one."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def certificate(self) -> Path | None: ...
    @property
    def private_key(self) -> Path | None: ...
    @property
    def client_ca(self) -> Path | None: ...


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_TIMEOUT_SECONDS  # of the handshake, of reading, and of writing

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    """One daemon thread a connection: closing waits for none of them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], family: int, tls: Certificate | None) -> None:
        self.address_family = family
        self._tls = tls
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer asks the resolver for its own name here, which can take half a minute.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self._tls is None:
            return connection, address
        try:
            return self._tls.wrap(connection), address
        except BaseException:
            connection.close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs, leaves or fails the handshake is no fault of the run."""
        log.debug("telemetry: connection of %s failed", client_address, exc_info=True)


class Certificate:
    """The server's certificate, read anew when its file changes."""

    def __init__(self, certificate: Path, private_key: Path, client_ca: Path | None) -> None:
        self._certificate, self._private_key = certificate, private_key
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if client_ca is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            try:
                self._context.load_verify_locations(client_ca)
            except OSError as error:  # ssl.SSLError is one
                raise UserError(
                    client_ca, "telemetry.client_ca", f"cannot be loaded ({error}); give a PEM file"
                ) from None
        self._loaded = self._written()
        try:
            self._load()
        except OSError as error:
            raise UserError(
                certificate,
                "telemetry.certificate",
                f"cannot be loaded with {private_key} ({error}); give a PEM pair without password",
            ) from None

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Speak TLS on an accepted connection; the handshake comes with the first read."""
        written = self._written()
        if written != self._loaded:
            self._loaded = written
            try:
                self._load()
                log.info("telemetry: certificate %s read anew", self._certificate)
            except OSError as error:
                log.warning("telemetry: new certificate not usable, old one kept: %s", error)
        return self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def _load(self) -> None:
        # An empty password makes an encrypted key fail; without one OpenSSL would ask a terminal.
        self._context.load_cert_chain(self._certificate, self._private_key, password=lambda: "")

    def _written(self) -> tuple[float, ...]:
        try:
            return tuple(p.stat().st_mtime for p in (self._certificate, self._private_key))
        except (
            OSError
        ):  # being replaced, or gone: loading says so at start, later the old one stays
            return ()


class MetricsServer:
    """Serves `/metrics` and `/health` from a thread until `close`."""

    def __init__(self, endpoint: Endpoint, local_rank: int, render: Render) -> None:
        """Bind `endpoint.port + local_rank`. Raises: UserError where that cannot be."""
        port = endpoint.port + local_rank
        if port > 65535:
            raise UserError(
                f"local rank {local_rank}",
                "telemetry.port",
                f"{endpoint.port} + {local_rank} exceeds 65535; choose a lower port",
            )
        tls = None
        if endpoint.certificate is not None and endpoint.private_key is not None:
            tls = Certificate(endpoint.certificate, endpoint.private_key, endpoint.client_ca)
        self._render = render
        self._server = _bind(endpoint.host, port, tls)
        self._server.set_app(self._respond)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="sgt-telemetry", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is bound."""
        return int(self._server.server_address[1])

    def is_alive(self) -> bool:
        """Whether the accepting thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop accepting and release the port; connections under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _respond(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        if environ["REQUEST_METHOD"] != "GET":
            status, body = "405 Method Not Allowed", b"GET only\n"
        elif environ["PATH_INFO"] == "/metrics":
            try:
                content_type, body = self._render(environ.get("HTTP_ACCEPT", ""))
            except Exception:  # counted and logged where it arose
                status, body = "500 Internal Server Error", b"metrics not available\n"
            else:
                status, headers = "200 OK", [("Content-Type", content_type)]
                if gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")):
                    body = gzip.compress(body, compresslevel=1)
                    headers.append(("Content-Encoding", "gzip"))
        elif environ["PATH_INFO"] == "/health":
            status, body = "200 OK", b"ok\n"
        else:
            status, body = "404 Not Found", b"only /metrics and /health\n"
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]


def _bind(host: str, port: int, tls: Certificate | None) -> _Server:
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return _Server((str(address[0]), port), family, tls)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            mend = f"port {port} is in use; free it or choose another telemetry.port"
            raise UserError(where, "telemetry.port", mend) from None
        if error.errno == errno.EACCES:
            mend = f"port {port} needs privileges; choose one above 1023"
            raise UserError(where, "telemetry.port", mend) from None
        mend = f"cannot be bound ({error.strerror or error}); give an address of this machine"
        raise UserError(where, "telemetry.host", mend) from None
