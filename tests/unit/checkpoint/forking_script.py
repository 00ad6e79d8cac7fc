"""Write a state to a file, fork in the middle of the write, and read the file when the child has ended:
`forking_script.py PATH`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from topkube.training.checkpoint.format import state_file
from topkube.training.checkpoint.format.state_file import _CheckedFile, read_state, write_state
from topkube.training.checkpoint.save import run_in_thread


def main(path: Path) -> None:
    state = {"values": [torch.full((1000,), float(number)) for number in range(50)]}
    reached, forked = threading.Event(), threading.Event()
    write, count = _CheckedFile.write, 0

    def write_when_allowed(self: _CheckedFile, data: Any) -> int:
        nonlocal count
        count += 1
        done = write(self, data)
        if count == 40:
            reached.set()
            forked.wait(200)
        return done

    _CheckedFile.write = write_when_allowed  # type: ignore[method-assign]
    writing = run_in_thread(lambda: write_state(path, state))
    reached.wait(200)
    child = os.fork()
    if child == 0:
        print("child", flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    forked.set()
    loaded = read_state(path, writing.result(200))
    same = all(torch.equal(a, b) for a, b in zip(loaded["values"], state["values"], strict=True))
    print("equal" if same else "different")


if __name__ == "__main__":
    state_file.SEEN_WITHIN_SECONDS = 0.0
    main(Path(sys.argv[1]))
