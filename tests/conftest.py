"""What all tests share."""

from hypothesis import HealthCheck, settings

# Time tells nothing about a property on a machine that is busy with other things.
settings.register_profile("roam", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roam")
