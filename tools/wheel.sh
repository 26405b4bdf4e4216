#!/bin/sh
# Build the wheel, and test it like a new user: in a new environment, with an empty home directory,
# from an empty directory outside the checkout.
#
#   tools/wheel.sh PYTHON RELEASE
set -eu
cd "$(dirname "$0")/.."
root=$(pwd -P)
python=${1:?the first argument is missing: a Python}
release=${2:?the second argument is missing: a release}
limit=1200000

say() { echo "$@" >&2; }
die() { say "error:" "$@"; exit 1; }

unset PYTHONPATH PYTHONHOME PYLLAMAKV_HOME PIP_TARGET PIP_PREFIX PIP_USER || true
rm -rf dist
"$python" -m pip wheel -q --disable-pip-version-check --no-deps -w dist . >&2
set -- dist/pyllamakv-*.whl
[ $# = 1 ] && [ -f "$1" ] || die "expected one wheel in dist/, found: $*"
wheel=$root/$1
size=$(wc -c <"$wheel")
[ "$size" -le $limit ] || die "$1 has $size bytes, the limit is $limit"
say "$1 has $size bytes"

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT INT TERM
mkdir "$place/home" "$place/empty"
"$python" -m venv --without-pip "$place/venv"
"$python" -m pip --python "$place/venv/bin/python" install -q --disable-pip-version-check \
    --no-cache-dir "$wheel" >&2
cd "$place/empty"
export HOME="$place/home" PATH="$place/venv/bin:$PATH"
unset XDG_CACHE_HOME || true

pyllamakv --version
pyllamakv build "$release" >&2
python - "$release" "$place" <<'PYTHON'
import pathlib, sys
import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models
from pyllamakv.home import home

release, place = sys.argv[1:]
assert pathlib.Path(kv.__file__).is_relative_to(place), kv.__file__
assert home().is_relative_to(pathlib.Path(place, "home").resolve()), home()
for spec in (f"{release}+stock", f"{release}+patched"):
    with kv.open(spec) as library, library.load_model(synthetic_models.tiny()) as model:
        with model.context(n_ctx=256) as context:
            context.decode([context.sequence().feed([1, 2, 3])])
            print(spec, "decodes;", library.path.relative_to(place))
PYTHON
[ -z "$(ls -A)" ] || die "the build left files in its working directory: $(ls -A)"
echo "the wheel ($size bytes) builds and runs $release outside the checkout"
