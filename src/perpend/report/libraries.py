"""The code that draws the charts: Vega, Vega-Lite and Vega-Embed in one script, by vl-convert.

Bundling takes seconds, so the bundle is kept in perpend's cache, with its checksum in its first line; a cache
that cannot be written, or whose content does not match, costs the seconds again and nothing else.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from perpend.errors import PerpendError


@lru_cache(1)
def libraries() -> str:
    """The script, in the version that altair writes charts for; nothing in it ends a script element."""
    from importlib import metadata

    import altair as alt
    import vl_convert

    from perpend.models._wheel import cache_root
    from perpend.runs.files import write_atomically

    wanted = re.sub(r"^v?(\d+\.\d+).*", r"\1", alt.SCHEMA_VERSION)
    offered = vl_convert.get_vegalite_versions()
    version = wanted if wanted in offered else offered[-1]
    kept = cache_root() / f"vega-{metadata.version('vl-convert-python')}-{version}.js"
    try:
        mark, _, code = kept.read_text(encoding="utf-8").partition("\n")
        if mark == _mark(code):
            return code
    except (OSError, UnicodeDecodeError):
        pass  # no cache yet, or no longer readable: made below
    # The newest version is the bundle's default, which is ready-made inside vl-convert.
    code = vl_convert.javascript_bundle(vl_version=None if version == offered[-1] else version)
    code = code.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, f"{_mark(code)}\n{code}")
    except (OSError, PerpendError):
        pass  # a home that cannot be written is no obstacle to a report
    return code


def _mark(code: str) -> str:
    return f"// sha256 {hashlib.sha256(code.encode()).hexdigest()}"
