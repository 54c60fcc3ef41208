"""What all tests share."""

import signal

from hypothesis import HealthCheck, settings

# Time tells nothing about a property on a machine that is busy with other things.
settings.register_profile("roam", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roam")

# A shell starts what it runs in the background with Ctrl-C ignored, and so would every child that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
