"""The base model that this server has, and which versions were made for it.

Several servers with different models may share a data directory: each serves the versions that fit its model.
"""

import hashlib

import msgspec
from loraserve_adapters.base_layout import BaseLayout

from loraserve.serving.errors import NO_RETRY, ErrorCode, ServingError
from loraserve.store.records import AdapterDoc, BaseRecord, VersionRecord

SHOWN_CHARACTERS = 8


def served_base(name: str, layout: BaseLayout) -> BaseRecord:
    return BaseRecord(name=name, fingerprint=linears_fingerprint(layout))


def linears_fingerprint(layout: BaseLayout) -> str:
    """Hex sha256 over names and shapes of all linears: what an adapter must match, whatever the dtype and grouping.

    Excludes the embedding, experts and routers, so that fingerprints recorded before those could have adapters remain
    valid. A base with the same linears but another embedding, experts or routers is detected when an adapter is loaded.
    """
    modules = (module for group in layout.groups for module in group if module.is_linear)
    shapes = sorted((module.name, module.in_features, module.out_features) for module in modules)
    return hashlib.sha256(msgspec.json.encode(shapes)).hexdigest()


def fits(version: VersionRecord, base: BaseRecord) -> bool:
    """A version whose base was not recorded may fit: loading it decides."""
    return not version.bases or any(known.fingerprint == base.fingerprint for known in version.bases)


def check_fits(doc: AdapterDoc, version: VersionRecord, base: BaseRecord) -> None:
    """Raises `ServingError` (409)."""
    if fits(version, base):
        return
    made_for = " and ".join(_shown(known) for known in version.bases)
    message = (
        f"Version {version.n} of '{doc.name}' was made for the base model {made_for}; this server has {_shown(base)}. "
        "Use a server that has that model, or upload the adapter here."
    )
    raise ServingError(ErrorCode.ADAPTER_OTHER_BASE, message, headers=NO_RETRY)


def does_not_fit(base_name: str, reason: str) -> ServingError:
    """For content whose base was not recorded."""
    message = f"The adapter does not fit this server's base model '{base_name}': {reason.rstrip('.')}."
    return ServingError(ErrorCode.ADAPTER_OTHER_BASE, message, headers=NO_RETRY)


def _shown(base: BaseRecord) -> str:
    """With a part of the fingerprint, because two models may have the same name."""
    return f"'{base.name}' ({base.fingerprint[:SHOWN_CHARACTERS]})"
