#!/usr/bin/env bash
# Stop and remove the launchd agents that the install scripts made. Keys, logs and data stay.
#
# usage: bash deploy/uninstall_launchd.sh [--dry-run]
set -euo pipefail

# shellcheck source=deploy/service_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/service_lib.sh"

read_options "${BASH_SOURCE[0]}" "$@"
for label in ai.kakeya.zmq-runtime-prefill ai.kakeya.prefill-network ai.kakeya.prefill-network-peer ai.kakeya.prefill-worker; do
    target="$kakeya_agents/$label.plist"
    [ -e "$target" ] || continue
    if [ "$kakeya_dry_run" = yes ]; then
        say "would remove $label"
        continue
    fi
    ! command -v launchctl >/dev/null 2>&1 || unload "$label"
    rm -f "$target"
    say "removed $label"
done
