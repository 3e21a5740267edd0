# Shared by the scripts that install services: render a template, (re)load it. Source it, don't run it. Works with bash 3.2.
# shellcheck shell=bash

kakeya_deploy="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
kakeya_repo="$(cd "$kakeya_deploy/.." && pwd)"
kakeya_dry_run=no
kakeya_home="${KAKEYA_HOME:-$HOME/.kakeya}"
kakeya_agents="${KAKEYA_LAUNCH_AGENTS:-$HOME/Library/LaunchAgents}"
# For tests: how long to wait between looks, in seconds.
kakeya_wait_s="${KAKEYA_INSTALL_WAIT_S:-0.25}"
kakeya_retry_s="${KAKEYA_INSTALL_RETRY_S:-2}"

say() { printf 'kakeya: %s\n' "$*" >&2; }

# One line, exit code 2: bad or missing input. Nothing has been touched by then.
refuse() {
    printf 'kakeya: error: %s\n' "$*" >&2
    exit 2
}

die() {
    printf 'kakeya: error: %s\n' "$*" >&2
    exit 1
}

# need VARIABLE WHAT: the variable must be set.
need() {
    [ -n "${!1:-}" ] || refuse "set $1 ($2)"
}

# need_key FILE REMEDY: a secret must be there, a regular file, and readable by its owner only.
need_key() {
    [ -f "$1" ] || refuse "there is no $1: $2"
    case "$(file_mode "$1")" in
        600 | 400) ;;
        *) refuse "$1 can be read by others: chmod 600 $1" ;;
    esac
}

file_mode() {
    case "$(uname -s)" in
        Darwin) stat -f %Lp "$1" ;;
        *) stat -c %a "$1" ;;
    esac
}

# read_options SCRIPT "$@": the options all install scripts have.
read_options() {
    local script="$1"
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
            --dry-run) kakeya_dry_run=yes ;;
            -h | --help)
                # The script's own comment is its help text.
                sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$script"
                exit 0
                ;;
            *) refuse "unknown option $1; see --help" ;;
        esac
        shift
    done
}

# find_kakeya [PYTHON]: print the kakeya command: beside the given Python, in the repository's .venv, or on the PATH.
find_kakeya() {
    local candidate
    if [ -n "${1:-}" ]; then
        candidate="$(dirname "$1")/kakeya"
        [ -x "$candidate" ] || refuse "there is no kakeya beside $1: $1 -m pip install '${kakeya_repo}[mlx]'"
        printf '%s\n' "$candidate"
        return
    fi
    for candidate in "$kakeya_repo/.venv/bin/kakeya" "$(command -v kakeya || true)"; do
        if [ -n "$candidate" ] && [ -x "$candidate" ]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    refuse "kakeya is not installed: run bash deploy/quickstart.sh first, or name a Python with kakeya"
}

# render TEMPLATE OUTPUT: standard library only, so any Python of 3.11 or newer does.
render() {
    "$kakeya_python" "$kakeya_deploy/render_service.py" "$1" "$2"
}

# use_python KAKEYA_COMMAND: the Python beside it renders the templates.
use_python() {
    local beside
    beside="$(dirname "$1")"
    for kakeya_python in "$beside/python" "$beside/python3" "$(command -v python3 || true)"; do
        [ -n "$kakeya_python" ] && [ -x "$kakeya_python" ] && return
    done
    refuse "no Python was found beside $1"
}

# check_arguments FILE: whether the daemon would accept the command line in FILE (a JSON list), before anything is touched.
check_arguments() {
    "$kakeya_python" - "$1" <<'PYTHON' || refuse "the settings are not usable: see the line above"
import json, subprocess, sys
with open(sys.argv[1], encoding="utf-8") as stream:
    arguments = json.load(stream)
sys.exit(subprocess.run([*arguments, "--check-settings"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode)
PYTHON
}

loaded() { launchctl print "gui/$(id -u)/$1" >/dev/null 2>&1; }

# unload LABEL: boot it out and wait until it is gone.
unload() {
    local tries=0
    loaded "$1" || return 0
    launchctl bootout "gui/$(id -u)/$1" >/dev/null 2>&1 || true
    while loaded "$1"; do
        tries=$((tries + 1))
        [ "$tries" -le 200 ] || die "$1 does not stop: look at its log, then try again"
        sleep "$kakeya_wait_s"
    done
}

# load LABEL PLIST: launchd now and then refuses a bootstrap right after a bootout; three tries.
load() {
    local try
    for try in 1 2 3; do
        if launchctl bootstrap "gui/$(id -u)" "$2"; then
            launchctl kickstart "gui/$(id -u)/$1" >/dev/null || die "$1 was loaded but does not start: launchctl print gui/$(id -u)/$1"
            return
        fi
        [ "$try" -eq 3 ] || sleep "$kakeya_retry_s"
    done
    die "launchd refuses $1 three times: launchctl bootstrap gui/$(id -u) $2 says why"
}

# install_agent LABEL TEMPLATE LOG: render, check, replace what runs. With --dry-run: render, check and print.
install_agent() {
    local label="$1" template="$kakeya_deploy/launchd/$2" rendered target="$kakeya_agents/$1.plist"
    rendered="$(mktemp -d)" || die "no temporary folder"
    # shellcheck disable=SC2064 # the folder of now
    trap "rm -rf '$rendered'" EXIT
    render "$template" "$rendered/$label.plist" || exit 2
    if command -v plutil >/dev/null 2>&1; then
        plutil -lint -s "$rendered/$label.plist" || die "$label: the rendered property list is not valid"
    fi
    "$kakeya_python" "$kakeya_deploy/render_service.py" --arguments "$template" "$rendered/arguments.json" || exit 2
    check_arguments "$rendered/arguments.json"
    if [ "$kakeya_dry_run" = yes ]; then
        cat "$rendered/$label.plist"
        say "dry run: $target was not written and nothing was started"
        return
    fi
    command -v launchctl >/dev/null 2>&1 || die "there is no launchctl: on Linux use deploy/install_systemd.sh"
    mkdir -p "$kakeya_agents"
    (umask 077 && mkdir -p "$kakeya_home")
    if cmp -s "$rendered/$label.plist" "$target" && loaded "$label"; then
        launchctl kickstart -k "gui/$(id -u)/$label" >/dev/null || die "$label does not start"
        say "$label was up to date; restarted"
        return
    fi
    unload "$label"
    cp "$rendered/$label.plist" "$target.new" && chmod 644 "$target.new" && mv "$target.new" "$target"
    load "$label" "$target"
    say "$label runs; log: $kakeya_home/$3"
}
