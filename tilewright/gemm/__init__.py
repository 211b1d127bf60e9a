"""Matrix products, dense and grouped by expert, one file for each way of grouping. Importing this package declares them all."""

import importlib
import pkgutil

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
