"""The output of `loraserve adapter show`."""

from typing import Any

from loraserve.cli.admin.output import bytes_text, print_fields, print_table, time_text

Json = dict[str, Any]

MAX_LABELS_SHOWN = 5


def print_adapter(found: Json) -> None:
    print_fields(
        [
            ("name", found["name"]),
            ("tenant", found["tenant"]),
            ("description", found["description"]),
            ("tags", ", ".join(found["tags"])),
            ("status", found["status"]),
            ("tier", found["tier"]),
            ("targets", ", ".join(found["targets"])),
            ("created", time_text(found["created_at"])),
            ("updated", time_text(found["updated_at"])),
            ("revision", found["rev"]),
        ]
    )
    print_table(
        ("alias", "version", "previous", "canary", "moved"),
        [
            (alias["alias"], f"v{alias['version']}", alias["previous"], _canary(alias), time_text(alias["moved_at"]))
            for alias in found["aliases"]
        ],
    )
    has_variant = any(_variant(version) for version in found["versions"])
    has_activated = any(version["invocation"] for version in found["versions"])
    has_classifier = any(version["classifier"] for version in found["versions"])
    has_template = any(version["chat_template"] for version in found["versions"])
    has_trained = any(version["trained_token_ids"] for version in found["versions"])
    has_own_tables = any(version["own_tables"] for version in found["versions"])
    more = (
        *has_variant * ("variant",),
        *has_activated * ("activated by",),
        *has_classifier * ("labels",),
        *has_template * ("chat template",),
        *has_trained * ("trained tokens",),
        *has_own_tables * ("own tables",),
    )
    print_table(
        ("version", "digest", "size", "rank", "base", "tier", "by", "created", *more),
        [
            (
                f"v{version['n']}",
                version["digest"][:12],
                bytes_text(version["size_bytes"]),
                version["max_rank"],
                ", ".join(version["bases"]) + ("" if version["fits"] else " (not served here)"),
                version["tier"],
                version["by"],
                time_text(version["created_at"]),
                *has_variant * (_variant(version),),
                *has_activated * (_invocation(version["invocation"]),),
                *has_classifier * (_labels(version["classifier"]),),
                *has_template * (_template(version),),
                *has_trained * (len(version["trained_token_ids"]) or None,),
                *has_own_tables * (", ".join(version["own_tables"]) or None,),
            )
            for version in found["versions"]
        ],
    )


def _variant(version: Json) -> str | None:
    names = {"DoRA": version["use_dora"], "rsLoRA": version["use_rslora"]}
    return ", ".join(name for name, is_used in names.items() if is_used) or None


def _invocation(invocation: Json | None) -> str | None:
    return None if invocation is None else repr(invocation["text"] or invocation["token_ids"])


def _template(version: Json) -> str | None:
    name = version["chat_template"]
    return f"{name} (missing here)" if version["chat_template_missing"] else name


def _labels(classifier: Json | None) -> str | None:
    if classifier is None:
        return None
    number, names = classifier["num_labels"], (classifier["labels"] or [])[:MAX_LABELS_SHOWN]
    return f"{number}: {', '.join(names)}{', …' * (number > len(names))}" if names else str(number)


def _canary(alias: Json) -> str | None:
    canary = alias["canary"]
    return None if canary is None else f"v{canary['version']} {canary['weight_bp'] / 100:g} %"
