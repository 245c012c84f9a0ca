"""Every test here has a home with the embedded data set, which `init` looks at."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _with_data(home: Path) -> Path:
    return home
