"""RMS norms: one weight and an epsilon, by `rms_norm`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ...ops.norm.rms_norm import rms_norm
from .probe import EXACT, Source, device_of, twin
from .roles import TRAINING, Count, Found, Skip, argument, bound, compared_in_modes, ignore, taking

EPSILONS = ("variance_epsilon", "eps", "epsilon")
OFFSETS = (0.0, 1.0)  # what is added to the weight


def norm_of(module: nn.Module) -> tuple[str, float] | Skip | None:
    """The name of a norm's epsilon and what is added to its weight. One weight, one epsilon, nothing else."""
    if set(module._parameters) != {"weight"} or module._modules or module._buffers:
        return None
    eps = next((e for e in EPSILONS if isinstance(getattr(module, e, None), float)), None)
    if module.weight is None or module.weight.dim() != 1 or eps is None or argument(type(module).forward) is None:
        return None
    draw, width = Source(device_of(module)), module.weight.shape[0]
    made, tokens = twin(module, {"weight": draw.tensor(width)}, {}), draw.tokens(4, width)
    words = [compared_in_modes(normed(eps, o, ignore), type(module).forward, EXACT, made, tokens) for o in OFFSETS]
    if None not in words:
        late = next((w for w in words if w.startswith(TRAINING)), None)
        failed = late is None and "rms" in type(module).__name__.lower()
        return Skip(f"not rms_norm: {late or words[0]}", failed)
    return eps, OFFSETS[words.index(None)]


def normed(eps: str, offset: float, count: Count) -> Callable[[nn.Module, Tensor], Tensor]:
    def compute(self: nn.Module, x: Tensor) -> Tensor:
        count("rms_norm")
        return rms_norm.function(x, self.weight, getattr(self, eps), weight_offset=offset)

    return compute


def norm(name: str, module: nn.Module) -> Found | Skip | None:
    found = norm_of(module)
    if not isinstance(found, tuple):
        return found
    x = argument(type(module).forward)
    return Found("rms_norm", lambda count: [bound(module, taking(x, normed(*found, count)))])
