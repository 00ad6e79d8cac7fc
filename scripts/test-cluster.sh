#!/usr/bin/env bash
# The tests on a real Kubernetes: several at a time, then one by one those that break nodes, links or the operator.
#   scripts/test-cluster.sh PYTHON [PYTEST OPTIONS]
# On the cluster that `make cluster` started, on the one of TOPKUBE_TEST_KUBECONFIG, or on one of their own.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
localkube() { PYTHONPATH=tests/cluster "$python" -m localkube "$@"; }
if [ -z "${TOPKUBE_TEST_KUBECONFIG:-}" ] && [ "$(id -u)" = 0 ] && ! localkube env >/dev/null 2>&1; then
  trap 'localkube down' EXIT
  localkube up --nodes 3 --openmpi || exit 1
fi
failed=0
"$python" -m pytest tests/cluster -m "not alone" -n 3 --maxschedchunk 1 "$@" || failed=$?
"$python" -m pytest tests/cluster -m alone "$@" || failed=$?
exit "$failed"
