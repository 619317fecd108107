"""A small HTTP(S) server for metrics, health and scrape targets. Knows no metric and no run.

`prometheus_client`'s own `start_http_server` was left aside for three faults that matter here:
it shakes hands in the accept loop, so that one client that connects to a TLS port and says nothing
stops all others; its connections have no timeout; it never reads a renewed certificate.
"""

from __future__ import annotations

import errno
import gzip
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import gzip_accepted
from pydantic import SecretStr

from sgt_ds.errors import UserError
from sgt_ds.telemetry.certificate import Certificate
from sgt_ds.telemetry.credentials import Credentials

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

log = logging.getLogger(__name__)

CONNECTION_TIMEOUT_SECONDS = 10.0
MAX_CONNECTIONS = 256

# How far `port_in_use: next` looks: more than the ranks of a few runs on one host.
MAX_PORTS_TRIED = 64

# Prometheus and agents like it send it with each scrape; a run that ends waits for no one else.
TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"

Render = Callable[[str, str | None], tuple[str, bytes]]
"""Accept header and scraper (None: someone else reads) in, content type and body out."""


class Endpoint(Protocol):
    """Where to listen; `sgt_ds.config.TelemetryConfig` is one."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def port_in_use(self) -> Literal["error", "next"]: ...
    @property
    def certificate(self) -> Path | None: ...
    @property
    def private_key(self) -> Path | None: ...
    @property
    def client_ca(self) -> Path | None: ...
    @property
    def username(self) -> str | None: ...
    @property
    def password(self) -> SecretStr | None: ...
    @property
    def password_file(self) -> Path | None: ...


class PortInUse(UserError):
    """Another process listens there."""


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
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
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


class MetricsServer:
    """Serves `/metrics` and `/health` from a thread until `close`."""

    def __init__(
        self, endpoint: Endpoint, local_rank: int, render: Render, run: str | None = None
    ) -> None:
        """Bind `endpoint.port + local_rank`. Raises: UserError where that cannot be.

        `run`: its name; scrapes that ask for another one are refused.
        """
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
        self._credentials: Credentials | None = None
        if endpoint.username is not None:
            self._credentials = Credentials(
                endpoint.username, endpoint.password, endpoint.password_file
            )
        self._render, self._run = render, run
        self._targets: bytes | None = None
        self._server = _bind_first_free(endpoint, port, tls)
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

    def serve_targets(self, document: str) -> None:
        """Serve the scrape targets of all ranks as well, at `/targets` (Prometheus http_sd)."""
        self._targets = document.encode()

    def close(self) -> None:
        """Stop accepting and release the port; connections under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _respond(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        if environ["REQUEST_METHOD"] != "GET":
            status, body = "405 Method Not Allowed", b"GET only\n"
        elif environ["PATH_INFO"] == "/health":
            status, body = "200 OK", b"ok\n"
        elif not self._may_read(environ):
            status, body = "401 Unauthorized", b"name and password, please\n"
            headers.append(("WWW-Authenticate", 'Basic realm="sgt-ds", charset="UTF-8"'))
        elif environ["PATH_INFO"] == "/targets" and self._targets is not None:
            status, body = "200 OK", self._targets
            headers = [("Content-Type", "application/json")]
        elif environ["PATH_INFO"] == "/metrics" and not self._is_meant(environ):
            status, body = "421 Misdirected Request", f"this is run {self._run}\n".encode()
        elif environ["PATH_INFO"] == "/metrics":
            try:
                content_type, body = self._render(environ.get("HTTP_ACCEPT", ""), _scraper(environ))
            except Exception:  # counted and logged where it arose
                status, body = "500 Internal Server Error", b"metrics not available\n"
            else:
                status, headers = "200 OK", [("Content-Type", content_type)]
                if gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")):
                    body = gzip.compress(body, compresslevel=1)
                    headers.append(("Content-Encoding", "gzip"))
        else:
            status, body = "404 Not Found", b"only /metrics, /health and, on rank 0, /targets\n"
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]

    def _is_meant(self, environ: WSGIEnvironment) -> bool:
        """Whether a scrape asks for this run: a target of another may be left from before it."""
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("run")
        return asked is None or self._run is None or asked == [self._run]

    def _may_read(self, environ: WSGIEnvironment) -> bool:
        credentials = self._credentials
        return credentials is None or credentials.accept(environ.get("HTTP_AUTHORIZATION", ""))


def _scraper(environ: WSGIEnvironment) -> str | None:
    """Who reads, if it is Prometheus or an agent like it: they tell how long they will wait."""
    if "HTTP_" + TIMEOUT_HEADER.upper().replace("-", "_") not in environ:
        return None
    return f"{environ['REMOTE_ADDR']} {environ.get('HTTP_USER_AGENT', '')}"


def _bind_first_free(endpoint: Endpoint, port: int, tls: Certificate | None) -> _Server:
    """On `port`, or on the next one that is free where the endpoint says so."""
    last = min(port + MAX_PORTS_TRIED, 65535) if endpoint.port_in_use == "next" else port
    for candidate in range(port, last):
        try:
            return _bind(endpoint.host, candidate, tls)
        except PortInUse:
            log.info("telemetry: port %d is in use, trying the next", candidate)
    return _bind(endpoint.host, last, tls)


def _bind(host: str, port: int, tls: Certificate | None) -> _Server:
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return _Server((str(address[0]), port), family, tls)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} is in use; free it or choose another telemetry.port"
            raise PortInUse(where, "telemetry.port", message) from None
        if error.errno == errno.EACCES:
            message = f"port {port} needs privileges; choose one above 1023"
            raise UserError(where, "telemetry.port", message) from None
        message = f"cannot be bound ({error.strerror or error}); give an address of this machine"
        raise UserError(where, "telemetry.host", message) from None
