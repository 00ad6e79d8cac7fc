"""The kind of error that ended a rank, from its traceback and last lines: mistakes of the script, broken hardware."""

from __future__ import annotations

import re

from topkube.job.fields.failure_policy import HARDWARE_FAULT
from topkube.launch.output.rank_report import RankReport

_USAGE_CODE = 2
"""Exit code of argparse, click and Python itself for wrong arguments."""
_KINDS = {
    "SyntaxError": "SyntaxError",
    "IndentationError": "SyntaxError",
    "TabError": "SyntaxError",
    "ImportError": "ImportError",
    "ModuleNotFoundError": "ImportError",
}
_NO_FILE = re.compile(r"can't open file .*No such file or directory")
_NO_MODULE = re.compile(r"\S*python\S*: (No module named |Error while finding module specification for )")
_USAGE = re.compile(r"usage: ", re.IGNORECASE)
# Messages of CUDA, NVML and NCCL that name the device itself. Each is a part of a message, in lower case.
_BROKEN_HARDWARE = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "hardware stack error",
    "fallen off the bus",
    "gpu is lost",
    "no cuda-capable device is detected",
)


def classify_error(report: RankReport) -> str:
    """Return SyntaxError, ImportError, UsageError, ScriptNotFound or HardwareFault for a rank that ended with an error
    and not by a signal; empty for all other errors."""
    error, tail = report.error or "", [line.strip() for line in report.tail if line.strip()]
    last = tail[-1] if tail else ""
    if not report.traceback:  # Python prints no traceback if it cannot compile the script itself
        error = last
    if any(words in error.lower() for words in _BROKEN_HARDWARE):
        return HARDWARE_FAULT
    kind = _KINDS.get(error.partition(":")[0].rpartition(".")[2], "")
    if kind or report.traceback:
        return kind
    if _NO_FILE.search(last) or _NO_MODULE.match(last):
        return "ScriptNotFound"
    return "UsageError" if report.exit_code == _USAGE_CODE and any(_USAGE.match(line) for line in tail) else ""
