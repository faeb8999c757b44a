"""Run the checks beside this file: ``python -m tests.fairseq_models SITE_PACKAGES``.

fairseq comes from the folder ``SITE_PACKAGES`` of its own environment, and everything else from this one.
"""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    # fairseq and what it imports warn of themselves.
    options = ["-q", "-W", "default", "-W", "error:::captum_norm", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, str(Path(__file__).with_name("checks.py"))]))
