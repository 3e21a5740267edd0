#!/usr/bin/env bash
# Set up .venv with what the tests need, then ruff, mypy and pytest; pytest's closing line is the last one printed.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash deploy/test.sh [--all] [--help] [pytest options...]

  --all    also the slow tests, and property tests with random examples
  --help   this text

Examples:
  bash deploy/test.sh tests/unit
  bash deploy/test.sh --all -k failover
TEXT
}

# `--all` may stand anywhere: the other arguments are turned round once, without it.
selection="not slow"
examples=same
remaining=$#
while [ "$remaining" -gt 0 ]; do
    argument="$1"
    shift
    remaining=$((remaining - 1))
    case "$argument" in
        -h | --help)
            usage
            exit 0
            ;;
        --all)
            selection=""
            examples=random
            ;;
        *) set -- "$@" "$argument" ;;
    esac
done

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# pytest with several processes finds nothing to run, and does not say why.
for argument in "$@"; do
    case "$argument" in
        tests/*)
            [ -e "$kakeya_root/${argument%%::*}" ] || {
                say "there is no ${argument%%::*}"
                exit 2
            }
            ;;
    esac
done

install_package demo test
# The tests of cut networks use namespaces; without root they are skipped.
if [ "$(uname -s)" = Linux ] && ! command -v ip >/dev/null 2>&1 && can_apt; then
    apt_install iproute2
fi
# The tests of the dashboard's page need a browser; without one they are skipped.
if [ "$(uname -s)" = Linux ] && ! command -v chromedriver >/dev/null 2>&1 && can_apt; then
    apt_install chromium chromium-driver || say "no Chromium: the tests of the dashboard's page are skipped"
fi
# The tests of `kakeya top` on a real terminal use tmux; without it they are skipped.
if ! command -v tmux >/dev/null 2>&1 && can_apt; then
    apt_install tmux || say "tmux could not be installed: its tests are skipped"
fi

cd "$kakeya_root"
say "preparing the demo model"
.venv/bin/python -m kakeya_zmq.demo.prepare </dev/null >/dev/null
say "ruff"
.venv/bin/ruff check .
say "mypy"
.venv/bin/mypy
say "pytest"
# Two files at a time: most tests wait for processes. More would disturb those that wait with a deadline.
exec .venv/bin/python -m pytest -n 2 --dist loadfile -m "$selection" --hypothesis-profile "$examples" "$@" </dev/null
