"""What all ops' variants are is found before the first test: a variant belongs to one op because no other before it has it, so all
are asked for the first op's, which would be said to have cost what all did."""

from __future__ import annotations

import pytest

from tilewright.check.compiled import chip_variants, own_variants


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    for item in session.items:
        name = getattr(item, "originalname", "")
        if name == "test_hopper_variants_keep_to_the_table":
            own_variants()
        elif name == "test_other_chips_compile_every_kernel":
            chip_variants(item.callspec.params["arch"])
