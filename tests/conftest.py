"""Fixtures for every test."""

from __future__ import annotations

import pytest

from shared.model_files import ModelFolder
from tests.support.model import smollm_folder


@pytest.fixture(scope="session")
def smollm() -> ModelFolder:
    """The real SmolLM2-135M-Instruct, pulled once and kept between test runs."""
    return smollm_folder()
