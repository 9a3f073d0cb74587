"""A real nginx before the coordinator, configured as docs/wire.md tells people to."""

import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from tests.services.conftest import Coordinate, Place

from blocktrain.commands.listen import Listen
from blocktrain.wire.certificates import load_authority
from blocktrain.wire.tls import Papers

DOCS = Path(__file__).parents[2] / "docs" / "wire.md"
BASE = "/runs/first"


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as sock:
        return int(sock.getsockname()[1])


def documented(place: Place, port: int, papers: Papers, folder: Path, keeps: bool) -> str:
    """nginx's configuration: the words of docs/wire.md with this test's ports and papers."""
    [told] = re.findall(r"```nginx\n(.*?)```", DOCS.read_text(), re.DOTALL)
    changes = {
        "127.0.0.1:8765": re.search(r"127\.0\.0\.1:\d+", place.url)[0],  # type: ignore[index]
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/ssl/example.org.pem": str(papers.certificate),
        "/etc/ssl/example.org.key": str(papers.key),
    }
    if keeps:
        changes["proxy_pass http://coordinator/;"] = "proxy_pass http://coordinator;"
    for old, new in changes.items():
        assert told.count(old) == 1, old
        told = told.replace(old, new)
    return (
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log {folder}/access.log;\n"
        f"client_body_temp_path {folder}/body; proxy_temp_path {folder}/temp;\n{told}}}\n"
    )


@contextmanager
def proxy(place: Place, folder: Path, keeps: bool) -> Iterator[tuple[str, ssl.SSLContext]]:
    """nginx before that coordinator: its URL, and what trusts it."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/bin:/usr/local/bin")
    if nginx is None:
        pytest.skip("There is no nginx; install Debian's package nginx-light.")
    folder.mkdir()
    authority = load_authority(place.folder)
    port, papers = free_port(), authority.server_certificate(["localhost"], folder)
    config = folder / "nginx.conf"
    config.write_text(documented(place, port, papers, folder, keeps))
    child = subprocess.Popen([nginx, "-p", folder, "-c", config], stderr=subprocess.PIPE)
    try:
        for _ in range(100):
            with closing(socket.socket()) as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert child.poll() is None, child.stderr and child.stderr.read().decode()
            time.sleep(0.05)
        trust = ssl.create_default_context(cadata=authority.pem.decode())
        yield f"https://localhost:{port}{BASE}", trust
    finally:
        child.terminate()
        child.communicate(timeout=10)


@pytest.mark.parametrize("keeps", [False, True], ids=["base path taken away", "base path kept"])
def test_a_whole_run_goes_through_nginx(
    coordinate: Coordinate, tmp_path: Path, keeps: bool
) -> None:
    place = coordinate(codec="int4", listen=Listen(port=0, base_path=BASE if keeps else ""))
    with proxy(place, tmp_path / "proxy", keeps) as (url, trust):
        place.url, straight = url, place.link
        place.link = lambda *told, **more: straight(*told, verify=trust, **more)  # type: ignore[method-assign]
        with httpx.Client(verify=trust, timeout=10) as browser:
            page = browser.get(f"{url}/")
            assert page.status_code == 200
            assert "BlockTrain" in page.text
            for path in re.findall(r'(?:src|href)="([^":]+)"', page.text):
                assert browser.get(page.url.join(path)).status_code == 200, path
            with browser.stream("GET", f"{url}/v1/events") as events:
                # It comes at once: nothing waits in the proxy until a buffer is full.
                assert next(events.iter_lines())
        crew = place.run_to_the_end(tmp_path / "crew", workers=2)
        assert sum(each.gave.updates for each in crew) >= 6
    log = (tmp_path / "proxy" / "access.log").read_text()
    assert f"PUT {BASE}/v1/" in log
