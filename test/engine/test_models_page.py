"""docs/models.md lists the models of the catalogue with what the code says of each, and families by their layers."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.engine.launch.model import Model
from marconi.engine.prefill.verified import VERIFIED_BACKENDS, are_captured_in_segments
from marconi.model import catalog, load

ROOT = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
LAYERS: Final = {
    "GDNAttnBackend": "gated delta rule",
    "KDAAttnBackend": "KDA",
    "LightningAttentionBackend": "lightning attention",
    "Mamba2AttnBackend": "Mamba2",
    "ShortConvAttnBackend": "short convolutions",
}


def served_as(model: Model, architecture: str) -> str:
    """Where a server keeps states of a model, in words."""
    from sglang.srt.models.registry import ModelRegistry  # imports every model

    if architecture not in ModelRegistry.get_supported_archs():
        return "not in SGLang 0.5.23"
    if not model.is_hybrid:
        return "SGLang's own cache"
    if model.recurrent_layers(captures_prefills=False).why_not_planned is not None:
        return "states at chunk ends"
    if are_captured_in_segments([architecture]):
        return "exact tokens, with `--cuda-graph-backend-prefill disabled`"
    return "exact tokens"


def expected() -> Iterator[str]:
    """The rows of the table, from the catalogue and from how SGLang would run each model."""
    for name, architecture in catalog.ARCHITECTURES.items():
        model, profile = Model.find(name, None), load(name)
        layers = LAYERS.get(model.recurrent_layers(captures_prefills=False).linear_backend or "", "")
        hub = ", ".join(f"`{each}`" for each, known in catalog.HUB_NAMES.items() if known == name)
        state = f"{profile.state_bytes:,}" if model.is_hybrid else ""
        kept = served_as(model, architecture)
        yield f"| `{name}` | {hub} | {layers} | {profile.kv_bytes_per_token:,} | {state} | {kept} |"
    for hub in catalog.KINDS:
        model = Model.find(hub, None)
        # Inkling's backend is of no family.
        layers = LAYERS.get(str(model.recurrent_layers(captures_prefills=False).linear_backend), "short convolutions")
        kept = served_as(model, model.hf_config.architectures[0])
        yield f"| | `{hub}` | {layers} | | | {kept} |"


def test_the_table_of_models_is_the_catalogue() -> None:
    rows = list(expected())
    shown = PAGE.partition("| name | on the hub |")[2].splitlines()[2 : 2 + len(rows) + 1]
    assert shown == [*rows, ""], "write instead:\n" + "\n".join(rows)


def test_every_verified_backend_is_a_family_of_the_page() -> None:
    assert set(LAYERS) == set(VERIFIED_BACKENDS)
    assert set(re.findall(r"^\| [^|]+ \| `(\w+Backend)` \|", PAGE, re.MULTILINE)) == set(VERIFIED_BACKENDS)


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"\[`(test_\w+\.py)`\]\(\.\./(test/[\w/]+\.py)\)", PAGE)
    assert len(named) > 8
    assert [name for name, path in named if Path(path).name != name or not (ROOT / path).is_file()] == []


def test_layers_that_are_unknown_keep_states_at_chunk_ends() -> None:
    assert "InklingShortConvAttnBackend" not in VERIFIED_BACKENDS


def test_an_architecture_that_sglang_lacks_is_found() -> None:
    model = SimpleNamespace(is_hybrid=True)
    assert served_as(model, "NoSuchForCausalLM") == "not in SGLang 0.5.23"  # type: ignore[arg-type]
