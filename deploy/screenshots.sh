#!/usr/bin/env bash
# Make the pictures of the README anew, from a real fleet on this machine. Needs Chromium with its chromedriver.
set -euo pipefail

case "${1:-}" in
    -h | --help)
        echo "usage: bash deploy/screenshots.sh [FOLDER]     (default: docs/images)"
        exit 0
        ;;
esac

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

install_package demo test
if ! command -v chromedriver >/dev/null 2>&1; then
    can_apt || die "Chromium with its chromedriver is needed: install chromium and chromium-driver"
    apt_install chromium chromium-driver
fi
cd "$kakeya_root"
.venv/bin/python -m kakeya_zmq.demo.prepare </dev/null >/dev/null
exec .venv/bin/python -m tests.browser.screenshots "$@" </dev/null
