#!/usr/bin/env bash
# Runs pytest. In CI, at most five tests that fail get a second try, one at a time, with nothing beside them.
#   scripts/pytest.sh PYTHON [PYTEST OPTIONS]
# What passes only at the second try is printed at the end: such a test depends on chance and must be mended.
set -uo pipefail
python=$1
shift
[ -n "${CI:-}" ] || exec "$python" -m pytest "$@"
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
"$python" -m pytest -o cache_dir="$cache" "$@"
first=$?
[ $first = 1 ] || exit $first
mapfile -t failed < <("$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$cache/v/cache/lastfailed")
if [ ${#failed[@]} -gt 5 ]; then
  echo "== ${#failed[@]} tests failed: too many for a second try"
  exit $first
fi
echo "== second try of ${#failed[@]}: ${failed[*]}"
"$python" -m pytest -o cache_dir="$cache" "$@" --last-failed --last-failed-no-failures none -n 0 || exit $?
echo "== passed only at the second try, mend these tests: ${failed[*]}"
