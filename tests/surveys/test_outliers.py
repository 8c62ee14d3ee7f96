"""High-norm tokens as the sink, against eager rows image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from perpend import survey_attention
from perpend.errors import InputError
from perpend.geometry import content_dispersion, split_entropy
from perpend.models.roles import find_roles
from perpend.surveys.outliers import find_outliers, survey_outliers


def test_row_statistics_are_those_of_eager_rows_with_each_images_own_sink() -> None:
    model = tiny.build("dinov2_registers")
    pixels = tiny.pixels(5)
    positions = [(4,), (3, 9), (), (11, 5, 7), (18,)]
    found = survey_outliers(model, pixels, positions, batch=2, block=2)
    assert (found.images, found.left_out) == (5, 1)
    assert found.rows.shape == (3, 3)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = torch.stack(model(pixels, output_attentions=True).attentions).double()  # [L, n, H, T, T]
    sinks, totals, spreads = [], [], []
    for image, places in enumerate(positions):
        if places:
            parts = split_entropy(rows[:, image], list(places))
            sinks.append(parts.sink_mass.mean(-1))
            totals.append(parts.total.mean(-1))
            spreads.append(content_dispersion(rows[:, image], list(places)).mean(-1))
    statistics = found.statistics
    np.testing.assert_allclose(statistics["sink_mass"], torch.stack(sinks).mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics["total"], torch.stack(totals).mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics["dispersion"], torch.stack(spreads).mean(0), rtol=1e-4)
    table = found.per_layer()
    assert table["rows"].tolist() == [4 * 19] * 3
    for means in found.resampled(3):
        assert means["sink_mass"].shape == (3, 4)


def test_with_the_class_token_in_every_image_it_is_the_ordinary_survey() -> None:
    model, pixels = tiny.tiny("dinov2"), tiny.pixels(4)
    found = survey_outliers(model, pixels, [(0,)] * 4).per_layer()
    expected = survey_attention(model, pixels, sink="cls").per_layer()
    np.testing.assert_allclose(found["sink_mass"], expected["row_mass"], rtol=1e-6)
    np.testing.assert_allclose(found["content"], expected["content"], rtol=1e-6)


def test_a_token_made_large_is_found_and_no_other() -> None:
    model = tiny.build("dinov2")
    pixels = tiny.pixels(3)
    roles = find_roles(model, pixels)
    assert find_outliers(model, pixels, roles, factor=50.0).count == 0

    def enlarge(module, args, output):
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        hidden[:, 0] *= 100  # the class token is no candidate
        hidden[1, 7] *= 30
        hidden[2, [4, 9]] *= 30
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    from perpend.models.layout import blocks

    handle = blocks(model)[-1].module.register_forward_hook(enlarge)
    found = find_outliers(model, pixels, roles, factor=10.0, batch=3)
    handle.remove()
    assert found.positions == ((), (7,), (4, 9))
    assert found.count == 3
    table = found.table()
    assert table["share_above"].iloc[-1] == pytest.approx(3 / 48)
    assert table["share_above"].iloc[0] == 0
    assert table["largest_over_median"].iloc[-1] > 10


def test_what_has_no_outlier_is_told() -> None:
    model, pixels = tiny.tiny("dinov2"), tiny.pixels(2)
    with pytest.raises(InputError, match="lower the factor"):
        survey_outliers(model, pixels, [(), ()])
    with pytest.raises(InputError, match="1 lists"):
        survey_outliers(model, pixels, [(1,)])
    with pytest.raises(InputError, match="over 1"):
        find_outliers(model, pixels, find_roles(model, pixels), factor=1.0)
