"""What of a hub model lies in the hub's cache on this disk, and taking one revision out of it again.

before = cached("pythia-160m")                        # commits that are there already
load("pythia-160m", revision="step512")
forget("pythia-160m", "step512", keep=before)         # bytes freed
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from perpend.models.catalog import find


def cached(model: str) -> set[str]:
    """Commits of a hub model (short name or owner/name) that are in the cache."""
    held = _repository(model)
    return {revision.commit_hash for revision in held.revisions} if held is not None else set()


def forget(model: str, revision: str, *, keep: Collection[str] = ()) -> int:
    """Takes one revision's files out of the cache, and returns the bytes that this freed.

    Commits in `keep` are left alone, as are files that another revision in the cache shares; 0 where nothing
    of the revision is there. The next use downloads it again.
    """
    held = _repository(model)
    if held is None:
        return 0
    chosen = [
        each.commit_hash
        for each in held.revisions
        if (revision in each.refs or each.commit_hash == revision) and each.commit_hash not in keep
    ]
    if not chosen:
        return 0
    from huggingface_hub import scan_cache_dir

    plan = scan_cache_dir().delete_revisions(*chosen)
    plan.execute()
    return int(plan.expected_freed_size)


def _repository(model: str) -> Any:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    entry = find(model)
    name = entry.hub if entry is not None else model
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return None
    return next((each for each in repositories if each.repo_type == "model" and each.repo_id == name), None)
