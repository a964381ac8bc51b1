"""Scenarios: format, generator, replay over HTTP, report."""
