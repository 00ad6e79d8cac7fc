"""`python -m monitoring` writes every generated file of this package; `--check` only names the stale ones."""

from __future__ import annotations

import sys

from monitoring.generated import stale, write

if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        print("\n".join(found := stale()) or "nothing is stale")
        raise SystemExit(bool(found))
    write()
