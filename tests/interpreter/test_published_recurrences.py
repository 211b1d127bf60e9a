"""Linear attention with a decay of each column beside the formulas that were published, written out in float64: sums over the
tokens before, with no state and none of our code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewright as tw

HEADS, WIDTH, VALUES, LENGTH = 2, 16, 24, 21
Arrays = tuple[np.ndarray, ...]


def drawn(seed: int) -> Arrays:
    """q (or r), k, v, what decays are made of, and a bonus, by head."""
    random = np.random.default_rng(seed)
    shapes = [(HEADS, LENGTH, n) for n in (WIDTH, WIDTH, VALUES, WIDTH)]
    return tuple(random.standard_normal(shape) for shape in (*shapes, (HEADS, WIDTH)))


def gla(q: np.ndarray, k: np.ndarray, v: np.ndarray, x: np.ndarray) -> Arrays:
    """Gated linear attention (Yang et al., arXiv 2312.06635): alpha_t = sigmoid(x_t)^(1/16),
    S_t = Diag(alpha_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t / sqrt(d); unrolled over the tokens i up to t."""
    alpha = (1.0 / (1.0 + np.exp(-x))) ** (1.0 / 16.0)
    o, state = np.zeros_like(v), np.zeros((HEADS, WIDTH, VALUES))
    for h in range(HEADS):
        for t in range(LENGTH):
            for i in range(t + 1):
                kept = np.prod(alpha[h, i + 1 : t + 1], axis=0)  # of each column, what later tokens leave of k_i
                o[h, t] += np.sum(q[h, t] * kept * k[h, i]) * v[h, i] / np.sqrt(WIDTH)
        for i in range(LENGTH):
            state[h] += np.outer(np.prod(alpha[h, i + 1 :], axis=0) * k[h, i], v[h, i])
    return o, state, np.log(alpha)


def rwkv6(r: np.ndarray, k: np.ndarray, v: np.ndarray, x: np.ndarray, u: np.ndarray) -> Arrays:
    """RWKV-6 (Peng et al., "Eagle and Finch", arXiv 2404.05892): w_t = exp(-exp(x_t)),
    wkv_t = diag(u) k_t^T v_t + sum over i < t of diag(w_{i+1} ... w_{t-1}) k_i^T v_i, and o_t = r_t wkv_t."""
    w = np.exp(-np.exp(x))
    o, state = np.zeros_like(v), np.zeros((HEADS, WIDTH, VALUES))
    for h in range(HEADS):
        for t in range(LENGTH):
            o[h, t] = np.sum(r[h, t] * u[h] * k[h, t]) * v[h, t]
            for i in range(t):
                kept = np.prod(w[h, i + 1 : t], axis=0)
                o[h, t] += np.sum(r[h, t] * kept * k[h, i]) * v[h, i]
        for i in range(LENGTH):
            state[h] += np.outer(np.prod(w[h, i + 1 :], axis=0) * k[h, i], v[h, i])
    return o, state, -np.exp(x)


@pytest.mark.parametrize("way", ["triton", "reference"])
@pytest.mark.parametrize("model", ["GLA", "RWKV-6"])
def test_formulas_as_published(model, way):
    """o and the state after the last token; the same token by token, from the state that each leaves."""
    q, k, v, x, u = drawn(0)
    exact = gla(q, k, v, x) if model == "GLA" else rwkv6(q, k, v, x, u)
    options = {} if model == "GLA" else {"bonus": torch.from_numpy(u).float(), "scale": 1.0}
    given = [torch.from_numpy(a.transpose(1, 0, 2)[None]).float() for a in (q, k, v, exact[2])]
    o, state = torch.from_numpy(exact[0].transpose(1, 0, 2)[None]), torch.from_numpy(exact[1][None])
    with tw.force(way), torch.no_grad():
        whole = tw.linear_attention(*given, **options)
        pool, made = torch.zeros(1, HEADS, WIDTH, VALUES), []
        for t in range(LENGTH):
            *now, decay = (a[:, t] for a in given)
            made.append(tw.linear_attention_step(*now, pool, decay, slots=torch.tensor([0]), **options))
    for found, wanted in ((whole[0], o), (whole[1], state), (torch.stack(made, 1), o), (pool, state)):
        assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-6
