"""Metrics leave the service, and never stop it."""

from __future__ import annotations

from reef.observe import Metrics


def test_metrics_of_two_services_in_one_process_are_apart() -> None:
    one, other = Metrics(), Metrics()
    one.receipts.inc(3)
    assert b"reef_receipts_total 3.0" in one.render()
    assert b"reef_receipts_total 0.0" in other.render()
