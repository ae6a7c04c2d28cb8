"""Fixtures of the data plane's tests."""

from __future__ import annotations

import pytest

from serving.neighbours import peer


@pytest.fixture(autouse=True)
def patient_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offered to a neighbour is not given up because the machine is busy with something else, for a second at times."""
    monkeypatch.setattr(peer, "OFFER_SECONDS", 60.0)
