"""Which addresses a host has, and whether everybody may reach them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses of a host. Raises OSError."""


async def resolve(host: str) -> list[str]:
    """Addresses from the system's name service, in its order of preference."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an address is one that everybody may reach, itself and any that it wraps."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped:
            return is_public(str(parsed.ipv4_mapped))
        # Outside 2000::/3 lie loopback, link-local and NAT64; inside it, 6to4 wraps IPv4.
        if parsed not in GLOBAL_UNICAST or parsed.sixtofour or parsed.teredo:
            return False
    return parsed.is_global and not parsed.is_multicast
