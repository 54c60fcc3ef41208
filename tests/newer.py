"""What tests ask of PyTorch beyond the oldest version that roam supports."""

import pytest
import torch

IS_NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
needs_2_15 = pytest.mark.skipif(not IS_NEW, reason="needs PyTorch 2.15")
