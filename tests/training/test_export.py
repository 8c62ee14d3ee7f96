"""Trained models outside the trainer: as plain Llamas in transformers, as variants through perpend.load."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import perpend
from perpend.compression import compress
from perpend.compression.save import save
from perpend.errors import InputError
from perpend.models.prune import save_pruned
from perpend.models.smaller import without
from perpend.models.stream import contributions
from perpend.models.weights import weights_hash
from perpend.training.export import apply_if_variant, copied, export
from perpend.training.model import build
from perpend.training.variants import VARIANTS, apply_variant


def trained(name: str, *, tied: bool = True):
    """A decoder with weights of a size that a trained one has, gates included."""
    model = apply_variant(build("tiny", seed=4, tied=tied), name).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def tokens(batch: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(0))


def llama(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_plain_transformers_loads_the_baseline_with_its_logits(tmp_path, tied):
    model = trained("baseline", tied=tied)
    export(model.state_dict(), model.shape, "baseline", tmp_path / "m")
    with torch.no_grad():
        torch.testing.assert_close(
            llama(tmp_path / "m")(tokens()).logits, model(tokens()), rtol=1e-4, atol=1e-5
        )
    assert not (tmp_path / "m/perpend_variant.json").exists()


@pytest.mark.parametrize("name", VARIANTS)
def test_perpend_loads_every_variant_with_its_logits(tmp_path, name):
    model = trained(name)
    export(model.state_dict(), model.shape, name, tmp_path / "m")
    loaded, _ = perpend.load(str(tmp_path / "m"))
    with torch.no_grad():
        wanted, got = model(tokens()), loaded(tokens()).logits
        plain = llama(tmp_path / "m")(tokens()).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)
    if name != "baseline":
        assert loaded.perpend_variant == name
        assert (plain - wanted).abs().max() > 1e-2, "the variant changes nothing: nothing is tested"


@pytest.mark.parametrize("name", ["residual", "value-full", "value-gate-head"])
def test_a_variant_is_told_apart_copied_and_saved_as_what_it_is(tmp_path, name):
    model = trained(name)
    export(model.state_dict(), model.shape, name, tmp_path / "m")
    loaded, _ = perpend.load(str(tmp_path / "m"))
    own = weights_hash(loaded)
    assert own != weights_hash(llama(tmp_path / "m")), "the same weights in another form have the same hash"
    if loaded.perpend_variant_gates:
        gate = next(iter(loaded.perpend_variant_gates.values()))
        gate.add_(1.0)
        assert weights_hash(loaded) != own
        gate.sub_(1.0)

    def logits(of):
        with torch.no_grad():
            return of(tokens()).logits

    before = logits(loaded)
    other = copied(loaded)
    assert torch.equal(logits(other), before)
    compress(other, None, "rtn:bits=8,group=0")
    rounded = logits(other)
    assert not torch.equal(rounded, before)
    assert torch.equal(logits(loaded), before), "the copy and the model share something"
    record = save(other, None, tmp_path / "smaller", {})
    again, _ = perpend.load(str(tmp_path / "smaller"))
    assert (again.perpend_variant, weights_hash(again)) == (name, record["weights_sha256"])
    assert torch.equal(logits(again), rounded)
    report = save_pruned(loaded, None, [(0, 0)], tmp_path / "pruned", tokens())
    assert report["error_after_loading"] < 1e-6
    with pytest.raises(InputError, match="cannot be saved without some of its parts"):
        without(loaded, [(0, "block")])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["residual", "value-full", "value-exclude-self", "value-gate-head"])
def test_cached_decoding_is_prefill(tmp_path, name):
    model = trained(name)
    export(model.state_dict(), model.shape, name, tmp_path / "m")
    loaded, _ = perpend.load(str(tmp_path / "m"))
    ids = tokens(1, 12)
    with torch.no_grad():
        whole = loaded(ids).logits
        first = loaded(ids[:, :8], use_cache=True)
        steps, cache = [first.logits], first.past_key_values
        for t in range(8, 12):
            steps.append(loaded(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["residual", "value-full", "value-exclude-self", "value-gate"])
def test_edits_compose_with_the_variant_and_leave_it_in_place(tmp_path, name):
    model = trained(name)
    export(model.state_dict(), model.shape, name, tmp_path / "m")
    loaded, _ = perpend.load(str(tmp_path / "m"))
    ids = tokens()
    site = "residual.mlp" if name == "residual" else "value.full"
    with torch.no_grad():
        before = loaded(ids).logits
        with perpend.edit(loaded, site=site, parallel=1.0, perpendicular=1.0):
            assert torch.equal(loaded(ids).logits, before)
        with perpend.edit(loaded, site=site, parallel=0.0):
            again = loaded(ids).logits
        with perpend.edit(loaded, site="value.full", perpendicular=0.0):
            assert (loaded(ids).logits - before).abs().max() > 1e-2
        assert torch.equal(loaded(ids).logits, before)
    if name in ("residual", "value-full"):  # what the variant took out already cannot be taken out again
        torch.testing.assert_close(again, before, rtol=1e-4, atol=1e-5)
    else:
        assert (again - before).abs().max() > 1e-3


def test_surveys_see_the_variant_as_the_model(tmp_path):
    """What the residual variant adds has nothing along the stream: the survey of updates finds alpha = 0."""
    seen = {}
    for name in ("baseline", "residual"):
        model = trained(name)
        export(model.state_dict(), model.shape, name, tmp_path / name)
        loaded, _ = perpend.load(str(tmp_path / name))
        parts = []

        def look(contribution, parts=parts):
            alpha = (contribution.update * contribution.reference).sum(-1)
            parts.append((alpha / contribution.reference.square().sum(-1)).abs().max())

        with contributions(loaded, look, parts=("attn", "mlp")), torch.no_grad():
            loaded(tokens())
        seen[name] = float(torch.stack(parts).max())
    assert seen["residual"] < 1e-5
    assert seen["baseline"] > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["baseline", "residual", "value-exclude-self"])
def test_verify_proves_a_loaded_variant_and_skips_only_what_the_variant_changes(tmp_path, name):
    model = trained(name)
    export(model.state_dict(), model.shape, name, tmp_path / "m")
    rows = perpend.verify(*perpend.load(str(tmp_path / "m"))).rows
    apart = {"residual": {"aggregate to contribution"}, "value-exclude-self": {"self message apart"}}
    assert {row.name for row in rows if row.status != "ok"} == apart.get(name, set())


def test_an_unknown_variant_is_refused_and_an_interrupted_export_leaves_no_folder(tmp_path, monkeypatch):
    model = trained("value-full")
    folder = export(model.state_dict(), model.shape, "value-full", tmp_path / "m")
    (folder / "perpend_variant.json").write_text(json.dumps({"version": 1, "variant": "value-fulll"}))
    with pytest.raises(InputError, match="did you mean 'value-full'"):
        apply_if_variant(llama(folder), folder)

    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("perpend.training.export.write_atomically", broken)
    with pytest.raises(KeyboardInterrupt):
        export(model.state_dict(), model.shape, "value-full", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    shorter = {k: v for k, v in model.state_dict().items() if k != "norm.weight"}
    with pytest.raises(InputError, match=r"model\.norm\.weight"):
        export(shorter, model.shape, "baseline", tmp_path / "none")


def test_no_warning_reaches_the_user(tmp_path):
    model = trained("value-gate")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(model.state_dict(), model.shape, "value-gate", tmp_path / "m")
