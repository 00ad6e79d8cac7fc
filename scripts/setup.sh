#!/usr/bin/env bash
# Creates the development environment: a virtual environment with everything that `make` needs, and the compiled extension.
#   scripts/setup.sh DIRECTORY
# If Debian packages are missing (a compiler, Python's headers, venv), it installs them as root, and prints the command otherwise.
set -euo pipefail
venv=${1:?usage: scripts/setup.sh DIRECTORY}
python=${PYTHON:-python3}

missing=()
command -v "$python" >/dev/null || missing+=(python3)
command -v g++ >/dev/null || missing+=(g++)
if command -v "$python" >/dev/null; then
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  "$python" -c 'import pathlib, sysconfig; assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()' 2>/dev/null ||
    missing+=(python3-dev)
else
  missing+=(python3-venv python3-dev)
fi
if [ ${#missing[@]} -gt 0 ]; then
  command="apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing ${missing[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive $command -qq >/dev/null
  else
    echo "setup: ${missing[*]} not installed. Next: sudo $command" >&2
    exit 1
  fi
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: $("$python" --version) is too old; TopKube needs 3.11 or newer. Next: make PYTHON=/path/to/python3.11" >&2
  exit 1
}

if [ ! -x "$venv/bin/python" ]; then
  echo "setup: creating $venv"
  "$python" -m venv "$venv"
fi
echo "setup: installing packages and compiling the extension (two to three minutes the first time)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$venv/bin/python" -m pip install -q -c constraints.txt -e '.[mpich,train,examples,cluster,operator,dev]' >"$log" 2>&1 || {
  cat "$log" >&2
  echo "setup: pip failed; its output is above. Likely cause: no network, or a full disk. Next: correct the cause, then run make again" >&2
  exit 1
}
echo "setup: ready. $("$venv/bin/topkube" --version 2>/dev/null || true)"
