"""How a service listens: address, papers. For coordinators and gateways; imports no torch."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import uvicorn
from starlette.applications import Starlette

from blocktrain.errors import BadInput
from blocktrain.services.coordinator.door import Head
from blocktrain.wire.certificates import Authority, load_authority
from blocktrain.wire.tls import Papers

KEEP_ALIVE = 75  # seconds; a worker that trains for a minute keeps its connection
GOOD_BYE = 3  # seconds that open requests have when the service stops


@dataclass(frozen=True)
class Listen:
    """Where a service listens."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is every one of this machine."""
    port: int = 8765
    """0 is any free one."""
    base_path: str = ""
    """What a reverse proxy puts before every path, if it keeps it."""
    tls: Literal["off", "auto"] = "off"
    """auto: HTTPS with a certificate of the run's own authority; others give --fingerprint."""
    tls_names: tuple[str, ...] = ()
    """Further names and addresses under which others reach this machine (auto)."""
    tls_cert: Path | None = None
    """Your own certificate chain (PEM) instead."""
    tls_key: Path | None = None
    """Its key (PEM)."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadInput("A certificate needs its key; give both --tls-cert and --tls-key.")

    @property
    def encrypted(self) -> bool:
        """Whether it speaks HTTPS."""
        return self.tls == "auto" or self.tls_cert is not None

    def papers(self, folder: Path) -> tuple[Papers | None, Authority | None]:
        """What it shows, and the authority that made it, if it is the run's own."""
        if self.tls_cert and self.tls_key:
            return Papers(self.tls_cert, self.tls_key), None
        if self.tls == "off":
            return None, None
        authority = load_authority(folder)
        anywhere = {"0.0.0.0", "::", ""}
        names = {"localhost", "127.0.0.1", socket.gethostname().lower(), self.host, *self.tls_names}
        return authority.server_certificate(sorted(names - anywhere), folder), authority


@contextmanager
def listening(where: Listen) -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens, and how to reach it."""
    try:
        sock = socket.create_server((where.host, where.port), backlog=1024)
    except OSError as error:
        raise BadInput(
            f"Cannot listen at {where.host}:{where.port} ({error.strerror}); choose another --port."
        ) from None
    scheme = "https" if where.encrypted else "http"
    host = f"[{where.host}]" if ":" in where.host else where.host
    base = where.base_path.strip("/")
    url = f"{scheme}://{host}:{sock.getsockname()[1]}" + (f"/{base}" if base else "")
    with sock:
        yield sock, url


def serve(app: Starlette, sock: socket.socket, papers: Papers | None) -> None:
    """Answers until somebody says stop."""
    uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GOOD_BYE,
            http=Head,
            ssl_certfile=papers.certificate if papers else None,
            ssl_keyfile=papers.key if papers else None,
        )
    ).run(sockets=[sock])
