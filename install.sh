#!/bin/sh
# Create the virtual environment VENV from a lock file, or print in one line what this machine lacks.
#
#     sh install.sh .venv requirements.lock           # PYTHON=/usr/bin/python3.12 chooses the Python
set -u
venv=$1
lock=$2
log=$venv/install.log
GIGABYTES=8

fail() {
    echo "install.sh: error: $1" >&2
    exit 2
}

# Print the first of the given Pythons that is 3.11 or 3.12 and can create virtual environments.
find_python() {
    for python in "$@"; do
        if "$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null
        then
            echo "$python"
            return
        fi
    done
}

# Print the package index that pip is configured to use, if any: uv does not read pip's configuration.
pips_index() {
    echo "${PIP_INDEX_URL:-$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null)}"
}

# An environment created from exactly this lock file is complete.
cmp -s "$lock" "$venv/installed" 2>/dev/null && exit
[ ! -L "$venv" ] || fail "$venv is a link to $(readlink "$venv"), where the packages of $lock are not installed; remove the link, and make creates an environment here"

python=$(find_python ${PYTHON:-python3.11 python3.12 python3})
[ -n "$python" ] || fail "needs Python 3.11 or 3.12 with the modules venv and ensurepip; install one, or give its path: make PYTHON=/path/to/python3.11"
free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1000000)}')
[ "$free" -ge "$GIGABYTES" ] || fail "needs $GIGABYTES GB of disk space in $PWD, which has $free GB; free some space, or clone elsewhere"

said=$("$python" -m venv "$venv" 2>&1) || fail "$python cannot create the environment $venv ($(echo "$said" | tail -1))"
uv=$(command -v uv)
if [ -z "$uv" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 uv >"$log" 2>&1 ||
        fail "pip cannot reach a package index ($(grep ERROR "$log" | tail -1)); connect this machine, or set PIP_INDEX_URL to a mirror"
    uv=$venv/bin/uv
fi
index=$(pips_index)
[ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
echo "installing $lock in $venv"
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes -r "$lock" >"$log" 2>&1 && cp "$lock" "$venv/installed" && exit
echo "uv failed ($(grep -m 1 . "$log")); installing with pip instead, which takes minutes"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$lock" >"$log" 2>&1 ||
    fail "pip could not install $lock ($(grep ERROR "$log" | tail -1)); the full log is $log"
cp "$lock" "$venv/installed"
