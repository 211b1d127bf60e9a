"""Number formats: one file each. Importing this package makes them known to `Format.parse`."""

from tilewright.formats.fp8 import Fp8, fp8

__all__ = ["Fp8", "fp8"]
