"""Jobs from the server to the process that reads tenants' files, and their answers."""

import msgspec
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.config import CONFIG_NAME
from loraserve_adapters.rules import AdapterRules
from loraserve_adapters.safetensors_file import WEIGHTS_NAME

from loraserve.control.ingest.manifest import Manifest
from loraserve.control.ingest.report import Report
from loraserve.store.blobs import MANIFEST_FILE

PACKED_NAME = "packed"
"""File name of the packed form in a job's output folder."""
NEW_CONFIG_NAME, NEW_WEIGHTS_NAME = f"{CONFIG_NAME}.new", f"{WEIGHTS_NAME}.new"
"""Likewise, of the content's files until everything is written."""
OUTPUT_NAMES = (PACKED_NAME, MANIFEST_FILE, NEW_CONFIG_NAME, NEW_WEIGHTS_NAME)


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the process sets for itself before it reads a byte of a tenant's."""

    cpu_s: int
    address_space_bytes: int
    file_size_bytes: int
    """The largest file it may write."""


class JudgeJob(msgspec.Struct, frozen=True, kw_only=True, tag="judge"):
    """Judge the config and the header of the weights, while the rest may still be arriving."""

    config_path: str
    weights_path: str
    weights_size: int
    """Announced size in bytes."""
    layout: BaseLayout
    rules: AdapterRules
    resources: ResourceLimits


class IngestJob(msgspec.Struct, frozen=True, kw_only=True, tag="ingest"):
    """Do everything: check values, hash, and write the packed form."""

    folder: str
    """Contains the two files under their names."""
    output_folder: str
    """Receives `PACKED_NAME` and, with write_content, the content's files: the manifest and, in place of what was
    uploaded, the files reduced to what the digest covers."""
    write_content: bool
    sha256: dict[str, str]
    """Announced hashes in hex, by file; may be empty."""
    layout: BaseLayout
    rules: AdapterRules
    resources: ResourceLimits


Job = JudgeJob | IngestJob


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    report: Report
    manifest: Manifest | None = None
    """Only for an accepted ingest."""
    write_errno: int | None = None
    """The disk, or the user's quota on it, has no room for the job's output: ENOSPC or EDQUOT. Nothing was decided."""
