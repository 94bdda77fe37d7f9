"""Access control: the administrator's token, and tenants that never share a prefix.

    cache_salt = BLAKE2b(tenant's name, client's own salt)        128 bits, in hexadecimal

A tenant's name, from a header that an authenticating proxy in front sets, becomes part of the `cache_salt` of each of
its requests. So two tenants have no block hash in common, and neither a hit nor its timing tells one about the other's
prompts. Fields that continue state made under another salt are refused.
"""

import base64
import hmac
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from aiohttp import hdrs, web

from marconi.router.gateway.errors import HttpRefusal

_SHARED_STATE: Final = ("session_params", "session_id", "previous_response_id")
"""Fields that continue an earlier request, whoever sent it."""
_MAX_TENANT: Final = 256
_CHALLENGE: Final = {str(hdrs.WWW_AUTHENTICATE): 'Basic realm="router", charset="UTF-8"'}
"""Has a browser ask for the password."""


def require_administrator(request: web.Request, token: str | None, challenge: Mapping[str, str] | None = None) -> None:
    """Raise a 401 unless the request has the token; without one only this host reaches the router."""
    if token is None:
        return
    scheme, given = _authorization(request)
    # Compared whole, in constant time, whatever the scheme was.
    is_same = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())
    if not (is_same and scheme == "bearer"):
        raise HttpRefusal(401, "Authorization must be Bearer TOKEN, with the administrator's token", challenge)


def require_reader(request: web.Request, token: str | None) -> None:
    """Raise a 401 unless the request has the token, as an administrator's or as the password of a browser.

    Browsers send a password by themselves, whatever page asks them to: it is for reading alone.
    """
    scheme, given = _authorization(request)
    if token is None or scheme != "basic":
        require_administrator(request, token, _CHALLENGE)
        return
    try:
        _, _, password = base64.b64decode(given, validate=True).partition(b":")
    except ValueError:
        password = b""
    if not hmac.compare_digest(password, token.encode()):
        raise HttpRefusal(401, "the password must be the administrator's token", _CHALLENGE)


def _authorization(request: web.Request) -> tuple[str, str]:
    """The scheme of a request's credentials, in small letters, and what it has of them."""
    scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return scheme.lower(), given.strip()


def tenant_of(request: web.Request, header: str) -> str:
    """The tenant of a request; a 400 where its header is absent or cannot be one."""
    tenants = request.headers.getall(header, [])
    if len(tenants) != 1 or not tenants[0].strip() or len(tenants[0]) > _MAX_TENANT:
        raise HttpRefusal(
            400, f"{header} must be one header of 1 to {_MAX_TENANT} characters, got {len(tenants)} of them"
        )
    return tenants[0].strip()


def salted(body: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """`body` in the tenant's own namespace; `ValueError` where it asks for what tenants cannot have."""
    for name in _SHARED_STATE:
        if body.get(name) is not None:
            raise ValueError(f"{name}: tenants must leave it out, since it continues what an earlier request left")
    own = body.get("cache_salt")
    if isinstance(own, list):
        return {**body, "cache_salt": [_salt(tenant, each) for each in own]}
    return {**body, "cache_salt": _salt(tenant, own)}


def _salt(tenant: str, own: object) -> str:
    if own is not None and not isinstance(own, str):
        raise ValueError(f"cache_salt must be a string, got a {type(own).__name__}")
    digest = blake2b(digest_size=16, person=b"marconi-tenant")
    for part in (tenant, own or ""):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
