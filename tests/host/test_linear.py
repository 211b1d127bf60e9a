"""`linear_fp8` against its definition block by block, the layer against torch's own, and gradients added to a buffer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import tilewright as tw
from tests.linear_oracle import drawn, layer, off, outcome
from tilewright.nn.expert_codes import quantize_weight

BARS = {torch.bfloat16: 1.8e-3, torch.float16: 2.3e-4, torch.float32: 1e-6}
BUFFER = torch.ops.tilewright.linear_fp8_accumulate.default


def made(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """More than one block in every dimension, none of them whole."""
    return (
        drawn(150, 200, dtype=dtype), drawn(130, 200, seed=1, dtype=dtype, scale=0.1), drawn(130, seed=2, dtype=dtype),
        drawn(150, 130, seed=3, dtype=dtype),
    )  # fmt: skip


def linear(**options) -> tw.nn.Linear:
    torch.manual_seed(0)
    return tw.nn.Linear(200, 130, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("dtype", list(BARS))
def test_products_are_of_codes(dtype):
    values = made(dtype)
    exact = layer(*values)
    errors = off(outcome(tw.linear_fp8, *values), exact)
    assert all(error < BARS[dtype] for error in errors.values()), errors
    plain = values[0].double() @ values[1].double().t() + values[2].double()
    assert float((exact["y"] - plain).norm() / plain.norm()) > 0.01  # what the oracle would miss if it rounded nothing


def test_a_layer_is_torchs_but_for_the_codes():
    theirs, ours = torch.nn.Linear(200, 130, dtype=torch.bfloat16), linear()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = made()[0].reshape(3, 50, 200)
    with torch.no_grad():
        y, there = ours(x), theirs.float()(x.float())
    assert y.shape == there.shape and y.dtype == x.dtype
    assert float((y - there).norm() / there.norm()) < 0.05
    state = copy.deepcopy(ours.state_dict())
    for other in (copy.deepcopy(ours), linear()):
        other.load_state_dict(state)
        assert torch.equal(other(x), y) and other.codes.made is not ours.codes.made
    assert repr(linear(keep="input")) == (
        "Linear(in_features=200, out_features=130, bias=True, keep=input, main_grad=False)"
    )
    with pytest.raises(ValueError, match="keep must be one of codes, input, got 'all'"):
        linear(keep="all")


@pytest.mark.parametrize("shape", [(0, 200), (200,), (1, 1, 200), (0, 3, 200)])
def test_any_leading_dimensions(shape):
    x, one = drawn(*shape).requires_grad_(), linear()
    y = one(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 130) and x.grad.shape == x.shape and one.weight.grad.shape == one.weight.shape
    assert bool(one.weight.grad.any()) == bool(x.numel())


def test_a_frozen_weight_and_modes_without_gradients():
    x, one = made()[0].requires_grad_(), linear()
    with torch.inference_mode():
        first = one(x)
    with torch.no_grad():
        second = one(x)
    y = one(x)  # after inference mode, whose tensors cannot be saved for a backward
    assert torch.equal(first, y) and torch.equal(second, y) and not second.requires_grad
    (wanted,) = torch.autograd.grad(y.sum(), x)
    one.weight.requires_grad_(False)
    y = one(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)


def test_codes_follow_the_weight():
    """Made once for a version of it; not kept at all for what stands in for a parameter."""
    x, one = made()[0], linear(bias=False).requires_grad_(False)
    y = one(x)
    codes = one.codes.of("weight", one.weight)
    assert torch.equal(one(x), y) and one.codes.of("weight", one.weight) is codes
    with torch.no_grad():
        one.weight.mul_(2.0)
    assert torch.equal(one(x), 2 * y)
    normed = weight_norm(linear(bias=False))
    before = normed(x).detach()
    normed.parametrizations.weight.original0.data.mul_(2.0)
    torch.testing.assert_close(normed(x), 2 * before)


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_codes_follow_an_optimiser_that_does_not_count_versions(settings):
    """torch's fused steps leave version counters as they are; between forward, evaluation and step nothing may go stale."""
    x, one = made()[0].detach(), linear(bias=False)
    step = torch.optim.AdamW(one.parameters(), lr=0.1, **settings)
    with torch.no_grad():
        seen = [one(x)]
    for _ in range(2):
        one(x).float().square().sum().backward()
        with torch.no_grad():
            assert torch.equal(one(x), seen[-1])
        step.step()
        with torch.no_grad():
            seen.append(one(x))
        assert torch.equal(seen[-1], copy.deepcopy(one)(x)) and not torch.equal(seen[-1], seen[-2])
        step.zero_grad()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("keep", ["codes", "input"])
def test_gradient_checkpointing(keep, reentrant):
    x, one = made()[0].requires_grad_(), linear(keep=keep)
    wanted = torch.autograd.grad(one(x).float().square().sum(), [x, *one.parameters()])
    checkpoint(one, x, use_reentrant=reentrant).float().square().sum().backward()
    for there, here in zip(wanted, (x, *one.parameters())):
        assert torch.equal(there, here.grad)


def test_no_second_derivative():
    x, one = made()[0].requires_grad_(), linear()
    (dx,) = torch.autograd.grad(one(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


# ---- gradients added to a buffer -------------------------------------------------------------------------------------


def test_micro_batches_add_up():
    """To what was there before; the second has two calls before its backward."""
    x, weight, bias, dy = made()
    weight, main_grad = torch.nn.Parameter(weight), drawn(130, 200, seed=5, dtype=torch.float32)
    exact, leaf = main_grad.double(), x.requires_grad_()
    known = layer(x, weight, bias, dy)
    for count in (1, 2):
        version = main_grad._version
        calls = [tw.linear_fp8_main_grad(leaf, weight, main_grad, bias) for _ in range(count)]
        sum((y * dy).sum() for y in calls).backward()
        exact += count * known["weight"]
        assert weight.grad is None and main_grad._version > version
    errors = off({"weight": main_grad, "y": calls[0].detach(), "x": leaf.grad / 3}, {**known, "weight": exact})
    assert errors["weight"] < 1e-6 and errors["y"] < 1.8e-3 and errors["x"] < 3e-3, errors


@pytest.mark.parametrize("compiled", [False, True])
def test_the_layer_adds_up_too(compiled):
    x, one, other = made()[0].requires_grad_(), linear(main_grad=True), linear()
    with pytest.raises(ValueError, match=r"weight\.main_grad"):
        one(x)
    one.weight.main_grad = torch.zeros(130, 200)
    one.weight.grad_added_to_main_grad = False
    call = torch.compile(one, fullgraph=True, backend="aot_eager") if compiled else one
    for _ in range(2):
        call(x).float().square().sum().backward()
    wanted = torch.autograd.grad(other(x.detach()).float().square().sum(), (other.weight, other.bias))
    torch.testing.assert_close(one.weight.main_grad.to(torch.bfloat16), 2 * wanted[0])
    assert torch.equal(one.bias.grad, 2 * wanted[1])
    if not compiled:
        assert one.weight.grad_added_to_main_grad  # what Megatron's hooks look at
    one.weight.requires_grad_(False)
    before = one.weight.main_grad.clone()
    one(x).sum().backward()
    assert torch.equal(one.weight.main_grad, before)


def test_a_frozen_weight_adds_nothing():
    x, weight, bias, _ = made()
    main_grad = torch.zeros(130, 200)
    tw.linear_fp8_main_grad(x.requires_grad_(), weight, main_grad, bias).sum().backward()
    assert x.grad.any() and not main_grad.any()


def test_torch_checks_what_is_registered():
    x, weight, bias, dy = (t.float() for t in made())
    q = quantize_weight(weight)
    main_grad, kinds = torch.zeros(130, 200), ("test_schema", "test_autograd_registration", "test_faketensor")
    one = torch.ops.tilewright.linear_fp8_main_grad.default
    torch.library.opcheck(one, (x, weight.requires_grad_(), main_grad, bias, None, None, None), test_utils=kinds)
    for data, add in ((True, False), (False, True), (True, True)):
        given = dy, x, weight.detach(), main_grad, None, None, None, data, add
        torch.library.opcheck(BUFFER, given, test_utils=kinds)
    given = BUFFER(dy, x, weight.detach(), main_grad, q.data, q.scale, q.data_t, True, False)
    assert torch.equal(given, BUFFER(dy, x, weight.detach(), main_grad, None, None, None, True, False))


@pytest.mark.parametrize(
    ("main_grad", "error", "words"),
    [
        (None, TypeError, "main_grad must be a Tensor"),
        (torch.zeros(130, 200, dtype=torch.bfloat16), TypeError, "main_grad must be float32"),
        (torch.zeros(130, 201), ValueError, "main_grad is .*weight is"),
        (torch.zeros(130, 200, device="meta"), ValueError, "main_grad is .*weight is"),
        (torch.zeros(200).expand(130, 200), ValueError, "elements that share memory"),
        (torch.zeros(130, 200).requires_grad_(), ValueError, "main_grad requires a gradient"),
    ],
)
def test_buffers_that_are_refused(main_grad, error, words):
    x, weight, bias, _ = made()
    with pytest.raises(error, match=words):
        tw.linear_fp8_main_grad(x, weight, main_grad, bias)


def test_other_refusals():
    x, weight, bias, dy = made()
    q = quantize_weight(weight)
    with pytest.raises(ValueError, match="given together"):
        tw.linear_fp8(x, weight, bias, q.data)
    with pytest.raises(ValueError, match="weight_scale must be"):
        tw.linear_fp8(x, weight, bias, q.data, q.scale[:1], q.data_t)
    both = torch.zeros(131, 200)
    with pytest.raises(ValueError, match="shares memory"):
        tw.linear_fp8_main_grad(x, both[:130], both[1:], bias)
    with pytest.raises(ValueError, match="columns must be 129, as in dy"):
        BUFFER(dy[:, 1:], x, weight, torch.zeros(130, 200), None, None, None, True, True)
