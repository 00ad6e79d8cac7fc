"""`python -m monitoring` writes all generated files of this package. With `--check`, it only lists stale files."""

from __future__ import annotations

import sys

from monitoring.generated import list_stale_files, write_files

if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        print("\n".join(problems := list_stale_files()) or "nothing is stale")
        raise SystemExit(bool(problems))
    write_files()
