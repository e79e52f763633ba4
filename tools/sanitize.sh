#!/bin/sh
# Builds the native kernel with the address and undefined-behaviour sanitizers, as vector code and as portable code, and
# runs it over every dtype, size and alignment. Exits non-zero on any report, on any wrong result, and when the
# sanitizer fails to notice a planted read beyond the end.
#
# usage: tools/sanitize.sh [PYTHON]      (default: .venv/bin/python; CC names the compiler, default cc)
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
cc=${CC:-cc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
runtime=$("$cc" -print-file-name=libasan.so)
if [ ! -e "$runtime" ]; then
    echo "sanitize: $cc has no libasan.so" >&2
    exit 1
fi

build() { # name, extra flags
    name=$1
    shift
    "$cc" -shared -fPIC -g -O1 -std=c11 -Wall -Wextra -Werror -ffp-contract=off -fno-omit-frame-pointer \
        -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all \
        -DPy_LIMITED_API=0x030A0000 "-I$include" "$@" \
        "$root/src/tensorprobe/numerics/_native.c" -o "$work/$name.so" -lm
}

# The interpreter itself is not built for leak detection; its own allocator would hide errors from the sanitizer.
exercise() {
    LD_PRELOAD="$runtime" ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
        PYTHONMALLOC=malloc OPENBLAS_NUM_THREADS=1 PYTHONPATH="$root/src" \
        "$python" "$root/tests/numerics/exercise_kernel.py" "$@"
}

for variant in vector portable; do
    flags=
    [ "$variant" = portable ] && flags=-DTENSORPROBE_PORTABLE
    # shellcheck disable=SC2086  # no flags at all must not become one empty argument
    build "$variant" $flags
    if exercise "$work/$variant.so" --overread >"$work/alarm" 2>&1 || ! grep -q heap-buffer-overflow "$work/alarm"; then
        echo "sanitize: the planted read beyond the end was not reported ($variant)" >&2
        cat "$work/alarm" >&2
        exit 1
    fi
    exercise "$work/$variant.so"
done
echo "sanitize: clean"
