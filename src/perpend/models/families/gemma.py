"""Gemma (the first): Llama's block with norms that multiply by 1 + weight."""

from dataclasses import replace

from perpend.models.families.llama import LLAMA as _LLAMA

GEMMA = replace(_LLAMA, name="gemma", model_types=("gemma",), norm_offset=1.0)
