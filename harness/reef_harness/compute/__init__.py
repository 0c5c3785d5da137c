"""Test-time compute: more tokens for one answer, counted."""
