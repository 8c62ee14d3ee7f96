"""Nemotron: Arcee's ungated MLP, with LayerNorms that multiply by 1 + weight."""

from dataclasses import replace

from perpend.models.families.arcee import ARCEE as _ARCEE

NEMOTRON = replace(_ARCEE, name="nemotron", model_types=("nemotron",), norm_offset=1.0)
