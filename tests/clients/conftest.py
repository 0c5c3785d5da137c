"""What the tests of clients share."""

from __future__ import annotations

import pytest

from tests.clients import guarded as guarded_service


@pytest.fixture(scope="session")
def guarded(make_service, make_fake_engine, starter, tmp_path_factory) -> guarded_service.Guarded:
    """A service with a key and small limits, whose engine says what a test tells it."""
    return guarded_service.make(make_service, make_fake_engine, starter, tmp_path_factory.mktemp("guarded"))
