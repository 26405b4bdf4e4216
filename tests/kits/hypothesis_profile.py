"""Make hypothesis independent of the machine: no deadlines, and no database of examples."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "calm", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("calm")
