"""Only the optional C extension lives here; everything else is in pyproject.toml."""

from setuptools import Extension, setup

ROOM = "src/tensorprobe/numerics"

setup(
    ext_modules=[
        Extension(
            "tensorprobe.numerics._native",
            sources=[f"{ROOM}/_native.c"],
            depends=[f"{ROOM}/_blocks.h", f"{ROOM}/_moments.h"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            # No contraction to fused multiply-add: the numpy twin must get the same bits on every processor.
            extra_compile_args=[
                "-O3",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fno-strict-aliasing",
                "-ffp-contract=off",
            ],
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
