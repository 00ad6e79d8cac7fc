"""Fail if the wheel lacks CUDA kernels, or machine code for one of the devices.

python check_kernels.py FOLDER "80;90"    reads the only wheel in FOLDER with cuobjdump, a program of the CUDA toolkit
"""

from __future__ import annotations

import re
import shutil
import string
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIBRARY = "topkube/libtopkube_cuda.so"


def list_compiled_devices(wheel: Path) -> set[str]:
    """Return the devices that the wheel's library has machine code for, such as {"80", "90"}. Exits with an error if
    the wheel has no library."""
    program = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        if LIBRARY not in archive.namelist():
            sys.exit(
                f"{wheel.name} has no {LIBRARY}: nvcc was not found. Next: build on an image with the CUDA toolkit"
            )
        library = archive.extract(LIBRARY, folder)
        listing = subprocess.run([program, "--list-elf", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\.sm_(\d+[a-z]?)\.cubin", listing))


def main() -> None:
    folder, required = Path(sys.argv[1]), set(sys.argv[2].split(";"))
    wheels = list(folder.glob("topkube-*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{len(wheels)} wheels in {folder}, expected 1. Next: read the output of pip wheel above")
    compiled = list_compiled_devices(wheels[0])
    if absent := required - compiled:
        only = _format_devices(compiled) or "none"
        sys.exit(f"{wheels[0].name} has no machine code for {_format_devices(absent)}, only for {only}")
    print(f"{wheels[0].name}: machine code for {_format_devices(compiled)}")


def _format_devices(devices: set[str]) -> str:
    """Return the devices in the order of their numbers. A letter may follow the number, as in 90a."""
    ordered = sorted(devices, key=lambda device: (int(device.rstrip(string.ascii_letters)), device))
    return ", ".join(f"sm_{device}" for device in ordered)


if __name__ == "__main__":
    main()
