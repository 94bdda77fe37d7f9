"""The application: the servers' deployment with its request router, and the ingress in front of it."""

from typing import Any, Final

from ray import serve
from ray.serve.config import RequestRouterConfig

from marconi.router.ray_serve.deployment import SGLang
from marconi.router.ray_serve.ingress import Ingress
from marconi.router.ray_serve.options import Options

ROUTER: Final = "marconi.router.ray_serve.request_router.StateAwareRouter"
_INGRESS_REQUESTS: Final = 4096
"""Under way in one ingress: it waits, and computes nothing."""
_HEALTH_PERIOD_S: Final = 5.0
_HEALTH_TIMEOUT_S: Final = 30.0


def application(args: dict[str, Any]) -> serve.Application:
    """What `serve run marconi.router.ray_serve:application model=...` runs, as a config's `args` have it.

    Deployments are named `SGLang` and `Ingress`: a config's `deployments` may set what is Serve's to set, of the former
    anything but its `request_router_config`. `ValueError`, one line, for an option that cannot be.
    """
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
