"""Fused ops, one file each. Importing this package declares them all; adding an op is adding its file here."""

import importlib
import pkgutil

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
