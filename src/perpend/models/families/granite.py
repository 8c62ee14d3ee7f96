"""Granite: Llama's block with both contributions multiplied by `residual_multiplier`."""

from dataclasses import replace

from perpend.models.families.llama import LLAMA as _LLAMA

GRANITE = replace(_LLAMA, name="granite", model_types=("granite",), multiplier="residual_multiplier")
