"""The variants that calls need, which the library itself lists."""

from tilewright.check.variants import *  # noqa: F403
