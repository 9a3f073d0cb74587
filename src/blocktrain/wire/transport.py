"""How a link reaches its coordinator: straight, or through a proxy that the environment names."""

import ssl

import httpcore
import httpx

from blocktrain import config
from blocktrain.errors import BadConfig, BadInput

KEEP_ALIVE = 60.0  # seconds an idle connection is kept; a TLS handshake costs some kilobytes


class Transport(httpx.HTTPTransport):
    """httpx's own transport over connections of our making.

    The pool is httpx's only way to a network backend and has no public name (httpx 0.28).
    """

    def __init__(
        self,
        verify: ssl.SSLContext | None,
        backend: httpcore.NetworkBackend,
        proxy: httpx.Proxy | None = None,
    ) -> None:
        if proxy is None:
            self._pool = httpcore.ConnectionPool(
                ssl_context=verify, keepalive_expiry=KEEP_ALIVE, network_backend=backend
            )
        else:
            self._pool = httpcore.HTTPProxy(
                str(proxy.url),
                proxy_auth=proxy.raw_auth,
                ssl_context=verify,
                keepalive_expiry=KEEP_ALIVE,
                network_backend=backend,
            )


def proxy_for(url: str) -> httpx.Proxy | None:
    """The proxy between us and this address, if the environment names one."""
    named = config.proxy_for(url)
    if named is None:
        return None
    try:
        proxy = httpx.Proxy(named if "://" in named else f"http://{named}")
    except (ValueError, httpx.InvalidURL):
        proxy = None
    # To a proxy over TLS, or by SOCKS, another layer would be needed below the one that we count.
    if proxy is None or proxy.url.scheme != "http" or not proxy.url.host:
        raise BadConfig(
            "The environment names a proxy that cannot be used here; write it as http://HOST:PORT, "
            "or leave the coordinator out of it with NO_PROXY."
        )
    return proxy


def checked(url: str) -> httpx.URL:
    """The address of a coordinator, if it is one that can be called."""
    try:
        address = httpx.URL(url.strip())
    except httpx.InvalidURL as error:
        raise BadInput(f"{url!r} is no URL ({error}); write it as http://HOST:PORT.") from None
    if address.userinfo:
        raise BadInput(
            f"The URL of {address.host} has a name or password in it; leave them out and give "
            "the token by itself."
        )
    if address.scheme not in ("http", "https") or not address.host:
        raise BadInput(
            f"{url!r} is no URL that can be called; write it as http://HOST:PORT or "
            "https://HOST/PATH."
        )
    if address.query or address.fragment or not 0 < (address.port or 1) < 2**16:
        raise BadInput(
            f"{url!r} has a part that makes no sense here; write it as http://HOST:PORT or "
            "https://HOST/PATH, without ? and #."
        )
    return address
