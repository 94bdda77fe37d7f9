"""Drafts on the CPU platform: trees, what is accepted of them, and the states after their nodes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi_cpu import convolution, draft_slots, draft_tree, gated_delta_rule, mamba2, state_tracking
from marconi_cpu.tree_attention import around_forward_extend

from .test_platform import random

NONE = draft_tree.NONE


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """The parents of the nodes of some trees of one size."""
    num_nodes, num_trees = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    return [[NONE, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes))] for _ in range(num_trees)]


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to `node`."""
    return [] if node == NONE else [*path_to(parents, parents[node]), node]


def linked(parents: list[list[int]]) -> SimpleNamespace:
    """What SGLang knows of these trees."""
    num_trees, num_nodes = len(parents), len(parents[0])
    mask = torch.zeros(num_trees, num_nodes, num_nodes, dtype=torch.bool)
    for tree, own in enumerate(parents):
        for node in range(num_nodes):
            mask[tree, node, path_to(own, node)] = True
    links = torch.empty(3, num_trees, num_nodes, dtype=torch.int64)
    positions = torch.empty(num_trees * num_nodes, dtype=torch.int64)
    lengths = 10 * torch.arange(1, num_trees + 1)
    draft_tree.reconstruct_indices_from_tree_mask(
        mask.flatten(), lengths, positions, *links, batch_size=num_trees, draft_token_num=num_nodes
    )
    return SimpleNamespace(mask=mask, index=links[0], child=links[1], sibling=links[2], positions=positions)


@given(trees())
def test_links_and_positions_are_those_of_the_tree(parents: list[list[int]]) -> None:
    tree = linked(parents)
    assert draft_tree.parents_of(tree.child, tree.sibling).tolist() == parents
    assert tree.index.flatten().tolist() == list(range(len(parents) * len(parents[0])))
    depths = [
        10 * (number + 1) + len(path_to(own, node)) - 1
        for number, own in enumerate(parents)
        for node in range(len(own))
    ]
    assert tree.positions.tolist() == depths


@given(trees(), st.data())
def test_the_path_that_the_model_agrees_with_is_accepted(parents: list[list[int]], data: st.DataObject) -> None:
    shape = len(parents), len(parents[0])
    few = st.lists(st.integers(0, 2), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    tokens, likeliest = (torch.tensor(data.draw(few)).view(shape) for _ in range(2))
    max_depth = data.draw(st.integers(1, shape[1]))
    tree = linked(parents)
    predicts = torch.full((shape[0] * shape[1],), -7, dtype=torch.int32)
    accepted, counts = (
        torch.full((shape[0], max_depth), -1, dtype=torch.int32),
        torch.empty(shape[0], dtype=torch.int32),
    )
    draft_tree.verify_tree_greedy_func(
        predicts, accepted, counts, tokens, tree.index, tree.child, tree.sibling, target_predict=likeliest
    )
    for row, own in enumerate(parents):
        node, path = 0, [0]
        while len(path) < max_depth:
            node = next((n for n in range(shape[1]) if own[n] == node and tokens[row, n] == likeliest[row, node]), NONE)
            if node == NONE:
                break
            path.append(node)
        assert accepted[row].tolist() == [row * shape[1] + n for n in path] + [-1] * (max_depth - len(path))
        assert counts[row] == len(path) - 1
        assert [predicts[row * shape[1] + n] for n in path] == [likeliest[row, n] for n in path]


@given(trees(), st.integers(0, 1))
def test_the_drafts_of_a_model_make_the_tree_that_it_drew(parents: list[list[int]], mode: int) -> None:
    """Candidates come in groups of `topk` behind one that was drawn before; the first group follows node 0."""
    topk, num_nodes = 8, len(parents[0])
    chosen, followed = [], []
    for own in parents:
        groups, candidates = [0], {}
        for node in range(1, num_nodes):
            parent = own[node]
            if parent and candidates[parent] not in groups[1:]:
                groups.append(candidates[parent])
            group = groups.index(candidates[parent], 1) if parent else 0
            candidates[node] = group * topk + sum(candidates[other] // topk == group for other in range(1, node))
        # SGLang has the chosen in ascending order, and so the nodes.
        order = sorted(candidates, key=candidates.__getitem__)
        own[1:] = [0 if not own[node] else 1 + order.index(own[node]) for node in order]
        chosen.append([candidates[node] for node in order])
        followed.append(groups + [0] * (num_nodes - len(groups)))
    tree, lengths = linked(parents), 10 * torch.arange(1, len(parents) + 1)
    sizes = [num_nodes * (num_nodes + (0 if mode else int(length))) for length in lengths]
    mask, positions = torch.ones(sum(sizes), dtype=torch.bool), torch.empty_like(tree.positions)
    links = torch.empty(3, len(parents), num_nodes, dtype=torch.int64)
    draft_tree.build_tree_kernel_efficient_func(
        torch.tensor(followed),
        torch.tensor(chosen, dtype=torch.int64).view(len(parents), num_nodes - 1),
        lengths,
        mask,
        positions,
        *links,
        topk=topk,
        spec_steps=num_nodes,
        num_verify_tokens=num_nodes,
        tree_mask_mode=mode,
    )
    assert [each.tolist() for each in links] == [each.tolist() for each in (tree.index, tree.child, tree.sibling)]
    assert torch.equal(positions, tree.positions)
    for own_mask, above in zip(mask.split(sizes), tree.mask, strict=True):
        columns = own_mask.view(num_nodes, -1)
        assert torch.equal(columns[:, -num_nodes:], above)
        assert columns[:, :-num_nodes].all()


def test_a_draft_that_was_chosen_without_the_one_before_it_is_on_no_path() -> None:
    links = torch.empty(3, 1, 3, dtype=torch.int64)
    mask, positions = torch.ones(9, dtype=torch.bool), torch.empty(3, dtype=torch.int64)
    draft_tree.build_tree_kernel_efficient_func(
        torch.tensor([[-1, 1]]), torch.tensor([[0, 2]]), torch.tensor([5]), mask, positions, *links, 2, 2, 3, 1
    )
    assert links[1].tolist() == [[1, NONE, NONE]]
    assert links[2].tolist() == [[NONE, NONE, NONE]]


SIBLINGS = [[NONE, 0, 0]]
PROBABILITIES = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.0, 0.25, 0.75, 0.0], [0.1, 0.2, 0.3, 0.4]])


def sampled(num_trials: int, last_coin: torch.Tensor | None = None) -> torch.Tensor:
    """How often each token came first, in as many trials with two drafts, tokens 1 and 0."""
    tree, counts = linked(SIBLINGS), torch.zeros(4)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_trials):
        predicts = torch.full((3,), -1, dtype=torch.int32)
        coins = torch.rand(1, 3, generator=generator)
        draft_tree.tree_speculative_sampling_target_only(
            predicts,
            torch.full((1, 3), -1, dtype=torch.int32),
            torch.empty(1, dtype=torch.int32),
            torch.tensor([[3, 1, 0]]),
            tree.index,
            tree.child,
            tree.sibling,
            coins,
            torch.rand(1, generator=generator) if last_coin is None else last_coin,
            PROBABILITIES[None],
            torch.zeros(1, 3, 4),
        )
        counts[predicts[0]] += 1
    return counts / num_trials


def test_sampled_tokens_come_as_often_as_the_model_says() -> None:
    torch.testing.assert_close(sampled(4000), PROBABILITIES[0], atol=0.03, rtol=0)


def test_the_control_of_it_a_draft_that_was_refused_may_not_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draft_tree._drawn
    monkeypatch.setattr(
        draft_tree,
        "_drawn",
        lambda children, probabilities, left, *rest: drawn(children, probabilities, left.clone(), *rest),
    )
    assert (sampled(4000) - PROBABILITIES[0]).abs().max() > 0.06


def test_a_coin_at_the_end_draws_the_last_token_that_may_come() -> None:
    assert sampled(50, last_coin=torch.ones(1))[3] == 0


def test_probabilities_are_cut_to_the_largest_and_to_their_head() -> None:
    probabilities = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    by_count = draft_tree.top_k_renorm_prob(probabilities, torch.tensor([2, 1 << 30], dtype=torch.int32))
    torch.testing.assert_close(by_count, torch.tensor([[4 / 7, 0, 3 / 7, 0], [0.25] * 4]))
    by_sum = draft_tree.top_p_renorm_prob(probabilities, torch.tensor([0.65, 1.0]))
    torch.testing.assert_close(by_sum, torch.tensor([[4 / 7, 0, 3 / 7, 0], [0.25] * 4]))


TREE = [[NONE, 0, 0, 1, 3], [NONE, 0, 1, 1, 2]]
CHAIN = [[NONE, 0, 1, 2, 3]] * 2
NUM_NODES = 5
SLOTS = torch.tensor([3, 1], dtype=torch.int32)
ROWS = torch.tensor([0, 1], dtype=torch.int32)


def links_of(parents: list[list[int]]) -> dict[str, torch.Tensor]:
    """Arguments of the convolution; a chain is known by having none."""
    if parents is CHAIN:
        return {}
    tree = linked(parents)
    links = {"retrieve_next_token": tree.child, "retrieve_next_sibling": tree.sibling}
    return links | {"retrieve_parent_token": torch.empty_like(tree.child)}


def parent_links(parents: list[list[int]]) -> torch.Tensor | None:
    return None if parents is CHAIN else torch.tensor(parents)


@pytest.mark.parametrize(
    ("parents", "are_shared"),
    [(CHAIN, False), (CHAIN, True), (TREE, False)],
    ids=["chain", "chain, shared windows", "tree"],
)
def test_a_convolution_over_drafts_is_a_decode_along_each_path(parents: list[list[int]], are_shared: bool) -> None:
    """Windows of a chain may share their memory, as SGLang lays them out."""
    weight, bias, x, pool = random(3, 4), random(3, seed=1), random(2, 3, NUM_NODES, seed=2), random(4, 3, 3, seed=3)
    kept = torch.zeros(3, NUM_NODES, 3, 3)
    if are_shared:
        kept = torch.zeros(3, 3, NUM_NODES + 2).unfold(-1, 3, 1).movedim(2, 1)
    before, links = pool.clone(), links_of(parents)
    call = {"conv_state_indices": SLOTS, "intermediate_conv_window": kept, "intermediate_state_indices": ROWS}
    outputs = convolution.causal_conv1d_update(x, pool, weight, bias, "silu", **call, **links)
    assert torch.equal(pool, before)
    assert not links or links["retrieve_parent_token"].tolist() == parents
    for row, own in enumerate(parents):
        for node in range(NUM_NODES):
            state = before[SLOTS[row : row + 1]]
            for above in path_to(own, node):
                expected = convolution.causal_conv1d_update(x[[row], :, above], state, weight, bias, "silu")
            assert torch.equal(outputs[row, :, node], expected[0])
            assert torch.equal(kept[row, node], state[0])


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_delta_rule_over_drafts_is_a_decode_along_each_path(parents: list[list[int]]) -> None:
    num_tokens = 2 * NUM_NODES
    mixed = random(num_tokens, 8 + 8 + 12)
    q, k, v = (part[None] for part in mixed.split([8, 8, 12], -1))
    q, k, v = q.unflatten(-1, (1, 8)), k.unflatten(-1, (1, 8)), v.unflatten(-1, (2, 6))
    a, b = random(num_tokens, 2, seed=1), random(num_tokens, 2, seed=2)
    gates = {"A_log": random(2, seed=3), "dt_bias": random(2, seed=4)}
    pool, kept = random(4, 2, 6, 8, seed=5), torch.zeros(3, NUM_NODES, 2, 6, 8)
    before = pool.clone()
    call = {"softplus_beta": 1.0, "softplus_threshold": 20.0, "use_qk_l2norm_in_kernel": True, "b": b, "a": a, **gates}
    call |= {"initial_state_source": pool, "initial_state_indices": SLOTS, "cache_steps": NUM_NODES}
    call |= {"intermediate_states_buffer": kept, "intermediate_state_indices": ROWS, "disable_state_update": True}
    call |= {"retrieve_parent_token": parent_links(parents), "q": q, "k": k, "v": v}
    outputs = gated_delta_rule.fused_sigmoid_gating_delta_rule_update(**call)
    assert torch.equal(pool, before)
    for row, own in enumerate(parents):
        for node in range(NUM_NODES):
            state, expected = before[SLOTS[row : row + 1]], torch.empty(1, 1, 2, 6)
            for above in (row * NUM_NODES + each for each in path_to(own, node)):
                gated_delta_rule.fused_recurrent_gated_delta_rule_packed_decode(
                    mixed[[above]],
                    a[[above]],
                    b[[above]],
                    **gates,
                    scale=8**-0.5,
                    initial_state=state,
                    out=expected,
                    ssm_state_indices=torch.tensor([0]),
                    use_qk_l2norm_in_kernel=True,
                )
            torch.testing.assert_close(outputs[0, row * NUM_NODES + node], expected[0, 0], atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(kept[row, node], state[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_mamba2_over_drafts_is_a_decode_along_each_path(parents: list[list[int]]) -> None:
    x, B, C = random(2, NUM_NODES, 2, 4), random(2, NUM_NODES, 1, 5, seed=1), random(2, NUM_NODES, 1, 5, seed=2)
    dt = random(2, NUM_NODES, 2, seed=3)[..., None].expand(-1, -1, -1, 4)
    A, D = torch.tensor([[[-0.1]], [[-0.2]]]).expand(-1, 4, 5), random(2, seed=4)[:, None].expand(-1, 4)
    pool, kept, out = random(4, 2, 4, 5, seed=5), torch.zeros(3, NUM_NODES, 2, 4, 5), torch.empty(2, NUM_NODES, 2, 4)
    before = pool.clone()
    gates = {"D": D, "dt_bias": random(2, seed=6)[:, None].expand(-1, 4), "dt_softplus": True}
    call = {"intermediate_states_buffer": kept, "intermediate_state_indices": ROWS, "cache_steps": NUM_NODES}
    call |= {"retrieve_parent_token": parent_links(parents), "disable_state_update": True, "out": out}
    mamba2.selective_state_update(pool, x, dt, A, B, C, state_batch_indices=SLOTS, **call, **gates)
    assert torch.equal(pool, before)
    for row, own in enumerate(parents):
        for node in range(NUM_NODES):
            state, expected = before[SLOTS[row : row + 1]], torch.empty(1, 2, 4)
            for above in path_to(own, node):
                inputs = (each[row : row + 1, above] for each in (x, dt, B, C))
                one_x, one_dt, one_b, one_c = inputs
                mamba2.selective_state_update(state, one_x, one_dt, A, one_b, one_c, out=expected, **gates)
            # Not equal: PyTorch's softplus and exp differ in the last bit between a vector and the rest behind the
            # last whole vector, and which of them a node is in depends on the size of the batch.
            torch.testing.assert_close(out[row, node], expected[0], atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(kept[row, node], state[0], atol=1e-6, rtol=1e-6)


def test_states_after_accepted_drafts_go_to_their_slots_and_no_others() -> None:
    conv, temporal = random(2, 6, 3, 3), random(2, 6, 4, 5, seed=1)
    kept = random(2, 4, NUM_NODES, 4, 5, seed=2)
    windows = random(2, 4, 3, NUM_NODES + 2, seed=3).unfold(-1, 3, 1).movedim(3, 2)
    before = conv.clone(), temporal.clone()
    caches = SimpleNamespace(conv=[conv], temporal=temporal, intermediate_ssm=kept, intermediate_conv_window=[windows])
    state_tracking.scatter_mamba_states_after_mtp_verify(
        caches, torch.tensor([4, 5, -1]), torch.tensor([2, -1, 1]), torch.tensor([0, 1, 2]), torch.tensor([-1, 3, -1])
    )
    for pool, old, states in ((conv, before[0], windows), (temporal, before[1], kept)):
        assert torch.equal(pool[:, 4], states[:, 0, 2])
        assert torch.equal(pool[:, 1], states[:, 1, 3])
        assert torch.equal(pool[:, [0, 2, 3, 5]], old[:, [0, 2, 3, 5]])


def test_entries_of_drafts_are_read_and_packed_in_order() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    found = draft_slots.assign_extend_cache_locs(
        torch.tensor([2, 0]), table, torch.tensor([3, 5]), torch.tensor([6, 8]), 2, 3, "cpu"
    )
    assert found.tolist() == [23, 24, 25, 5, 6, 7]
    draft_slots.assign_req_to_token_pool_func(
        torch.tensor([1, 3]), table, torch.tensor([0, 8]), torch.tensor([2, 9]), torch.tensor([70, 71, 72]), 2
    )
    assert table[1].tolist() == [70, 71, *range(12, 20)]
    assert table[3].tolist() == [*range(30, 38), 72, 39]
    front, accepted = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    draft_slots.fill_front_out_cache_loc_func(torch.tensor([2, 1]), found, front)
    assert front.tolist() == [23, 24, 5, 0, 0, 0]
    draft_slots.fill_accept_out_cache_loc_func(torch.tensor([[0, 2, -1], [3, -1, -1]]), found, accepted, 6)
    assert accepted.tolist() == [23, 25, 5, 0, 0, 0]


def test_entries_are_copied_whole_even_onto_each_other() -> None:
    pools = [torch.arange(12, dtype=torch.float32).view(6, 2), torch.arange(6, dtype=torch.int64)]
    before = [pool.clone() for pool in pools]
    pointers = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.uint64)
    strides = torch.tensor([pool[0].nbytes for pool in pools])
    targets, sources = torch.tensor([2, 3, 0]), torch.tensor([3, 4, 0])
    draft_slots.copy_all_layer_kv_cache_func(pointers, strides, targets, sources, 2, 4, {})
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool, old[[0, 1, 3, 4, 4, 5]])


class Pool:
    """The KV of one layer."""

    def __init__(self) -> None:
        self.keys, self.values = random(40, 1, 8), random(40, 1, 8, seed=1)

    def get_key_buffer(self, _: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, _: int) -> torch.Tensor:
        return self.values


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_sees_the_requests_tokens_and_those_above_it(parents: list[list[int]]) -> None:
    lengths, pool = torch.tensor([4, 7]), Pool()
    table = torch.randperm(40, generator=torch.Generator().manual_seed(2)).int().view(2, 20)
    mask = None
    if parents is TREE:
        rows = [
            torch.cat([torch.ones(NUM_NODES, int(length), dtype=torch.bool), own], 1).flatten()
            for length, own in zip(lengths, linked(parents).mask, strict=True)
        ]
        mask = torch.cat(rows)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=SimpleNamespace(draft_token_num=NUM_NODES, custom_mask=mask),
        req_pool_indices=torch.tensor([1, 0]),
        seq_lens=lengths,
    )
    backend = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=table))
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=2, tp_k_head_num=1, qk_head_dim=8, v_head_dim=8, scaling=8**-0.5)
    queries = random(2 * NUM_NODES, 16, seed=3)
    found = around_forward_extend(pytest.fail, backend, queries, None, None, layer, batch, save_kv_cache=False)
    for row, own in enumerate(parents):
        for node in range(NUM_NODES):
            seen = [*range(int(lengths[row])), *(int(lengths[row]) + above for above in path_to(own, node))]
            places = table[1 - row, seen].long()
            query = queries[row * NUM_NODES + node].view(2, 8)
            weights = torch.softmax(query @ pool.keys[places, 0].T * 8**-0.5, -1)
            expected = (weights @ pool.values[places, 0]).flatten()
            torch.testing.assert_close(found[row * NUM_NODES + node], expected)
