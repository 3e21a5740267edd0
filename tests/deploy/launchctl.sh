#!/bin/sh
# A stand-in for launchctl: records its calls and remembers what is loaded, in $FAKE_LAUNCHD.
# refuse-bootstrap, slow-bootout: how many of the next calls fail or see the service still there.
printf '%s\n' "$*" >>"$FAKE_LAUNCHD/calls"
count() {
    left="$(cat "$FAKE_LAUNCHD/$1" 2>/dev/null || echo 0)"
    [ "$left" -gt 0 ] || return 1
    echo $((left - 1)) >"$FAKE_LAUNCHD/$1"
}
label="${2##*/}"
case "$1" in
    print)
        [ ! -e "$FAKE_LAUNCHD/leaving-$label" ] || count slow-bootout || rm -f "$FAKE_LAUNCHD/leaving-$label" "$FAKE_LAUNCHD/loaded-$label"
        [ -e "$FAKE_LAUNCHD/loaded-$label" ]
        ;;
    bootout) touch "$FAKE_LAUNCHD/leaving-$label" ;;
    bootstrap)
        ! count refuse-bootstrap || exit 5
        touch "$FAKE_LAUNCHD/loaded-$(basename "$3" .plist)"
        ;;
    kickstart)
        for label in "$@"; do :; done
        [ -e "$FAKE_LAUNCHD/loaded-${label##*/}" ]
        ;;
    *) exit 64 ;;
esac
