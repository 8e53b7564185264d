"""Checks that a model is where the operator says, without spending the seconds that importing torch takes."""

import os


def why_absent(model: str, revision: str | None) -> str | None:
    """For the operator; None if its config is there, or if `HF_HUB_OFFLINE` is set, which may allow downloads."""
    if os.path.isdir(model):  # a name may be longer than pathlib accepts
        if os.path.isfile(os.path.join(model, "config.json")):
            return None
        if not os.access(model, os.R_OK | os.X_OK):
            return f"{model} is not readable by this user (uid {os.getuid()})"
        return f"{model} has no config.json: give the saved model's directory"
    if "HF_HUB_OFFLINE" in os.environ or is_cached(model, revision):
        return None
    return not_found(model)


def not_found(model: str) -> str:
    where = "the local Hugging Face cache: `hf download` puts models there"
    return f"{model} is neither a directory nor a model in {where}"


def is_cached(model: str, revision: str | None) -> bool:
    """Whether the local Hugging Face cache has its config."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str)
    except ValueError:  # not the name of a repository
        return False
