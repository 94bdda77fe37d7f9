"""The tiny models load everywhere, are the same bytes for the same seed, and show a wrong recurrent state."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import LinearAttentionLayer

from marconi_cpu import tiny_model
from marconi_cpu.tiny_model import Family
from marconi_cpu.tiny_model.tokenizer import GENERATED_IDS, NUM_SPECIAL, SPECIAL_TOKENS, VOCAB_SIZE

from .conftest import VISION

PROMPT_LENGTHS = (50, 129, 333, 512, 700)
NUM_GREEDY_TOKENS = 32
# What another order of summation, another chunking or another library moves a logit by, with room to spare.
ROUNDING = 2.5e-5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operators this small lose far more to waking threads than they gain by them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@dataclass(frozen=True, slots=True)
class Greedy:
    """The greedy continuation of a prompt, and by how much each token won over the second best."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


class Loaded:
    """A tiny model in transformers."""

    def __init__(self, path: Path, memory_tokens: int = 40):
        self.path = path
        self.memory_tokens = memory_tokens
        """So long after it was lost, a state still changes logits by more than 1."""
        self.model, self.loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)

    @torch.no_grad()
    def prefill(self, prompt: list[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
        """The logits after `prompt`, which follows what `cache` holds, and the cache with it."""
        output = self.model(torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1], output.past_key_values

    def greedy(self, prompt: list[int]) -> Greedy:
        logits, cache = self.prefill(prompt)
        token_ids, margins = [], []
        for _ in range(NUM_GREEDY_TOKENS):
            best = logits.topk(2)
            token_ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            logits, cache = self.prefill(token_ids[-1:], cache)
        return Greedy(tuple(token_ids), tuple(margins))


@pytest.fixture(scope="module", params=[each for each in Family if each is not Family.WINDOWS], ids=str)
def loaded(request: pytest.FixtureRequest, models: dict[str, Path]) -> Loaded:
    return Loaded(models[request.param], *([1] if request.param is Family.SHORT_CONV else []))


@pytest.fixture(scope="module")
def answers(loaded: Loaded) -> list[Greedy]:
    return [loaded.greedy(random_prompt(length, length)) for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def tokenizer(models: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(models[Family.GDN])


def random_prompt(seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(NUM_SPECIAL, VOCAB_SIZE, length).tolist()
    return ids


def recurrent_states(cache: Any) -> list[torch.Tensor]:
    # Layers that keep nothing, MLPs, have the cache of a recurrent layer too, and no state in it.
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    states = [layer.recurrent_states[0] for layer in layers]
    windows = [layer.conv_states[0] for layer in layers]
    return [each for each in (states if any(state is not None for state in states) else windows) if each is not None]


def largest_change(logits: torch.Tensor, others: torch.Tensor) -> float:
    return float((logits - others).abs().max())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_python(code: str, *args: str, **env: str) -> str:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env={**os.environ, **env}, check=True, capture_output=True, text=True).stdout


def test_importing_the_package_imports_no_library_of_an_extra() -> None:
    heavy = "{'safetensors', 'sglang', 'tokenizers', 'torch', 'transformers'}"
    assert run_python(f"import sys, marconi_cpu.tiny_model; print({heavy} & set(sys.modules))") == "set()\n"


@pytest.mark.slow
def test_another_process_with_other_hashes_and_threads_writes_the_same_bytes(
    models: dict[str, Path], tmp_path: Path
) -> None:
    code = (
        "import sys, pathlib; from marconi_cpu import tiny_model\n"
        "for family in reversed(tiny_model.Family): tiny_model.write(family, pathlib.Path(sys.argv[1], family))"
    )
    run_python(code, str(tmp_path), PYTHONHASHSEED="12345", OMP_NUM_THREADS="2", TZ="Pacific/Apia")
    for family in Family:
        assert contents(tmp_path / family) == contents(models[family])


def test_another_seed_changes_the_weights_and_nothing_else_of_the_model(
    models: dict[str, Path], tmp_path: Path
) -> None:
    tiny_model.write(Family.GDN, tmp_path / "other", seed=1)
    first, second = contents(models[Family.GDN]), contents(tmp_path / "other")
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors", "tiny_model.json"}


def test_a_model_that_takes_images_has_the_text_models_own_parameters(models: dict[str, Path]) -> None:
    from safetensors.numpy import load

    text, vision = (load(contents(models[name])["model.safetensors"]) for name in (Family.GDN, VISION))
    for name, values in text.items():
        same = vision[name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name]
        assert np.array_equal(values, same[: len(values)]), name
    beyond = {name for name in vision if not name.startswith(("model.language_model.", "model.visual."))}
    assert beyond == {"lm_head.weight"}


@pytest.mark.parametrize(("family", "has_mtp"), [(Family.MAMBA2, False), (Family.GDN, True)])
def test_only_the_plain_gdn_model_takes_images(family: Family, has_mtp: bool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be of the family gdn and have no head for one more token"):
        tiny_model.write(family, tmp_path / "model", has_mtp=has_mtp, has_vision=True)


@pytest.mark.parametrize("family", [each for each in Family if each.can_have_mtp])
def test_a_head_for_one_more_token_changes_of_the_model_what_it_says_alone(
    family: Family, models: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load

    tiny_model.write(family, tmp_path / "other", has_mtp=True)
    first, second = contents(models[family]), contents(tmp_path / "other")
    assert {name for name in first if first[name] != second[name]} == {
        "config.json",
        "model.safetensors",
        "tiny_model.json",
    }
    without, with_head = load(first["model.safetensors"]), load(second["model.safetensors"])
    added = with_head.keys() - without.keys()
    assert all(name.startswith("mtp.") for name in added)
    assert sum(name.endswith("q_proj.weight") for name in added) == 1
    assert [name for name, values in without.items() if not np.array_equal(values, with_head[name])] == [
        "lm_head.weight"
    ]


@pytest.mark.parametrize("family", Family)
def test_a_model_is_under_20_mb(family: Family, models: dict[str, Path]) -> None:
    assert sum(len(content) for content in contents(models[family]).values()) < 20e6


def test_a_model_written_before_is_replaced(tmp_path: Path) -> None:
    tiny_model.write(Family.GDN, tmp_path / "model")
    tiny_model.write(Family.MAMBA2, tmp_path / "model", seed=-3)
    assert json.loads((tmp_path / "model" / "config.json").read_bytes())["model_type"] == "nemotron_h"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tiny_model.write(Family.MAMBA2, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^a tiny model's family must be one of gdn, mamba2, short-conv, windows, got 'rwkv'$"
    ):
        tiny_model.write("rwkv", tmp_path / "model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one more token must be one of gdn, mamba2, got 'short-conv'$"):
        tiny_model.write(Family.SHORT_CONV, tmp_path / "model", has_mtp=True)
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("mine")
    with pytest.raises(ValueError, match=r"must be empty, .* got the file '.*notes\.txt'$"):
        tiny_model.write(Family.GDN, out)
    assert out.read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "tiny_model.json", "notes.txt"])
@pytest.mark.parametrize("content", ["mine", "{}", "[]", '{"sha256": []}'])
def test_somebody_elses_folder_is_left_alone(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"must be empty, .* which holds {name!r}"):
        tiny_model.write(Family.GDN, tmp_path)
    assert contents(tmp_path) == {name: content.encode()}


@pytest.mark.parametrize("name", ["config.json", "notes.txt"])
def test_a_model_that_somebody_changed_or_added_to_is_left_alone(name: str, tmp_path: Path) -> None:
    tiny_model.write(Family.GDN, tmp_path / "model")
    (tmp_path / "model" / name).write_text("mine")
    with pytest.raises(ValueError, match=f"which holds {name!r}"):
        tiny_model.write(Family.GDN, tmp_path / "model")
    assert (tmp_path / "model" / name).read_text() == "mine"


@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
def test_an_interrupted_write_leaves_what_was_there(
    existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model"
    if existing:
        tiny_model.write(Family.GDN, out)
    before = contents(out) if existing else None
    write_bytes = Path.write_bytes

    def interrupted(path: Path, content: bytes) -> int:
        if path.name == "tokenizer.json":
            raise KeyboardInterrupt
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_model.write(Family.MAMBA2, out)
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if existing else [])
    assert before is None or contents(out) == before


def test_transformers_finds_every_parameter_and_no_other(loaded: Loaded) -> None:
    assert not any(loaded.loading.values())
    assert loaded.model.dtype == torch.float32


def test_the_model_has_the_tokenizers_vocabulary_and_context(loaded: Loaded) -> None:
    tokenizer = AutoTokenizer.from_pretrained(loaded.path)
    config = loaded.model.config
    assert len(tokenizer) == config.vocab_size == loaded.model.get_output_embeddings().weight.shape[0] == VOCAB_SIZE
    assert config.max_position_embeddings == tokenizer.model_max_length == 32768
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(config, name) == getattr(tokenizer, name) == getattr(loaded.model.generation_config, name)


def test_sglang_reads_the_same_layers_and_state_as_transformers(loaded: Loaded) -> None:
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils.hf_transformers_utils import get_config

    ours, theirs = loaded.model.config, get_config(str(loaded.path), trust_remote_code=False)
    kinds = ours.layer_types
    recurrent = [index for index, kind in enumerate(kinds) if kind in ("linear_attention", "conv")]
    attention = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    assert type(theirs).__module__.startswith("sglang.")
    assert theirs.architectures == ours.architectures
    assert theirs.full_attention_layer_ids == attention
    with get_parallel().override(attn_tp_size=1, enable_cp_tp_group_sharing=False):
        params = theirs.mamba2_cache_params
    assert list(params.layers) == recurrent
    num_channels, *more = sorted(recurrent_states(loaded.prefill(random_prompt(0, 5))[1])[0].shape[1:], reverse=True)
    if math.prod(params.shape.temporal):
        assert sorted(params.shape.temporal, reverse=True) == [num_channels, *more]
    else:
        # Transformers keeps the token as well that the window is convolved with.
        assert (params.shape.conv[0], more) == ((num_channels, 2), [3])


@settings(max_examples=50)
@given(text=st.text())
@example(text="\0\x01\x7f\r\n\t")
@example(text="  a  . don't , n't ")
@example(text="naïve 漢字 🙂‍↔️")
@example(text="</s><|im_start|> x")
def test_every_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    if not any(token in text for token in SPECIAL_TOKENS):
        assert ids == [NUM_SPECIAL + byte for byte in text.encode()]


def test_any_ids_can_be_decoded(tokenizer: Any) -> None:
    assert all(tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE))
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 200)
        expected = bytes(i - NUM_SPECIAL for i in ids if i >= NUM_SPECIAL).decode(errors="replace")
        assert tokenizer.decode(ids, skip_special_tokens=True) == expected


CHAT: list[dict[str, str | None]] = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "{{ 1 + 1 }} <b>?\n\n"},
    {"role": "assistant", "content": " Two. "},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "ünd 🙂"},
]


@pytest.mark.parametrize("tokenize", [False, True])
@pytest.mark.parametrize("num_messages", range(1, len(CHAT)))
def test_a_chat_renders_to_a_prefix_of_its_continuation(tokenizer: Any, num_messages: int, tokenize: bool) -> None:
    def render(num: int, add_generation_prompt: bool = False) -> Any:
        return tokenizer.apply_chat_template(
            CHAT[:num], tokenize=tokenize, return_dict=False, add_generation_prompt=add_generation_prompt
        )

    rendered, continued = render(num_messages), render(num_messages + 1)
    assert continued[: len(rendered)] == rendered
    assert len(continued) > len(rendered)
    if CHAT[num_messages]["role"] == "assistant":
        prompt = render(num_messages, add_generation_prompt=True)
        assert continued[: len(prompt)] == prompt


def test_a_chat_ignores_tools(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
    render = tokenizer.apply_chat_template
    assert render(CHAT, tools=tools, tokenize=False) == render(CHAT, tokenize=False)


def test_greedy_answers_are_varied_and_differ_between_prompts(answers: list[Greedy]) -> None:
    assert all(len(set(answer.token_ids)) >= NUM_GREEDY_TOKENS // 2 for answer in answers)
    for index, answer in enumerate(answers):
        for other in answers[:index]:
            num_equal = sum(a == b for a, b in zip(answer.token_ids, other.token_ids, strict=True))
            assert num_equal < NUM_GREEDY_TOKENS // 4


def test_greedy_answers_are_printable_and_tokenize_to_themselves(answers: list[Greedy], tokenizer: Any) -> None:
    for answer in answers:
        assert set(answer.token_ids) <= set(GENERATED_IDS)
        text = tokenizer.decode(answer.token_ids)
        assert text.isprintable()
        assert text.isascii()
        assert tuple(tokenizer.encode(text)) == answer.token_ids


def test_greedy_tokens_win_by_far_more_than_rounding(answers: list[Greedy]) -> None:
    margins = np.array([margin for answer in answers for margin in answer.margins])
    assert np.median(margins) > 0.2
    assert np.quantile(margins, 0.1) > 0.02
    assert margins.min() > 10 * ROUNDING


def test_a_prefill_in_pieces_changes_logits_by_no_more_than_rounding(loaded: Loaded) -> None:
    prompt = random_prompt(1, 700)
    whole, _ = loaded.prefill(prompt)
    _, cache = loaded.prefill(prompt[:333])
    pieces, _ = loaded.prefill(prompt[333:], cache)
    assert largest_change(whole, pieces) < ROUNDING


def test_the_first_of_700_tokens_changes_the_logits(loaded: Loaded) -> None:
    prompt = random_prompt(2, 700)
    logits, _ = loaded.prefill(prompt)
    changed, _ = loaded.prefill([another(prompt[0]), *prompt[1:]])
    assert largest_change(logits, changed) > 1000 * ROUNDING


@pytest.mark.parametrize("loaded", [Family.GDN, Family.MAMBA2], indirect=True, ids=str)
def test_the_first_of_700_tokens_changes_the_logits_through_the_recurrent_states_alone(loaded: Loaded) -> None:
    prompt = random_prompt(2, 700)
    logits, _ = loaded.prefill(prompt)
    _, cache = loaded.prefill(prompt[:64])
    _, changed_cache = loaded.prefill([another(prompt[0]), *prompt[1:64]])
    for state, changed_state in zip(recurrent_states(cache), recurrent_states(changed_cache), strict=True):
        state.copy_(changed_state)
    changed, _ = loaded.prefill(prompt[64:], cache)
    assert largest_change(logits, changed) > 1000 * ROUNDING


def test_a_state_lost_at_token_400_changes_the_answer(loaded: Loaded) -> None:
    prompt = random_prompt(3, 400 + loaded.memory_tokens)
    logits, _ = loaded.prefill(prompt)
    _, cache = loaded.prefill(prompt[:400])
    for state in recurrent_states(cache):
        state.zero_()
    changed, _ = loaded.prefill(prompt[400:], cache)
    assert largest_change(logits, changed) > 1.0


@pytest.mark.parametrize("num_stale", [1, 16])
def test_a_state_that_is_a_few_tokens_stale_changes_the_logits(loaded: Loaded, num_stale: int) -> None:
    prompt = random_prompt(4, 400 + loaded.memory_tokens)
    logits, _ = loaded.prefill(prompt)
    _, cache = loaded.prefill(prompt[:400])
    _, stale_cache = loaded.prefill(prompt[: 400 - num_stale])
    for state, stale_state in zip(recurrent_states(cache), recurrent_states(stale_cache), strict=True):
        state.copy_(stale_state)
    changed, _ = loaded.prefill(prompt[400:], cache)
    assert largest_change(logits, changed) > 1000 * ROUNDING


def test_the_time_steps_of_mamba2_stay_clear_of_the_bound_that_sglang_does_not_have(models: dict[str, Path]) -> None:
    loaded = Loaded(models[Family.MAMBA2])
    bound = loaded.model.config.time_step_min
    smallest = []

    def note(mixer: Any, _inputs: Any, projected: torch.Tensor) -> None:
        steps = torch.nn.functional.softplus(projected[..., -mixer.num_heads :] + mixer.dt_bias)
        smallest.append(float(steps.min()))

    mixers = [module for module in loaded.model.modules() if hasattr(module, "dt_bias")]
    for mixer in mixers:
        mixer.in_proj.register_forward_hook(lambda _, inputs, output, mixer=mixer: note(mixer, inputs, output))
    loaded.prefill(random_prompt(5, 4000))
    assert len(smallest) == len(mixers) == 2
    assert min(smallest) > 4 * bound


def another(token_id: int) -> int:
    """A byte's token that is not `token_id`."""
    return NUM_SPECIAL + (token_id - NUM_SPECIAL + 100) % 256
