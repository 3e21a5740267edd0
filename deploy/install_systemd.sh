#!/usr/bin/env bash
# Install a service as a systemd unit of this user (Linux). Idempotent: run it again after changing a value.
#
# usage: bash deploy/install_systemd.sh runtime|worker|cache|dashboard [--dry-run]
#        bash deploy/install_systemd.sh --uninstall [--dry-run]
#
#   --dry-run     render and check everything, print the unit, touch nothing
#   --uninstall   stop and remove all of them; keys, logs and data stay
#
# The values come from the same environment variables as for launchd: see the --help of
# install_runtime_launchd.sh, install_prefill_worker_launchd.sh and install_prefill_network_launchd.sh.
# Services of a user end with the last login unless: loginctl enable-linger
set -euo pipefail

# shellcheck source=deploy/service_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/service_lib.sh"
# shellcheck source=deploy/service_values.sh
source "$kakeya_deploy/service_values.sh"

units="${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user"

# The manager of this user's units: it runs for a login of the user's own, and for lingering users.
need_manager() {
    command -v systemctl >/dev/null 2>&1 || die "there is no systemctl: on macOS use the launchd scripts"
    systemctl --user show-environment >/dev/null 2>&1 ||
        die "this user's systemd does not answer: log in as $(id -un) itself (not by su or sudo), or say once: loginctl enable-linger"
}

uninstall() {
    local service found=no
    [ "$kakeya_dry_run" = yes ] || need_manager
    for service in runtime worker cache dashboard; do
        [ -e "$units/kakeya-$service.service" ] || continue
        found=yes
        if [ "$kakeya_dry_run" = yes ]; then
            say "would remove kakeya-$service.service"
            continue
        fi
        systemctl --user disable --now "kakeya-$service.service" >/dev/null 2>&1 || true
        rm -f "$units/kakeya-$service.service"
        say "removed kakeya-$service.service"
    done
    [ "$found" = yes ] || say "nothing is installed"
    [ "$kakeya_dry_run" = yes ] || systemctl --user daemon-reload
}

service=""
remove=no
remaining=()
for argument in "$@"; do
    case "$argument" in
        runtime | worker | cache | dashboard) service="$argument" ;;
        --uninstall) remove=yes ;;
        *) remaining+=("$argument") ;;
    esac
done
read_options "${BASH_SOURCE[0]}" ${remaining[@]+"${remaining[@]}"}
if [ "$remove" = yes ]; then
    uninstall
    exit 0
fi

psk_file="${KAKEYA_FLEET_PSK_FILE:-$kakeya_home/fleet.psk}"
case "$service" in
    runtime)
        need KAKEYA_RUNTIME_MODEL "the folder of the MLX model"
        need_key "$psk_file" "make it with kakeya key new, and copy it to every node"
        export KAKEYA_ENABLE_PREFILL_CACHE="${KAKEYA_ENABLE_PREFILL_CACHE:-1}"
        python="${KAKEYA_RUNTIME_PYTHON:-}"
        ;;
    worker)
        need KAKEYA_WORKER_NODE_ID "the name of this node, for example prefill-1"
        need KAKEYA_WORKER_MODEL "the folder of the MLX model"
        need KAKEYA_WORKER_ADVERTISE "the address others reach this node at, for example 192.168.1.21:53051"
        need_key "$psk_file" "copy the fleet's key from the primary"
        python="${KAKEYA_WORKER_PYTHON:-}"
        ;;
    cache)
        need KAKEYA_CACHE_NODE_ID "the name of this node, for example cache-1"
        need KAKEYA_CACHE_ADVERTISE "the address others reach this node at, for example 192.168.1.22:52051"
        need_key "$psk_file" "copy the fleet's key from the primary"
        python=""
        ;;
    dashboard)
        export KAKEYA_NETWORK_API_KEY_FILE="${KEY_FILE:-$kakeya_home/network_api_key}"
        need_key "$KAKEYA_NETWORK_API_KEY_FILE" "openssl rand -hex 24 > $KAKEYA_NETWORK_API_KEY_FILE; chmod 600 $KAKEYA_NETWORK_API_KEY_FILE"
        python=""
        ;;
    *) refuse "name a service: runtime, worker, cache or dashboard; see --help" ;;
esac
[ -n "$python" ] || [ -z "${VENV:-}" ] || python="$VENV/bin/python"
command="$(find_kakeya "$python")" || exit 2
use_python "$command"
export KAKEYA_RUNTIME_COMMAND="$command" KAKEYA_WORKER_COMMAND="$command" KAKEYA_NETWORK_COMMAND="$command"
name_the_namespace

rendered="$(mktemp -d)" || die "no temporary folder"
trap 'rm -rf "$rendered"' EXIT
unit="kakeya-$service.service"
render "$kakeya_deploy/systemd/$unit" "$rendered/$unit" || exit 2
"$kakeya_python" "$kakeya_deploy/render_service.py" --arguments "$kakeya_deploy/systemd/$unit" "$rendered/arguments.json" || exit 2
check_arguments "$rendered/arguments.json"
if [ "$kakeya_dry_run" = yes ]; then
    cat "$rendered/$unit"
    say "dry run: $units/$unit was not written and nothing was started"
    exit 0
fi
need_manager
mkdir -p "$units"
(umask 077 && mkdir -p "$kakeya_home")
cp "$rendered/$unit" "$units/$unit.new" && chmod 644 "$units/$unit.new" && mv "$units/$unit.new" "$units/$unit"
systemctl --user daemon-reload
systemctl --user enable "$unit" >/dev/null 2>&1 || die "systemd refuses $unit: systemctl --user status $unit"
systemctl --user restart "$unit" || die "$unit does not start: systemctl --user status $unit"
say "$unit runs; log: see StandardError in $units/$unit"
