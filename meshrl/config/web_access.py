"""Access rules for this package's HTTP servers, so that no web page in a browser can use a server on this machine.

A page of any site may send requests to this machine's addresses. The page can use its own host name for the address
(DNS rebinding), which shows in the header `Host`. It can also post a "simple" request, which needs no permission. Such
a request shows in `Origin` and in a `Content-Type` other than JSON's. Every server of this package calls these pure
functions of header texts.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# As a host name: accept all names.
ANY = "*"
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(?::(\d{1,5}))?", re.IGNORECASE)
# Limits of a request's head (its first line and headers): the number of bytes and the number of headers.
MOST_HEADER_BYTES, MOST_HEADERS = 64 << 10, 100
# The time within which the whole head must arrive.
HEADER_SECONDS = 30.0


def is_loopback(host: str) -> bool:
    """Return whether a host to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_names(host: str, more: Sequence[str] = ()) -> frozenset[str]:
    """Return the host names that a server on `host` accepts: loopback names, `host` itself and the names in `more`.

    If `host` is not a loopback address, this machine's own names are accepted as well.
    """
    names = {*LOOPBACK_NAMES, host, *more}
    if not is_loopback(host):
        names |= {socket.gethostname(), socket.getfqdn()}
    return frozenset(_plain(name) for name in names)


def refusal(hosts: Sequence[str], origins: Sequence[str], names: Collection[str], hint: str = "") -> str | None:
    """Return the reason to refuse a request with these `Host` and `Origin` headers, or None to answer it.

    `hint` tells the user how to add a name.
    """
    if ANY in names:
        return None
    found = HOST.fullmatch(hosts[0].strip()) if len(hosts) == 1 else None
    if found is None:
        return f"a request needs one Host header, and this one has {len(hosts) or 'none'}" + (
            f": {hosts[0][:100]!r}" if hosts else ""
        )
    if _plain(found[1]) not in names:
        return f"this server does not answer to {found[1][:100]!r}, only to {', '.join(sorted(names))}{hint}"
    for origin in origins:
        scheme, _, place = origin.partition("://")
        if scheme not in ("http", "https") or place.lower() != hosts[0].strip().lower():
            return f"this server answers no web page of {origin[:100]!r}"
    return None


def is_json(content_types: Sequence[str]) -> bool:
    """Return whether the request has exactly one `Content-Type` and that is JSON.

    A page of another site cannot send JSON without a preflight request.
    """
    return len(content_types) == 1 and content_types[0].split(";")[0].strip().lower() == "application/json"


def _plain(name: str) -> str:
    return name.strip().strip("[]").rstrip(".").lower()
