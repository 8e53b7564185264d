"""What the owner of a refused adapter can do, by the refusal's code."""

_SAVE_AGAIN = "Save the adapter again with PEFT's save_pretrained and upload both files unchanged."

_REMEDIES = {
    "bad_json": _SAVE_AGAIN,
    "duplicate_key": _SAVE_AGAIN,
    "unknown_field": "Remove the field if it has no effect, or save the adapter with a PEFT version up to 0.21.",
    "ignored_field": "No action needed if a newer PEFT wrote the field for a feature that the adapter does not use.",
    "unsupported_option": "Train or convert the adapter without this option.",
    "invalid_field": "Set the field to a value that PEFT's LoraConfig would write.",
    "rank_too_large": "Train with a smaller rank, or reduce the rank with a singular value decomposition.",
    "too_large": "Make the file smaller, or ask the operator whether the limit can be raised.",
    "bad_pattern": "Correct the regular expression, or list the modules by name.",
    "unsupported_pattern": "Use a simpler regular expression, or list the modules by name.",
    "pattern_too_complex": "Use a simpler regular expression, or list the modules by name.",
    "unknown_module": "Use an adapter that was trained on the served base model.",
    "unsupported_module": "Train the adapter with target_modules that are linear layers only.",
    "unreached_modules": "Train with exclude_modules='.*vision_tower.*', or whatever that part of the model is called.",
    "unused_tensors": "No action needed if the adapter is for text.",
    "bad_safetensors": _SAVE_AGAIN,
    "duplicate_tensor": _SAVE_AGAIN,
    "bad_dtype": "Convert the tensors to float32, float16 or bfloat16.",
    "missing_tensor": "Upload all tensors of the modules that adapter_config.json targets, or correct target_modules.",
    "unexpected_tensor": "Remove the tensor if it is unused, or correct adapter_config.json so that it covers it.",
    "shape_mismatch": "Use an adapter that was trained on the served base model.",
    "rank_mismatch": "Correct r or rank_pattern in adapter_config.json so that they match the tensors.",
    "not_finite": "Train again from a checkpoint before the loss diverged, or save in a wider format.",
    "base_weight_differs": "Use an adapter that was trained on exactly the served base weights.",
    "file_changed": "Upload again, and do not change the files during the upload.",
    "missing_file": "An adapter consists of adapter_config.json and adapter_model.safetensors; upload both.",
    "not_a_regular_file": "Copy the file itself into the folder instead of a link to it.",
    "unreadable_file": "Make the file readable for the server's user.",
    "sha256_mismatch": "Upload the file again: the received bytes do not match the announced sha256.",
    "other_base_model": "Check that the adapter was trained on the served base model.",
    "other_class": "No action needed if that class computes the same. LLM2Vec's does not: its attention is "
    "bidirectional.",
    "other_chat_template": "Start the server with this template: as --chat-template if all adapters use it, else with "
    'a name in --adapter-chat-templates, and set "chat_template" in adapter_config.json to that name.',
    "unknown_chat_template": "Name one that the server has, or ask the operator to add it (--adapter-chat-templates).",
    "no_effect": "Upload the trained adapter: this one answers exactly like the base model.",
}


def remedy_for(code: str) -> str | None:
    return _REMEDIES.get(code)
