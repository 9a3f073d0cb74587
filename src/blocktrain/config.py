"""One TOML file -> one frozen object; the only reader of environment variables.

Owners declare their settings as frozen dataclasses beside the code that uses them. `load` knows
none of them: it is given the dataclass and fills it, refusing unknown keys.
"""

import dataclasses
import difflib
import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_type_hints
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import msgspec
import platformdirs

from blocktrain.errors import BadConfig

T = TypeVar("T")


def load(path: Path, kind: type[T]) -> T:
    """Reads a TOML file into `kind`, a frozen dataclass whose fields may be dataclasses."""
    return fill(kind, read(path), where=str(path))


def read(path: Path) -> dict[str, Any]:
    """The plain table of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} is not TOML ({error}); correct that line.") from None


def fill(kind: type[T], table: dict[str, Any], where: str) -> T:
    """A plain table -> `kind`, with one clear sentence for whatever does not fit."""
    refuse_unknown(kind, table, where)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise BadConfig(f"{where}: {error}; correct that value.") from None
    except BadConfig as error:
        raise BadConfig(f"{where}: {error}") from None


def refuse_unknown(kind: Any, table: dict[str, Any], where: str) -> None:
    """Raises for the first key that `kind` does not have, naming the nearest one it has."""
    hints = get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            advice = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}."
            raise BadConfig(f"{where}: unknown key '{key}'; {advice}")
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, dict):
            refuse_unknown(hints[key], value, f"{where} [{key}]")


def cache_folder() -> Path:
    """Where fetched text is kept: $BLOCKTRAIN_CACHE, else the user's cache folder."""
    chosen = os.environ.get("BLOCKTRAIN_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("blocktrain"))


def proxy_for(url: str) -> str | None:
    """The proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY name for an address, if any.

    This machine itself is reached straight, whatever they say: a run on one machine needs nobody.
    """
    address = urlsplit(url)
    host, proxies = address.hostname or "", getproxies_environment()
    here = is_within(host, "localhost") or is_within(host, "127.0.0.0/8") or is_within(host, "::1")
    if here or any(is_within(host, part) for part in proxies.get("no", "").split(",")):
        return None
    return proxies.get(address.scheme) or proxies.get("all")


def is_within(host: str, part: str) -> bool:
    """Whether a part of the network holds a host: a name, a domain, an address, 10.0.0.0/8, *."""
    part = part.strip().lower().lstrip(".")
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(part, strict=False)
    except ValueError:
        return part == "*" or host == part or (bool(part) and host.endswith(f".{part}"))


def calm_threads() -> None:
    """Idle compute threads sleep instead of spinning. To be called before torch is imported.

    On busy cores spinning threads hold up whoever has the work they wait for (LOG.md, 2026-11-15).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment for a child, with some variables changed."""
    return {**os.environ, **changes}
