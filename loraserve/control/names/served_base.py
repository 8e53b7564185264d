"""The base model that this server has, and which versions were made for it.

Several servers with different models may share a data directory: each serves what fits its own.
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

    Not over embedding, experts and routers: what was recorded of a base before they had adapters goes on being true of
    it. Of a base with the same linears and others of those that is found out when an adapter is loaded.
    """
    modules = (module for group in layout.groups for module in group if module.is_linear)
    shapes = sorted((module.name, module.in_features, module.out_features) for module in modules)
    return hashlib.sha256(msgspec.json.encode(shapes)).hexdigest()


def fits(version: VersionRecord, base: BaseRecord) -> bool:
    """One whose base was not recorded may fit: that is found out when it is loaded."""
    return not version.bases or any(known.fingerprint == base.fingerprint for known in version.bases)


def check_fits(doc: AdapterDoc, version: VersionRecord, base: BaseRecord) -> None:
    """Raises `ServingError` (409)."""
    if fits(version, base):
        return
    made_for = " and ".join(_shown(known) for known in version.bases)
    message = (
        f"Version {version.n} of '{doc.name}' was made for the base model {made_for}; this server has {_shown(base)}. "
        "Ask a server that has that model, or upload the adapter here."
    )
    raise ServingError(ErrorCode.ADAPTER_OTHER_BASE, message, headers=NO_RETRY)


def does_not_fit(base_name: str, reason: str) -> ServingError:
    """For a content whose base was not recorded."""
    message = f"The adapter does not fit this server's base model '{base_name}': {reason.rstrip('.')}."
    return ServingError(ErrorCode.ADAPTER_OTHER_BASE, message, headers=NO_RETRY)


def _shown(base: BaseRecord) -> str:
    """Two models may be called the same."""
    return f"'{base.name}' ({base.fingerprint[:SHOWN_CHARACTERS]})"
