"""tilewright: GPU kernels in Triton and Gluon for training and running large language models.

Every op is a function here: `import tilewright as tw; y = tw.rms_norm(x, weight)`. Names are loaded on first use; importing
does no GPU work.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import Any

__version__ = "0.1.0"
LAYERS = ("ops", "gemm", "nn")  # packages that declare ops
# Names that are not ops, and the modules that hold them.
NAMES = {
    "clip_grad_norm_": "ops.clip_grad",
    "dequantize": "ops.quantize",
    "Draw": "core.draw",
    "embedding_main_grad": "ops.embedding",
    "force": "core.op",
    "Format": "core.format",
    "fp8": "formats.fp8",
    "from_awq": "formats.weights",
    "from_gptq": "formats.weights",
    "global_norm": "ops.clip_grad",
    "grouped_mm": "gemm.grouped_mm",
    "int4": "formats.integers",
    "int8": "formats.integers",
    "kernel": "core.kernel",
    "linear_fp8_main_grad": "nn.linear_fp8",
    "mx": "formats.mx",
    "nvfp4": "formats.nvfp4",
    "Op": "core.op",
    "parallel_cross_entropy": "ops.parallel_cross_entropy",
    "patch": "integrations.huggingface",
    "Quantized": "core.format",
    "scaled_mm": "gemm.scaled_mm",
    "smooth_scale": "ops.smooth_quantize",
    "swizzle_scale": "formats.swizzle",
    "Target": "core.target",
    "Triton": "core.op",
    "unpatch": "integrations.huggingface",
    "unswizzle_scale": "formats.swizzle",
    "warmup": "core.op",
}


def __getattr__(name: str) -> Any:
    if name in NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{NAMES[name]}"), name)
    elif name == "nn":
        value = importlib.import_module(f"{__name__}.nn")
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        value = _declared(name)
        if value is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = value.function
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES, "nn", *catalogue()})


def _declared(name: str) -> Any:
    """The op of this name, or None: from the file of its name if there is one, so that the first use of one op does not load
    all of them."""
    for layer in LAYERS[:2]:
        if importlib.util.find_spec(f"{__name__}.{layer}.{name}") is not None:
            importlib.import_module(f"{__name__}.{layer}.{name}")
            from .core.op import OPS

            if name in OPS:
                return OPS[name]
    return catalogue().get(name)


def catalogue() -> dict[str, Any]:
    """Every declared op by name."""
    for layer in LAYERS:
        package = importlib.import_module(f"{__name__}.{layer}")
        for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
            importlib.import_module(f"{package.__name__}.{module}")
    from .core.op import OPS

    return OPS
