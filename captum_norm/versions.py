"""Tells the version of this package, and of every package that the numbers depend on."""

from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("captum", "numpy", "tokenizers", "torch", "transformers")

try:
    __version__ = version("captum-norm")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"


def versions() -> dict[str, str]:
    """Version by package."""
    return {"captum-norm": __version__} | {package: version(package) for package in _PACKAGES}
