"""Build-time metadata: the optional dependencies of the distribution.

`[server]` needs `sgl-kernel-ext`, a distribution of its own. Built from a checkout, where its folder stands beside
`pyproject.toml`, the extra points at that folder, so `pip install ".[server]"` works with no index that carries it.
What is built for an index must not name a folder: with `MARCONI_RELEASE=1` the extra names the release.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

KERNELS = "sgl-kernel-ext"


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `project.optional-dependencies`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the extras in `metadata`, the `project` table being built."""
        folder = Path(self.root) / KERNELS
        in_checkout = (folder / "pyproject.toml").is_file() and os.environ.get("MARCONI_RELEASE") != "1"
        kernels = f"{KERNELS} @ {folder.as_uri()}" if in_checkout else f"{KERNELS}=={metadata['version']}"
        router = [
            "aiohttp>=3.13",
            "huggingface-hub>=0.34",
            # Renders the templates of what transformers loads, and tokenizes where a model has tekken.json alone.
            "jinja2>=3.1",
            "mistral-common>=1.11.7",
            "prometheus-client>=0.22",
            "pyzmq>=27",
            "transformers[sentencepiece]>=5.19",
            "uvloop>=0.21; sys_platform != 'win32'",
        ]
        metadata["optional-dependencies"] = {
            "server": ["sglang==0.5.23", kernels],
            "router": router,
            # In which a request router sees what a replica said of itself (`replica_metadata`).
            "ray": [*router, "ray[serve]>=2.60"],
            # What the kernels are compared with on a CUDA machine, beside SGLang's own.
            "cuda-test": [
                "flash-linear-attention>=0.6; sys_platform == 'linux'",
                "mamba-ssm>=2.3; sys_platform == 'linux'",
            ],
        }
