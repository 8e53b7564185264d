"""One example of each object that the management API returns, for the OpenAPI document."""

import msgspec
from loraserve_adapters.checks import CheckStatus

from loraserve.api.schemas.adapters import AdapterItem, LiveVersion
from loraserve.api.schemas.aliases import AliasItem, CanaryItem
from loraserve.api.schemas.keys import KeyItem
from loraserve.api.schemas.reports import CheckItem
from loraserve.api.schemas.tenants import TenantItem
from loraserve.api.schemas.uploads import (
    UploadFileItem,
    UploadItem,
    UploadResult,
)
from loraserve.api.schemas.versions import VersionItem
from loraserve.control.adapters.queries import AdapterState
from loraserve.control.documents.tenant_edits import TenantState
from loraserve.store.records import Limits, Role, Status, Tier
from loraserve.store.upload_session import UploadState

DIGEST = "30b84a326bc9f1fca5b33a61aa1a7f38d1b0c1d1a9c1e0e6d1f7a1c2b3d4e5f6"
UPLOAD = "f0d3d4249455d8566bfd011b65085e18"
CREATED_AT = 1795301684.5

EXAMPLES: list[msgspec.Struct] = [
    AdapterItem(
        name="sql",
        tenant="acme",
        description="Questions to SQL",
        tags=["team-data"],
        enabled=True,
        status=AdapterState.READY,
        tier=Tier.DEVICE,
        live=LiveVersion(3, DIGEST, CREATED_AT),
        canary_version=4,
        canary_weight_bp=500,
        num_versions=4,
        size_bytes=33_685_504,
        max_rank=16,
        targets=["k_proj", "o_proj", "q_proj", "v_proj"],
        pin=None,
        created_at=CREATED_AT,
        updated_at=CREATED_AT,
        deleted_at=None,
        last_used_at=CREATED_AT,
        requests_24h=1284,
        ttft_p95_ms=87.5,
        rev=9,
    ),
    AliasItem(alias="live", version=3, previous=2, canary=CanaryItem(4, 500), moved_at=CREATED_AT),
    VersionItem(
        n=3,
        digest=DIGEST,
        upload_id=UPLOAD,
        created_at=CREATED_AT,
        by="ptwzheyn",
        size_bytes=33_685_504,
        max_rank=16,
        targets=["k_proj", "o_proj", "q_proj", "v_proj"],
        invocation=None,
        classifier=None,
        chat_template=None,
        chat_template_missing=False,
        trained_token_ids=[],
        own_tables=[],
        use_dora=False,
        use_rslora=False,
        bases=["llama-3.1-8b-instruct"],
        fits=True,
        aliases=["live"],
        tier=Tier.DEVICE,
        memory_bytes=27_262_976,
        last_used_at=CREATED_AT,
        num_hits=1284,
        load_ms=41.7,
    ),
    UploadItem(
        id=UPLOAD,
        adapter="sql",
        tenant="acme",
        state=UploadState.READY,
        files=[
            UploadFileItem("adapter_config.json", 1119, 1119),
            UploadFileItem("adapter_model.safetensors", 33_684_385, 33_684_385),
        ],
        activate=True,
        chunk_bytes=8_388_608,
        created_at=CREATED_AT,
        expires_at=CREATED_AT + 86_400,
        by="ptwzheyn",
        result=UploadResult(version=3, digest=DIGEST, created=True),
        report=None,
        error=None,
    ),
    CheckItem(
        name="config.options",
        status=CheckStatus.FAIL,
        message="adapter_config.json: use_qalora: found true, expected false: QA-LoRA is not supported",
        code="unsupported_option",
        file="adapter_config.json",
        key="use_qalora",
        found="true",
        expected="false",
        remedy="Train or convert the adapter without this option.",
    ),
    KeyItem(
        id="ptwzheyn",
        name="notebook of the data team",
        tenant="acme",
        role=Role.OPERATOR,
        adapters=None,
        limits=Limits(requests_per_min=600),
        status=Status.ACTIVE,
        is_expired=False,
        created_at=CREATED_AT,
        expires_at=None,
        rotating_until=None,
        rev=1,
    ),
    TenantItem(
        id="acme",
        description="Data team",
        status=TenantState.ACTIVE,
        limits=Limits(requests_per_min=6000, max_adapters=100),
        weight=1.0,
        num_adapters=12,
        adapter_bytes=404_226_048,
        num_keys=3,
        updated_at=CREATED_AT,
        deleted_at=None,
        erased_at=None,
        rev=2,
    ),
]
