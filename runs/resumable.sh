# Runs that go on where they stopped, for scripts of several. Sourced, with the flags of all of a
# script's runs in the array `common`.

ended() {  # ended FOLDER: its last step is saved and, if the first row is, evaluated
    local steps; steps=$(sed -n 's/^ *"steps": \([0-9]*\),*$/\1/p' "$1/config.json")
    [ "$(readlink "$1/checkpoint")" = "$(printf 'checkpoint-%06d' "$steps")" ] &&
        [ "$(head -n 1 "$1/log.jsonl" | grep -c eval/)" = \
            "$(tail -n 1 "$1/log.jsonl" | grep -c eval/)" ]
}
train() {  # train MODULE FOLDER FLAGS...: start it, resume it, or skip it if it has ended
    if [ -e "$2/config.json" ]; then
        ! ended "$2" || return 0
        set -- "$@" --resume
    fi
    python -m "$1" "${common[@]}" --out-dir "$2" "${@:3}"
    ended "$2"  # one that was stopped ends this script; the same command continues
}
