"""The decoder's variants: their equation, their gradient, their causality, their initial values."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from perpend.errors import InputError
from perpend.training.attention import causal_attention
from perpend.training.model import SIZES, build, shape
from perpend.training.variants import VARIANTS, apply_variant


def variant(name: str, *, double: bool = False, perturb_gates: bool = True):
    model = apply_variant(build("tiny", seed=3), name)
    model = model.double() if double else model
    if perturb_gates:
        generator = torch.Generator().manual_seed(5)
        for key, parameter in model.named_parameters():
            if ".scale." in key:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def tokens(batch: int = 2, length: int = 24, vocab: int = 256) -> torch.Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(0))


def eager_logits(model, name: str, ids: torch.Tensor) -> torch.Tensor:
    """The same network written out with T×T softmax rows, in the order of the definitions."""
    s = model.shape
    z = model.embedding(ids)
    for block in model.blocks:
        x = block.attention_norm(z)
        attention = block.attention
        heads = attention.heads
        q, k = model.rotary(heads(attention.query(x))), model.rotary(heads(attention.key(x)))
        k, v = (y.repeat_interleave(s.heads // s.kv_heads, 1) for y in (k, heads(attention.value(x))))
        scores = q @ k.mT / math.sqrt(s.head_dim)
        rows = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        o = rows @ v
        d = rows.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * v
        if name.startswith("value"):
            y = o if "full" in name else o - d
            along = (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
            gate = attention.mix.scale
            keep = (
                torch.sigmoid(x @ gate.weight.mT).transpose(1, 2).unsqueeze(-1) if gate is not None else 0.0
            )
            o = (y - along) + keep * along + (0 if "full" in name else d)
        update = attention.out(o.transpose(1, 2).flatten(2))
        for step in ("attention", "mlp"):
            if step == "mlp":
                update = block.mlp(block.mlp_norm(z))
            if name == "residual":
                update = update - (update * z).sum(-1, keepdim=True) / (z * z).sum(-1, keepdim=True) * z
            z = z + update
    return model.unembedding(model.norm(z))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_are_those_of_eager_double_precision(name):
    model = variant(name, double=True)
    ids = tokens()
    weights = torch.randn(2, 24, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = dict(model.named_parameters())

    logits, wanted = model(ids), eager_logits(model, name, ids)
    torch.testing.assert_close(logits, wanted, rtol=1e-11, atol=1e-12)
    got = torch.autograd.grad((logits * weights).sum(), parameters.values())
    expected = torch.autograd.grad((wanted * weights).sum(), parameters.values())
    for key, a, b in zip(parameters, got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")


def test_the_gradient_check_sees_a_self_weight_without_a_gradient(monkeypatch):
    """The trap: A_tt from the kernel's log-sum-exp, used as it comes, gives a wrong gradient in silence."""

    def no_gradient(query, key, value):
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output, causal_attention(query, key, value)[1].detach()

    monkeypatch.setattr("perpend.training.variants.causal_attention", no_gradient)
    with pytest.raises(AssertionError):
        test_logits_and_gradients_are_those_of_eager_double_precision("value-exclude-self")


@pytest.mark.parametrize("name", VARIANTS)
def test_changing_a_token_changes_no_logit_before_it(name):
    model, ids, at = variant(name), tokens(1), 9
    changed = ids.clone()
    changed[:, at] = (changed[:, at] + 1) % 256
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at:], after[:, at:])


def test_the_causality_test_sees_a_projection_over_the_flattened_sequence():
    """x-transformers projects over the whole sequence, which tells token t about its future."""
    model, ids, at = build("tiny", seed=3), tokens(1), 9
    changed = ids.clone()
    changed[:, at] = (changed[:, at] + 1) % 256
    for block in model.blocks:
        plain = block.attention.mix

        class Leaky(type(plain)):
            def forward(self, query, key, value, x):
                o = super().forward(query, key, value, x)
                v = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
                return o - (o * v).sum((-1, -2), keepdim=True) / (v * v).sum((-1, -2), keepdim=True) * v

        block.attention.mix = Leaky()
    with torch.no_grad():
        assert not torch.equal(model(ids)[:, :at], model(changed)[:, :at])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "width"), [(4, 4, 17, 8), (6, 2, 33, 20), (1, 1, 1, 4)]
)
def test_causal_attention_against_rows_written_out(dtype, heads, kv_heads, length, width):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(2, h, length, width, dtype=torch.float64, generator=generator).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    groups = heads // kv_heads
    scores = q @ k.repeat_interleave(groups, 1).mT * width**-0.5
    rows = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    wanted = rows @ v.repeat_interleave(groups, 1), rows.diagonal(dim1=-2, dim2=-1)
    low = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    got = causal_attention(*low)

    exact = F.scaled_dot_product_attention(*low, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got[0], exact, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=1e-15)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}[dtype]
    probes = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in wanted]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(sum((x.double() * p).sum() for x, p in zip(got, probes, strict=True)), low)
    expected = torch.autograd.grad(sum((x * p).sum() for x, p in zip(wanted, probes, strict=True)), (q, k, v))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.abs().max() + 1))


def test_only_the_self_weight_used_still_has_its_gradient():
    q, k, v = (torch.randn(1, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *x: causal_attention(*x)[1], (q, k, v))


@pytest.mark.parametrize("small", [0.0, 1e-30, 1e-14, 1e-6])
def test_gradients_of_very_different_sizes_keep_their_precision(small):
    """The incoming gradient of o vanishing beside that of A_tt in every other row: float32 against double."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, p = (torch.randn(2, h, 9, 8, generator=generator) for h in (4, 2, 2, 4))
    w = torch.randn(2, 4, 9, generator=generator)
    size = torch.where(torch.arange(9) % 2 == 0, small, 1.0).view(1, 1, 9, 1)
    grads = []
    for dtype in (torch.float32, torch.float64):
        x = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        o, a = causal_attention(*x)
        if dtype == torch.float64:  # rows written out
            scores = x[0] @ x[1].repeat_interleave(2, 1).mT * 8**-0.5
            mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
            rows = scores.masked_fill(mask, -torch.inf).softmax(-1)
            o, a = rows @ x[2].repeat_interleave(2, 1), rows.diagonal(dim1=-2, dim2=-1)
        grads.append(torch.autograd.grad((o * p * size).sum() + (a * w).sum(), x))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-6)


def test_a_device_without_the_kernel_is_refused():
    with pytest.raises(InputError, match="not on meta"):
        causal_attention(*(torch.empty(1, 1, 4, 8, device="meta") for _ in range(3)))


def test_value_full_is_the_exclusive_self_attention_of_transformers():
    """transformers' NeoMME module, its learned strength tanh(alpha) turned up to 1."""
    neomme = pytest.importorskip(
        "transformers.models.neomme.modeling_neomme", reason="needs transformers >= 5.24"
    )
    model = variant("value-full")
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
    oracle = neomme.NeoMMEExclusiveSelfAttention(config)
    oracle.alpha.data.fill_(20.0)
    q, k, v = (torch.randn(2, h, 12, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = oracle(o.transpose(1, 2), v).transpose(1, 2)
    torch.testing.assert_close(model.blocks[0].attention.mix(q, k, v, None), wanted, rtol=1e-5, atol=1e-6)


def test_the_first_token_under_each_reading():
    """At t = 0 the aggregate is the own value: full removal leaves nothing, exclude-self leaves it whole."""
    q, k, v = (torch.randn(1, h, 5, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    own = v.repeat_interleave(2, 1)[:, :, 0]
    full = variant("value-full").blocks[0].attention.mix(q, k, v, None)[:, :, 0]
    kept = variant("value-exclude-self").blocks[0].attention.mix(q, k, v, None)[:, :, 0]
    torch.testing.assert_close(full, torch.zeros_like(own), atol=1e-6, rtol=0)
    torch.testing.assert_close(kept, own, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_zero_values_and_a_zero_stream_give_no_nan(name):
    model = variant(name)
    with torch.no_grad():
        model.embedding.weight[7] = 0.0  # z = 0 and so v = 0 at the first block
        for block in model.blocks:
            block.attention.value.weight.zero_()
    logits = model(torch.full((1, 6), 7))
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", [n for n in VARIANTS if "gate" in n])
def test_gates_start_at_one_half_and_count_as_they_say(name):
    model = variant(name, perturb_gates=False)
    gates = [b.attention.mix.scale for b in model.blocks]
    assert {tuple(g.weight.shape) for g in gates} == {(4 if name.endswith("head") else 1, 32)}
    assert torch.all(gates[0](torch.randn(2, 3, 32)) == 0.5)


def test_all_variants_start_from_the_same_weights():
    base = dict(build("tiny", seed=1).named_parameters())
    for name in VARIANTS:
        for key, parameter in apply_variant(build("tiny", seed=1), name).named_parameters():
            assert ".scale." in key or torch.equal(parameter, base[key])
    other = dict(build("tiny", seed=2).named_parameters())
    assert not torch.equal(base["embedding.weight"], other["embedding.weight"])


def test_unknown_names_and_a_second_variant_are_refused():
    with pytest.raises(InputError, match="value-exclude-self"):
        apply_variant(build("tiny"), "value-exclude")
    with pytest.raises(InputError, match="already"):
        apply_variant(apply_variant(build("tiny"), "residual"), "value-full")
    with pytest.raises(InputError, match=r"1\.4B"):
        build("1.4b")
    with pytest.raises(InputError, match="context of 64"):
        build("tiny")(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_come_out(size):
    with torch.device("meta"):
        model = build(size)
    count = sum(p.numel() for p in model.parameters())
    assert count == shape(size).parameters()
    if size[0].isdigit():
        unit = {"M": 1e6, "B": 1e9}[size[-1]]
        assert f"{count / unit:.{len(size.partition('.')[2][:-1])}f}{size[-1]}" == size
    paper = {"1.4B": (2048, 24, 16, 4), "2.7B": (2560, 32, 32, 8)}
    if size in paper:
        s = shape(size)
        assert (s.dim, s.layers, s.heads, s.kv_heads) == paper[size]


def test_the_cuda_kernels_are_called_as_their_schema_says():
    """On fake tensors, so that a machine without CUDA can tell; the numbers need the device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from perpend.training.attention import _CausalAttention

    context = SimpleNamespace()
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    with FakeTensorMode(), torch.no_grad():
        query, key, value = (
            torch.empty(2, h, 32, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2)
        )
        output, own = _CausalAttention.forward(context, query, key, value)
        grads = _CausalAttention.backward(context, output, own)
        assert output.shape == query.shape
        assert own.shape == query.shape[:3]
        assert own.dtype == torch.float32
        assert [g.shape for g in grads] == [x.shape for x in (query, key, value)]
        with pytest.raises(InputError, match="bfloat16"):
            causal_attention(query.float(), key.float(), value.float())
