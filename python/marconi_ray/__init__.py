"""A fleet that Ray Serve runs: SGLang servers as replicas, and a request router that knows what each of them holds.

    client --HTTP--> Serve's proxy --> Ingress --Call--> handle --StateAwareRouter--> replica --HTTP--> SGLang server
                                                             ^                                               |
                                                             +----------- events: what its cache holds ------+

Each handle has a router of its own, in the process that holds it: here, the ingress. So the prompt is an argument of
the handle's call, and the ingress receives the servers' events. Needs the extra `ray`; `docs/fleet.md` has a
configuration.

    application           what `serve run` and a config's `import_path` name
    Call, ResponseHead    a request to a replica, and the beginning of its answer
"""

from typing import TYPE_CHECKING, Any, Final

from marconi_ray.call import Call, ResponseHead

if TYPE_CHECKING:
    from ray import serve

__all__ = ["Call", "ResponseHead", "application"]

ROUTER: Final = "marconi_ray.request_router.StateAwareRouter"
_INGRESS_REQUESTS: Final = 4096
"""Requests at a time in one ingress, which waits and computes nothing."""
_HEALTH_PERIOD_S: Final = 5.0
_HEALTH_TIMEOUT_S: Final = 30.0


def application(args: dict[str, Any]) -> "serve.Application":
    """Build the servers' deployment with its request router, and the ingress in front of it, from a config's `args`.

    Deployments are named `SGLang` and `Ingress`: a config's `deployments` may set any of Serve's options, but not
    `request_router_config` of the former. `ValueError`, one line, for a wrong option.
    """
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        from marconi_ray.deployment import SGLang
        from marconi_ray.ingress import Ingress
        from marconi_ray.options import Options
    except ImportError as absent:
        raise ImportError(
            f"{__name__} needs {absent.name}, which is not installed: pip install '.[ray]' in its checkout"
        ) from None
    options = Options.of(args)
    servers = serve.deployment(SGLang).options(
        name="SGLang",
        num_replicas=options.num_replicas,
        max_ongoing_requests=options.max_ongoing_requests,
        ray_actor_options={"num_gpus": options.num_gpus, "num_cpus": options.num_cpus},
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs=options.for_router()
        ),
    )
    ingress = serve.deployment(Ingress).options(
        name="Ingress", num_replicas=options.num_ingress_replicas, max_ongoing_requests=_INGRESS_REQUESTS
    )
    return ingress.bind(servers.bind(options), options.max_body_bytes, options.max_attempts)
