"""Answer for an attention kernel: a block run again with another aggregate, without its q·k.

    with answering(model, site, output):         # o [B, T, H, d_v]
        block(...)                               # everything after the kernel, on this o

Layers outside transformers' attention functions run their kernel, and its result is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from perpend.models.attention.attach import attach
from perpend.models.attention.call import AttentionSite
from perpend.models.attention.sites import implementation, module_of, routing


@contextmanager
def answering(model: nn.Module, site: AttentionSite, output: Tensor) -> Iterator[None]:
    """While inside, the attention of one layer returns `output` [B, T, H, d_v] whatever it is asked."""
    module = module_of(model, site)
    route = routing(type(module)) if site.path == "registry" else None
    own = implementation(module) if route else ""
    if route is None or (own == "eager" and route.eager is None):
        with attach(model, lambda call, before: output, layers=[site.index]):
            yield
        return
    names: Any = route.names if own == "eager" else route.interface
    key = route.eager if own == "eager" else own
    before = names[key]
    overridden = own == "eager" or key in names._local_mapping

    def answer(asked: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (output, None) if asked is module else before(asked, *args, **kwargs)

    names[key] = answer
    try:
        yield
    finally:
        if overridden:
            names[key] = before
        else:
            del names[key]
