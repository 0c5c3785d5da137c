"""Pages of other sites in a browser on this machine may not ask: they could reach a service that nobody else can."""

from collections.abc import Mapping

from reef.config import LOOPBACK
from reef.errors import ForbiddenError


def refuse_other_sites(headers: Mapping[str, str], is_open: bool) -> None:
    """Check `Origin`; and `Host` where no key is asked.

    A page's own name may be made to resolve to this machine (DNS rebinding), and then its `Origin` is the host that it
    asks. It has no key; where none is needed, only loopback's names are answered.

    Raises:
        ForbiddenError: another site's page asks, or under another name than loopback's.
    """
    host = headers.get("host")
    origin = headers.get("origin")
    if origin is not None and (host is None or origin.partition("://")[2].lower() != host.lower()):
        raise ForbiddenError(
            f"a page of {origin[:200]} may not ask {(host or 'this service')[:200]}", param="origin", code="other_site"
        )
    if is_open and host is not None and _name(host) not in LOOPBACK:
        raise ForbiddenError(
            f"no key is asked here, so that only {', '.join(LOOPBACK)} are answered, not {host[:200]} "
            "(reef.access: key lifts this)",
            param="host",
            code="other_host",
        )


def _name(host: str) -> str:
    """The host without its port; an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
