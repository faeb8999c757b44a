"""The versions of what numbers depend on."""

from importlib import metadata

_PACKAGES = ("captum", "numpy", "tokenizers", "torch", "transformers")


def versions() -> dict[str, str]:
    """Version by package."""
    import captum_norm

    return {"captum-norm": captum_norm.__version__} | {package: metadata.version(package) for package in _PACKAGES}
