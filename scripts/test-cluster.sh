#!/usr/bin/env bash
# Runs the tests on a real Kubernetes: first several at a time, then one by one the tests that break nodes, links or the operator.
#   scripts/test-cluster.sh PYTHON [PYTEST OPTIONS]
# Uses the cluster that `make cluster` started, or the cluster of TOPKUBE_TEST_KUBECONFIG, or starts a new one.
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
scripts/pytest.sh "$python" tests/cluster --timeout 900 -m "not alone" -n 3 --maxschedchunk 1 "$@" || failed=$?
scripts/pytest.sh "$python" tests/cluster --timeout 900 -m alone "$@" || failed=$?
exit "$failed"
