"""The model of a command line, from its configuration alone: what SGLang would run its recurrent layers on.

The decisions are SGLang's own functions of a configuration. The one that it takes from a model that is loaded, the
class of the linear attention backend, is followed here (`attn_backend_wrapper`), and the tests hold the two together.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import sglang.srt.models
from sglang.srt.configs import hybrid_arch
from sglang.srt.configs.inkling import InklingMMConfig, InklingModelConfig
from sglang.srt.configs.lfm2 import Lfm2Config
from sglang.srt.configs.lfm2_moe import Lfm2MoeConfig
from sglang.srt.configs.lfm2_vl import Lfm2VlConfig
from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    is_hybrid_swa_model,
    is_multimodal_breakable_cuda_graph_supported,
    is_multimodal_model,
)
from sglang.srt.configs.zaya import ZayaConfig
from sglang.srt.environ import envs
from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase
from sglang.srt.model_loader.utils import resolve_transformers_arch
from sglang.srt.utils.hf_transformers.common import get_hf_text_config
from sglang.srt.utils.hf_transformers_utils import get_config

from marconi.engine.launch import support
from marconi.engine.launch.configuration import BESIDE, Configuration, own_quantization
from marconi.engine.launch.support import Facts
from marconi.engine.prefill.verified import HYBRID_BACKEND, RecurrentLayers, are_captured_in_segments
from marconi.model import ModelProfile, Precision, load

_PLAIN: Final = "lmsys/vicuna-7b-v1.5"
"""Asks for nothing that a draft model may not be."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is known by its configuration."""

    spelt: str
    """How `marconi.model.load` finds it."""
    hf_config: Any
    """SGLang's object of it."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The configuration itself."""
    quantization: Mapping[str, Any] | None = None
    """Its `quantization_config`; None where its weights are as they were trained."""
    home: Path | None = None
    """Its folder; None for one that is known by its name or a file."""
    is_whole: bool = True
    """False if only a catalogue name is known, which suffices for decisions about the cache."""

    @classmethod
    def find(cls, model_path: str, config: Path | None) -> "Model":
        """From `config`, a file or its folder, else the folder `model_path`, else the catalogue; `ValueError`."""
        found = Configuration.find(model_path, config)
        hf_config = _read(found.fields, found.source)
        return cls(found.spelt, hf_config, found.fields, found.quantization, found.home, found.is_whole)

    @contextmanager
    def folder(self) -> Iterator[str]:
        """Its folder, else one with its configuration, for as long as SGLang reads it."""
        if self.home is not None:
            yield str(self.home)
            return
        with _folder_of(self.fields) as folder:
            if self.quantization is not None and not own_quantization(self.fields):
                beside = {"quantization": dict(self.quantization)}
                (Path(folder) / BESIDE).write_text(json.dumps(beside), encoding="utf-8")
            yield folder

    def require_class(self, model_config: Any) -> None:
        """Raise `ValueError` as SGLang does for a model that neither it nor Transformers can run for it."""
        architectures = self.hf_config.architectures or []
        if sglang_classes().isdisjoint(architectures):
            resolve_transformers_arch(model_config, architectures)

    def profile(self, precision: Precision, tensor_parallel: int) -> ModelProfile:
        """Bytes of its KV and states; `ValueError` for one that the cost model does not know."""
        return load(self.spelt, precision=precision, tensor_parallel=tensor_parallel)

    def against_ranks(self, num_ranks: int) -> Iterator[str]:
        """A line where `num_ranks` ranks cannot share its heads, as far as its dimensions are known."""
        with suppress(ValueError):
            load(self.spelt)
            try:
                # Attention groups that do not divide the ranks leave none, which is refused as such.
                load(self.spelt, tensor_parallel=max(1, num_ranks))
            except ValueError as error:
                yield str(error)

    @property
    def as_model_config(self) -> Any:
        """The attributes that SGLang's functions of a `ModelConfig` read."""
        architectures = self.hf_config.architectures or []
        return SimpleNamespace(
            hf_config=self.hf_config,
            is_draft_model=False,
            is_multimodal=is_multimodal_model(architectures),
            is_multimodal_breakable_cuda_graph_supported=is_multimodal_breakable_cuda_graph_supported(architectures),
            is_hybrid_swa=self.has_sliding_window,
            # Of no hybrid model: keys and values of unlike widths are a matter of sliding windows.
            has_asymmetric_kv=False,
            attention_arch=AttentionArch.MLA if self._has_latent_attention else AttentionArch.MHA,
            linear_attn_registry_result=get_linear_attn_config(self.hf_config),
        )

    @property
    def is_hybrid(self) -> bool:
        """True if it has recurrent layers."""
        return self._is_inkling or uses_ssm_state(self.as_model_config)

    @property
    def _is_inkling(self) -> bool:
        """Whether sizes of its states depend on arguments that SGLang has published in a server alone."""
        return isinstance(self.hf_config, InklingModelConfig | InklingMMConfig)

    @property
    def has_sliding_window(self) -> bool:
        """True if SGLang keeps a pool of sliding windows for it."""
        architectures = self.hf_config.architectures or []
        return bool(is_hybrid_swa_model(architectures, get_hf_text_config(self.hf_config)))

    @property
    def _has_latent_attention(self) -> bool:
        try:
            return any(kind.kind == "mla" for kind in load(self.spelt).kinds)
        except ValueError:
            return False

    def facts(self, server_args: Any, view: Any, *, is_on_cpu: bool) -> Facts:
        """Facts of a server of this model, from its arguments and SGLang's `view` of them."""
        is_hybrid = self.is_hybrid
        layers = self.recurrent_layers(captures_prefills=not is_on_cpu and self._captures_prefills(server_args, view))
        return Facts(
            is_hybrid=is_hybrid,
            has_sliding_window=self.has_sliding_window and not server_args.disable_hybrid_swa_memory,
            why_not_planned=layers.why_not_planned if is_hybrid else None,
            is_cache_disabled=view.disable_radix_cache,
            has_one_pool=is_hybrid and server_args.enable_unified_memory,
            has_host_tier=server_args.enable_hierarchical_cache,
            has_int8_checkpoints=is_hybrid and server_args.enable_int8_mamba_checkpoint,
            skips_decode_lock=envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.get(),
            num_ranks=support.num_attention_ranks(server_args),
            captures_layers=not is_on_cpu and self._captures_in_segments(view),
            is_on_cpu=is_on_cpu,
            has_side_states=self._has_side_states,
        )

    @property
    def _has_side_states(self) -> bool:
        """True if states beside those of its recurrent layers belong to a prefix."""
        text = get_hf_text_config(self.hf_config)
        return bool(getattr(text, "short_conv_layer_ids", None) or getattr(text, "ngram_context_len", 0))

    def _captures_prefills(self, server_args: Any, view: Any) -> bool:
        """True if a prefill graph runs the recurrent layers on static tables, on a CUDA device."""
        if envs.SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND.get():
            return False
        if (Phase.PREFILL, "backend") in getattr(server_args, "_cuda_graph_config_locked", ()):
            return bool(view.cuda_graph_config.prefill.backend == Backend.BREAKABLE)
        # Of all models on the backend that could, SGLang lets one do so by default.
        return "Glm5NextForConditionalGeneration" in (self.hf_config.architectures or [])

    def _captures_in_segments(self, view: Any) -> bool:
        """True if the segments of the prefill graph hold recurrent layers, on a CUDA device."""
        config = view.cuda_graph_config
        # SGLang makes none of arguments that it refuses.
        is_breakable = config is not None and config.prefill.backend == Backend.BREAKABLE
        return is_breakable and are_captured_in_segments(self.hf_config.architectures)

    def recurrent_layers(self, *, captures_prefills: bool) -> RecurrentLayers:
        """How SGLang runs its recurrent layers, on a device whose graphs capture prefills or not."""
        hybrid, linear = linear_backends(self.as_model_config)
        return RecurrentLayers(
            hybrid_backend=hybrid,
            linear_backend=linear,
            # Alone of the verified ones it runs on the graphs' static tables.
            are_captured=captures_prefills and linear == "KDAAttnBackend",
        )


def linear_backends(model_config: Any) -> tuple[str, str | None]:
    """The classes of the attention backends of a hybrid model, in the order in which SGLang asks for its kind."""
    if isinstance(model_config.hf_config, InklingModelConfig | InklingMMConfig):
        return "InklingShortConvHybridAttnBackend", "InklingShortConvAttnBackend"
    if hybrid_arch.hybrid_gdn_config(model_config) is not None:
        return HYBRID_BACKEND, "GDNAttnBackend"
    if (mamba2 := hybrid_arch.mamba2_config(model_config)) is not None:
        if isinstance(mamba2, ZayaConfig | Lfm2Config | Lfm2MoeConfig | Lfm2VlConfig):
            return "ShortConvHybridAttnBackend", "ShortConvAttnBackend"
        return HYBRID_BACKEND, "Mamba2AttnBackend"
    if hybrid_arch.hybrid_kda_config(model_config) is not None:
        return HYBRID_BACKEND, "KDAAttnBackend"
    if hybrid_arch.hybrid_lightning_config(model_config) is not None:
        return HYBRID_BACKEND, "LightningAttentionBackend"
    spec = hybrid_arch.linear_attn_model_spec(model_config)
    if spec is None:
        return "AttentionBackend", None
    hybrid = spec.hybrid_backend_class_name or HYBRID_BACKEND
    return hybrid.rpartition(".")[2], spec.backend_class_name.rpartition(".")[2]


def _read(fields: Mapping[str, Any], source: str) -> Any:
    """Have SGLang make its object of a configuration, as it does of a model's folder."""
    with _folder_of(fields) as folder:
        try:
            return get_config(folder, trust_remote_code=False)
        except Exception as error:
            # The reader's file in place of the copy, which is gone when they read this.
            told = str(error).replace(f"{folder}/config.json", source).replace(folder, source)
            raise ValueError(f"{source}: SGLang cannot read it ({' '.join(told.split())[:200]})") from None


@contextmanager
def _folder_of(fields: Mapping[str, Any]) -> Iterator[str]:
    """A model's folder with nothing but its configuration."""
    with tempfile.TemporaryDirectory(prefix="marconi-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
        yield folder


@contextmanager
def draft_folder(path: str | None) -> Iterator[str]:
    """A folder with a draft model's configuration; for one that is not known here, that of a model without states."""
    if is_draft_known(path):
        yield str(path)
        return
    with Model.find(_PLAIN, None).folder() as folder:
        yield folder


def is_draft_known(path: str | None) -> bool:
    """True if it has a folder with a configuration."""
    return path is not None and (Path(path) / "config.json").is_file()


@cache
def sglang_classes() -> frozenset[str]:
    """The model classes of SGLang, by the text of its modules: to import them all takes a minute."""
    found: set[str] = set()
    for path in Path(sglang.srt.models.__path__[0]).glob("*.py"):
        _, _, entries = path.read_text(encoding="utf-8").rpartition("\nEntryClass")
        found.update(re.findall(r"\w+", entries))
    return frozenset(found)
