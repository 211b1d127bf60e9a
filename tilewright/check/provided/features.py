"""What a library of replaced operators offers beside them: fused operations, whole models, launches without a build step.

Truth is torch's own operator or a formula written out, in float64.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright as tw

from ...core import triton_versions
from ...core.target import INTERPRETING
from ..agreement import FP16, agrees, normal
from . import serving, training

FP32 = torch.float32


def replaces(device: str) -> bool:
    """Whether torch's operators can be replaced there."""
    return device != "cpu" or INTERPRETING


# ---- fused operations ------------------------------------------------------------------------------------------------


def fused(device: str) -> None:
    """Those that other rows do not check already."""
    serving.rotated_halves(device)
    training.routing(device)
    norms(device)
    units(device)
    caches(device)
    latents(device)
    grouped_by_expert(device)
    keys_of_rwkv(device)
    rows_by_weights(device)
    planes_and_products(device)
    by_torchs_operators(device)


def norms(device: str) -> None:
    """skip_layer_norm, fused_add_rms_norm."""
    x, residual, weight, bias = (normal(device, *s, seed=n) for n, s in enumerate([(5, 72), (5, 72), (72,), (72,)]))
    y, total = tw.add_layer_norm(x, residual, weight, bias)
    agrees("the sum", total, x.double() + residual.double(), "A")
    agrees("y", y, F.layer_norm(total.double(), (72,), weight.double(), bias.double(), 1e-5))
    y, total = tw.add_rms_norm(x, residual, weight)
    agrees("y", y, F.rms_norm(total.double(), (72,), weight.double(), 1e-6))


def units(device: str) -> None:
    """silu_and_mul, gelu_and_mul in both forms, cross_entropy_loss."""
    x = normal(device, 5, 48)
    gate, up = x.double().chunk(2, -1)
    agrees("silu", tw.glu(x, act="silu"), F.silu(gate) * up, "A")
    agrees("gelu", tw.glu(x, act="gelu_erf"), F.gelu(gate) * up, "A")
    agrees("gelu", tw.glu(x, act="gelu_tanh"), F.gelu(gate, approximate="tanh") * up, "A")
    logits, labels = normal(device, 7, 50, scale=3.0), torch.arange(7, device=device)
    truth = F.cross_entropy(logits.double(), labels)
    agrees("the loss", tw.cross_entropy(logits, labels)[None], truth[None], "D")


def caches(device: str) -> None:
    """reshape_and_cache, reshape_and_cache_flash: tokens into their slots; the slot below 0 is none."""
    k, v = (normal(device, 4, 2, 16, dtype=FP16, seed=seed) for seed in (0, 1))
    stored = [normal(device, 3, 4, 2, 16, dtype=FP16, seed=seed) for seed in (2, 3)]
    slots = [9, -1, 0, 6]
    wanted = [t.clone() for t in stored]
    for token, slot in enumerate(slots):
        if slot >= 0:
            for cache, t in zip(wanted, (k, v)):
                cache[slot // 4, slot % 4] = t[token]
    tw.cache_write(k, v, *stored, torch.tensor(slots, device=device))
    assert all(torch.equal(a, b) for a, b in zip(stored, wanted)), "a cache holds something else"


def latents(device: str) -> None:
    """concat_and_cache_mla, flash_mla: a latent and the turned columns beside it in one cache, whose keys are all columns and whose
    values the first."""
    latent, turned, heads, scale = 32, 16, 4, 48**-0.5
    compressed, k_rope = normal(device, 11, 1, latent), normal(device, 11, 1, turned, seed=1)
    cache = torch.zeros(3, 8, 1, latent + turned, dtype=compressed.dtype, device=device)
    table, slots = (
        torch.tensor([[2, 0]], device=device, dtype=torch.int32),
        [16 + i if i < 8 else i - 8 for i in range(11)],
    )
    at = torch.tensor(slots, device=device)
    tw.cache_write(compressed, None, cache[..., :latent], None, at)
    tw.cache_write(k_rope, None, cache[..., latent:], None, at)
    keys = torch.cat([compressed, k_rope], -1)
    assert torch.equal(cache.flatten(0, 1)[at], keys), "the cache holds something else"
    q = normal(device, 1, 2, heads, latent + turned, seed=2)
    lengths = torch.tensor([11], device=device, dtype=torch.int32)
    o, _ = tw.cached_attention(q, cache, block_table=table, kv_len=lengths, value_dim=latent, scale=scale)
    scores = torch.einsum("lhd,kd->hlk", q[0].double(), keys[:, 0].double()) * scale
    scores[:, 0, 10] = -math.inf  # the last key is the second query's own
    agrees("o", o, torch.einsum("hlk,kd->lhd", scores.softmax(-1), compressed[:, 0].double())[None], "I")


def grouped_by_expert(device: str) -> None:
    """moe_align_block_size: tokens in the order of their experts, each expert's padded to a multiple of a block."""
    experts, block = 4, 8
    chosen = torch.tensor([[0, 3], [3, 1], [0, 1], [3, 0], [3, 1]], device=device)
    _, source, offsets, _ = tw.moe_row_map(chosen, experts=experts, align=block)
    wanted, ends = [], []
    for expert in range(experts):
        own = [token for token, pair in enumerate(chosen.tolist()) if expert in pair]
        wanted += [*own, *[-1] * (-len(own) % block)]
        ends.append(len(wanted))
    assert offsets.tolist() == ends and source.tolist()[: len(wanted)] == wanted


def keys_of_rwkv(device: str) -> None:
    """rwkv_ka_fusion: k (1 + (a - 1) ka), k kk of each head brought to length 1, and that times a."""
    tokens, heads, width = 3, 2, 16
    k, a = (normal(device, tokens, heads * width, seed=seed) for seed in (0, 1))
    kk, ka = (normal(device, heads * width, seed=seed) for seed in (2, 3))
    made = tw.rwkv_keys(k, kk, a, ka, heads=heads)
    wide = [t.double() for t in (k, a, kk, ka)]
    unit = F.normalize((wide[0] * wide[2]).unflatten(-1, (heads, width)), dim=-1).flatten(-2)
    exact = wide[0] * (1 + (wide[1] - 1) * wide[3]), unit, unit * wide[1]
    for name, found, wanted in zip(("k", "kk", "kk a"), made, exact, strict=True):
        agrees(name, found, wanted)


def rows_by_weights(device: str) -> None:
    """rwkv_mm_sparsity: the sum of rows by weights, most of which are 0; rows of weight 0 are not read, whatever they hold."""
    weights, rows = normal(device, 64).sub(1.0).relu(), normal(device, 64, 24, seed=1)
    exact = weights.double() @ rows.double()
    rows[weights == 0] = math.inf
    agrees("the sum", tw.sparse_mm(weights, rows), exact, "E")


def planes_and_products(device: str) -> None:
    """outer, instance_norm, with the gradients of each."""
    x, y, image = normal(device, 6), normal(device, 9, seed=1), normal(device, 2, 3, 4, 5, seed=2)
    weight, bias = normal(device, 3, seed=3), normal(device, 3, seed=4)
    for name, ours, exact, given in (
        ("outer", tw.outer, torch.outer, (x, y)),
        (
            "instance_norm",
            tw.instance_norm,
            lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
            (image, weight, bias),
        ),
    ):
        own, wide = ([t.to(kind).requires_grad_() for t in given] for kind in (given[0].dtype, torch.float64))
        made, wanted = ours(*own), exact(*wide)
        agrees(name, made, wanted)
        upstream = normal(device, *made.shape, seed=5)
        gradients = torch.autograd.grad(made, own, upstream), torch.autograd.grad(wanted, wide, upstream.double())
        for at, (found, truth) in enumerate(zip(*gradients)):
            agrees(f"{name}: gradient {at}", found, truth, "H")


def by_torchs_operators(device: str) -> None:
    """weight_norm: a composite of torch, what it reaches being ours."""
    v, g = (normal(device, *s, dtype=FP32, seed=9) for s in ((4, 10), (4, 1)))
    there = replaces(device)
    with tw.aten.use("all", include="_weight_norm_interface") if there else contextlib.nullcontext():
        made = torch._weight_norm(v, g, 0)
        said = tw.aten.report()
        assert not there or said["_weight_norm_interface"]["taken"], said
    norm = v.double().square().sum(1, keepdim=True).sqrt()
    torch.testing.assert_close(made.double(), v.double() * g.double() / norm, rtol=1e-5, atol=1e-5)


# ---- models ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention and a feed-forward part: as BERT's, norms after the sums, or as Llama's, norms before and a gate."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList([(nn.RMSNorm if causal else nn.LayerNorm)(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=not causal), nn.Linear(width, width, bias=not causal)
        self.up, self.down = nn.Linear(width, 4 * width, bias=not causal), nn.Linear(2 * width, width, bias=not causal)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            place = torch.arange(x.shape[1], device=x.device)
            scores = scores.masked_fill(place > place[:, None], -math.inf)
        return self.out((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(-2))

    def feed(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down((F.silu(gate) if self.causal else F.gelu(gate)) * up)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        if self.causal:
            x = x + self.attend(first(x))
            return x + self.feed(second(x))
        x = first(x + self.attend(x))
        return second(x + self.feed(x))


class Model(nn.Module):
    """A text model; with `patches` an image comes before the text, through a layer of its own, as Llava's does."""

    def __init__(self, causal: bool, patches: int = 0, width: int = 16, vocab: int = 20) -> None:
        super().__init__()
        self.tokens, self.layer, self.head = nn.Embedding(vocab, width), Layer(width, causal), nn.Linear(width, vocab)
        self.seen = nn.ModuleList([nn.Linear(12, width), Layer(width, False)] if patches else [])

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        x = self.tokens(ids)
        for part in self.seen:
            image = part(image)
        x = torch.cat([image, x], 1) if len(self.seen) else x
        return F.cross_entropy(self.head(self.layer(x))[:, -ids.shape[1] :].flatten(0, 1), ids.flatten())


MODELS = {"BERT": (False, 0), "Llama": (True, 0), "Llava": (True, 2)}
# What a step of each cannot do without
CALLS = {
    "mm",
    "bmm",
    "_softmax",
    "_softmax_backward_data",
    "_log_softmax",
    "nll_loss_forward",
    "embedding",
    "add.Tensor",
}


def models(device: str) -> None:
    """The loss and every gradient of a step are plain torch's; that step's operators are ours."""
    for name, (causal, patches) in MODELS.items():
        torch.manual_seed(0)
        model = Model(causal, patches).to(device)
        ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], device=device)
        image = normal(device, 2, 2, 12, dtype=FP32)

        def step(model: Model = model, ids: Tensor = ids, image: Tensor = image) -> list[Tensor]:
            loss = model(ids, image)
            return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

        plain = step()
        with tw.aten.observe() as calls:
            step()
        counted = {call.overload for call in calls.counts}
        assert counted >= CALLS, f"{name}: nothing replaces {sorted(CALLS - counted)}"
        if replaces(device):
            with tw.aten.use("all"):
                made, said = step(), tw.aten.report()
            left = {one: n["declined"] for one, n in said.items() if n["declined"]}
            assert not left and all(said[one]["taken"] for one in CALLS), f"{name}: {left}"
            for found, wanted in zip(made, plain, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


# ---- launches --------------------------------------------------------------------------------------------------------


def launched_without_a_build(device: str) -> None:
    """On a GPU by the launcher that Triton compiles, without Triton's own way to it; nothing of the package is compiled before."""
    package = Path(tw.__file__).parent
    assert not [path for path in package.rglob("*") if path.suffix in (".so", ".pyd", ".c", ".cc", ".cpp", ".cu")]
    assert device == "cpu" or triton_versions.launches_directly(), "Triton's launcher is not known"
