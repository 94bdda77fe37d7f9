"""The kernels' benchmark: its shapes, bytes, turns and bars, and a device's rows by a clock with a script.

Times are not asserted.
"""

import json
from typing import Any

import pytest

pytest.importorskip("torch", reason="the server extra is not installed: pip install '.[server]'")

import torch

from marconi.model.catalog import CONFIGS

from .kernel_rows import CPU, OwnLayer, ScriptedClock, operands, part, sample, shapes, timing, tiny

batch, cuda, report, traffic, upstream = (part(name) for name in ("batch", "cuda", "report", "traffic", "upstream"))


# What is measured.


def test_shapes_are_those_of_the_catalog() -> None:
    families = {"qwen3_next": "gated_delta_rule", "kimi_linear": "kda"}
    held = [name for name in shapes.LAYERS if name in CONFIGS]
    assert len(held) == 6, "all but Nemotron-H-56B, which differs from the 8B in size"
    for name in held:
        layer, config = shapes.LAYERS[name], CONFIGS[name]
        linear = config.get("linear_attn_config", {})
        assert layer.family == families.get(config["model_type"], "mamba2")
        heads = ("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads")
        assert layer.num_heads == next((config[key] for key in heads if key in config), linear.get("num_heads"))
        columns = ("linear_key_head_dim", "ssm_state_size", "mamba_d_state")
        assert layer.num_columns == next((config[key] for key in columns if key in config), linear.get("head_dim"))
        shared = ("linear_num_key_heads", "n_groups", "mamba_n_groups")
        assert layer.num_shared_heads == next((config[key] for key in shared if key in config), linear.get("num_heads"))
        widths = ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv")
        width = next((config[key] for key in widths if key in config), linear.get("short_conv_kernel_size"))
        assert layer.conv_width == width
        inner = config.get("mamba_d_ssm", config.get("mamba_expand", 0) * config["hidden_size"])
        rows = config.get("linear_value_head_dim", config.get("mamba_head_dim", linear.get("head_dim")))
        assert layer.num_rows == (rows or inner // layer.num_heads)


@pytest.mark.parametrize("chunk_size", [64, 256])
def test_positions_lie_in_their_sequences_and_sglangs_at_the_start_of_the_last_chunk(chunk_size: int) -> None:
    made = batch.batch_of(1024, 3, 2, chunk_size)
    assert made == batch.batch_of(1024, 3, 2, chunk_size), "the same for the same seed"
    assert made.lengths == (1024, 1019, 1014)
    assert made.sequences == (0, 0, 1, 1, 2, 2)
    where = zip(made.sequences, made.positions, strict=True)
    assert all(1 <= position <= made.lengths[sequence] for sequence, position in where)
    for length, aligned in zip(made.lengths, made.aligned, strict=True):
        assert aligned % chunk_size == 0
        assert 0 < aligned < length <= aligned + chunk_size
    slots = [*range(3), *made.checkpoints.slots, *made.aligned_slots]
    assert slots == list(range(made.num_slots)), "every slot has one owner"


# Bytes.


def test_bytes_that_must_move_are_each_read_and_written_once() -> None:
    shape = tiny(shapes.Family.GATED_DELTA_RULE)
    heads, rows, columns = shape.state_shape
    made = batch.Batch((200,), (0, 0, 0), (70, 80, 130), (192,))
    given = operands.stand_in(shape, made, torch.bfloat16, CPU)
    pool = torch.zeros(made.num_slots, *shape.state_shape)
    found = traffic.of_states(given, batch.state_spans(shape, made, CPU), pool)
    token = 2 * 2 * columns + heads * rows * 2 + heads * 4
    state = heads * rows * columns
    # 70 and 80 lie in one chunk: its state and its first 16 tokens are read once.
    assert found.must_bytes == 3 * state * 4 + 2 * state * 2 + (16 + 2) * token
    # Rows are two tiles, columns one; keys are loaded by every head.
    loaded = heads * (2 * columns * 2 + rows * 2 + 2 * 4)
    assert found.moved_bytes == 3 * state * (4 + 2) + (6 + 16 + 2) * loaded


def test_a_sequence_inside_a_chunk_of_the_batch_reads_no_state() -> None:
    shape = tiny(shapes.Family.MAMBA2)
    made = batch.Batch((70, 30), (0, 1), (70, 7), (64, 0))
    given = operands.stand_in(shape, made, torch.bfloat16, CPU)
    pool = torch.zeros(made.num_slots, *shape.state_shape)
    state = pool[0].numel() * 4
    found = traffic.of_states(given, batch.state_spans(shape, made, CPU), pool)
    heads, rows, columns = shape.state_shape
    assert found.must_bytes == 3 * state + (6 + 7) * (heads * rows * 2 + 2 * columns * 2 + heads * 8)


# Times.


def test_bandwidth_counts_bytes_read_and_written() -> None:
    assert timing.copy_bytes_per_s(ScriptedClock(2.0), CPU, 3, num_bytes=4096) == pytest.approx(8192 / 2e-6)


# Rows.

MEMORY = report.Memory(copy_bytes_per_s=4e12, l2_bytes=50_000_000)


def row(tokens: int = 4096, must_bytes: int = 100_000_000, **times_us: float) -> Any:
    times = {name: sample(time) for name, time in times_us.items()}
    moved = traffic.Traffic(must_bytes, 2 * must_bytes)
    return report.Row("m", shapes.Family.KDA, tokens, 1, 2, traffic=moved, **times)


@pytest.mark.parametrize(
    ("given", "bars"),
    [
        (row(checkpoint=37.5, prefill=1875.0, aligned=37.5), (True, True, True)),
        (row(checkpoint=37.6, prefill=1875.0, aligned=37.5), (False, False, False)),
        (row(tokens=4095, checkpoint=37.6, prefill=1.0), (None, False, None)),
        (row(must_bytes=50_000_000, checkpoint=37.6, prefill=9e9), (True, None, None)),
        (report.Row("m", shapes.Family.KDA, 4096, 1, 2), (None, None, None)),
    ],
)
def test_bars_hold_up_to_their_limit_and_only_where_they_apply(given: Any, bars: tuple[bool | None, ...]) -> None:
    assert tuple(given.bars(MEMORY).values()) == bars


def test_a_row_says_all_and_a_table_shows_it() -> None:
    full = row(checkpoint=50.0, prefill=5000.0, aligned=100.0)
    found = json.loads(json.dumps(full.to_json(MEMORY)))
    assert (found["floor_us"], found["of_floor"], found["share"]) == (25.0, 0.5, 0.01)
    assert (found["over_aligned"], found["moved_over_must"], found["fills_chip"]) == (0.5, 2.0, True)
    assert found["bars"] == {"share": True, "floor": False, "aligned": True}
    bare = report.Row("n", shapes.Family.KDA, 1024, 16, 32).without("any figure", "no memory")
    table = report.table_of([full, bare], MEMORY)
    assert list(table.columns[-1].cells) == ["share holds, floor MISSED, aligned holds", ""]
    assert report.missing_of([full, bare]) == ["not measured: any figure: no memory (n 16 x 1,024)"]
    assert report.missing_of([bare]) == ["not measured: any figure: no memory (all rows)"]


class UpstreamFails(OwnLayer):
    def track(self) -> None:
        raise RuntimeError("no such kernel\non this machine")


def measure(layer_of: Any, family: str = "gated_delta_rule", clock: Any = None) -> Any:
    shape = tiny(shapes.Family(family))
    return cuda.measure(shape, (512, 2), 2, clock or ScriptedClock(7.0), 2, CPU, layer_of)


def test_without_sglang_ours_is_measured_alone() -> None:
    found = measure("sglang is not installed")
    assert found.checkpoint.median_us == 7.0
    assert (found.num_checkpoints, found.prefill, found.aligned) == (4, None, None)
    assert found.missing == ("prefill and aligned: sglang is not installed",)
    assert 0 < found.traffic.must_bytes < found.traffic.moved_bytes


def test_tracking_is_its_copies_and_what_the_chunk_kernel_takes_more() -> None:
    # checkpoint, prefill, aligned, tracking, not_tracking; the next round begins with the second.
    found = measure(OwnLayer, clock=ScriptedClock(1.0, 100.0, 3.0, 12.0, 10.0, 100.0, 3.0, 12.0, 10.0, 1.0))
    assert (found.checkpoint.median_us, found.prefill.median_us) == (1.0, 100.0)
    assert found.aligned.median_us == 3.0 + 2.0
    assert found.missing == ()


def test_what_sglang_cannot_do_is_said_in_one_line_and_the_rest_is_measured() -> None:
    found = measure(UpstreamFails)
    assert found.missing == ("aligned: RuntimeError: no such kernel",)
    assert found.prefill is not None
    assert found.aligned is None

    def broken(*_: Any) -> None:
        raise TypeError("operands changed")

    found = measure(broken)
    assert found.missing == ("prefill and aligned: TypeError: operands changed",)
    assert found.checkpoint is not None


def test_too_little_memory_is_a_row_without_figures() -> None:
    def too_large(*_: Any) -> None:
        raise torch.OutOfMemoryError

    found = measure(too_large)
    assert found.missing == ("any figure: the device's memory is too small",)
    assert found.checkpoint is None


def test_a_module_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream.convolution, "MODULE", "no_such_sglang.kernels")
    why = upstream.why_absent(shapes.Family.MAMBA2)
    assert why == "no_such_sglang.kernels: ModuleNotFoundError: No module named 'no_such_sglang'"
