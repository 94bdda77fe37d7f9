"""A fleet that Ray Serve runs: SGLang servers as replicas, and a request router that knows what each of them holds.

    client --HTTP--> Serve's proxy --> Ingress --Call--> handle --StateAwareRouter--> replica --HTTP--> SGLang server
                                                             ^                                               |
                                                             +----------- events: what its cache holds ------+

Each handle has a router of its own, in the process of who holds it: here, the ingress. So the prompt is an argument of
the handle's call, and what servers tell is listened to in the ingress. Needs the extra `ray`; `docs/fleet.md` has a
configuration.

    application    what `serve run` and a config's `import_path` name
    Call, Head     what is asked of a replica, and how its answer begins
"""

from typing import Any

from marconi.router.ray_serve.call import Call, Head

__all__ = ["Call", "Head", "application"]


def __getattr__(name: str) -> Any:
    if name != "application":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from marconi.router.ray_serve.build import application
    except ImportError as absent:
        raise ImportError(
            f"{__name__} needs {absent.name}, which is not installed: pip install '.[ray]' in its checkout"
        ) from None
    return application
