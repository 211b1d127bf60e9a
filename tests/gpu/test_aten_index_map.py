"""Boxes and bands of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_index_map.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_index_map import (  # noqa: F401
    few_are_enough,
    known,
    test_boxes_and_bands,
    test_every_width,
    test_more_loops_than_a_launch_takes,
    test_rows_that_are_no_whole_words,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
