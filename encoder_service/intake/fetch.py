"""Items given as URLs: fetched from hosts that the configuration names, and from nowhere else.

The name is resolved here and the connection goes to the address that was checked, so that an answer
of the name server that changes in between leads nowhere. Knows nothing of what the bytes are.
"""

from __future__ import annotations

import asyncio
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from actors.errors import DeadlineExceeded, InvalidMedia, InvalidRequest, TooLarge
from encoder_service.config import FetchOptions
from encoder_service.intake.addresses import Resolve, is_public, resolve

MOST_REDIRECTS = 3


class Fetcher:
    """Fetches what it may. One for a process; keeps no connection open."""

    def __init__(
        self,
        options: FetchOptions,
        resolve: Resolve = resolve,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.options = options
        self.allowed = {host.lower() for host in options.allow_hosts}
        self.resolve = resolve
        # No proxy from the environment: it would connect wherever the name leads it. No connection
        # is kept: one to an address would be used again for another name at that address.
        self.client = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            timeout=options.timeout_seconds,
            limits=httpx.Limits(max_keepalive_connections=0),
            # No cookie is kept: one of an address would be sent to another name at that address.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )

    async def get(self, url: str) -> bytes:
        """The body. Raises InvalidRequest, InvalidMedia, TooLarge or DeadlineExceeded."""
        target = self.check(url)
        try:
            async with asyncio.timeout(self.options.timeout_seconds):
                for _ in range(MOST_REDIRECTS + 1):
                    answer = await self.request(target)
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
        """The URL, if it may be fetched at all. Raises InvalidRequest."""
        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequest(f"the url cannot be read: {error}") from error
        host = target.raw_host.decode("ascii").lower()
        if host not in self.allowed:
            raise InvalidRequest(
                f"urls of host {host!r} are not fetched here (fetch.allow_hosts): "
                "send the file itself as data"
            )
        if target.scheme != "https" or target.port not in (None, 443):
            raise InvalidRequest("only https urls on port 443 are fetched")
        if target.userinfo:
            raise InvalidRequest("urls with a user name or password are not fetched")
        return target

    def check_redirect(self, source: httpx.URL, location: str) -> httpx.URL:
        """Where a redirect leads, if that is the same host."""
        try:
            target = self.check(str(source.join(location)))
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidMedia(f"{source.host} redirects to an unreadable url") from error
        if target.host != source.host:
            raise InvalidRequest(f"{source.host} redirects to {target.host}: give that url itself")
        return target

    async def request(self, target: httpx.URL) -> bytes | str:
        """The body, or where it redirects to."""
        failure: Exception | None = None
        for address in await self.addresses(target.host):
            request = self.client.build_request(
                "GET",
                target.copy_with(host=address),
                headers={"host": target.netloc.decode("ascii"), "accept-encoding": "identity"},
                # The certificate must be that of the name, although we connect to an address.
                extensions={"sni_hostname": target.raw_host.decode("ascii")},
            )
            try:
                response = await self.client.send(request, stream=True)
                try:
                    if response.has_redirect_location:
                        return str(response.headers["location"])
                    return await self.read(response, target.host)
                finally:
                    await response.aclose()
            except httpx.TimeoutException as error:
                raise TimeoutError from error
            except httpx.TransportError as error:
                failure = error
        raise InvalidMedia(f"{target.host} cannot be reached: {failure}") from failure

    async def addresses(self, host: str) -> list[str]:
        """All addresses of a host, if each is a public one."""
        try:
            found = list(dict.fromkeys(await self.resolve(host)))
        except (OSError, UnicodeError) as error:
            raise InvalidMedia(f"the host {host!r} cannot be found: {error}") from error
        if not found or not all(is_public(address) for address in found):
            raise InvalidRequest(
                f"the host {host!r} has an address that is not public: not fetched"
            )
        return found

    async def read(self, response: httpx.Response, host: str) -> bytes:
        """The body, within the limits."""
        if response.status_code != 200:
            raise InvalidMedia(f"{host} answered {response.status_code}, not 200")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InvalidMedia(f"{host} sent a compressed body that was not asked for")
        declared = response.headers.get("content-length", "0")
        body = bytearray()
        # Python refuses to convert thousands of digits; these are enough to be too many.
        too_large = declared.isdecimal() and int(declared[:18]) > self.options.max_bytes
        if not too_large:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > self.options.max_bytes:
                    too_large = True
                    break
        if too_large:
            raise TooLarge(
                f"the file at {host} is over {self.options.max_bytes} bytes (fetch.max_bytes)"
            )
        return bytes(body)
