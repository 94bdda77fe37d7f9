"""SGLang's CUDA branches under our hooks, on a card that is not there: every state is written, and nothing waits.

The cases run in a process of their own, `fake_cuda_cases.py`; here stands what they must have found.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from marconi.engine.prefill.verified import are_captured_in_segments

pytestmark = pytest.mark.slow

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

Findings = dict[str, dict[str, Any]]

IN_ONE_PIECE = (
    "GDN by Triton",
    "GDN by FlashInfer",
    "GDN by FlashInfer, shorter than a chunk",
    "KDA by Triton",
    "Mamba2",
    "a ragged batch",
    "a padded replay",
)
CUT = ("GDN that is cut",)
PREFILLS = (*IN_ONE_PIECE, *CUT)
MAX_OPERATIONS_A_VERIFY_STEP = 2
COMMITTED = [*["_fused_mamba_state_scatter_with_mask_kernel"] * 2, "_fused_conv_window_scatter_multi_kernel"]
"""SGLang's launches that commit a step: working states, those at ends, and the windows of both."""
CHAIN_STEPS = {
    "a chain's step": COMMITTED,
    "a chain's step from inputs": [
        "kda_replayssm_exact_fold_kernel",
        *["_fused_conv_window_scatter_with_mask_kernel"] * 2,
    ],
}
"""And those of DSPARK's, from states that are kept or from inputs."""
"""Small kernels and copies of ours, beside the two launches that move states: whose turn it is, and who ends."""

NUM_LAYERS = 2
NUM_KERNEL_HOOKS, NUM_OPERATORS = 7, 6


@pytest.fixture(scope="module")
def findings() -> Findings:
    """What each case found, by its name."""
    kept = {name: value for name, value in os.environ.items() if name not in ("SGLANG_PLATFORM", "TRITON_INTERPRET")}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "engine.fake_cuda_cases"],
        env=kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not ended.returncode, ended.stderr
    found: Findings = json.loads(ended.stdout.splitlines()[-1])
    return found


def waits_of(finding: dict[str, Any], owner: str) -> list[tuple[str, str]]:
    return [(kind, line) for kind, whose, line in finding["waits"] if whose == owner]


@pytest.mark.parametrize("case", PREFILLS)
def test_every_layer_writes_every_planned_state(findings: Findings, case: str) -> None:
    assert not findings[case]["error"]
    assert findings[case]["num_written"]
    assert set(findings[case]["num_written"]) == {findings[case]["num_layers"]}


@pytest.mark.parametrize("case", [*PREFILLS, "verify steps", *CHAIN_STEPS, "a state of a verify step"])
def test_our_part_of_a_step_waits_for_no_card(findings: Findings, case: str) -> None:
    assert not findings[case]["error"]
    assert waits_of(findings[case], "ours") == []


def num_copies(finding: dict[str, Any]) -> int:
    """Copies of ours to the card."""
    return len([line for owner, line in finding["copies"] if owner == "ours"])


@pytest.mark.parametrize("case", PREFILLS)
def test_all_that_a_prefill_sends_to_the_card_is_one_copy(findings: Findings, case: str) -> None:
    assert num_copies(findings[case]) == 1


def test_verify_steps_send_whose_turn_it_is_and_once_a_batch_what_ends_its_requests(findings: Findings) -> None:
    assert num_copies(findings["verify steps"]) == 3 + 1


def test_a_second_copy_to_the_card_is_seen(findings: Findings) -> None:
    """Negative control: working slots, vectors of three passes, or what ends requests, that are copied one by one."""
    assert num_copies(findings["planted: pageable memory"]) == 2
    assert num_copies(findings["planted: copies of passes"]) == 3 * 6
    assert num_copies(findings["planted: copies of stops"]) == 3 + 3


@pytest.mark.parametrize("case", IN_ONE_PIECE)
def test_a_prefill_whose_kernels_leave_enough_is_not_cut(findings: Findings, case: str) -> None:
    assert findings[case]["way"] == "FromChunks"
    ours = [kernel for module, kernel, _ in findings[case]["launches"] if module.startswith("sgl_kernel_ext.")]
    assert ours


@pytest.mark.parametrize("case", CUT)
def test_a_prefill_whose_kernels_leave_nothing_is_cut(findings: Findings, case: str) -> None:
    assert findings[case]["way"] == "Passes"


def test_a_verify_step_runs_no_more_operations_than_it_did(findings: Findings) -> None:
    """The first step of a batch copies besides what ends its requests, and makes conditions of numbers."""
    finding = findings["verify steps"]
    first, later = finding["num_operations"]
    assert later <= MAX_OPERATIONS_A_VERIFY_STEP
    assert first <= later + 2
    assert not finding["error"]
    kernels = [kernel for _, kernel, _ in finding["launches"]]
    assert kernels[:2] == ["_find_kernel"] * 2
    assert kernels[2:] == ["_find_kernel", *COMMITTED]


@pytest.mark.parametrize("case", CHAIN_STEPS)
def test_a_chains_step_is_committed_by_sglangs_own_launches_alone(findings: Findings, case: str) -> None:
    assert not findings[case]["error"]
    found, *committed = [kernel for _, kernel, _ in findings[case]["launches"]]
    assert found == "_find_kernel"
    assert committed == CHAIN_STEPS[case]


def test_a_commit_that_tracks_nodes_without_slots_is_seen(findings: Findings) -> None:
    """Negative control: a server whose requests' drafts were accepted ended with this error on a card."""
    assert "is_contiguous" in findings["planted: tracked nodes without slots"]["error"]


ONE_OF_TWO = "sglang.srt.layers.attention.mamba.causal_conv1d.causal_conv1d_fn"
"""It calls the other of that name, whose hook writes what was not written."""
AT_THE_END = "state_copy.copy"


def faulty(findings: Findings, when: str) -> dict[str, dict[str, Any]]:
    """What was found where something raised `before` or `after` its work, by the place."""
    names = [name.split() for name in findings if name.startswith("fault: ")]
    return {where: findings[f"fault: {where} {when}"] for _, where, each in names if each == when}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_layer_returns_what_sglangs_own_does_where_a_hook_around_its_kernel_raises(
    findings: Findings, when: str
) -> None:
    """As far as shapes say, by the same launches; the fault of each layer is counted, and the first is logged."""
    for where, finding in faulty(findings, when).items():
        like, facts = findings[finding["facts"]["like"]], finding["facts"]
        theirs, own = (
            [each for each in found["launches"] if not each[0].startswith("sgl_kernel_ext.")]
            for found in (finding, like)
        )
        assert (finding["error"], theirs, finding["results"]) == ("", own, like["results"]), where
        assert len(facts["lines"]) == 1, where
        assert "failed, and SGLang continues without it" in facts["lines"][0]
        # The states of all layers are copied at once, and both convolutions meet the operator.
        num = {AT_THE_END: 1, "short_conv.checkpoint": 2 * NUM_LAYERS}.get(where, NUM_LAYERS)
        assert facts["num"] == num, where


def test_states_that_a_fault_kept_from_being_written_count_as_unwritten(findings: Findings) -> None:
    """One state of five is at a sequence's end."""
    found = faulty(findings, "before")
    assert len(found) == NUM_KERNEL_HOOKS + NUM_OPERATORS
    every = [NUM_LAYERS] * 5
    inside, end = [0, 0, NUM_LAYERS, 0, 0], [NUM_LAYERS, NUM_LAYERS, 0, NUM_LAYERS, NUM_LAYERS]
    expected = dict.fromkeys(found, inside) | {ONE_OF_TWO: every, AT_THE_END: end}
    assert {where: each["num_written"] for where, each in found.items()} == expected


def test_states_that_a_hook_had_written_before_it_raised_are_written(findings: Findings) -> None:
    found = faulty(findings, "after")
    assert len(found) == NUM_KERNEL_HOOKS
    assert all(each["num_written"] == [NUM_LAYERS] * 5 for each in found.values())


KEPT_AND_BROKEN = {
    "falcon_h1": (True, False),
    "falcon_mamba": (False, False),
    "granitemoehybrid": (False, False),
    "jet_nemotron": (False, False),
    "mamba2": (False, False),
    "nemotron_h": (True, True),
}
"""By SGLang's module: whether the breakable graph is kept for its recurrent layers, and whether they break out."""


def test_models_whose_recurrent_layers_a_prefill_graph_captures_are_listed(findings: Findings) -> None:
    finding = findings["layers of Mamba"]
    assert not finding["error"]
    facts = finding["facts"]
    assert {name: (each["keeps_graph"], each["breaks"]) for name, each in facts.items()} == KEPT_AND_BROKEN
    for each in facts.values():
        is_captured = each["keeps_graph"] and not each["breaks"]
        assert {are_captured_in_segments([name]) for name in each["architectures"]} == {is_captured}


def test_the_watch_sees_every_kind_of_wait_and_no_other(findings: Findings) -> None:
    finding = findings["what waits"]
    assert not finding["error"]
    assert {name for name, num in finding["facts"]["waits"].items() if not num} == set()
    assert {name for name, num in finding["facts"]["goes on"].items() if num} == set()


def test_the_wait_of_sglangs_own_is_seen_and_is_not_ours(findings: Findings) -> None:
    """The one number that SGLang's metadata of Mamba2 reads: the watch would see it in our code as well."""
    assert [kind for kind, _ in waits_of(findings["Mamba2"], "SGLang's")] == ["item()"]


def test_a_wait_of_ours_is_found(findings: Findings) -> None:
    ((kind, line),) = waits_of(findings["planted: a wait"], "ours")
    assert kind == "__int__()"
    assert line.startswith("spans.py:")


def test_a_copy_of_ours_from_memory_that_is_not_pinned_is_found(findings: Findings) -> None:
    ((kind, line),) = waits_of(findings["planted: pageable memory"], "ours")
    assert "not pinned" in kind
    assert line.startswith("spans.py:")


def test_every_blocking_copy_of_a_prefill_that_is_cut_is_found(findings: Findings) -> None:
    """The planned states cut the longest sequence in three; a pass has six vectors."""
    found = waits_of(findings["planted: blocking copies of a pass"], "ours")
    assert len(found) == 6 * 3
    assert all("numbers on the card" in kind and line.startswith("passes.py:") for kind, line in found)


def test_a_tensor_on_the_host_ends_a_launch(findings: Findings) -> None:
    assert "must be on cuda, got cpu" in findings["planted: a tensor on the host"]["error"]


def test_a_kernel_that_is_not_met_leaves_its_states_unwritten(findings: Findings) -> None:
    """The one at a sequence's end is a copy of the working slot, and is written."""
    finding = findings["planted: a kernel that is not met"]
    assert finding["num_written"] == [0, 0, finding["num_layers"], 0, 0]
