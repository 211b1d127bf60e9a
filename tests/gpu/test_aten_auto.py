"""Mode "auto" of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_auto.py` with CUDA tensors, by rows that are
made up, and that a choice holds in a captured graph."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tests.aten.test_auto import (  # noqa: F401
    FLAT,
    both,
    nothing_is_left,
    rows,
    test_a_predicate_on_bytes,
    test_an_overload_is_replaced_if_its_calls_gain_more_than_others_lose,
    test_calls_are_counted_by_kind,
    test_the_innermost_block_says_which_calls_are_ours,
    test_the_table_of_calls,
    test_what_is_closed_is_ours_in_all_that_its_row_takes,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]


def test_a_choice_holds_in_a_captured_graph(rows):  # noqa: F811
    rows(*both([2.0] * 3))
    x, turned, graph = torch.randn(40, 60), torch.randn(60, 40).t(), torch.cuda.CUDAGraph()
    with tw.aten.use("auto", observed=FLAT):
        for _ in range(3):
            torch.neg(x), torch.neg(turned)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = torch.neg(x), torch.neg(turned)
        said = tw.aten.report()["neg"]
        assert said["taken"] == 4 and sum(said["declined"].values()) == 4
    x.copy_(torch.randn(40, 60))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(made[0], -1 * x) and torch.equal(made[1], -1 * turned)
