"""The files that a launcher and its workers mount, as the operator writes them."""

from __future__ import annotations

from pathlib import Path

from launcher_certificate import write_certificate

from topkube.launch.contract import OPERATOR_TOKEN_FILE, TOKEN_FILE, TOKEN_KEY_FILE


def write_credentials(directory: Path, begins: float = -1.0, ends: float = 30.0) -> Path:
    """Write a launcher's and a worker's files to one folder, and return the folder. The certificate is valid from
    `begins` to `ends`, in days from now."""
    write_certificate(directory, begins, ends)
    for name in (TOKEN_KEY_FILE, OPERATOR_TOKEN_FILE, TOKEN_FILE):
        (directory / name).write_text("secret")
    return directory
