#!/bin/sh
# Build the wheels of pyllamakv and pyllamakv-prebuilt into dist/, and test them where nothing can be
# compiled: in a new environment, with an empty home directory, without compiler, make and git.
#
#   tools/prebuilt.sh PYTHON [RELEASE]   default: the newest verified release
set -eu
cd "$(dirname "$0")/.."
root=$(pwd -P)
python=${1:?the first argument is missing: a Python}
release=${2:-}

say() { echo "$@" >&2; }
die() { say "error:" "$@"; exit 1; }
wheel() { "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$@" >&2; }

unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER || true
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT INT TERM
mkdir "$place/project" "$place/home" "$place/empty"
rm -rf dist
wheel dist .
say "building the portable variants"
# shellcheck disable=SC2086 # no release is no argument
ids=$("$python" tools/prebuilt/stage.py "$place/project" $release)
wheel "$place/linux" "$place/project"
# Its own tag is that of any Linux. auditwheel replaces it by that of the oldest C library with all
# symbols, and fails for a library that no tag allows.
PATH="$(dirname "$python"):$PATH" "$python" -m auditwheel repair -w dist "$place"/linux/*.whl >&2 ||
    die "auditwheel cannot tag the wheel; see its output above"
set -- dist/pyllamakv_prebuilt-*-manylinux*.whl
[ $# = 1 ] && [ -f "$1" ] || die "expected one wheel for manylinux in dist/, found: $*"
made=$1

"$python" -m venv --without-pip "$place/venv"
"$python" -m pip --python "$place/venv/bin/python" install -q --disable-pip-version-check \
    --no-cache-dir --find-links dist "pyllamakv[prebuilt]" >&2
cd "$place/empty"
env -i HOME="$place/home" PATH="$place/venv/bin" LANG=C.UTF-8 "$place/venv/bin/python" - $ids <<'PYTHON'
import shutil, sys
import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

stock, patched = sys.argv[1:]
assert not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang", "make", "git", "sh")))
assert [each.id for each in kv.variants()] == sorted((stock, patched)), kv.variants()
for spec, expected in ((None, patched), (stock, stock)):
    with kv.open(spec) as library, library.load_model(synthetic_models.tiny()) as model:
        assert library.about.variant == expected, library.about
        with model.context(n_ctx=256) as context:
            context.decode([context.sequence().feed([1, 2, 3])])
            print(expected, "decodes")
PYTHON
[ -z "$(ls -A)" ] || die "files in the working directory: $(ls -A)"
cd "$root"
echo "$made ($(wc -c <"$made") bytes) works without a compiler"
echo "install it: pip install --find-links $root/dist 'pyllamakv[prebuilt]'"
