"""What the server tells the process that reads tenants' files, and what that answers."""

import msgspec
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.limits import Limits

from loraserve.control.ingest.manifest import Manifest
from loraserve.control.ingest.report import Report

PACKED_NAME = "packed"
"""Of the packed form in a job's output folder."""


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the process, set by itself before it reads a tenant's byte."""

    cpu_s: int
    address_space_bytes: int
    file_size_bytes: int
    """The largest file it may write."""


class JudgeJob(msgspec.Struct, frozen=True, kw_only=True, tag="judge"):
    """Config and header of the weights, while the rest may still be on its way."""

    config_path: str
    weights_path: str
    weights_size: int
    """Announced, in bytes."""
    layout: BaseLayout
    base_names: list[str]
    chat_templates: list[str]
    """Names that adapters may choose from."""
    limits: Limits
    resources: ResourceLimits


class IngestJob(msgspec.Struct, frozen=True, kw_only=True, tag="ingest"):
    """Everything: values, hashes, and the packed form."""

    folder: str
    """Holds the two files under their names."""
    output_folder: str
    """Gets `PACKED_NAME`, and with write_content also the content's files: the manifest and, in place of what was
    uploaded, the files reduced to what the digest covers."""
    write_content: bool
    sha256: dict[str, str]
    """Announced, hex, by file; may be empty."""
    layout: BaseLayout
    base_names: list[str]
    chat_templates: list[str] | None
    """Names that adapters may choose from; None = any: one that was accepted stays so."""
    limits: Limits
    resources: ResourceLimits


Job = JudgeJob | IngestJob


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    report: Report
    manifest: Manifest | None = None
    """Of an accepted ingest."""
