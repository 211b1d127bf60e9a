"""One declaration, everything else: a toy op, complete in one file, and all that appears when it is declared."""

from __future__ import annotations

import inspect
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw
from tests.mutants import SUBJECT, Mutant, declared
from tilewright.check.cases import Net
from tilewright.check.oracle import same_bits
from tilewright.check.registration import FACES
from tilewright.core.cost import traffic
from tilewright.core.draw import Draw
from tilewright.core.memory import interleaved
from tilewright.core.private import guard
from tilewright.core.signature import at_least
from tilewright.op import Gradient, Op, Out, Triton
from tilewright.runtime.front import taking

WHOLE = Mutant("none", "Toy op", "Toy op", "", "", SUBJECT)


@pytest.fixture
def toy(tmp_path):
    with declared(WHOLE, tmp_path) as (op, _):
        yield op


def arguments(*leading: int, hidden: int = 7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(*leading, hidden, generator=source).to(dtype)
    return x, torch.randn(hidden, generator=source)


def test_it_appears_and_goes(tmp_path):
    with declared(WHOLE, tmp_path) as (op, _):
        name = op.name
        assert tw.catalogue()[name] is op
        assert tw.__getattr__(name) is op.function
        assert name in dir(tw)
        assert repr(op) == f"<op {name}>"
    assert name not in tw.catalogue()
    with pytest.raises(AttributeError, match=name):
        tw.__getattr__(name)


def test_public_function_has_the_signature_and_words_of_the_reference(toy):
    public, written = inspect.signature(toy.function), inspect.signature(toy.reference)
    assert list(public.parameters.values())[:-1] == list(written.parameters.values())
    assert str(public.parameters["out"]) == "out: 'Tensor | None' = None"
    assert public.return_annotation == "Tensor"  # two of the reference's results are for the backward alone
    rms_norm = tw.catalogue()["rms_norm"]
    shown = inspect.signature(tw.rms_norm)
    assert [*shown.parameters] == [*inspect.signature(rms_norm.reference).parameters, "out"]
    assert shown.parameters["out"].annotation == "Tensor | Quantized | None"
    both = inspect.signature(tw.add_rms_norm).parameters["out"].annotation
    assert both == "tuple[Tensor | Quantized | None, Tensor | None] | None"
    assert toy.function.__doc__ == toy.reference.__doc__ == toy.__doc__
    assert toy.function.__name__ == toy.name
    assert toy.function.op is toy


def test_cpu_path_is_the_reference(toy):
    x, weight = arguments(3, 4)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * (weight + 1)
    torch.testing.assert_close(toy(x, weight, offset=1.0), expected)
    torch.testing.assert_close(toy(x), F.layer_norm(x, (7,)))
    assert toy(x.transpose(0, 1)).is_contiguous()
    out = torch.empty_like(x)
    assert toy(x, weight, out=out) is out
    same_bits("out", out, toy(x, weight))


def test_autograd(toy):
    x, weight = arguments(5)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    g = torch.randn(5, 7)
    found = torch.autograd.grad(toy(x, weight), (x, weight), g)
    expected = torch.autograd.grad(F.layer_norm(x, (7,), weight), (x, weight), g)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("prop", FACES, ids=lambda p: p.__name__)
def test_properties(prop, toy):
    """Errors, fakes, opcheck, torch.compile static and dynamic, gradcheck."""
    prop(toy, Net())


def test_registered_op(toy):
    x, weight = arguments(4)
    registered = getattr(torch.ops.tilewright, toy.name)
    assert registered is getattr(torch.ops.tilewright, toy.name)
    assert set(registered.overloads()) == {"default", "out"}
    y, mean, rstd = registered(x, weight, 1e-5, 0.5, "plain")
    same_bits("y", y, toy(x, weight, offset=0.5, kind="plain"))
    assert mean.shape == rstd.shape == (4,)
    with pytest.raises(ValueError, match="eps must be >= 0"):
        registered(x, weight, -1.0)


def test_export(toy):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(7))

        def forward(self, x: Tensor) -> Tensor:
            return toy(x, self.weight, offset=1.0)

    model = Model()
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(model, (torch.randn(5, 7),), dynamic_shapes=({0: rows},))
    assert any(toy.name in str(node.target) for node in exported.graph.nodes)
    for count in (5, 11):
        x = torch.randn(count, 7)
        torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda f, x, w: f(x, w[:3]), ValueError, "weight is float32[3], but hidden must be 7, as in x"),
        (lambda f, x, w: f(x, w.int()), TypeError, "weight must be bfloat16 or float16 or float32 or float64, got int32"),
        (lambda f, x, w: f(x, w[None]), ValueError, "weight must have 1 dimensions, got float32[1, 7]"),
        (lambda f, x, w: f(x, w.to("meta")), ValueError, "weight is on meta, x on cpu"),
        (lambda f, x, w: f(x, w, "1"), TypeError, "eps must be float, got str"),
        (lambda f, x, w: f(x, w, float("nan")), ValueError, "eps must be finite, got nan"),
        (lambda f, x, w: f(x, kind="other"), ValueError, "kind must be one of ['centred', 'plain'], got 'other'"),
        (lambda f, x, w: f(x, out=x), ValueError, "out shares memory with x"),
        (lambda f, x, w: f(x, out=x[:1].expand(4, 7)), ValueError, "out has elements that share memory"),
        (lambda f, x, w: f(x, w, weight=w), TypeError, "weight twice"),
        (lambda f, x, w: f(x, wieght=w), TypeError, "has no argument wieght"),
        (lambda f, x, w: f(weight=w), TypeError, "needs argument x"),
        (lambda f, x, w: f(x.to_sparse()), TypeError, "x must be a strided tensor"),
        (lambda f, x, w: f(torch.complex(x, x).conj().imag), ValueError, "x is a lazily negated"),
        (lambda f, x, w: f(x.clone().requires_grad_(), out=torch.empty_like(x)), ValueError, "out cannot be given when a gradient"),
    ],
)  # fmt: skip
def test_errors_say_what_it_was_and_what_it_should_be(toy, call, error, words):
    with pytest.raises(error) as caught:
        call(toy, *arguments(4))
    assert words in str(caught.value)
    assert str(caught.value).startswith(toy.name)


def test_cost(toy):
    x, weight = arguments(6, hidden=10, dtype=torch.bfloat16)
    values = toy.signature.bind((x, weight), {})
    statistics = 2 * 6 * 4  # aux results are written too
    assert traffic(toy, values) == (x.numel() * 2 + weight.numel() * 4, x.numel() * 2 + statistics)
    spread = toy.signature.bind((x[:1].expand(6, 10),), {})
    assert traffic(toy, spread) == (10 * 2, x.numel() * 2 + statistics)
    values = tw.catalogue()["rms_norm"].signature.bind((x, weight), {"out_format": tw.fp8("row", ways="row")})
    assert traffic(tw.catalogue()["rms_norm"], values)[1] == x.numel() + 6 * 4


def test_modes_of_torch_make_no_difference(toy):
    x, weight = arguments(4)
    expected = toy(x, weight)
    with torch.inference_mode():
        same_bits("inference mode", toy(x, weight), expected)
        out = torch.empty_like(x)
        same_bits("out in inference mode", toy(x, weight, out=out), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same_bits("autocast", toy(x, weight), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        same_bits("another default device", toy(x, weight), expected)
    same_bits("parameter", toy(x, torch.nn.Parameter(weight)).detach(), expected)

    class Sub(torch.Tensor):
        pass

    same_bits("subclass", torch.Tensor(toy(x.as_subclass(Sub), weight)), expected)
    same_bits("vmap", torch.vmap(toy, (0, None))(x[None], weight)[0], expected)


def test_checkpoint_gives_the_same_gradients(toy):
    x, weight = arguments(4)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    plain = torch.autograd.grad(toy(x, weight).square().sum(), (x, weight))
    kept = torch.utils.checkpoint.checkpoint(toy.function, x, weight, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(kept.square().sum(), (x, weight)), plain):
        same_bits("checkpointed", a, b)


def test_forcing_an_implementation(toy):
    x, weight = arguments(4)
    expected = toy(x, weight)
    with tw.force("reference"):
        same_bits("reference", toy(x, weight), expected)
    seen = []
    with tw.force("triton"):
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
            toy(x, weight)
        thread = threading.Thread(target=lambda: seen.append(toy(x, weight)))
        thread.start()
        thread.join()
    same_bits("another thread", seen[0], expected)
    same_bits("afterwards", toy(x, weight), expected)


def test_declarations_are_checked():
    def reference(x: Tensor, eps: float = 0.0) -> Tensor:
        return x + eps

    def untyped(x: list) -> Tensor:
        return x

    none = Triton(reference)
    for words, where, function in (
        ("names ['y']", {"x": "float[n]", "y": "float[n]"}, reference),
        ("x needs a row", {"eps": at_least(0.0)}, reference),
        ("not of the form", {"x": "float of n"}, reference),
        ("cannot be of type", {"x": "float[n]"}, untyped),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            Op("never_declared", function, dict, none, where=where, results={"y": "x[n]"})
        assert words in str(caught.value)
    good = {"where": {"x": "float[n]"}, "results": {"y": "x[n]"}}
    for words, said in (
        ("gradient.of names z", {"gradient": Gradient(of=("z",))}),
        ("gradient.saves names w", {"gradient": Gradient(of=("x",), saves=("w",))}),
        ("out.lies_on names u", {"out": Out(lies_on={"y": ("u",)})}),
        ("writes names v", {"writes": ("v",)}),
        ("written has no gradient", {"writes": ("x",), "gradient": Gradient(of=("x",))}),
    ):
        with pytest.raises(ValueError, match=words):
            Op("never_declared", reference, dict, none, **good, **said)
    assert "never_declared" not in tw.catalogue()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_guard_tells_kinds_of_call_apart():
    """The check before a replayed launch must fail for whatever the launch was not recorded from."""
    x, weight = arguments(8, hidden=8)
    check = guard([x, weight])
    assert check is not None and check(x.clone(), weight + 1)
    others = {
        "shape": x[:7],
        "stride": x.t(),
        "dtype": x.double(),
        "integers": x.int(),
        "gradient": x.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(x, requires_grad=False),
        "negated": torch._neg_view(x),
        "meta": x.to("meta"),
        "sparse": x.to_sparse(),
        "expanded": x[:1].expand(8, 8),
        "number": 1.0,
        "none": None,
    }
    for what, other in others.items():
        try:
            same = check(other, weight)
        except TypeError:
            same = False
        assert not same, what
    with torch.inference_mode():
        made = x.clone()
        assert not check(made, weight)
    assert not check(made, weight)
    with Watching():
        assert not check(x, weight)
    seen = []
    torch.vmap(lambda row: seen.append(check(x, weight)) or row)(x)
    assert seen == [False]
    assert check(x, weight)


def test_a_kind_of_call_tells_what_is_no_tensor_apart():
    """What takes tensors from arguments gives those of a call whose others are equal, and of the same types, and no others."""
    x, y = torch.zeros(2), torch.ones(2)
    first, static = tw.fp8("1x128"), tw.fp8("tensor", scale=torch.ones(1))
    take, found = taking((x, 1, 0.5, "word", None, first, [x, 2]))
    assert [id(t) for t in found] == [id(x), id(x)]
    again = (
        tw.fp8("1x128", rule="exact"),
        tw.fp8("1x128", rule="te"),
    )  # the second is equal to the first, and another object
    assert again[1] is not first and again[1].key == first.key
    like = (y, 1, 0.5, "word", None, again[1], [x, 2])
    assert [id(t) for t in take(like)] == [id(y), id(x)]
    for at, other in ((1, True), (1, 1.0), (1, 2), (2, 0.25), (3, "other"), (4, 0), (5, again[0]), (5, None), (5, "word"),
                      (6, (x, 2)), (6, [x, 3]), (6, [x, True]), (6, [x])):  # fmt: skip
        assert take((*like[:at], other, *like[at + 1 :])) is None, (at, other)
    take, found = taking((x, math.nan))
    assert take((y, math.nan)) == (y,) and take((y, 0.0)) is None
    take, found = taking((x, static))
    other = tw.fp8("tensor", scale=torch.zeros(1))
    assert found[1] is static.tensor and take((x, other))[1] is other.tensor  # this call's scale, not the first one's
    assert take((x, tw.fp8("tensor"))) is None and taking((x, y)) == (None, (x, y))


@pytest.mark.parametrize(
    "asked",
    [(16, 32768, 256, 8192), (32, 262144, 128, 32768), (7, 12301, 131, 4099), (3, 100, 10, 60), (5, 50, 10, 10)],
)
def test_sizes_spread_over_a_range_add_up(asked):
    count, total, least, most = asked
    sizes = Draw().spread(*asked)
    assert len(sizes) == count and sum(sizes) == total and min(sizes) == least and max(sizes) == most
    assert sizes == Draw(seed=1).spread(*asked) and (least == most or sizes not in (sorted(sizes), sorted(sizes)[::-1]))
    for wrong in (
        (count, count * least - 1, least, most),
        (count, count * most + 1, least, most),
        (2, total, least, most),
    ):
        with pytest.raises(ValueError, match="add up to"):
            Draw().spread(*wrong)


def test_draws_are_repeatable_and_obey():
    def drawn(seed: int, **fixed) -> tuple:
        draw = tw.Draw(seed, **fixed)
        return draw.tensor("tokens", "hidden"), draw.integers("tokens", high=9), draw.option("act", 1, 2, 3), draw.dims

    for seed in range(20):
        first, again = drawn(seed), drawn(seed)
        same_bits("floats", first[0], again[0])
        same_bits("integers", first[1], again[1])
        assert first[2:] == again[2:]
        assert first[0].numel() <= 64 * 1024
    assert drawn(0)[0].shape != drawn(1)[0].shape
    fixed = drawn(3, dims={"tokens": 5, "hidden": 6}, options={"act": 9}, dtype=torch.bfloat16)
    assert fixed[0].shape == (5, 6) and fixed[0].dtype == torch.bfloat16 and fixed[2] == 9


def test_quantised_out_must_be_laid_out_as_its_format_says():
    """Kernels write where the format says: an `out` of other inner sizes or strides would be written outside its memory."""
    fmt = tw.fp8("1x128", ways="both")
    x = torch.randn(6, 256)
    good = fmt.empty((6, 256), x.dtype, "cpu")
    assert tw.rms_norm(x, out_format=fmt, out=good) is good
    short = [t[:, :2] if name == "scale" else t for name, t in zip(fmt.tensor_names, good.tensors())]
    turned = [t.t().contiguous().t() if name == "data_t" else t for name, t in zip(fmt.tensor_names, good.tensors())]
    for tensors, named in ((short, "out.scale"), (turned, "out.data_t")):
        out = tw.Quantized.from_tensors(fmt, x.dtype, (6, 256), tensors)
        with pytest.raises(ValueError, match=named):
            tw.rms_norm(x, out_format=fmt, out=out)
    with pytest.raises(ValueError, match="out.scale_t"):  # made for no groups
        tw.glu(torch.cat([x, x], -1), out_format=fmt, out=good, offsets=torch.tensor([2, 6]))


def test_fields_of_records_share_no_memory():
    """Codes, scales and numbers of one buffer, record by record, though their spans meet."""
    record = torch.zeros(3, 4, 1, 656, dtype=torch.uint8)
    codes, scale, rope = (
        record[..., :512],
        record[..., 512:528].view(torch.float32),
        record[..., 528:].view(torch.bfloat16),
    )
    for a, b in ((codes, scale), (scale, codes), (rope, codes), (scale, rope)):
        assert interleaved(a, b)
    for a, b in ((record, scale), (scale, record), (record[..., :513], scale), (record[1:, ..., 527:], scale)):
        assert not interleaved(a, b)
    flat = torch.zeros(64)
    assert not interleaved(flat[:32].view(4, 8), flat[31:63].view(4, 8))  # one element in common
    assert not interleaved(flat.as_strided((4, 3), (8, 1)), flat.as_strided((4, 3), (8, 1), 6))  # over the record's end
    assert interleaved(flat.view(8, 8)[:, :3], flat.view(8, 8)[1:, 3:5])
