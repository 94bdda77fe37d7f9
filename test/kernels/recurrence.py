"""The definitions of the operators, one token after the other, in float64: what every reference has to equal.

Each takes the tokens of one sequence and its initial state, and returns the outputs and the states (num_tokens + 1,
...): before the first token, and after each.
"""

import torch
from torch import Tensor


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    group = v.shape[1] // k.shape[1]
    states = [state.double()]
    outputs = torch.zeros(v.shape, dtype=torch.float64)
    for t in range(v.shape[0]):
        after = torch.empty_like(states[-1])
        for head in range(v.shape[1]):
            key, query = k[t, head // group].double(), q[t, head // group].double()
            decayed = g[t, head].double().exp() * states[-1][head]
            corrected = beta[t, head].double() * (v[t, head].double() - decayed @ key)
            after[head] = decayed + torch.outer(corrected, key)
            outputs[t, head] = scale * after[head] @ query
        states.append(after)
    return outputs, torch.stack(states)


def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    group = v.shape[1] // k.shape[1]
    states = [state.double()]
    outputs = torch.zeros(v.shape, dtype=torch.float64)
    for t in range(v.shape[0]):
        after = torch.empty_like(states[-1])
        for head in range(v.shape[1]):
            key, query = k[t, head // group].double(), q[t, head // group].double()
            decayed = states[-1][head] @ torch.diag(g[t, head].double().exp())
            corrected = beta[t, head].double() * (v[t, head].double() - decayed @ key)
            after[head] = decayed + torch.outer(corrected, key)
            outputs[t, head] = scale * after[head] @ query
        states.append(after)
    return outputs, torch.stack(states)


def mamba2(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    group = x.shape[1] // B.shape[1]
    states = [state.double()]
    outputs = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        after = torch.empty_like(states[-1])
        for head in range(x.shape[1]):
            step, inputs = delta[t, head].double(), x[t, head].double()
            decayed = (step * A[head].double()).exp() * states[-1][head]
            after[head] = decayed + torch.outer(step * inputs, B[t, head // group].double())
            outputs[t, head] = after[head] @ C[t, head // group].double()
            if D is not None:
                outputs[t, head] += D[head].double() * inputs
        states.append(after)
    return outputs, torch.stack(states)


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, state: Tensor) -> tuple[Tensor, Tensor]:
    states = [state.double()]
    outputs = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        window = torch.cat([states[-1], x[t].double()[:, None]], 1)
        total = (weight.double() * window).sum(1) + (0 if bias is None else bias.double())
        outputs[t] = total * total.sigmoid() if silu else total
        states.append(window[:, 1:])
    return outputs, torch.stack(states)
