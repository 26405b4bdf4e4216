#!/bin/sh
# Install pyllamakv and its dependencies into a Python if they are missing, and print its path.
#
#   tools/bootstrap.sh own  EXTRAS   use the active virtual environment, or .venv if none is active
#                                    or if another checkout uses it
#   tools/bootstrap.sh here EXTRAS   like own, but prefer python3 if its pip may install packages
#   tools/bootstrap.sh peer PYTHON   install llama-cpp-python there, without its library
#   tools/bootstrap.sh clients PYTHON
#                                    install the clients of `pyllamakv serve` there
#   tools/bootstrap.sh clang         install clang with libFuzzer, if root may install it with apt
#   tools/bootstrap.sh hint PYTHON   print the command that runs the tests with that Python
#
# stdout contains only the result. Progress and errors go to stderr.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd -P)

# Lists below have one path per line, and paths may have spaces.
IFS=$(printf '\nx')
IFS=${IFS%x}

say() { echo "$@" >&2; }
die() { say "error:" "$@"; exit 2; }

# With these variables, pip would install into another environment.
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_NO_BUILD_ISOLATION PIP_DRY_RUN PYTHONHOME || true
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
if [ -z "${HOME:-}" ] || [ ! -w "${HOME:-/nonexistent}" ]; then
    export PIP_NO_CACHE_DIR=1
fi

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# A name on PATH may be a shim of a version that is not installed, so run each.
pythons() {
    for name in "${PYTHON:-}" python3 python python3.11 python3.12 python3.13 python3.14 \
        /usr/bin/python3; do
        if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1 && new_enough "$name"; then
            command -v "$name"
        fi
    done
}

no_python() {
    die "found no Python 3.11 or later on PATH or in the variable PYTHON." \
        "Debian 12, Ubuntu 24.04 and newer: apt-get install python3 python3-venv"
}

may_install() {
    "$1" -m pip --version >/dev/null 2>&1 && [ -z "${PIP_REQUIRE_VIRTUALENV:-}" ] && "$1" -c '
import os, pathlib, sys, sysconfig
managed = pathlib.Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
allowed = os.environ.get("PIP_BREAK_SYSTEM_PACKAGES", "0").lower() not in ("", "0", "false", "no")
paths = (sysconfig.get_path("purelib"), sysconfig.get_path("scripts"))
sys.exit((managed and not allowed) or not all(os.access(p, os.W_OK) for p in paths))
' >/dev/null 2>&1
}

works() { [ -x "$1" ] && new_enough "$1" && "$1" -m pip --version >/dev/null 2>&1; }

make_venv() {
    works .venv/bin/python && return 0
    found=
    for python in $(pythons); do
        found=1
        rm -rf .venv
        say "creating .venv with $python"
        if "$python" -m venv .venv >/dev/null 2>&1 && works .venv/bin/python; then return 0; fi
        rm -rf .venv
        if "$python" -m virtualenv -q .venv >/dev/null 2>&1 && works .venv/bin/python; then
            return 0
        fi
        # Without python3-venv, Debian lacks only the bundled pip; use the system's pip.
        rm -rf .venv
        if "$python" -m venv --without-pip .venv >/dev/null 2>&1 &&
            "$python" -m pip --python .venv/bin/python install -q pip >&2 &&
            works .venv/bin/python; then
            return 0
        fi
    done
    rm -rf .venv
    [ -n "$found" ] || no_python
    die "cannot create a virtual environment in $root/.venv." \
        "Debian or Ubuntu: apt-get install python3-venv; elsewhere: python3 -m pip install virtualenv"
}

# Name the file that marks an installation, by interpreter, extras and pyproject.toml.
stamp_of() {
    "$1" - "$2" <<'PYTHON'
import hashlib, pathlib, sys
text = pathlib.Path("pyproject.toml").read_bytes()
facts = repr((sys.prefix, sys.version, sys.argv[1])).encode() + text
print("vendor/.installed-" + hashlib.sha256(facts).hexdigest()[:16])
PYTHON
}

# Print the directory from which pyllamakv was installed into a Python.
origin() {
    "$1" -c '
import importlib.metadata, json, urllib.parse
origin = importlib.metadata.distribution("pyllamakv").read_text("direct_url.json") or "{}"
print(urllib.parse.unquote(urllib.parse.urlsplit(json.loads(origin).get("url", "")).path))
' 2>/dev/null
}

# Print the other checkout that uses a Python: the package is installed from it, or the Python is in
# its .venv, which may lack the package.
other() {
    from=$(origin "$1" || true)
    [ "$from" != "$root" ] || return 1
    if [ -n "$from" ] && [ -e "$from/pyproject.toml" ]; then
        printf '%s\n' "$from"
        return 0
    fi
    case $1 in */.venv/bin/*) ;; *) return 1 ;; esac
    place=$(cd "${1%/.venv/bin/*}" 2>/dev/null && pwd -P) || return 1
    [ "$place" != "$root" ] && [ -e "$place/pyllamakv/__init__.py" ] && printf '%s\n' "$place"
}

imports() {
    [ "$(origin "$1")" = "$root" ] && "$1" -c '
import importlib.util, sys
names = ("pyllamakv", "cffi", "numpy", "cmake", "ninja", "typer", "pytest")
sys.exit(not all(map(importlib.util.find_spec, names)))
' >/dev/null 2>&1
}

install() {
    stamp=$(stamp_of "$1" "$2")
    if [ -e "$stamp" ] && imports "$1"; then return 0; fi
    say "installing pyllamakv[$2] with $1"
    "$1" -m pip install -q -e ".[$2]" >&2 || return 1
    mkdir -p vendor
    : >"$stamp"
    if command -v pyenv >/dev/null 2>&1; then pyenv rehash >/dev/null 2>&1 || true; fi
}

own() {
    python=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}
    if [ -n "$python" ] && place=$(other "$python"); then
        say "$VIRTUAL_ENV is used by the checkout $place: using .venv"
        python=
    fi
    if [ -z "$python" ] || ! works "$python"; then
        make_venv
        python=$root/.venv/bin/python
    fi
    install "$python" "$1" || die "pip could not install pyllamakv[$1]; see its output above"
    printf '%s\n' "$python"
}

here() {
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        for python in $(pythons); do
            # Use the first only: its pytest is the one that the shell runs.
            if place=$(other "$python"); then
                say "$python is used by the checkout $place: using .venv"
                break
            fi
            if may_install "$python" && install "$python" "$1"; then
                printf '%s\n' "$python"
                return 0
            fi
            say "pip cannot install into $python: using .venv"
            break
        done
    fi
    own "$1"
}

peer() {
    version=$("$1" -c '
import pathlib, tomllib
extras = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
print(extras["peer"][0])')
    if "$1" -c '
import importlib.metadata, sys
name, version = sys.argv[1].split("==")
sys.exit(importlib.metadata.version(name) != version)' "$version" >/dev/null 2>&1; then
        return 0
    fi
    say "installing $version without its library"
    # Without --no-cache-dir, a later installation would reuse this wheel, which lacks the library.
    if ! CMAKE_ARGS="-DLLAMA_BUILD=OFF" "$1" -m pip install -q --no-cache-dir "$version" >&2; then
        say "cannot install $version: tests that need it will be skipped"
    fi
}

clients() {
    if "$1" -c '
import importlib.util, sys
names = ("openai", "litellm", "langchain_openai", "schemathesis")
sys.exit(not all(map(importlib.util.find_spec, names)))' >/dev/null 2>&1; then
        return 0
    fi
    say "installing clients of pyllamakv serve"
    if ! "$1" -m pip install -q -e ".[clients]" >&2; then
        say "cannot install the clients: tests that need them will be skipped"
    fi
}

# Report whether a clang compiles programs of libFuzzer.
fuzzes() {
    program=$(mktemp) || return 1
    echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }' |
        clang++ -fsanitize=fuzzer,address -x c++ - -o "$program" >/dev/null 2>&1
    status=$?
    rm -f "$program"
    return $status
}

clang() {
    if fuzzes; then return 0; fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing clang with apt-get"
        apt-get update -q >&2 || true
        version=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p')
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
            clang "libclang-rt-${version:-14}-dev" >&2 || true
    fi
    fuzzes || say "found no clang with libFuzzer: the target kept-header will be skipped"
}

hint() {
    case $1 in
    "$root"/.venv/*) echo '. .venv/bin/activate && pytest' ;;
    *)
        beside=$("$1" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/pytest
        found=$(command -v pytest || true)
        case $found in
        "$beside" | */shims/pytest) echo pytest ;;
        *) echo "$1 -m pytest" ;;
        esac
        ;;
    esac
}

case ${1:-} in
own | here | peer | clients | hint) "$1" "${2:?the second argument is missing}" ;;
clang) clang ;;
*) die "expected own, here, peer, clients, clang or hint" ;;
esac
