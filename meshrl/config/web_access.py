"""Which HTTP requests a server of this machine answers, so that no web page in a browser can ask it anything.

A page of any site may send requests to this machine's addresses. It can take a name of its own for the address (DNS
rebinding), which shows in `Host`, and it can post what needs no permission (a "simple" request), which shows in
`Origin` and in a `Content-Type` other than JSON's. Pure functions over texts: every server of this package asks them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# Lets every name in.
ANY = "*"
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(?::(\d{1,5}))?", re.IGNORECASE)
# The largest head of a request: its first line and its headers, and how many of these there may be.
MOST_HEADER_BYTES, MOST_HEADERS = 64 << 10, 100
# In which a head must come.
HEADER_SECONDS = 30.0


def is_loopback(host: str) -> bool:
    """Return whether a host to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_names(host: str, more: Sequence[str] = ()) -> frozenset[str]:
    """Return the names that a server which listens on `host` answers to; `more` are those it was told.

    On an address of the network, this machine's own names are among them.
    """
    names = {*LOOPBACK_NAMES, host, *more}
    if not is_loopback(host):
        names |= {socket.gethostname(), socket.getfqdn()}
    return frozenset(_plain(name) for name in names)


def refusal(hosts: Sequence[str], origins: Sequence[str], names: Collection[str], hint: str = "") -> str | None:
    """Return why a request with these headers is not answered, and how to add a name; None if it is answered."""
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
    """Return whether a body is said to be JSON, which no page of another site can say without asking first."""
    return len(content_types) == 1 and content_types[0].split(";")[0].strip().lower() == "application/json"


def _plain(name: str) -> str:
    return name.strip().strip("[]").rstrip(".").lower()
