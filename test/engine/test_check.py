"""`marconi check` says what a server would, by the same lists: it has a model's configuration in the model's place."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.server_args import prepare_server_args

from marconi import cli
from marconi.check.answer import CheckResult, answer
from marconi.check.line import CommandLine
from marconi.check.machine import Machine, Platform
from marconi.engine.launch import support
from marconi.engine.launch.flags import BACKEND
from marconi.engine.launch.model import Model, linear_backends
from marconi.engine.plugin import backend
from marconi.engine.version import Refusal
from marconi.model import catalog

from .processes import free_ports
from .test_support import WANTED

GDN = "Qwen/Qwen3-Next-80B-A3B-Instruct"
KDA = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
FALCON = "tiiuae/Falcon-H1-7B-Instruct"
DENSE = "lmsys/vicuna-7b-v1.5"
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
ONE_POOL = "--enable-unified-memory"
BUILT = object()


pytestmark = pytest.mark.usefixtures("loaded_plugins")


def checked(*argv: str, model: str = GDN, machine: Machine | None = None) -> CheckResult:
    line = CommandLine.parse(["--model-path", model, *argv])
    return answer(line, Model.find(line.model_path, None), machine or Machine())


class Host:
    """A scheduler that builds its cache, as far as that decides: pools and models are stand-ins of the right kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.patch, self.capsys = monkeypatch, capsys
        # What a cache is made of, once it is decided that there is one.
        for name in (
            "hook_into",
            "require_hooked",
            "register_tree_core",
            "require_alike",
            "warm_up_prefills",
            "warm_up_drafts",
        ):
            monkeypatch.setattr(backend, name, lambda *_: None)
        for name in ("pool_costs", "settings_of"):
            monkeypatch.setattr(backend, name, lambda *_: None)
        for name in ("create_unified_radix_cache", "default_radix_cache_factory"):
            monkeypatch.setattr(backend, name, lambda *_, **__: BUILT)

    def refusal(self, *argv: str, model: str = GDN) -> str | None:
        """What a server with `argv` is refused with; None if it is served."""
        try:
            record = self._started(argv)
            assert backend.build(self._context(record, model)) is BUILT
        except Refusal as refusal:
            return str(refusal)
        return None

    def _started(self, argv: tuple[str, ...]) -> Any:
        try:
            return prepare_server_args(["--model-path", GDN, "--radix-cache-backend", BACKEND, *argv])
        except SystemExit:
            # On a command line `startup` prints it.
            line = self.capsys.readouterr().err.splitlines()[-1]
            raise Refusal(line.removeprefix("marconi: error: ")) from None

    def _context(self, record: Any, model: str) -> TreeCacheBuildContext:
        name = catalog.name_of(model)
        found = Model.find(model, None)
        hybrid, linear = linear_backends(found.as_model_config)
        attention = type(hybrid, (), {})()
        attention.linear_attn_backend = type(str(linear), (), {})()
        attention.use_captured_forward_metadata_for_breakable_cuda_graph = (
            # What `HybridLinearAttnBackend` asks of the linear one; no other has such tables.
            linear == "KDAAttnBackend" and record.cuda_graph_backend_prefill == "breakable"
        )
        # On a CUDA device breakable is the default.
        is_breakable = record.cuda_graph_backend_prefill in (None, "breakable")
        self.patch.setattr(backend, "check_cuda_graph_backend", lambda *_: is_breakable)
        slots = record.max_mamba_cache_size or 100
        states = SimpleNamespace(
            size=slots // 5,
            mamba_allocator=SimpleNamespace(size=slots),
            mamba_initial_tracking_slots=0 if record.mamba_radix_cache_strategy == "no_buffer" else 2,
            short_conv_pool=SimpleNamespace(enabled=False),
            ngram_pool=SimpleNamespace(enabled=False),
        )
        self.patch.setattr(
            backend.JointMemory, "of", classmethod(lambda *_: object() if record.enable_unified_memory else None)
        )
        runner = SimpleNamespace(attn_backend=attention, req_to_token_pool=states)
        page_tokens = record.page_size or 1
        tokens = (record.max_total_tokens or 10_000) // page_tokens * page_tokens
        return TreeCacheBuildContext(
            server_args=record,
            params=SimpleNamespace(
                req_to_token_pool=states,
                token_to_kv_pool_allocator=SimpleNamespace(size=tokens),
                page_size=page_tokens,
            ),
            is_hybrid_swa=False,
            is_hybrid_ssm=catalog.CONFIGS[str(name)]["model_type"] != "llama",
            enable_hierarchical_cache=record.enable_hierarchical_cache,
            disable_radix_cache=record.disable_radix_cache,
            tp_worker=SimpleNamespace(model_runner=runner),
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=dict, architectures=found.hf_config.architectures)
            ),
            tp_size=1,
            tp_rank=0,
            tp_group=None,
        )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Host:
    return Host(monkeypatch, capsys)


def option_of(unsupported: support.Unsupported) -> list[str]:
    value = WANTED.get(unsupported.field, True)
    return [unsupported.option] if value is True else [unsupported.option, str(value)]


def first(found: CheckResult) -> str | None:
    """The first reason that this project has; SGLang's own are not the cache's."""
    return next((line for line in found.reasons if not line.startswith("sglang 0")), None)


@pytest.mark.parametrize("unsupported", support.UNSUPPORTED, ids=lambda each: each.field)
def test_what_is_refused_when_a_cache_is_built_is_refused_before(unsupported: support.Unsupported, host: Host) -> None:
    argv = option_of(unsupported)
    found = checked(*argv)
    assert not found.is_served
    assert found.reason_against(unsupported.option) == host.refusal(*argv)


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        ((), GDN),
        ((), KDA),
        (("--tp-size", "1", "--page-size", "64"), GDN),
        (NO_BUFFER, GDN),
        (("--max-mamba-cache-size", "3"), GDN),
        (("--max-mamba-cache-size", "4"), GDN),
        (("--max-mamba-cache-size", "1", *NO_BUFFER), GDN),
        (("--max-total-tokens", "100", "--page-size", "64"), GDN),
        ((ONE_POOL,), GDN),
        ((ONE_POOL, "--marconi-admission", "chunk-end"), GDN),
        ((ONE_POOL,), KDA),
        ((ONE_POOL, "--cuda-graph-backend-prefill", "breakable"), KDA),
        ((ONE_POOL, "--cuda-graph-backend-prefill", "breakable"), GDN),
        ((), FALCON),
        (("--cuda-graph-backend-prefill", "disabled"), FALCON),
        (("--enable-lmcache",), GDN),
        (("--enable-flexkv",), DENSE),
        (("--marconi-eviction", "marconi:-1"), GDN),
        (("--marconi-eviction", "lru:1"), GDN),
        (("--speculative-algorithm", "NEXTN"), DENSE),
        (("--speculative-algorithm", "NEXTN"), GDN),
        (("--disable-radix-cache", "--speculative-algorithm", "NEXTN"), GDN),
        (("--speculative-algorithm", "NEXTN", "--enable-hierarchical-cache"), GDN),
        (("--disaggregation-mode", "prefill"), GDN),
        (("--disaggregation-mode", "prefill", "--enable-hierarchical-cache"), GDN),
        (("--disaggregation-mode", "decode"), GDN),
        (("--disaggregation-mode", "decode", "--marconi-events", "tcp://127.0.0.1:{port}"), GDN),
        (("--marconi-events", "tcp://127.0.0.1:{port}"), GDN),
        (("--marconi-events", "tcp://127.0.0.1:{port}"), DENSE),
        (("--marconi-events", "tcp://127.0.0.1:{port}", "--disable-radix-cache"), GDN),
        (("--marconi-events", "tcp://127.0.0.1:{port}", "--kv-events-config", '{"publisher": "zmq"}'), GDN),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else each.rpartition("/")[2],
)
def test_the_verdict_is_that_of_the_server(argv: tuple[str, ...], model: str, host: Host) -> None:
    port = str(free_ports(2))
    argv = tuple(word.replace("{port}", port) for word in argv)
    assert first(checked(*argv, model=model)) == host.refusal(*argv, model=model)


def test_a_lock_that_the_environment_gives_back_is_refused_by_both(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "1")
    found = first(checked())
    assert found is not None
    assert found.startswith("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 is not supported with")
    assert found == host.refusal()


def test_a_refusal_that_is_new_or_lifted_is_so_for_both(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    argv, new = ("--load-format", "dummy"), support.Unsupported("load_format", lambda it: it == "dummy", "a reason")
    assert first(checked(*argv)) is host.refusal(*argv) is None
    monkeypatch.setattr(support, "REFUSED_CACHES", (new,))
    assert first(checked(*argv)) == host.refusal(*argv) != None  # noqa: E711
    assert first(checked("--enable-hisparse")) is host.refusal("--enable-hisparse") is None


def test_windows_are_a_fact_unless_sglang_keeps_them_like_other_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "has_sliding_window", property(lambda _: True))
    tier = "--enable-hierarchical-cache"
    assert "on a model with sliding windows" in str(first(checked(tier)))
    assert first(checked(tier, "--disable-hybrid-swa-memory")) is None


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--mamba-radix-cache-strategy", "no_buffer"), "no_buffer do not support overlap schedule"),
        ((*NO_BUFFER, "--page-size", "64"), "no_buffer only supports page_size=1"),
        (("--prefill-decode-interval", "-3"), "prefill-decode-interval"),
        (("--tp-size", "2", "--attn-dp-size", "4"), "assert cfg.tp_size % cfg.attn_dp_size == 0"),
        (("--ep-size", "2"), "parallel topology is inconsistent"),
        (
            ("--max-mamba-cache-size", "4", "--page-size", "64"),
            "must give at least 5 state slots, which it counts",
        ),
    ],
)
def test_what_sglang_refuses_is_a_reason_of_its_own(argv: tuple[str, ...], says: str) -> None:
    (reason,) = checked(*argv).reasons
    assert reason.startswith("sglang 0.5.23: ")
    assert says in reason


@pytest.mark.parametrize(
    "argv",
    [
        ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "nobody/draft"),
        ("--speculative-algorithm", "DSPARK"),
    ],
    ids=" ".join,
)
def test_of_a_draft_model_that_is_not_known_nothing_is_asked(argv: tuple[str, ...]) -> None:
    found = checked(*argv)
    assert found.is_served
    assert [note for note in found.notes if "draft model" in note]


def test_a_name_does_not_tell_how_long_a_context_is_and_a_folder_does(models: dict[str, Path]) -> None:
    argv = ("--context-length", str(2**22))
    assert checked(*argv).is_served
    assert "is greater than the derived context_length" in str(checked(*argv, model=str(models["gdn"])).reasons)


def test_what_a_server_says_of_a_setting_that_it_serves_is_a_note() -> None:
    assert [note.split()[0] for note in checked("--mamba-max-states-per-path", "4").notes] == [
        "--mamba-max-states-per-path"
    ]


def test_checkpoints_in_int8_in_memory_of_few_slots_are_advised_against() -> None:
    for num_slots, num_notes in (("4", 1), ("100", 0)):
        notes = checked("--enable-int8-mamba-checkpoint", "--max-mamba-cache-size", num_slots).notes
        assert sum("full precision would keep" in note for note in notes) == num_notes


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "share one pool"),
        (("--page-size", "64", "--tp-size", "2"), "share one pool"),
        (("--enable-hierarchical-cache",), "share one pool"),
        (("--enable-hierarchical-cache", "--speculative-algorithm", "NEXTN"), "does not support --enable-hierarchical"),
        (("--speculative-algorithm", "NEXTN"), "share one pool"),
        (("--speculative-algorithm", "NGRAM"), "only supports --speculative-algorithm DSPARK, DFLASH, EAGLE"),
        (("--marconi-admission", "chunk-end"), "only supported with --marconi-admission judicious"),
        (("--disaggregation-mode", "prefill"), "--disaggregation-mode prefill"),
        (("--linear-attn-backend", "cutedsl"), "linear-attention DECODE backend must be one of"),
    ],
    ids=lambda each: " ".join(each) or "default" if isinstance(each, tuple) else "",
)
def test_memory_that_no_flag_divides_is_one_pool_where_that_is_served(argv: tuple[str, ...], says: str) -> None:
    found = checked(*argv)
    assert found.is_served
    assert found.split is not None
    assert says in found.split
    assert found.pools is not None
    assert found.pools.is_one_pool == (says == "share one pool")


@pytest.mark.parametrize(
    "argv",
    [
        ("--mamba-full-memory-ratio", "0.9"),
        ("--max-mamba-cache-size", "100"),
        (ONE_POOL,),
        ("--enable-lmcache",),
        ("--disable-radix-cache",),
    ],
    ids=" ".join,
)
def test_memory_is_not_divided_for_an_operator_who_does_it_nor_where_there_is_none(argv: tuple[str, ...]) -> None:
    assert checked(*argv).split is None


def test_sglang_refuses_the_same_when_it_starts(models: dict[str, Path]) -> None:
    """Its whole resolution, on the CPU platform, of a model that is there."""
    for argv, is_refused in ((NO_BUFFER[:2], True), (NO_BUFFER, False), ((), False)):
        record = prepare_server_args(["--model-path", str(models["gdn"]), *argv])
        found = checked(*argv, model=str(models["gdn"]))
        with pytest.raises(AssertionError) if is_refused else nullcontext() as refused:
            record.resolve_once()
        assert found.reasons == ((f"sglang 0.5.23: {refused.value}",) if refused is not None else ())


@pytest.mark.parametrize("name", catalog.CONFIGS)
def test_every_known_model_of_sglangs_is_known_by_its_kind(name: str) -> None:
    if name == "jamba-1.5-mini":
        pytest.skip("SGLang serves no Jamba")
    model = Model.find(catalog.NAMES[0] if name not in catalog.CONFIGS else hub_of(name), None)
    assert model.is_hybrid == (name != "vicuna-7b")
    assert not model.has_sliding_window
    layers = model.recurrent_layers(captures_prefills=False)
    assert (layers.why_not_planned is None) == model.is_hybrid


@pytest.mark.parametrize("name", [name for name in catalog.CONFIGS if name not in ("jamba-1.5-mini", "vicuna-7b")])
def test_sglang_runs_a_models_recurrent_layers_on_the_backend_that_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.linear import utils

    model_config = Model.find(hub_of(name), None).as_model_config
    model_config.hf_text_config = model_config.hf_config
    made = "sglang.srt.layers.attention"
    for path in (
        *("hybrid_linear_attn_backend.HybridLinearAttnBackend", "hybrid_linear_attn_backend.Mamba2AttnBackend"),
        *("linear.gdn_backend.GDNAttnBackend", "linear.kda_backend.KDAAttnBackend"),
        *("linear.lightning_backend.LightningAttentionBackend", "linear.short_conv_backend.ShortConvAttnBackend"),
    ):
        monkeypatch.setattr(f"{made}.{path}.__init__", lambda backend, *made_of: setattr(backend, "made_of", made_of))
    for family in ("gdn", "kda"):
        monkeypatch.setattr(f"{made}.linear.{family}_backend.flashinfer_{family}_prefill_default", lambda _: None)
    monkeypatch.setattr(utils, "resolve_linear_attn_backends", lambda **_: None)
    monkeypatch.setattr("sglang.kernels.ops.attention.fla.utils.check_environments", lambda: None)
    runner = SimpleNamespace(model_config=model_config, use_mla_backend=False, is_draft_worker=False)
    hybrid: Any = attention_registry.attn_backend_wrapper(runner, object())
    _, linear, _ = hybrid.made_of
    assert linear_backends(model_config) == (type(hybrid).__name__, type(linear).__name__)


def hub_of(name: str) -> str:
    return next(hub for hub, each in catalog.HUB_NAMES.items() if each == name)


def test_a_prefill_graph_captures_the_layers_of_kimi_alone() -> None:
    """Which SGLang leaves out unless it is asked for."""
    captured = ("--cuda-graph-backend-prefill", "breakable")
    assert checked(*captured, model=KDA).admission == "chunk-end"
    assert checked(*captured, model=GDN).admission == "judicious"
    for argv in ((), ("--cuda-graph-backend-prefill", "disabled")):
        assert checked(*argv, model=KDA).admission == "judicious"


@pytest.mark.parametrize(
    ("argv", "num_slots"),
    [
        ((), 1),
        (NO_BUFFER, 1),
        (("--page-size", "64"), 3),
        (("--marconi-admission", "chunk-end"), 3),
        (("--speculative-algorithm", "NGRAM"), 3),
        (("--mamba-radix-cache-strategy", "extra_buffer_lazy"), 2),
    ],
)
def test_a_running_request_holds_no_slot_that_nobody_reads(argv: tuple[str, ...], num_slots: int) -> None:
    pools = checked(*argv).pools
    assert pools is not None
    assert pools.num_working_slots == num_slots


@pytest.mark.parametrize("argv", [("--cuda-graph-backend-prefill", "disabled"), ("--disable-prefill-cuda-graph",)])
def test_falcon_h1_is_served_with_the_flag_that_its_refusal_names(argv: tuple[str, ...]) -> None:
    assert [line.split()[0] for line in checked(model=FALCON).reasons] == ["--cuda-graph-backend-prefill"]
    assert checked(*argv, model=FALCON).admission == "judicious"
    assert checked(*argv, model=FALCON).is_served
    assert str(first(checked("--disable-radix-cache", model=FALCON))).startswith("--disable-radix-cache leaves")


@pytest.mark.parametrize("model", [KDA, GDN, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen/Qwen3.6-27B"])
def test_a_device_whose_prefills_are_captured_changes_nothing(model: str) -> None:
    """SGLang's default on CUDA, where it asks more of the model."""
    cuda = checked("--tp-size", "2", model=model)
    cpu = checked("--tp-size", "2", model=model, machine=Machine(Platform.CPU))
    # One pool over several ranks is a matter of the device.
    assert cuda == replace(cpu, pools=cuda.pools, split=cuda.split)


# The command


def run(*argv: str) -> int:
    return cli.main(["check", "--platform", "cuda", *argv])


def test_a_command_line_that_would_be_served_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answer.json"
    argv = ("--", "--model-path", GDN, "--page-size", "64", "--mem-fraction-static", "0.9", "--tp-size", "1")
    assert run("--gpu-memory", "180GB", "--json", str(file), *argv) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--page-size 64 yes" in shown
    assert "a state 77,266,944 bytes" in shown
    assert "served: the cache is marconi, states kept by judicious" in shown
    read = json.loads(file.read_text(encoding="utf-8"))
    assert (read["served"], read["pools"]["num_working_slots"]) == (True, 3)
    assert (run("--gpu-memory", "180GB", "--json", "-", *argv), json.loads(capsys.readouterr().out)) == (0, read)
    assert {"flag": "--page-size", "value": "64", "reason": None} in read["flags"]


def test_one_that_would_not_exits_with_1_and_a_reason_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--", "--model-path", GDN, "--enable-lmcache", "--enable-streaming-session", "--pp-size", "2") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "--enable-lmcache no --enable-lmcache and --radix-cache-backend marconi are two caches" in shown
    assert "--enable-streaming-session no" in shown
    assert "does not yet support streaming sessions" in shown, "in SGLang's words"
    assert "not served: 4 reasons" in shown


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--model-path", GDN, "--polcy", "3"), "sglang: unrecognized arguments: --polcy 3"),
        (
            ("--model-path", GDN, "--tp-size", "two"),
            "--tp-size/--tensor-parallel-size: invalid int value: 'two'",
        ),
        ((), "sglang: the following arguments are required: --model-path"),
        (("--model-path", "nobody/nothing"), "no configuration of nobody/nothing is known here: give its config.json"),
        (("--model-path", GDN, "--radix-cache-backend", "flexkv"), "--radix-cache-backend must be marconi"),
    ],
)
def test_what_cannot_be_asked_exits_with_2_in_one_line(
    argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--", *argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


@pytest.mark.parametrize(("option", "says"), [("--gpu-memory", "0.5x"), ("--weights", "20GB")])
def test_an_amount_that_makes_no_card_is_refused(option: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(option, says, "--", "--model-path", GDN) == 2
    assert option in capsys.readouterr().err


def test_a_configuration_is_a_file_or_a_folder(models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "another-name.json"
    file.write_text((models["mamba2"] / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    for config in (file, models["mamba2"]):
        assert run("--config", str(config), "--", "--model-path", "nobody/nothing") == 0
    assert run("--", "--model-path", str(models["mamba2"])) == 0
    assert run("--config", str(tmp_path), "--", "--model-path", GDN) == 2


def test_a_folder_without_a_configuration_is_told_the_missing_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--", "--model-path", str(tmp_path)) == 2
    told = f"marconi: error: --model-path: {tmp_path / 'config.json'} cannot be read: No such file or directory\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("fields", [{}, {"model_type": "new", "auto_map": {"AutoConfig": "new.Config"}}])
def test_a_configuration_that_sglang_cannot_read_is_named_and_not_its_copy(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(fields), encoding="utf-8")
    assert run("--config", str(file), "--", "--model-path", GDN) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{file}: SGLang cannot read it (" in line
    assert str(file) in line.partition("cannot read it")[2]
    assert "marconi-" not in line.replace(str(tmp_path), "")


def test_without_sglang_the_command_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run("--", "--model-path", GDN) == 2
    assert "`marconi check` needs SGLang, which is not installed: pip install '.[server]'" in capsys.readouterr().err
