"""Which versions of a library an integration knows."""

from __future__ import annotations

from importlib.metadata import version

from roam.errors import CaptureError


def require(package: str, major: int) -> None:
    """Refuses a library of another major version than the one whose trainer is known.

    Raises:
        CaptureError: with the code ``library_version``.
    """
    installed = version(package)
    if int(installed.partition(".")[0]) != major:
        raise CaptureError(
            f"{package} {installed} is installed, and roam is tested with version {major}.x only; install "
            f"'{package}>={major},<{major + 1}', or compile a function of your own with roam.compile",
            code="library_version",
        )
