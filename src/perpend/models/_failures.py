"""What a failure inside transformers, the hub or torch means for the user who asked for a model."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from perpend.errors import InputError, PerpendError
from perpend.models._source import Source


@contextmanager
def explained(source: Source) -> Iterator[None]:
    """Failures of the libraries below, as errors that say what to do."""
    try:
        yield
    except PerpendError:
        raise
    except ImportError as error:
        raise InputError(f"{source.label} needs a package that is not here: {_brief(error)}") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise PerpendError(_no_memory(source)) from error
    except (OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, struct.error) as error:
        text = str(error)
        if "out of memory" in text or "can't allocate memory" in text:
            raise PerpendError(_no_memory(source)) from error
        if "trust_remote_code" in text or "contains custom code" in text:
            raise InputError(
                f"{source.label} comes with Python code of its own, which perpend does not run unless asked: "
                "trust_remote_code=True, only if you trust its authors"
            ) from error
        raise InputError(
            _hub_trouble(source, error) or f"{source.label} cannot be loaded: {_brief(error)}"
        ) from error
    except Exception as error:
        if type(error).__name__ in (
            "SafetensorError",
            "StrictDataclassFieldValidationError",
            "HfHubHTTPError",
        ):
            raise InputError(
                _hub_trouble(source, error)
                or f"{source.label} is damaged: {_brief(error)}; copy or download it again"
            ) from error
        raise


def _no_memory(source: Source) -> str:
    return (
        f"{source.label} does not fit in memory; try dtype=bfloat16, another device, or device=auto to "
        "spread it over all devices"
    )


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(error).__name__


def _hub_trouble(source: Source, error: BaseException) -> str | None:
    """What a failed look-up on the hub means, from the chain of its causes; None for other failures."""
    if source.kind != "hub":
        return None
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    kinds = {type(e).__name__ for e in chain}
    url = f"https://huggingface.co/{source.place}"
    text = " ".join(str(e) for e in chain)
    if "GatedRepoError" in kinds:
        return f"{source.place} is gated: accept its licence at {url}, then 'hf auth login' (or set HF_TOKEN)"
    if "RevisionNotFoundError" in kinds:
        return f"{source.place} has no revision {source.revision!r}; its branches and tags: {url}/tree/main"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"there is no model {source.place} on the hub, or it is private (then 'hf auth login'); 'perpend "
            "models' lists the names perpend knows"
        )
    if kinds & {
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
        "ConnectError",
        "ConnectTimeout",
        "ConnectionError",
    }:
        return (
            f"{source.place} is not on this machine and the model hub cannot be reached; where there is a "
            f"network run 'hf download {source.place}' and give the folder, set HF_ENDPOINT for a mirror, or "
            "use a model that needs no hub: leave MODEL out"
        )
    if "does not appear to have a file named" in text and "safetensors" in text:
        at = f" at {source.revision}" if source.revision else ""
        return (
            f"{source.place}{at} has no safetensors weights, and perpend opens no pickle, because a pickle "
            "can run any program; try a revision that has them (often refs/pr/1), or convert it: "
            f"https://huggingface.co/spaces/safetensors/convert ({url}/tree/main)"
        )
    return None
