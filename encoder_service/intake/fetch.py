"""Fetches items given as URLs, only from hosts that the configuration names.

The host name is resolved here, and the connection goes to the address that was checked, so that DNS
rebinding has no effect.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from actors.errors import DeadlineExceeded, InvalidMedia, InvalidRequest, TooLarge
from encoder_service.config import FetchOptions
from encoder_service.intake.limits import Take, declared_bytes

MOST_REDIRECTS = 3
INSTEAD = "send the file itself as data"
CLOUDS_OWN = [ipaddress.IPv4Network("168.63.129.16/32"), ipaddress.IPv4Network("192.0.0.0/24")]
"""Public according to Python's tables, but used for Azure's wire server and Oracle's metadata
service for virtual machines. Those of other clouds are link-local, shared or private."""
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses of a host. Raises OSError."""


async def resolve(host: str) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an address is globally reachable, and so is any address embedded in it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped:
            return is_public(str(parsed.ipv4_mapped))
        # Outside 2000::/3 are loopback, link-local and NAT64; inside it, 6to4 embeds IPv4.
        if parsed not in GLOBAL_UNICAST or parsed.sixtofour or parsed.teredo:
            return False
    elif any(parsed in network for network in CLOUDS_OWN):
        return False
    return parsed.is_global and not parsed.is_multicast


@cache
def tls() -> ssl.SSLContext:
    """Cached, because reading the certificates would block each change of the options for 30 ms."""
    return httpx.create_ssl_context(trust_env=False)


class Fetcher:
    """Fetches files from allowed hosts. One per process; keeps no connection open."""

    def __init__(
        self,
        options: FetchOptions,
        resolve: Resolve = resolve,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.options = options
        self.allowed = {host.lower() for host in options.allow_hosts}
        self.resolve = resolve
        # No proxy from the environment, because it would resolve the name itself. No connection or
        # cookie is kept, because they would be used for another name at the same address.
        self.client = httpx.AsyncClient(
            transport=transport,
            verify=tls(),
            trust_env=False,
            timeout=options.timeout_seconds,
            limits=httpx.Limits(max_keepalive_connections=0),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )

    async def get(self, url: str, take: Take) -> bytes:
        """Returns the body. `take` counts its chunks; those of a failed attempt are given back.
        Raises InvalidRequest, InvalidMedia, TooLarge, DeadlineExceeded, and what `take` raises."""
        target = self.check(url)
        try:
            async with asyncio.timeout(self.options.timeout_seconds):
                for _ in range(MOST_REDIRECTS + 1):
                    answer = await self.request(target, take)
                    if isinstance(answer, bytes):
                        return answer
                    target = self.check_redirect(target, answer)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{target.host} did not send the file within "
                f"{self.options.timeout_seconds:g} s (fetch.timeout_seconds)"
            ) from error
        raise InvalidMedia(f"{target.host} redirects more than {MOST_REDIRECTS} times")

    def check(self, url: str) -> httpx.URL:
        """The parsed URL, if it may be fetched. Raises InvalidRequest."""
        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequest(f"the url cannot be read: {error}") from error
        host = target.raw_host.decode("ascii").lower()
        if host not in self.allowed:
            raise InvalidRequest(
                f"urls of host {host!r} are not fetched here (fetch.allow_hosts): {INSTEAD}"
            )
        if target.scheme != "https" or target.port not in (None, 443):
            raise InvalidRequest(f"only https urls on port 443 are fetched: {INSTEAD}")
        if target.userinfo:
            raise InvalidRequest(f"urls with a user name or password are not fetched: {INSTEAD}")
        return target

    def check_redirect(self, source: httpx.URL, location: str) -> httpx.URL:
        """The target of a redirect, which must be on the same host."""
        try:
            target = self.check(str(source.join(location)))
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidMedia(f"{source.host} redirects to an unreadable url") from error
        if target.host != source.host:
            raise InvalidRequest(f"{source.host} redirects to {target.host}: send that url itself")
        return target

    async def request(self, target: httpx.URL, take: Take) -> bytes | str:
        failure: Exception | None = None
        for address in await self.addresses(target.host):
            request = self.client.build_request(
                "GET",
                target.copy_with(host=address),
                headers={"host": target.netloc.decode("ascii"), "accept-encoding": "identity"},
                # The certificate must match the name, although we connect to an address.
                extensions={"sni_hostname": target.raw_host.decode("ascii")},
            )
            try:
                response = await self.client.send(request, stream=True)
                try:
                    if response.has_redirect_location:
                        return str(response.headers["location"])
                    return await self.read(response, target.host, take)
                finally:
                    await response.aclose()
            except httpx.TimeoutException as error:
                raise TimeoutError from error
            except httpx.TransportError as error:
                failure = error
        raise InvalidMedia(f"{target.host} cannot be reached: {failure}") from failure

    async def addresses(self, host: str) -> list[str]:
        """All addresses of a host, if each of them is public."""
        try:
            found = list(dict.fromkeys(await self.resolve(host)))
        except (OSError, UnicodeError) as error:
            raise InvalidMedia(f"the host {host!r} cannot be found: {error}") from error
        if not found or not all(is_public(address) for address in found):
            raise InvalidRequest(f"the host {host!r} has an address that is not public: {INSTEAD}")
        return found

    async def read(self, response: httpx.Response, host: str, take: Take) -> bytes:
        if response.status_code != 200:
            raise InvalidMedia(f"{host} answered {response.status_code}, not 200: check the url")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InvalidMedia(f"{host} sent a compressed body that was not asked for")
        self.check_bytes(declared_bytes(response.headers.get("content-length", "")), host)
        body = bytearray()
        try:
            async for chunk in response.aiter_bytes():
                take(len(chunk))
                body += chunk
                self.check_bytes(len(body), host)
        except BaseException:
            take(-len(body))
            raise
        return bytes(body)

    def check_bytes(self, size_bytes: int, host: str) -> None:
        if size_bytes > (most := self.options.max_bytes):
            raise TooLarge(f"the file at {host} is over {most} bytes (fetch.max_bytes)")
