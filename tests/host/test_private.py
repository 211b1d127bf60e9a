"""A torch without the private names that are used: slower, or an error, never wrong."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilewright as tw
from tilewright.core import private
from tilewright.runtime import call, front

NOTHING = SimpleNamespace()
LIBRARY = Path(tw.__file__).parent
# Where else in the machinery private names may stand, and why.
ELSEWHERE = {
    "core/cost.py": "fake tensors, which torch's documentation names, have no other home; nothing runs through it",
    "core/format.py": "what torch's documentation has every subclass of a tensor call",
}


def test_names_that_are_missing():
    assert private.modes_of(NOTHING)() == 1 and private.transforms_of(NOTHING)()
    assert private.keeps_graph_of(NOTHING)()
    assert private.no_modes_of(NOTHING) is nullcontext
    counted = torch.ones(2)
    for count in (private.count_write_of(NOTHING), private.count_write):
        count([counted])
    assert counted._version == 2
    assert private.guard([torch.ones(2)], NOTHING) is None
    base = torch.arange(24.0)[4:].view(4, 5)
    for view in (private.strided_view_of(NOTHING), private.strided_view):
        made = view(base, (2, 4), (1, 5), 3)
        assert torch.equal(made, base[:, 3:].t()) and made.data_ptr() == base[:, 3:].data_ptr()
    with (
        pytest.raises(RuntimeError, match="does not let a registered backward use autograd"),
        private.recording(NOTHING),
    ):
        pass


def test_names_that_are_there():
    """Each is the torch's own here: a name that torch drops is noticed."""
    assert private.modes is torch._C._len_torch_dispatch_stack and private.modes() == 0
    assert private.transforms is torch._C._are_functorch_transforms_active and not private.transforms()
    assert private.keeps_graph is torch._C._autograd._get_current_graph_task_keep_graph
    assert private.levels is torch.autograd.forward_ad and private.count_write is torch._C._increment_version
    assert private.guard([torch.ones(2)]) is not None
    assert private.strided_view is torch._C._dynamo.guards._reinterpret_tensor
    with private.recording():
        pass


def test_calls_go_through_the_registered_op_where_modes_cannot_be_seen(monkeypatch):
    x, w = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    wanted = tw.rms_norm(x, w)
    (grad,) = torch.autograd.grad(wanted.sum(), x)
    taken = []
    original = call.register.call
    monkeypatch.setattr(call.register, "call", lambda *given: (taken.append(1), original(*given))[1])
    for module in (call, front):
        monkeypatch.setattr(module, "modes", private.modes_of(NOTHING))
    found = tw.rms_norm(x, w)
    assert taken and torch.equal(found, wanted)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], grad)


def test_no_level_is_asked_for_where_torch_does_not_say(monkeypatch):
    for module in (call, front):
        monkeypatch.setattr(module, "levels", private._Level)
    monkeypatch.setattr(call.register, "levels", private._Level)
    monkeypatch.setattr(private, "levels", private._Level)
    x = torch.ones(2, 4)
    with torch.autograd.forward_ad.dual_level():
        assert tw.rms_norm(x).shape == x.shape
        with pytest.raises(NotImplementedError, match="forward-mode"):
            tw.rms_norm(torch.autograd.forward_ad.make_dual(x, x))


def test_the_public_apply():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    x = torch.ones(3, requires_grad=True)
    private.apply_of(Twice)(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3


def private_names(path: Path) -> list[str]:
    """The private names of torch that a file reads or imports, as `torch._C`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            found.append(ast.unparse(node))
    return [
        name for name in found if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]


def test_private_names_stand_in_one_module_of_the_machinery():
    found = {}
    for room in ("core", "runtime"):
        for path in sorted((LIBRARY / room).rglob("*.py")):
            found[str(path.relative_to(LIBRARY))] = private_names(path)
    assert found.pop("core/private.py")
    others = {path: names for path, names in found.items() if names}
    assert others.keys() == ELSEWHERE.keys(), others
