"""A hook in SGLang's sizing of its pools: how many state slots count for a running request (`running.py`).

No cache exists yet. Whether it will plan states is foretold from the arguments and the model's configuration, as
`marconi check` does; a server of which that was wrong is refused (`running.against_rows`).
"""

import os
from typing import Any

from marconi.engine.cpu_platform import is_active
from marconi.engine.int8 import division
from marconi.engine.launch.flags import BACKEND, from_environ
from marconi.engine.launch.policies import JUDICIOUS
from marconi.engine.launch.running import tracking_of


def after_calculate_mamba_ratio(num_counted: int, configurator: Any) -> int:
    """After `KVCacheConfigurator._calculate_mamba_ratio`: slots that no request holds do not count."""
    server_args = configurator.server_args
    if server_args.radix_cache_backend != BACKEND:
        return num_counted
    if server_args.enable_int8_mamba_checkpoint:
        return division.num_live_of(configurator) if division.is_ours(server_args) else num_counted
    from sglang.srt.arg_groups.overrides import resolved_view

    from marconi.engine.launch.model import Model

    view, model = resolved_view(server_args), Model(server_args.model_path, configurator.model_config.hf_config)
    facts = model.facts(server_args, view, is_on_cpu=is_active())
    if not facts.has_own_cache or facts.admission(from_environ(os.environ)) != JUDICIOUS:
        return num_counted
    tracking = tracking_of(view, configurator.page_size)
    return num_counted - tracking.num_slots if tracking.are_lent else num_counted
