"""What all tests share."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Time tells nothing about a property on a machine that is busy with other things.
settings.register_profile("roam", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roam")

# A shell starts what it runs in the background with Ctrl-C ignored, and so would every child that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels as small as those of tests gain nothing from more threads, and wait for them where the machine is busy."""
    import torch  # here: most tests do without it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
