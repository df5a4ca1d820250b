"""Saving a run so that it continues exactly, and never loading anything else than what was saved."""
