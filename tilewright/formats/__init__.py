"""Number formats: one file each. Importing this package makes them known to `Format.parse`."""

from tilewright.formats.fp8 import Fp8, fp8
from tilewright.formats.integers import Int4, Int8, int4, int8
from tilewright.formats.mx import Mx, mx
from tilewright.formats.nvfp4 import Nvfp4, nvfp4

__all__ = ["Fp8", "Int4", "Int8", "Mx", "Nvfp4", "fp8", "int4", "int8", "mx", "nvfp4"]
