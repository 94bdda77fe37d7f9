"""Trees of drafted tokens: what SGLang's kernels do with them, in torch.

A request's tree has nodes in an order in which parents come before their children; node 0 is the token that was
sampled last. SGLang links them by `retrieve_next_token`, a node's first child, and `retrieve_next_sibling`, the next
child of its parent, -1 where there is none. Accepting walks from node 0: a child is accepted if the model would have
said its token at its parent, and the token that the model says at the last accepted node comes on top.

Upstream: `sglang/kernels/ops/speculative/{reconstruct_tree,spec_tree,sampling}.py` and its `speculative/sampling.cuh`.
"""

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from marconi_cpu.arguments import unsupported
from sgl_kernel_ext.state_pool import StateSlots

NONE: Final = -1
"""In place of a node."""


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write positions (batch * num_nodes,) and links (batch, num_nodes) from which nodes are above which.

    tree_mask (batch * num_nodes * num_nodes,) bool: row i, column j is true where node j is i or above it.
    """
    above = tree_mask.view(batch_size, draft_token_num, draft_token_num).tril(-1)
    node = torch.arange(draft_token_num)
    positions.copy_((above.sum(-1) + verified_seq_len[:, None]).flatten())
    retrieve_index.copy_(torch.arange(batch_size * draft_token_num).view(batch_size, draft_token_num))
    parent = torch.where(above, node, NONE).amax(-1)
    _link(parent, retrieve_next_token, retrieve_next_sibling)


def build_tree_kernel_efficient_func(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Write mask, positions and links from the drafts that were chosen of those that a draft model made.

    top_scores_index (batch, num_nodes - 1): the chosen, ascending, of candidates in groups of `topk` with one parent;
    parent_list (batch, num_groups): the candidate that each group follows, the first of them node 0. tree_mask is flat,
    and of mode FULL_MASK (0), whose columns before the tree are left as they are, or QLEN_ONLY (1). Not read:
    `spec_steps` bounds the depth.
    """
    if tree_mask_mode not in (0, 1):
        raise unsupported("build_tree_kernel_efficient_func", f"tree_mask_mode={tree_mask_mode!r}")
    parents = torch.full((len(seq_lens), num_verify_tokens), NONE)
    for row, (chosen, followed) in enumerate(zip(top_scores_index.tolist(), parent_list.tolist(), strict=True)):
        nodes = {candidate: node for node, candidate in enumerate(chosen, start=1)}
        for candidate, node in nodes.items():
            group = candidate // topk
            # Of equal scores a draft may be chosen without the one that it follows: no path leads there.
            parents[row, node] = nodes.get(followed[group], NONE) if group else 0
    positions_of_rows = positions.view(parents.shape)
    start = 0
    for row, (own, length) in enumerate(zip(parents.tolist(), seq_lens.tolist(), strict=True)):
        num_columns = num_verify_tokens + (0 if tree_mask_mode else length)
        end = start + num_verify_tokens * num_columns
        above = torch.eye(num_verify_tokens, dtype=torch.bool)
        for node in range(1, num_verify_tokens):
            if own[node] != NONE:
                above[node] |= above[own[node]]
        tree_mask[start:end].view(num_verify_tokens, num_columns)[:, -num_verify_tokens:] = above
        positions_of_rows[row] = length + above.sum(-1) - 1
        start = end
    retrieve_index.copy_(torch.arange(parents.numel()).view(parents.shape))
    _link(parents, retrieve_next_token, retrieve_next_sibling)


def parents_of(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """The parent of each node, from the links: all (batch, num_nodes)."""
    parents = torch.full_like(next_token, NONE)
    rows = zip(next_token.tolist(), next_sibling.tolist(), strict=True)
    for row, (first_children, siblings) in enumerate(rows):
        for node in range(len(first_children)):
            for child in _children(node, first_children, siblings):
                parents[row, child] = node
    return parents


def states_along(
    before: Tensor, kept: Tensor, rows: Tensor, parents: Tensor | None, step: Callable[[int, StateSlots], Tensor]
) -> Tensor:
    """Run `step` at every node from the state at its parent, and keep the state that it leaves; returns the outputs.

    before (batch, *state_shape) are the states at the parent of node 0; kept (num_rows, num_nodes, *state_shape) takes
    the states of the requests in its `rows` (batch,); without `parents` (batch, num_nodes) a tree is a chain. A batch
    may be padded, as a whole on a rank that has nothing to do: `rows` or `parents` are fewer then, and padding keeps no
    state. A step is given the node and slots of the states to update; its outputs are stacked along dimension 1.
    """
    batch = torch.arange(before.shape[0])
    num = len(rows) if parents is None else min(len(rows), len(parents))
    rows, padding = rows[:num].long(), before[num:]
    outputs = []
    for node in range(kept.shape[1] if parents is None else parents.shape[1]):
        if node == 0:
            states = before.clone()
        elif parents is None:
            states = torch.cat([kept[rows, node - 1].to(before.dtype), padding])
        else:
            states = torch.cat([kept[rows, parents[:num, node]].to(before.dtype), padding])
        outputs.append(step(node, StateSlots(states, batch)))
        # One row at a time: windows of neighbouring nodes may overlap in memory.
        for row, state in zip(rows.tolist(), states[:num], strict=True):
            kept[row, node] = state
    return torch.stack(outputs, 1)


def verify_tree_greedy_func(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept what the model's likeliest token agrees with; writes and returns the first three.

    predicts (batch * num_nodes,) the token after each accepted node; accept_index (batch, max_depth) the accepted
    nodes, counted over the batch; accept_token_num (batch,) how many beside node 0; candidates and target_predict
    (batch, num_nodes). Not read: `topk` is a hint.
    """
    links = zip(retrieve_next_token.tolist(), retrieve_next_sibling.tolist(), strict=True)
    tokens, likeliest = candidates.tolist(), target_predict.tolist()
    for row, (first_children, siblings) in enumerate(links):
        node, accepted = 0, [0]
        while len(accepted) < accept_index.shape[1]:
            agreeing = [
                child
                for child in _children(node, first_children, siblings)
                if tokens[row][child] == likeliest[row][node]
            ]
            if not agreeing:
                break
            node = agreeing[0]
            accepted.append(node)
        flat = retrieve_index[row, accepted]
        predicts[flat] = target_predict[row, accepted].to(predicts.dtype)
        accept_index[row, : len(accepted)] = flat.to(accept_index.dtype)
        accept_token_num[row] = len(accepted) - 1
    return predicts, accept_index, accept_token_num


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept at random, so that tokens come as the model's probabilities target_probs (batch, num_nodes, vocab) say.

    A coin of each accepted node, uniform_samples (batch, num_nodes), falls on one of its children or on none; the last
    token is drawn from what is left. Writes the first three, as `verify_tree_greedy_func`. Not read: `draft_probs` is
    memory to work in, and torch is always deterministic here.
    """
    links = zip(retrive_next_token.tolist(), retrive_next_sibling.tolist(), strict=True)
    for row, (first_children, siblings) in enumerate(links):
        node, accepted = 0, [0]
        left = target_probs[row, 0].clone()
        while len(accepted) < accept_index.shape[1]:
            child = _drawn(
                [(each, int(candidates[row, each])) for each in _children(node, first_children, siblings)],
                target_probs[row, node],
                left,
                float(uniform_samples[row, node]),
                (threshold_single, max(threshold_acc, 1e-9)),
            )
            if child is None:
                break
            predicts[retrive_index[row, node]] = candidates[row, child].to(predicts.dtype)
            node, left = child, target_probs[row, child].clone()
            accepted.append(node)
        sums = left.cumsum(0)
        last = torch.searchsorted(sums, uniform_samples_for_final_sampling[row] * sums[-1], right=True)
        # Past the end by rounding: the last token that may come.
        predicts[retrive_index[row, node]] = int(last.clamp(max=int(left.nonzero()[-1])))
        accept_index[row, : len(accepted)] = retrive_index[row, accepted].to(accept_index.dtype)
        accept_token_num[row] = len(accepted) - 1


def _drawn(
    children: list[tuple[int, int]],
    probabilities: Tensor,
    left: Tensor,
    coin: float,
    thresholds: tuple[float, float],
) -> int | None:
    """The child, of (node, token), on which the coin falls; None if on none, whose tokens are taken out of `left`."""
    threshold_single, threshold_acc = thresholds
    reached = 0.0
    for child, token in children:
        probability = float(probabilities[token])
        reached += probability
        if probability > 0 and (coin < reached / threshold_acc or probability >= threshold_single):
            return child
        left[token] = 0.0
    return None


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Probabilities (num_rows, vocab) with all but the top_ks (num_rows,) largest of a row at 0, and a sum of 1."""
    largest = probs.sort(-1, descending=True).values
    least = largest.gather(-1, (top_ks.long().clamp(1, probs.shape[-1]) - 1)[:, None])
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Probabilities (num_rows, vocab) with a row's tail beyond a sum of top_ps (num_rows,) at 0, and a sum of 1."""
    ordered, order = probs.sort(-1, descending=True)
    is_head = ordered.cumsum(-1) - ordered < top_ps[:, None]
    kept = torch.zeros_like(probs).scatter(-1, order, torch.where(is_head, ordered, 0.0))
    return kept / kept.sum(-1, keepdim=True)


def _link(parent: Tensor, next_token: Tensor, next_sibling: Tensor) -> None:
    """Write the links (batch, num_nodes) of the trees of `parent`."""
    num_nodes = parent.shape[-1]
    node = torch.arange(num_nodes)
    is_child = parent[:, None, :] == node[:, None]
    is_later_sibling = (
        (parent[:, None, :] == parent[:, :, None]) & (parent[:, :, None] != NONE) & (node > node[:, None])
    )
    for links, is_linked in ((next_token, is_child), (next_sibling, is_later_sibling)):
        first = torch.where(is_linked, node, num_nodes).amin(-1)
        links.copy_(torch.where(first < num_nodes, first, NONE))


def _children(node: int, first_children: list[int], siblings: list[int]) -> Iterator[int]:
    child = first_children[node]
    while child != NONE:
        yield child
        child = siblings[child]
