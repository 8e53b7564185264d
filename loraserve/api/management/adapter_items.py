"""Converts adapter documents into the items of /v1/adapters."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from loraserve.api.schemas.adapters import AdapterDetail, AdapterItem, LiveVersion, PinItem
from loraserve.api.schemas.aliases import AliasItem, CanaryItem
from loraserve.api.schemas.versions import ClassifierItem, InvocationItem, VersionItem
from loraserve.control.adapters.pins import live_numbers, pin_at
from loraserve.control.adapters.service import AdapterService
from loraserve.control.contents.residency import DigestResidency, Residency
from loraserve.control.documents.adapter_edits import live_version, versions_of
from loraserve.control.tenancy.principal import Principal
from loraserve.control.usage.traffic import AdapterTraffic
from loraserve.store.records import LIVE_ALIAS, AdapterDoc, Alias, ClassifierRecord, Document, Tier, VersionRecord


@dataclass(frozen=True, slots=True)
class AdapterItems:
    adapters: AdapterService
    residency: Residency
    text_of: Callable[[Sequence[int]], str]
    """Decodes token ids of the served base model."""
    chat_templates: Collection[str] = ()
    """Names of the templates that adapters may choose from."""
    clock: Callable[[], float] = time.time

    def item(
        self, viewer: Principal, document: Document[AdapterDoc], traffic: AdapterTraffic | None = None
    ) -> AdapterItem:
        """traffic: its use in the last 24 hours; None = unknown."""
        adapter = document.doc
        alias = adapter.aliases.get(LIVE_ALIAS)
        live = live_version(adapter)
        canary = None if alias is None else alias.canary
        pin = pin_at(adapter, self.clock())
        return AdapterItem(
            name=adapter.name,
            tenant=adapter.tenant,
            description=adapter.description,
            tags=adapter.tags,
            enabled=adapter.enabled,
            status=self.adapters.state_of(document),
            tier=Tier.DISK if live is None else self._resident(viewer, adapter, live).tier,
            live=None if live is None else LiveVersion(live.n, live.digest, live.created_at),
            canary_version=None if canary is None else canary.version,
            canary_weight_bp=None if canary is None else canary.weight_bp,
            num_versions=len(versions_of(adapter)),
            size_bytes=0 if live is None else live.size_bytes,
            max_rank=0 if live is None else live.max_rank,
            targets=[] if live is None else live.targets,
            pin=None if pin is None else PinItem(pin.tier, pin.until),
            created_at=adapter.created_at,
            updated_at=document.at,
            deleted_at=adapter.deleted_at,
            last_used_at=None if traffic is None else traffic.last_used_at,
            requests_24h=None if traffic is None else traffic.num_requests,
            ttft_p95_ms=None if traffic is None else traffic.ttft_p95_ms,
            rev=document.rev,
        )

    def detail(
        self, viewer: Principal, document: Document[AdapterDoc], traffic: AdapterTraffic | None = None
    ) -> AdapterDetail:
        item, adapter = self.item(viewer, document, traffic), document.doc
        return AdapterDetail(
            **msgspec.structs.asdict(item),
            aliases=alias_items(adapter),
            versions=[self.version(viewer, adapter, version) for version in reversed(versions_of(adapter))],
        )

    def version(self, viewer: Principal, adapter: AdapterDoc, version: VersionRecord) -> VersionItem:
        resident, fits = self._resident(viewer, adapter, version), self.adapters.fits(version)
        token_ids = version.invocation_token_ids
        return VersionItem(
            n=version.n,
            digest=version.digest,
            upload_id=version.upload_id,
            created_at=version.created_at,
            by=version.by,
            size_bytes=version.size_bytes,
            max_rank=version.max_rank,
            targets=version.targets,
            invocation=InvocationItem(token_ids, self.text_of(token_ids) if fits else None) if token_ids else None,
            classifier=None if version.classifier is None else classifier_item(version.classifier),
            chat_template=version.chat_template,
            chat_template_missing=version.chat_template not in {None, *self.chat_templates},
            trained_token_ids=version.trained_token_ids,
            own_tables=version.own_tables,
            use_dora=version.use_dora,
            use_rslora=version.use_rslora,
            bases=[base.name for base in version.bases],
            fits=fits,
            aliases=sorted(name for name, alias in adapter.aliases.items() if alias.version == version.n),
            tier=resident.tier,
            memory_bytes=resident.packed_bytes,
            last_used_at=resident.last_used_at,
            num_hits=resident.num_hits,
            load_ms=resident.load_ms,
        )

    def _resident(self, viewer: Principal, adapter: AdapterDoc, version: VersionRecord) -> DigestResidency:
        """NOTE: another tenant may have the same content; a tenant must not learn that from the content being in
        use."""
        if viewer.is_any_tenant:
            return self.residency.of(version.digest)
        is_pinned = pin_at(adapter, self.clock()) is not None and version.n in live_numbers(adapter)
        return self.residency.seen_by(viewer.acting_tenant, version.digest, is_pinned=is_pinned)


def classifier_item(classifier: ClassifierRecord) -> ClassifierItem:
    return ClassifierItem(
        classifier.num_labels, classifier.problem_type, classifier.labels or None, classifier.score_template
    )


def alias_items(adapter: AdapterDoc) -> list[AliasItem]:
    """`live` first."""
    names = sorted(adapter.aliases, key=lambda name: (name != LIVE_ALIAS, name))
    return [alias_item(name, adapter.aliases[name]) for name in names]


def alias_item(name: str, alias: Alias) -> AliasItem:
    canary = alias.canary
    return AliasItem(
        alias=name,
        version=alias.version,
        previous=alias.previous,
        canary=None if canary is None else CanaryItem(canary.version, canary.weight_bp),
        moved_at=alias.moved_at,
    )
