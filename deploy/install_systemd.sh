#!/usr/bin/env bash
# Install a service as a systemd unit of this user (Linux). Idempotent: run it again after changing a value.
#
# usage: bash deploy/install_systemd.sh runtime|worker|cache|dashboard [--dry-run] [--replace]
#        bash deploy/install_systemd.sh --uninstall [runtime|worker|cache|dashboard]... [--dry-run]
#
#   --dry-run     render and check everything, print the unit, touch nothing
#   --replace     also in the place of one that is installed for another KAKEYA_HOME
#   --uninstall   stop and remove the named services, or all of them; keys, logs and data stay
#
# The values come from the same environment variables as for launchd: see the --help of
# install_runtime_launchd.sh, install_prefill_worker_launchd.sh and install_prefill_network_launchd.sh.
# Services of a user end with the last login unless: loginctl enable-linger
[ -n "${BASH_VERSION:-}" ] || { echo "kakeya: error: this script needs bash: bash $0" >&2; exit 2; }
set -euo pipefail

script="${BASH_SOURCE[0]}"
while [ -L "$script" ]; do # run through a link: what it needs is beside the script itself
    link="$(readlink "$script")"
    case "$link" in /*) script="$link" ;; *) script="$(dirname "$script")/$link" ;; esac
done
# shellcheck source=deploy/service_lib.sh
source "$(dirname "$script")/service_lib.sh"
# shellcheck source=deploy/service_values.sh
source "$kakeya_deploy/service_values.sh"

# The manager of this user's units: it runs for a login of the user's own, and for lingering users.
need_manager() {
    command -v systemctl >/dev/null 2>&1 || die "there is no systemctl: on macOS use the launchd scripts"
    systemctl --user show-environment >/dev/null 2>&1 ||
        die "this user's systemd does not answer: log in as $(id -un) itself (not by su or sudo), or say once: loginctl enable-linger"
}

# uninstall SERVICE...: exit code 1 when one of them could not be removed; the others are all the same.
uninstall() {
    local service found=no status=0 reason
    [ "$kakeya_dry_run" = yes ] || need_manager
    for service in "$@"; do
        [ -e "$units/kakeya-$service.service" ] || [ -L "$units/kakeya-$service.service" ] || continue
        found=yes
        if [ "$kakeya_dry_run" = yes ]; then
            say "would remove kakeya-$service.service"
            continue
        fi
        systemctl --user disable --now "kakeya-$service.service" >/dev/null 2>&1 || true
        if reason="$(rm -f "$units/kakeya-$service.service" 2>&1)"; then
            say "removed kakeya-$service.service"
        else
            complain "kakeya-$service.service does not run any more, but $units/kakeya-$service.service cannot be removed: ${reason##*: }"
            status=1
        fi
    done
    [ "$found" = yes ] || say "nothing to remove"
    [ "$kakeya_dry_run" = yes ] || systemctl --user daemon-reload
    return "$status"
}

# start_unit: have systemd take what is in the place of the unit. If it does not: 1, kakeya_trouble and kakeya_remedy.
start_unit() {
    kakeya_remedy="systemctl --user status $unit"
    if ! systemctl --user daemon-reload; then
        kakeya_trouble="systemd did not read the new $unit"
        kakeya_remedy="systemctl --user daemon-reload says why"
    elif ! systemctl --user enable "$unit" >/dev/null 2>&1; then
        kakeya_trouble="systemd refuses $unit"
    elif ! systemctl --user restart "$unit"; then
        kakeya_trouble="$unit does not start"
    else
        return 0
    fi
    return 1
}

# go_back_to_unit: the new unit does not work: put the one before in its place, and start it where it ran before.
go_back_to_unit() {
    local why="$kakeya_trouble with the new definition, which --dry-run shows"
    kakeya_staged="$units/$unit.new"
    if ! { cp "$rendered/old" "$units/$unit.new" && put_in_place "$units/$unit"; } 2>/dev/null; then
        die "$why; the old one could not be put back"
    fi
    case "$state" in
        active | activating | reloading) ;;
        *)
            systemctl --user daemon-reload || true
            systemctl --user stop "$unit" >/dev/null 2>&1 || true # the new one is tried again for ever otherwise
            die "$why; the old one is back"
            ;;
    esac
    start_unit || die "$why; the old one is back, and does not run either: $kakeya_remedy"
    die "$why; the old one is back and runs"
}

services=()
remove=no
remaining=()
for argument in "$@"; do
    case "$argument" in
        runtime | worker | cache | dashboard) services+=("$argument") ;;
        --uninstall) remove=yes ;;
        *) remaining+=("$argument") ;;
    esac
done
read_options "${BASH_SOURCE[0]}" ${remaining[@]+"${remaining[@]}"}
find_folders XDG_CONFIG_HOME
units="${XDG_CONFIG_HOME:-${HOME:-}/.config}/systemd/user"
if [ "$remove" = yes ]; then
    [ "$kakeya_replace" = no ] || refuse "--replace goes with an installation"
    [ ${#services[@]} -gt 0 ] || services=(runtime worker cache dashboard)
    uninstall "${services[@]}" || exit 1
    exit 0
fi
[ ${#services[@]} -le 1 ] || refuse "one service at a time: run it for each of ${services[*]}"
service="${services[0]:-}"

case "$service" in
    runtime)
        need KAKEYA_RUNTIME_MODEL "the folder of the MLX model"
        need_fleet_key "make it with kakeya key new, and copy it to every node"
        python="${KAKEYA_RUNTIME_PYTHON:-}"
        ;;
    worker)
        need KAKEYA_WORKER_NODE_ID "the name of this node, for example prefill-1"
        need KAKEYA_WORKER_MODEL "the folder of the MLX model"
        need KAKEYA_WORKER_ADVERTISE "the address others reach this node at, for example 192.168.1.21:53051"
        need_fleet_key "copy the fleet's key from the primary"
        python="${KAKEYA_WORKER_PYTHON:-}"
        ;;
    cache)
        need KAKEYA_CACHE_NODE_ID "the name of this node, for example cache-1"
        need KAKEYA_CACHE_ADVERTISE "the address others reach this node at, for example 192.168.1.22:52051"
        need_fleet_key "copy the fleet's key from the primary"
        python=""
        ;;
    dashboard)
        name_the_dashboard
        need_api_key
        python=""
        ;;
    *) refuse "name a service: runtime, worker, cache or dashboard; see --help" ;;
esac
[ -n "$python" ] || [ -z "${VENV:-}" ] || python="$VENV/bin/python"
command="$(find_kakeya "$python")" || exit 2
use_python "$command"
export KAKEYA_RUNTIME_COMMAND="$command" KAKEYA_WORKER_COMMAND="$command" KAKEYA_NETWORK_COMMAND="$command"
name_the_namespace

trap clean_up EXIT
kakeya_rendered="$(mktemp -d)" || die "no temporary folder"
rendered="$kakeya_rendered"
unit="kakeya-$service.service"
render "$kakeya_deploy/systemd/$unit" "$rendered/$unit" || exit 2
"$kakeya_python" "$kakeya_deploy/render_service.py" --arguments "$kakeya_deploy/systemd/$unit" "$rendered/arguments.json" || exit 2
check_arguments "$rendered/arguments.json"
need_same_home "$units/$unit" "remove it first (bash deploy/install_systemd.sh --uninstall $service)"
paths="$("$kakeya_python" "$kakeya_deploy/service_paths.py" "$rendered/arguments.json" "$kakeya_home" "$rendered/$unit")" || exit 2
note="$(sed -n 1p <<<"$paths")"
warn_of_variables "$kakeya_deploy/systemd/$unit"
if [ "$kakeya_dry_run" = yes ]; then
    cat "$rendered/$unit"
    [ -z "$note" ] || say "$note"
    say "dry run: $units/$unit was not written and nothing was started"
    exit 0
fi
need_manager
make_folders "$units"
# What a unit may write to has to be there when it starts.
while IFS= read -r folder; do
    [ -z "$folder" ] || make_private_folder "$folder"
done < <(sed 1d <<<"$paths")
stage "$rendered/$unit" "$units/$unit"
keep_old "$units/$unit"
state="$(systemctl --user is-active "$unit" 2>/dev/null || true)"
put_in_place "$units/$unit" || die "$units/$unit cannot be replaced: the old definition is still there"
if ! start_unit; then
    ! has_old "$units/$unit" || go_back_to_unit
    die "$kakeya_trouble: $kakeya_remedy"
fi
[ -z "$note" ] || say "$note"
say "$unit runs; log: see StandardError in $units/$unit"
