"""The versions of this package and of the packages that results depend on."""

from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("captum", "numpy", "tokenizers", "torch", "transformers")

try:
    __version__ = version("captum-norm")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"


def versions() -> dict[str, str]:
    """Return the versions by package."""
    return {"captum-norm": __version__} | {package: version(package) for package in _PACKAGES}
