"""The CPU platform: chosen by name only, and its launchers stand where SGLang's did."""

import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import marconi_cpu
from marconi.engine.cpu_platform import PLATFORM, is_active
from marconi.engine.plugin.touch import Kind, Touch, is_hooked, resolve
from marconi.engine.plugin.upstream import of_every_process
from marconi_cpu import convolution, gated_delta_rule, gating, mamba2, state_tracking, upstream
from sgl_kernel_ext import gated_delta_rule as delta_operator
from sgl_kernel_ext import mamba2 as mamba_operator
from sgl_kernel_ext.state_pool import StateSlots


def short_name(touch: Touch) -> str:
    return touch.target.rpartition(".ops.")[2]


def run_python(program: str, platform: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_PLATFORM"}
    if platform is not None:
        environment["SGLANG_PLATFORM"] = platform
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("platform", [None, "", "cuda", "marconi_cpu2"])
def test_without_its_name_the_platform_stays_out(monkeypatch: pytest.MonkeyPatch, platform: str | None) -> None:
    if platform is None:
        monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    else:
        monkeypatch.setenv("SGLANG_PLATFORM", platform)
    assert not is_active()
    assert marconi_cpu.activate() is None


def test_by_its_name_the_platform_is_a_class_that_sglang_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.platforms.interface import SRTPlatform

    monkeypatch.setenv("SGLANG_PLATFORM", PLATFORM)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name = marconi_cpu.activate()
    assert name is not None
    platform = resolve(name)()
    assert isinstance(platform, SRTPlatform)
    assert platform.is_out_of_tree()
    assert isinstance(platform.get_device(), str)
    assert torch.device(platform.get_device()).type == "cpu"


def test_a_visible_gpu_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", PLATFORM)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES="):
        marconi_cpu.activate()


def test_importing_the_package_without_the_platform_changes_nothing() -> None:
    program = (
        "import sys, torch; pin = torch.Tensor.pin_memory; module = torch.get_device_module;"
        "import marconi_cpu; marconi_cpu.register_launchers();"
        "print(torch.Tensor.pin_memory is pin and torch.get_device_module is module"
        " and not any(name.startswith(('sglang', 'sgl_kernel_ext')) for name in sys.modules))"
    )
    assert run_python(program, None) == "True"


def test_in_a_serving_process_every_launcher_is_ours_and_nothing_is_pinned() -> None:
    if not is_active():
        pytest.skip(f"needs a process that serves on {PLATFORM}")
    import sglang.srt.layers.attention.mamba.mamba as mixer
    from sglang.srt.plugins import load_plugins

    load_plugins()
    host = torch.zeros(1)
    assert all(map(is_hooked, upstream.LAUNCHERS.hooks + upstream.POOL.hooks))
    assert host.pin_memory() is host
    assert torch.get_device_module() is torch.cpu
    assert mixer.causal_conv1d_fn is mixer.causal_conv1d_fn_triton


def test_a_server_on_the_platform_requires_its_hooks_and_no_other_server_does() -> None:
    assert set(upstream.GROUPS) < set(of_every_process(on_cpu_platform=True))
    assert not set(upstream.GROUPS) & set(of_every_process(on_cpu_platform=False))


@pytest.mark.parametrize("launcher", upstream.LAUNCHERS.hooks, ids=short_name)
def test_a_replacement_takes_upstreams_arguments_under_their_names_and_defaults(launcher: Touch) -> None:
    assert launcher.kind is Kind.REPLACE

    def named(function: Callable[..., object]) -> dict[str, object]:
        parameters = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {parameter.name: parameter.default for parameter in parameters if parameter.kind in kinds}

    theirs, ours = named(resolve(launcher.target)), named(launcher.function)
    renamed = {"module" if name == "self" else name: default for name, default in theirs.items()}
    assert list(ours) == list(renamed)
    # Ours may do without an argument that upstream asks for.
    assert all(ours[name] == default for name, default in renamed.items() if default is not inspect.Parameter.empty)


def server_args(**given: object) -> SimpleNamespace:
    unset = {"max_running_requests": None, "max_mamba_cache_size": None, "max_total_tokens": None, "dtype": "bfloat16"}
    ranks = {"dp_size": 1, "tp_size": 1, "pp_size": 1}
    return SimpleNamespace(**{**unset, **ranks, "sleep_on_idle": False, **given})


def test_pools_are_bounded_where_the_operator_said_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from marconi_cpu.platform import CpuPlatform

    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    args = server_args()
    CpuPlatform().apply_server_args_defaults(args)
    assert 0 < args.max_running_requests * 3 < args.max_mamba_cache_size
    assert args.max_total_tokens > 0
    assert args.sleep_on_idle


def test_what_the_operator_gave_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from marconi_cpu.platform import CpuPlatform

    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    given = {"max_running_requests": 3, "max_mamba_cache_size": 7, "max_total_tokens": 99, "dtype": "bfloat16"}
    args = server_args(**given)
    CpuPlatform().apply_server_args_defaults(args)
    assert {name: getattr(args, name) for name in given} == given
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize(
    ("num_ranks", "cores", "expected"),
    [(1, {0, 1}, None), (2, {0, 1}, "0|1"), (2, {2, 3, 4, 5}, "2,4|3,5"), (4, {0, 1}, "0|1|0|1"), (3, {7}, "7|7|7")],
)
def test_ranks_that_outnumber_the_nodes_share_the_cores_out(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, cores: set[int], expected: str | None
) -> None:
    from sglang.srt.utils import common

    from marconi_cpu import platform

    monkeypatch.setattr(common, "get_cpu_ids_by_node", lambda: ["0,1"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setenv(platform._BIND, "before")
    monkeypatch.delenv(platform._BIND)
    platform.bind_ranks(num_ranks)
    assert os.environ.get(platform._BIND) == expected
    monkeypatch.setenv(platform._BIND, "the operator's")
    platform.bind_ranks(num_ranks)
    assert os.environ[platform._BIND] == "the operator's"


CONV = {"weight": torch.ones(3, 4), "bias": None}
GDN = {name: torch.ones(1, 2, 1, 4) for name in "qkv"} | {name: torch.ones(1, 2, 1) for name in ("g", "beta")}
SSM = {"x": torch.ones(1, 2, 1, 4), "dt": torch.ones(1, 2, 1), "A": -torch.ones(1), "chunk_size": 64}
SSM |= {name: torch.ones(1, 2, 1, 5) for name in "BC"}
SSM_CALL = {"cu_seqlens": torch.tensor([0, 2]), "out": torch.empty(1, 2, 1, 4)}
SSM_CALL |= {"return_varlen_states": True, "return_track_states": True}
STEP = {"state": torch.ones(2, 1, 4, 5), "x": torch.ones(1, 1, 4), "dt": torch.ones(1, 1, 1).expand(1, 1, 4)}
STEP |= {"A": -torch.ones(1, 1, 1).expand(1, 4, 5), "B": torch.ones(1, 1, 5), "C": torch.ones(1, 1, 5)}
STEP |= {"out": torch.empty(1, 1, 4)}
UPDATE = {"x": torch.ones(2, 3), "conv_state": torch.zeros(2, 3, 3)} | CONV
PREFILL = {"x": torch.ones(3, 2), "conv_states": None, "query_start_loc": torch.tensor([0, 2])} | CONV
FLAG = torch.ones(1)


@pytest.mark.parametrize(
    ("launcher", "arguments", "unsupported"),
    [
        *[
            (convolution.causal_conv1d_update, UPDATE, {name: FLAG})
            for name in (
                "cache_seqlens",
                "num_accept_tokens",
                "intermediate_conv_window",
                "intermediate_state_indices",
                "retrieve_next_token",
                "retrieve_next_sibling",
                "retrieve_parent_token",
                "metadata",
            )
        ],
        (convolution.causal_conv1d_update, UPDATE, {"pad_slot_id": 0}),
        (convolution.causal_conv1d_update, UPDATE, {"activation": "gelu"}),
        (convolution.causal_conv1d_update, UPDATE, {"x": torch.ones(2, 3, 2)}),
        (convolution.causal_conv1d_fn, PREFILL, {"pad_slot_id": 0}),
        (convolution.causal_conv1d_fn, PREFILL, {"activation": "gelu"}),
        (convolution.causal_conv1d_fn, PREFILL, {"an_argument_of_a_later_release": 1}),
        (gated_delta_rule.chunk_gated_delta_rule, GDN, {"head_first": True}),
        (gated_delta_rule.chunk_gated_delta_rule, GDN, {"cu_seqlens": None}),
        (gating.fused_sigmoid_mul, {"attn_output": FLAG, "gate": FLAG}, {"quant": True}),
        *[
            (gating.fused_rms_norm_gated_forward, {"module": None, "x": FLAG, "g": FLAG}, {name: value})
            for name, value in (("residual", FLAG), ("prenorm", True), ("residual_in_fp32", True))
        ],
        *[
            (mamba2.mamba_chunk_scan_combined, SSM | SSM_CALL, {name: value})
            for name, value in (
                ("z", FLAG),
                ("return_final_states", True),
                ("return_intermediate_states", True),
                ("cu_seqlens", None),
                ("out", None),
                ("return_varlen_states", False),
                ("return_track_states", False),
            )
        ],
        *[
            (mamba2.selective_state_update, STEP, {name: value})
            for name, value in (
                ("z", FLAG),
                ("disable_state_update", True),
                ("intermediate_states_buffer", FLAG),
                ("cache_steps", 2),
                ("retrieve_parent_token", FLAG),
                ("intermediate_state_indices", FLAG),
                ("enable_stochastic_rounding", True),
                ("cache_philox_rounds", 4),
                ("pad_slot_id", 0),
                ("x", torch.ones(1, 2, 1, 4)),
                ("out", None),
            )
        ],
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_an_unsupported_argument_is_refused_by_name(
    launcher: Callable[..., object], arguments: dict[str, object], unsupported: dict[str, object]
) -> None:
    (name,) = unsupported
    with pytest.raises(NotImplementedError, match=rf"\b{name}\b"):
        launcher(**{**arguments, **unsupported})


@pytest.mark.parametrize("name", ["A", "dt", "dt_bias"])
def test_a_step_that_differs_within_a_head_is_refused(name: str) -> None:
    varying = {"A": torch.ones(1, 4, 5), "dt": torch.ones(1, 1, 4), "dt_bias": torch.ones(1, 4)}
    with pytest.raises(NotImplementedError, match=rf"{name} that varies within a head"):
        mamba2.selective_state_update(**{**STEP, name: varying[name]})


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_the_scan_gives_the_states_of_the_flat_grid_and_those_before_tracked_tokens() -> None:
    lengths, chunk_size = (100, 90), 64
    total = sum(lengths)
    bounds = torch.tensor([0, 100, 190])
    x, dt, A = random(1, total, 2, 4), random(1, total, 2, seed=1), -torch.tensor([0.1, 0.2])
    B, C, initial = random(1, total, 1, 5, seed=2), random(1, total, 1, 5, seed=3), random(2, 2, 4, 5, seed=4)
    out = torch.empty(1, total, 2, 4)
    kept = initial.clone()
    call = {"dt_softplus": True, "cu_seqlens": bounds, "initial_states": initial, "out": out}
    call |= {"return_varlen_states": True, "return_track_states": True}
    call |= {"track_seq_idx": torch.tensor([1]), "track_end_locs": torch.tensor([164])}
    grid, final, tracked = mamba2.mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **call)
    assert torch.equal(initial, kept)
    assert grid.shape == (1, 3, 2, 4, 5)

    def state_after(sequence: int, num_tokens: int) -> torch.Tensor:
        own = slice(int(bounds[sequence]), int(bounds[sequence]) + num_tokens)
        delta = torch.nn.functional.softplus(dt[0, own])
        states = StateSlots(initial[[sequence]], torch.tensor([0]))
        return mamba_operator.prefill(
            x[0, own],
            delta,
            A,
            B[0, own],
            C[0, own],
            cu_seqlens=torch.tensor([0, num_tokens]),
            chunk_size=7,
            states=states,
        ).final_states[0]

    assert tracked is not None
    torch.testing.assert_close(grid[0], torch.stack([initial[0], state_after(0, 64), state_after(1, 28)]))
    torch.testing.assert_close(final, torch.stack([state_after(0, 100), state_after(1, 90)]))
    torch.testing.assert_close(tracked[0, 0], state_after(1, 64))


@pytest.mark.parametrize("inplace_update", [True, False])
def test_the_delta_rule_counts_chunks_from_each_sequence_and_writes_only_when_asked(inplace_update: bool) -> None:
    q, k, v = random(1, 170, 1, 8), random(1, 170, 1, 8, seed=1), random(1, 170, 2, 6, seed=2)
    g, beta = -random(1, 170, 2, seed=3).square() / 50, random(1, 170, 2, seed=4).sigmoid()
    pool = random(5, 2, 6, 8, seed=5)
    before = pool.clone()
    bounds, slots = torch.tensor([0, 65, 170], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    outputs, nothing, chunk_states = gated_delta_rule.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=pool,
        initial_state_indices=slots,
        cu_seqlens=bounds,
        use_qk_l2norm_in_kernel=True,
        inplace_update=inplace_update,
    )
    unit = torch.nn.functional.normalize
    expected = delta_operator.prefill(
        unit(q[0], dim=-1),
        unit(k[0], dim=-1),
        v[0],
        g[0],
        beta[0],
        cu_seqlens=bounds,
        states=StateSlots(before.clone(), slots),
    )
    assert nothing is None
    assert chunk_states.shape == (1, 4, 2, 6, 8)
    torch.testing.assert_close(chunk_states[0, [0, 2]], before[[3, 1]])
    torch.testing.assert_close(outputs[0], expected.outputs)
    torch.testing.assert_close(pool[[3, 1]], expected.final_states if inplace_update else before[[3, 1]])


def test_the_two_layouts_of_a_projection_hold_the_same_parts() -> None:
    num_keys, num_values, key_dim, value_dim = 2, 6, 4, 5
    q, k = random(3, num_keys, key_dim), random(3, num_keys, key_dim, seed=1)
    v, z = random(3, num_values, value_dim, seed=2), random(3, num_values, value_dim, seed=3)
    b, a = random(3, num_values, seed=4), random(3, num_values, seed=5)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(3, num_keys, -1)

    sizes = (num_keys, num_values, key_dim, value_dim)
    flat = gated_delta_rule.fused_qkvzba_split_reshape_cat_contiguous(
        torch.cat([x.flatten(1) for x in (q, k, v, z)], 1), torch.cat([b, a], 1), *sizes
    )
    by_head = gated_delta_rule.fused_qkvzba_split_reshape_cat(
        torch.cat([grouped(x) for x in (q, k, v, z)], 2).flatten(1),
        torch.cat([grouped(b), grouped(a)], 2).flatten(1),
        *sizes,
    )
    for found in (flat, by_head):
        expected = (torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1), z, b, a)
        assert all(torch.equal(part, wanted) for part, wanted in zip(found, expected, strict=True))


def test_a_convolution_state_may_be_wider_than_its_filter_needs() -> None:
    weight, x = random(3, 4), random(3, 5, seed=1)
    exact, wide = random(2, 3, 3, seed=2), torch.full((2, 3, 6), torch.nan)
    wide[..., :3] = exact
    call = {"weight": weight, "bias": None, "query_start_loc": torch.tensor([0, 5]), "seq_lens_cpu": [5]}
    call |= {"cache_indices": torch.tensor([1]), "has_initial_state": torch.tensor([True])}
    outputs = [convolution.causal_conv1d_fn(x, conv_states=states, **call) for states in (exact, wide)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(exact, wide[..., :3])
    assert wide[..., 3:].isnan().all()


def test_states_are_tracked_where_the_mask_is_set() -> None:
    conv, ssm = random(2, 6, 3), random(2, 6, 4, 5)
    before = conv.clone(), ssm.clone()
    call = {"cache_indices": torch.tensor([1, 2, 0]), "mamba_track_mask": torch.tensor([True, False, True])}
    call |= {"mamba_track_indices": torch.tensor([4, 5, 3]), "batch_size": 2}
    state_tracking.track_mamba_states_all_layers(conv, ssm, **call)
    for pool, old in zip((conv, ssm), before, strict=True):
        assert torch.equal(pool[:, 4], old[:, 1])
        assert torch.equal(pool[:, [0, 1, 2, 3, 5]], old[:, [0, 1, 2, 3, 5]])


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_a_gated_norm_norms_groups_before_or_after_its_gate(norm_before_gate: bool, activation: str) -> None:
    x, z, weight = random(3, 8), random(3, 8, seed=1), random(8, seed=2)
    module = SimpleNamespace(weight=weight, bias=None, eps=1e-6, activation=activation)
    module = SimpleNamespace(**vars(module), group_size=4, norm_before_gate=norm_before_gate)
    gate = z.sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(z)
    inner = x if norm_before_gate else x * gate
    normed = torch.nn.functional.rms_norm(inner.reshape(3, 2, 4), (4,), eps=1e-6).reshape(3, 8) * weight
    expected = normed * gate if norm_before_gate else normed
    torch.testing.assert_close(gating.rms_norm_gated_forward(module, x, z), expected)


def test_a_controller_without_requests_waits_and_takes_one_at_once(sglang_configuration: None) -> None:
    """SGLang's own loop, which ends with the dispatcher's error. The control: by itself it asks without a pause."""
    import zmq
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.io_struct import AbortReq, sock_send

    from marconi_cpu.launchers import around_event_loop

    class Taken(Exception):
        pass

    def dispatch(_: object) -> None:
        raise Taken

    def num_feeds(loop: Callable[..., None]) -> int:
        context = zmq.Context()
        ends, feeds = context.socket(zmq.PULL), list[float]()
        begins = context.socket(zmq.PUSH)
        begins.connect(f"tcp://127.0.0.1:{ends.bind_to_random_port('tcp://127.0.0.1')}")
        watchdog = SimpleNamespace(feed=lambda: feeds.append(time.monotonic()))
        controller = SimpleNamespace(recv_from_tokenizer=ends, soft_watchdog=watchdog, _request_dispatcher=dispatch)
        sender = threading.Timer(0.5, lambda: sock_send(begins, AbortReq(rid="1")))
        sender.start()
        try:
            with pytest.raises(Taken):
                loop(controller)
            sender.join()
        finally:
            context.destroy(linger=0)
        return len(feeds)

    event_loop = inspect.unwrap(DataParallelController.event_loop)
    assert num_feeds(lambda controller: around_event_loop(event_loop, controller)) < 20
    assert num_feeds(event_loop) > 100
