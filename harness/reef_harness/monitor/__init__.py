"""Monitoring: what a run did, on one page."""
