#!/bin/sh
# Make the environment VENV of what a lock file lists, or say in one line what this machine lacks.
#
#     sh install.sh .venv requirements.lock           # PYTHON=/usr/bin/python3.12 names the Python to take
set -u
venv=$1
lock=$2
log=$venv/install.log
GIGABYTES=8

fail() {
    echo "install.sh: error: $1" >&2
    exit 2
}

# Prints the first of the Pythons that are named which is 3.11 or 3.12 and can make environments.
find_python() {
    for python in "$@"; do
        if "$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null
        then
            echo "$python"
            return
        fi
    done
}

# Prints the index that pip is told to use, of which uv knows nothing; nothing where there is none.
pips_index() {
    echo "${PIP_INDEX_URL:-$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null)}"
}

# An environment that was made of this very lock file is whole, wherever it lies and however old it is.
cmp -s "$lock" "$venv/installed" 2>/dev/null && exit
[ ! -L "$venv" ] || fail "$venv is a link to $(readlink "$venv"), where what $lock lists is not installed; remove the link, and an environment is made in its place"

python=$(find_python ${PYTHON:-python3.11 python3.12 python3})
[ -n "$python" ] || fail "needs Python 3.11 or 3.12 with its modules venv and ensurepip; install one, or name it: make PYTHON=/path/to/python3.11"
free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1000000)}')
[ "$free" -ge "$GIGABYTES" ] || fail "needs $GIGABYTES GB of disk in $PWD, which has $free GB; make room, or clone elsewhere"

said=$("$python" -m venv "$venv" 2>&1) || fail "$python cannot make the environment $venv ($(echo "$said" | tail -1))"
uv=$(command -v uv)
if [ -z "$uv" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 uv >"$log" 2>&1 ||
        fail "no package index is in reach of pip ($(grep ERROR "$log" | tail -1)); connect this machine, or set PIP_INDEX_URL to a mirror"
    uv=$venv/bin/uv
fi
index=$(pips_index)
[ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
echo "installing $lock in $venv"
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes -r "$lock" >"$log" 2>&1 && cp "$lock" "$venv/installed" && exit
echo "uv could not ($(grep -m 1 . "$log")); pip does, which takes minutes"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$lock" >"$log" 2>&1 ||
    fail "pip could not install $lock ($(grep ERROR "$log" | tail -1)); all it said is in $log"
cp "$lock" "$venv/installed"
