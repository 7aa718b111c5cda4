"""Import diffusers' networks without the optional packages that it imports only because they are installed."""

import sys

OPTIONAL = ("peft", "scipy", "transformers")  # seconds of imports that a network needs neither to train nor to sample


def import_networks() -> None:
    """Import diffusers' U-Nets as in an environment without `OPTIONAL`.

    For a process that runs one command of ours and nothing else: diffusers' adapters of those packages (LoRA casts,
    quantized text encoders, beta sigmas) stay off in it. Does nothing if diffusers was imported before.
    """
    if "diffusers" in sys.modules:
        return
    import diffusers
    from diffusers.utils import import_utils

    names = [f"_{package}_available" for package in OPTIONAL]  # what `is_peft_available()` and the others return
    found = {name: getattr(import_utils, name) for name in names if hasattr(import_utils, name)}
    vars(import_utils).update(dict.fromkeys(found, False))
    try:
        diffusers.UNet2DModel, diffusers.UNet2DConditionModel  # noqa: B018  # diffusers imports a class on access
    finally:
        vars(import_utils).update(found)
