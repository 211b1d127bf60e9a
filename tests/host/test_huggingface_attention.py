"""The role `attention` of `patch`: models of transformers held to their own eager attention, however a batch is put together."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import transformers
from transformers import masking_utils
from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS, LlamaAttention, eager_attention_forward

from tests.survey import small
from tests.transformer_models import FP32, IDS, LABELS, build, error, step
from tilewright.integrations.huggingface import attention as role
from tilewright.integrations.huggingface.patching import patch, unpatch

# What makes each family's attention its own, where sliding layers see 4 keys
FAMILIES = {
    "Llama": {}, "Qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
    "Gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {"sliding_window": 4}, "DeepseekV3": {"v_head_dim": 16, "qk_nope_head_dim": 24},
}  # fmt: skip
LENGTH = IDS.shape[1]
LEFT = torch.arange(LENGTH) >= torch.tensor([[3], [0]])  # the first row begins after three tokens of padding
RIGHT = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 4]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0, 1]])


def eager(family: str, **more: object) -> torch.nn.Module:
    model = build(family, **{**FAMILIES[family], **more})
    model.set_attn_implementation("eager")
    return model


def labels_for(there: torch.Tensor | None) -> torch.Tensor:
    """No loss of tokens of padding, nor by them, of the token after: what such rows see is nobody's."""
    return LABELS if there is None else LABELS.masked_fill(~(there & there.roll(1, 1)), -100)


BATCHES = {
    "plain": ({}, None),
    "left": ({"attention_mask": LEFT.long()}, LEFT),
    "right": ({"attention_mask": RIGHT.long()}, RIGHT),
    "packed": ({"position_ids": PACKED}, None),
    "packed alone": ({"position_ids": PACKED[:1]}, None),
    "given": ({"attention_mask": (torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.5)}, None),
}


def results(model: torch.nn.Module, batch: str) -> dict[str, torch.Tensor]:
    """Logits of tokens, the loss and every gradient."""
    named, there = BATCHES[batch]
    rows = 1 if batch == "packed alone" else 2
    if batch == "given":  # a mask of somebody's own: eager attention adds it, and every query sees itself
        mask = named["attention_mask"] | torch.eye(9, dtype=torch.bool)
        named = {"attention_mask": torch.where(mask & torch.ones(9, 9).tril().bool(), 0.0, torch.finfo().min)}
    model.zero_grad()
    out = model(input_ids=IDS[:rows], labels=labels_for(there)[:rows], use_cache=False, **named)
    out.loss.backward()
    logits = out.logits if there is None else out.logits[there]
    return {"loss": out.loss, "logits": logits} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def copied(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_every_kind(family):
    model = eager(family)
    before = {batch: copied(results(model, batch)) for batch in BATCHES}
    report = patch(model, only="attention")
    assert [(r.role, r.op) for r in report.replaced] == [("attention", "attention")] * 2 and not report.skipped
    for count, batch in enumerate(BATCHES, 1):
        assert error(copied(results(model, batch)), before[batch]) < FP32, batch
        assert report.calls() == {"attention": 2 * count} and not report.skipped
    unpatch(model)
    assert error(copied(results(model, "left")), before["left"]) == 0


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_the_same(family, cache):
    """Past the windows of sliding layers, with padding on the left."""
    model = eager(family).eval()
    given = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "output_logits": True}
    given |= {"return_dict_in_generate": True, "min_new_tokens": 6}
    expected = [model.generate(IDS, attention_mask=m, **given) for m in (LEFT.long(), torch.ones_like(IDS))]
    report = patch(model, only="attention")
    made = [model.generate(IDS, attention_mask=m, **given) for m in (LEFT.long(), torch.ones_like(IDS))]
    for ours, theirs in zip(made, expected, strict=True):
        assert torch.equal(ours.sequences, theirs.sequences)
        assert error(dict(enumerate(ours.logits)), dict(enumerate(theirs.logits))) < FP32
    assert report.calls() == {"attention": 2 * 2 * 6} and not report.skipped


def test_static_caches_are_read_by_cached_attention(monkeypatch):
    """Prompt and steps, without padding; with it, or with gradients, by a mask."""
    calls = []
    whole = role.cached_attention.function
    kept = SimpleNamespace(function=lambda *args, **named: calls.append(named) or whole(*args, **named))
    monkeypatch.setattr(role, "cached_attention", kept)
    model = eager("Llama").eval()
    given = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "min_new_tokens": 4}
    expected = model.generate(IDS, attention_mask=torch.ones_like(IDS), **given)
    patch(model, only="attention")
    assert torch.equal(model.generate(IDS, attention_mask=torch.ones_like(IDS), **given), expected)
    assert len(calls) == 2 * 4
    assert [int(named["kv_len"][0]) for named in calls[::2]] == [IDS.shape[1] + step for step in range(4)]
    model.generate(IDS, attention_mask=LEFT.long(), **given)
    assert len(calls) == 2 * 4
    mask = role.Mask((1, 1, 2, 5), filled=torch.tensor([3], dtype=torch.int32))
    assert mask.dense(torch.device("cpu"))[0, 0].int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    q, k, v = (torch.randn(1, n, 2, 8) for n in (2, 5, 5))
    named = {"scale": None, "softcap": 0.0, "sink": None}
    torch.testing.assert_close(
        role.over_static_cache(q.requires_grad_(), k, v, mask, named).detach(),
        role.over_static_cache(q.detach(), k, v, mask, named),
    )
    assert len(calls) == 2 * 4 + 1


def test_masks_are_made_only_where_arguments_do_not_say_them(monkeypatch):
    """None for plain, sliding, padded and packed batches; a tensor for a mask function of somebody's own."""
    made = []
    theirs = masking_utils.sdpa_mask
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **given: made.append(given) or theirs(**given))
    model = eager("Gemma3")
    patch(model, only="attention")
    for batch in BATCHES:
        results(model, batch)
    assert not made
    given = {
        "config": model.config, "inputs_embeds": torch.zeros(2, 9, 32), "attention_mask": None, "past_key_values": None,
    }  # fmt: skip
    mask = masking_utils.create_causal_mask(**given, or_mask_function=lambda b, h, q, k: k == 8)
    assert len(made) == 1 and mask.shape == (2, 1, 9, 9) and mask[0, 0, 0].tolist() == [True, *[False] * 7, True]
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # without packing, positions may lie anyhow
        within = masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, PACKED)
        sizes = {"batch_size": 2, "q_length": 9, "kv_length": 9, "q_offset": 0, "kv_offset": 0, "device": "cpu"}
        mask = role.mask_for(role.kinds(), **sizes, mask_function=within)
        assert torch.equal(mask[:, 0], PACKED[:, None, :] <= PACKED[:, :, None])
    mask = masking_utils.create_causal_mask(**given)
    assert isinstance(mask, role.Mask) and masking_utils.create_causal_mask(**{**given, "attention_mask": mask}) is mask
    blocks = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1, -1]] * 2)
    dense = masking_utils.create_causal_mask(**given, block_sequence_ids=blocks)
    assert dense.dtype == torch.bool and dense[0, 0, 1, 2] and not dense[0, 0, 0, 1]
    model.config.is_causal = False  # decoders may be asked to look both ways
    assert masking_utils.create_causal_mask(**given).all()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_is_what_transformers_makes(window, packed):
    """As a tensor, for calls that are left to the model's own code."""
    config = transformers.LlamaConfig(sliding_window=window)
    given = {"inputs_embeds": torch.zeros(2, 9, 4), "past_key_values": None}
    given |= {"attention_mask": None if packed else RIGHT, "position_ids": PACKED if packed else None}
    create = masking_utils.create_causal_mask if window is None else masking_utils.create_sliding_window_causal_mask
    config._attn_implementation = "eager"
    expected = create(config=config, **given) == 0
    role.register()
    config._attn_implementation = role.NAME
    mask = create(config=config, **given)
    assert isinstance(mask, role.Mask) and torch.equal(mask.dense(torch.device("cpu")), expected)
    if packed:  # as many marks as there may be sequences
        assert mask.marks.dtype == torch.int32 and mask.marks.unique().tolist() == [0, 3, 5, 9, 16, 18]


def test_a_mask_of_the_last_queries():
    """For layers that are asked for the last ones alone: it is that part of the whole mask, and nothing else is."""
    there, cpu = LEFT[:, :5], torch.device("cpu")
    sequence = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    for given in ({"window": 2}, {"padding": there}, {"filled": torch.tensor([4, 3])}, {"sequence": sequence}):
        mask = role.Mask((2, 1, 5, 5), **given)
        for last in (0, 1, 3):
            made, whole = mask[:, :, slice(-last, None), :], mask.dense(cpu)[:, :, slice(-last, None), :]
            assert torch.equal(made if isinstance(made, torch.Tensor) else made.dense(cpu), whole)
        assert mask[0] == (2, 1, 5, 5) and len(mask[1:]) == 5
        for at in ((..., slice(2)), (*[slice(None)] * 3, slice(2)), (slice(None), slice(None), slice(2), slice(None))):
            with pytest.raises(TypeError, match="'Mask' object has no elements"):
                mask[at]


def test_layers_that_take_keys_of_others():
    """Gemma 4 has such, and asks them for the last queries alone; our attention is chosen by its name."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = small.build("gemma4_text", layer_types=kinds, num_kv_shared_layers=2).eval()
    role.register()

    def logits(name: str) -> dict[str, torch.Tensor]:
        model.set_attn_implementation(name)
        with torch.no_grad():
            batches = ({}, {"attention_mask": LEFT.long()}, {"position_ids": PACKED, "use_cache": False})
            return {str(i): model(IDS, logits_to_keep=2, **given).logits for i, given in enumerate(batches)}

    assert error(logits(role.NAME), logits("eager")) < FP32


def test_marks_of_the_collator_are_taken(monkeypatch):
    model, seen = eager("Llama"), []
    marks = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    before = copied(results(model, "packed alone"))
    patch(model, only="attention")
    ours = role.op.function
    monkeypatch.setattr(role.op, "function", lambda *a, **n: seen.append(n["cu_seqlens_q"]) or ours(*a, **n))
    model.zero_grad()
    named = {"cu_seq_lens_q": marks, "cu_seq_lens_k": marks, "max_length_q": 4, "max_length_k": 4}
    out = model(input_ids=IDS[:1], labels=LABELS[:1], position_ids=PACKED[:1], use_cache=False, **named)
    torch.testing.assert_close(out.loss, before["loss"], rtol=FP32, atol=0)
    assert all(m is marks for m in seen) and len(seen) == 2


@pytest.mark.parametrize(("length", "keys"), [(5, 5), (1, 5), (3, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_no_mask_means_what_it_does_in_transformers(length, keys, causal):
    """Causal from the first key on, as in a static cache that is being filled, but for a single query."""
    layer = build("Llama").model.layers[0].self_attn
    layer.is_causal = causal
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, generator=draw) for h, n in ((4, length), (2, keys), (2, keys)))
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, q, k, v, None, scaling=0.3)
    found, _ = role.attend(layer, q, k, v, None, scaling=0.3)
    torch.testing.assert_close(found, expected)
    if causal and length > 1:
        torch.testing.assert_close(role.attend(layer, q, k, v, None, scaling=0.3, sliding_window=5)[0], expected)
        assert not torch.equal(role.attend(layer, q, k, v, None, scaling=0.3, sliding_window=2)[0], expected)


def test_what_is_left_to_the_model(monkeypatch):
    """Weights that are asked for: with a reason in the report, and the model's own results."""
    model = eager("Gemma2").eval()
    expected = model(IDS, output_attentions=True)
    report = patch(model, only="attention")
    found = model(IDS, output_attentions=True)
    torch.testing.assert_close(found.attentions, expected.attentions)
    assert torch.equal(found.logits, expected.logits) and not report.calls()
    model(IDS, output_attentions=True)
    rows = [(s.module, s.reason) for s in report.skipped]
    reason = "some calls: output_attentions: its weights are asked for"
    assert rows == [(f"model.layers.{i}.self_attn", reason) for i in range(2)]
    assert "2 skipped: some calls: output_attentions" in str(report)
    layer = eager("Llama").model.layers[0].self_attn
    with pytest.raises(ValueError, match="paged caches are not supported"):
        role.attend(layer, *[torch.zeros(1, 4, 3, 8)] * 3, None, cache=object())


@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("batch", ["plain", "left"])
def test_dropout_is_left_to_the_model(own, batch, monkeypatch):
    """To the implementation that it had, in training alone, with the same random numbers."""
    model = build("Llama", attention_dropout=0.3)
    model.set_attn_implementation(own)
    torch.manual_seed(7)
    expected = copied(results(model, batch))
    quiet = model.eval()(IDS).logits
    report = patch(model.train(), only="attention")
    assert {s.reason for s in report.skipped} == {"dropout in training: that is left to its own code"}
    module, name = ("sdpa_attention", "sdpa_attention_forward") if own == "sdpa" else (None, "eager_attention_forward")
    where = getattr(transformers.integrations, module) if module else inspect.getmodule(LlamaAttention)
    masks, theirs = [], getattr(where, name)
    monkeypatch.setattr(where, name, lambda *a, **n: masks.append(a[4]) or theirs(*a, **n))
    torch.manual_seed(7)
    assert error(copied(results(model, batch)), expected) < FP32 and not report.calls() and len(masks) == 2
    assert (masks[0] is None) == (own == "sdpa" and batch == "plain")
    assert {s.reason for s in report.skipped} >= {"some calls: dropout in training"}
    assert model(IDS, output_attentions=True).attentions[0] is not None  # by eager attention, whatever it had
    assert error({"logits": model.eval()(IDS).logits}, {"logits": quiet}) < FP32 and report.calls() == {"attention": 2}


def test_only_one_instance_changes():
    """Two models with one config; what is set in it while one of them is patched stays."""
    model = eager("Llama")
    other = type(model)(model.config)
    config, state = model.config, dict(model.config.__dict__)
    report = patch(model, attention=True)
    assert "attention" in {r.role for r in report.replaced}
    assert other.config is config and config._attn_implementation == "eager" == other.model.config._attn_implementation
    held = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    assert held == {role.NAME} and config.__dict__ == state and type(config) is transformers.LlamaConfig
    assert isinstance(model.config, transformers.LlamaConfig) and model.config.to_dict() == config.to_dict()
    assert model.config.to_diff_dict() == config.to_diff_dict()
    assert type(transformers.AutoModelForCausalLM.from_config(model.config)) is type(model)
    step(other)
    assert not report.calls()
    model.config.use_cache = False
    assert config.use_cache is False
    model.set_attn_implementation("sdpa")  # whoever asks for another is given it
    step(model)
    assert "attention" not in report.calls()
    model.set_attn_implementation("eager")
    step(model)
    assert report.calls()["attention"] == 2
    unpatch(model)
    assert all(m.config is config for m in model.modules() if hasattr(m, "config")) and config.use_cache is False
    assert "attention" not in {r.role for r in patch(model).replaced}  # it is asked for, or left out


def test_copies_and_gradient_checkpointing():
    model = eager("GptOss")
    before = copied(results(model, "right"))
    report = patch(model, attention=True, loss="cross_entropy")
    model.gradient_checkpointing_enable()
    other = copy.deepcopy(model)
    assert error(copied(results(model, "right")), before) < FP32 and report.calls()["attention"] == 4
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert error(copied(results(other, "right")), before) < FP32 and report.calls()["attention"] == 8
    unpatch(other)
    assert error(copied(results(other, "right")), before) == 0
    assert model.config._attn_implementation == role.NAME != other.config._attn_implementation


def test_compiled_whole():
    """The full layer by arguments, the sliding one by a tensor."""
    model = eager("Gemma2")
    before = copied(results(model, "left"))
    report = patch(model, only="attention")
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, given: list) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, given)

    named = {"labels": labels_for(LEFT), "attention_mask": LEFT.long(), "use_cache": False}
    model.zero_grad()
    out = torch.compile(model, backend=backend, fullgraph=True)(IDS, **named)
    out.loss.backward()
    found = {"loss": out.loss, "logits": out.logits[LEFT], **{n: p.grad for n, p in model.named_parameters()}}
    assert error(copied(found), before) < FP32 and not report.calls()
    (nodes,) = graphs
    assert nodes.count("tilewright.attention.default") == 2


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_under_autocast():
    model = eager("Qwen3")
    truth = copied(results(model, "left"))
    with torch.autocast("cpu", torch.bfloat16):
        plain = copied(results(model, "left"))
        report = patch(model, only="attention")
        ours = copied(results(model, "left"))
    assert report.calls() == {"attention": 2} and 0 < error(ours, truth) < 1.2 * error(plain, truth)


class Other(LlamaAttention):
    """Keys that are values too, by the eager attention that this file's globals name."""

    more: dict = {}

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k = (linear(hidden_states).view(shape).transpose(1, 2) for linear in (self.q_proj, self.k_proj))
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        o, _ = function(self, q, k, k, attention_mask, scaling=self.scaling, dropout=0.0, **self.more, **kwargs)
        return self.o_proj(o.reshape(*hidden_states.shape)), None


def bent(module, query, *given, **named):
    return LLAMAS(module, query.tanh(), *given, **named)


LLAMAS = eager_attention_forward


def test_layers_that_compute_something_else(monkeypatch):
    """One wrong layer, and none is replaced: they share how masks are made."""
    monkeypatch.setitem(globals(), "eager_attention_forward", bent)
    model = eager("Llama")
    own = model.model.layers[1].self_attn
    own.__class__ = Other
    with pytest.raises(ValueError, match=r"not attention: results differ by .* \(at model.layers.1.self_attn\)"):
        patch(model, only="attention")
    assert model.config._attn_implementation == "eager"
    report = patch(model, attention=True, strict=False)
    assert {(s.role, s.module) for s in report.skipped} == {
        ("attention", f"model.layers.{i}.self_attn") for i in range(2)
    }
    unpatch(model)
    monkeypatch.setitem(globals(), "eager_attention_forward", LLAMAS)
    assert len(patch(model, only="attention").replaced) == 2
    unpatch(model)
    own.more = {"position_bias": torch.zeros(1)}
    report = patch(model, attention=True)
    assert {s.reason for s in report.skipped} == {"it wants more: a bias by position (at model.layers.1.self_attn)"}
    unpatch(model)
    own.more, own.is_causal = {}, False
    report = patch(model, attention=True)
    assert {s.reason for s in report.skipped} == {"it is not causal (at model.layers.1.self_attn)"}
    unpatch(model)
    own.is_causal, own.forward = True, lambda *given, **named: None
    report = patch(model, attention=True, strict=False)
    assert "its forward was replaced before (at model.layers.1.self_attn)" in {s.reason for s in report.skipped}
