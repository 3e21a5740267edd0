"""The real demo model, for tests that are marked with ``model``."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya_zmq.demo.prepare import prepare_demo_model


@pytest.fixture(scope="module")
def model_folder() -> Path:
    return prepare_demo_model(on_progress=lambda step, share: None)
