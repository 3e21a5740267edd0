# Shared by the scripts of this folder: find Python, make .venv, install the package into it. Source it, don't run it.
# Works with the bash 3.2 of macOS. Everything it says goes to standard error.
# shellcheck shell=bash

kakeya_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
kakeya_venv="$kakeya_root/.venv"
kakeya_stamp="$kakeya_venv/kakeya-installed"
kakeya_venv_is_new=no

say() { printf 'kakeya: %s\n' "$*" >&2; }

die() {
    printf 'kakeya: error: %s\n' "$*" >&2
    exit 1
}

# Whether Debian's packages can be installed: apt-get is there and we are root.
can_apt() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; }

# apt_install PACKAGE...: quietly, without questions.
apt_install() {
    say "installing Debian packages: $*"
    export DEBIAN_FRONTEND=noninteractive
    # The package lists may be missing (containers) or old: fetch them only when a first try fails.
    apt-get install -y -q --no-install-recommends "$@" </dev/null >/dev/null 2>&1 && return
    apt-get update -q </dev/null >/dev/null 2>&1 || true
    apt-get install -y -q --no-install-recommends "$@" </dev/null >&2
}

# python_fits COMMAND: whether it is a Python of 3.11 or newer.
python_fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Print the first fitting Python; KAKEYA_PYTHON overrides the search.
find_python() {
    local candidate
    if [ -n "${KAKEYA_PYTHON:-}" ]; then
        python_fits "$KAKEYA_PYTHON" || die "KAKEYA_PYTHON ($KAKEYA_PYTHON) is not a Python of 3.11 or newer"
        command -v "$KAKEYA_PYTHON"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3; do
        if command -v "$candidate" >/dev/null 2>&1 && python_fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# Print a Python that can make virtual environments; install what is missing where that is possible.
need_python() {
    local python
    if ! python="$(find_python)"; then
        [ -z "${KAKEYA_PYTHON:-}" ] || exit 1
        can_apt || die "Python 3.11 or newer is needed: get it from https://www.python.org/downloads/ (macOS: brew install python@3.13; Debian: apt-get install python3 python3-venv)"
        apt_install python3 python3-venv
        python="$(find_python)" || die "this system's python3 is older than 3.11: install a newer one and set KAKEYA_PYTHON to it"
    fi
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        can_apt || die "$python can't make virtual environments: install python3-venv"
        # Debian's versioned Pythons have a venv package of their own.
        apt_install "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" || apt_install python3-venv
    fi
    printf '%s\n' "$python"
}

# What an installation depends on: the two files that name its dependencies, the Python, and the place (it is editable).
install_fingerprint() {
    {
        cat "$kakeya_root/setup.cfg" "$kakeya_root/pyproject.toml"
        "$kakeya_venv/bin/python" -c 'import sys; print(sys.version)'
        printf '%s\n' "$kakeya_root"
    } | cksum
}

# is_installed EXTRA...: whether the stamp says that these extras are in, as the files have them now.
is_installed() {
    local extra
    [ -x "$kakeya_venv/bin/python" ] && [ -f "$kakeya_stamp" ] || return 1
    [ "$(sed -n 1p "$kakeya_stamp")" = "$(install_fingerprint)" ] || return 1
    for extra in "$@"; do
        case " $(sed -n 2p "$kakeya_stamp") " in
            *" $extra "*) ;;
            *) return 1 ;;
        esac
    done
}

# Called when a script ends before the installation is complete.
drop_half_made() {
    if [ "$kakeya_venv_is_new" = yes ]; then
        say "stopped: removing the incomplete .venv"
        rm -rf "$kakeya_venv"
    fi
}

# install_package EXTRA...: .venv with the package and these extras; nothing to do when the stamp says so.
install_package() {
    is_installed "$@" && return
    local python extras started=$SECONDS
    extras="$(printf '%s,' "$@")"
    trap drop_half_made EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    if ! "$kakeya_venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(need_python)"
        say "making .venv with $("$python" --version 2>&1)"
        kakeya_venv_is_new=yes
        "$python" -m venv --clear "$kakeya_venv" >&2
    fi
    rm -f "$kakeya_stamp" # whatever happens from here on: a stopped installation is not a complete one
    say "installing packages (the first time this downloads about 400 MB)"
    "$kakeya_venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
        --editable "${kakeya_root}[${extras%,}]" </dev/null >&2 ||
        die "the packages could not be installed: see pip's message above"
    printf '%s\n%s\n' "$(install_fingerprint)" "$*" >"$kakeya_stamp.new"
    mv "$kakeya_stamp.new" "$kakeya_stamp"
    trap - EXIT INT TERM
    kakeya_venv_is_new=no
    say "installed in $((SECONDS - started)) s"
}
