#!/bin/sh
# Builds the C code with the address and undefined-behaviour sanitizers and runs it: the native kernel, as vector code and
# as portable code, over every dtype, size and alignment, one tensor at a time and in pairs; the loops of capture over
# objects that look like tensors, well behaved or not; the recorder's loop over frames, whole and damaged. Exits non-zero
# on any report, on any wrong result, and when the sanitizer fails to notice a planted read beyond the end.
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

build() { # source below src/tensorprobe, name, extra flags
    source=$1
    name=$2
    shift 2
    "$cc" -shared -fPIC -g -O1 -std=c11 -Wall -Wextra -Werror -ffp-contract=off -fno-omit-frame-pointer \
        -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all \
        -DPy_LIMITED_API=0x030A0000 "-I$include" "$@" \
        "$root/src/tensorprobe/$source" -o "$work/$name.so" -lm
}

# The interpreter itself is not built for leak detection; its own allocator would hide errors from the sanitizer.
run() { # program below tests, extension, options
    program=$1
    shift
    LD_PRELOAD="$runtime" ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
        PYTHONMALLOC=malloc OPENBLAS_NUM_THREADS=1 PYTHONPATH="$root/src" \
        "$python" "$root/tests/$program" "$@"
}

exercise() { # program, name, planted errors: first the proof that each is seen, then everything
    program=$1
    name=$2
    shift 2
    for planted in "$@"; do
        if run "$program" "$work/$name.so" "$planted" >"$work/alarm" 2>&1 || ! grep -q heap-buffer-overflow "$work/alarm"; then
            echo "sanitize: the planted read beyond the end was not reported ($name $planted)" >&2
            cat "$work/alarm" >&2
            exit 1
        fi
    done
    run "$program" "$work/$name.so"
}

build numerics/_native.c vector
exercise numerics/exercise_kernel.py vector --overread --overread-pair
build numerics/_native.c portable -DTENSORPROBE_PORTABLE
exercise numerics/exercise_kernel.py portable --overread --overread-pair
build _fast.c loops
exercise taps/exercise_fast.py loops --overread
build record/_frames.c frames
exercise record/exercise_frames.py frames --overread
echo "sanitize: clean"
