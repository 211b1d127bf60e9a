"""torch's own operators, replaced: `tw.aten.enable()`, or `with tw.aten.use():` around a part of a program.

A *row* says what an operator is, an *engine* has the kernels that rows share (`pointwise.py`), the *router* registers them and
gives aten what they decline; in mode "auto" by *verdicts*, which are made of measurements.
"""

from .observed import Calls, observe
from .router import disable, enable, explain, report, use

__all__ = ["Calls", "disable", "enable", "explain", "observe", "report", "use"]
