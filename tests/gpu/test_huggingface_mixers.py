"""Models of transformers whose layers are recurrences, patched, on a GPU: held to their own code in fp32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
from tests.mixer_models import FAMILIES, build, results
from tests.transformer_models import IDS, error
from tilewright.integrations.huggingface.patching import patch

pytestmark = pytest.mark.gpu
BAR = 1e-4  # of the largest value: sums in another order, through two layers and back


@pytest.fixture(autouse=True)
def whole_products(monkeypatch) -> None:
    """Their convolutions would round factors to 11 bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_generation(family):
    model, (_, layers, trained) = build(family).cuda(), FAMILIES[family]
    ids, given = IDS.cuda(), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    before, tokens = results(model), model.eval().generate(ids, attention_mask=torch.ones_like(ids), **given)
    report = patch(model.train(), only="mixer")
    assert len(report.replaced) == layers
    assert error(results(model), before) < BAR
    assert report.calls().get("linear_attention", 0) == (2 * layers if trained else 0)
    assert torch.equal(model.eval().generate(ids, attention_mask=torch.ones_like(ids), **given), tokens)
    assert report.calls()["linear_attention_step"] == 5 * layers
