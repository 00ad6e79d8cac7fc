"""The device of the CUDA kernels' tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module", params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    import torch
    from cuda_device import Device

    from topkube.kernels import cuda_library

    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU here")
        if cuda_library.find_library_path() is None:
            pytest.skip("this build has no CUDA kernels")
    return Device(request.param)
