#!/usr/bin/env bash
# Stop and remove the launchd agents that the install scripts made. Keys, logs and data stay.
#
# usage: bash deploy/uninstall_launchd.sh [--dry-run]
[ -n "${BASH_VERSION:-}" ] || { echo "kakeya: error: this script needs bash: bash $0" >&2; exit 2; }
set -euo pipefail

script="${BASH_SOURCE[0]}"
while [ -L "$script" ]; do # run through a link: what it needs is beside the script itself
    link="$(readlink "$script")"
    case "$link" in /*) script="$link" ;; *) script="$(dirname "$script")/$link" ;; esac
done
# shellcheck source=deploy/service_lib.sh
source "$(dirname "$script")/service_lib.sh"

read_options "${BASH_SOURCE[0]}" "$@"
[ "$kakeya_replace" = no ] || refuse "unknown option --replace; see --help"
find_folders KAKEYA_LAUNCH_AGENTS

# is_loaded LABEL: also one whose property list was deleted by hand.
is_loaded() { command -v launchctl >/dev/null 2>&1 && loaded "$1"; }

found=no
status=0
for label in ai.kakeya.zmq-runtime-prefill ai.kakeya.prefill-network ai.kakeya.prefill-network-peer ai.kakeya.prefill-worker; do
    target="$kakeya_agents/$label.plist"
    [ -e "$target" ] || [ -L "$target" ] || is_loaded "$label" || continue
    found=yes
    if [ "$kakeya_dry_run" = yes ]; then
        say "would remove $label"
        continue
    fi
    # One that cannot be removed does not keep the others; unload ends its subshell with a line that says why.
    if is_loaded "$label" && ! (unload "$label"); then
        status=1
    elif reason="$(rm -f "$target" 2>&1)"; then
        say "removed $label"
    else
        complain "$label does not run any more, but $target cannot be removed: ${reason##*: }"
        status=1
    fi
done
[ "$found" = yes ] || say "nothing to remove"
exit "$status"
