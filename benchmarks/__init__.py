"""Measurements: what autopar does, and how it compares.  Run from the repository's root; nothing here is a test."""
