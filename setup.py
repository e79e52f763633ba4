"""Only the optional C extensions live here; everything else is in pyproject.toml."""

from setuptools import Extension, setup

SOURCE = "src/tensorprobe"
STABLE_ABI = [("Py_LIMITED_API", "0x030A0000")]
# No contraction to fused multiply-add: the numpy twin must get the same bits on every processor.
ARITHMETIC = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-ffp-contract=off"]

setup(
    ext_modules=[
        Extension(
            "tensorprobe.numerics._native",
            sources=[f"{SOURCE}/numerics/_native.c"],
            depends=[
                f"{SOURCE}/numerics/_{name}.h"
                for name in ("blocks", "distance", "glance", "moments", "pairs", "peak", "scans")
            ],
            define_macros=STABLE_ABI,
            py_limited_api=True,
            extra_compile_args=ARITHMETIC,
            optional=True,
        ),
        Extension(
            "tensorprobe._fast",
            sources=[f"{SOURCE}/_fast.c"],
            depends=[
                *(f"{SOURCE}/numerics/_{name}.h" for name in ("blocks", "peak")),
                *(
                    f"{SOURCE}/_fast_{name}.h"
                    for name in ("gradients", "mode", "pack", "record", "roles", "scan", "slots", "stacks", "values")
                ),
            ],
            define_macros=STABLE_ABI,
            py_limited_api=True,
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "tensorprobe.record._frames",
            sources=[f"{SOURCE}/record/_frames.c"],
            depends=[
                f"{SOURCE}/_fast_pack.h",
                *(f"{SOURCE}/numerics/_{name}.h" for name in ("blocks", "moments")),
                *(f"{SOURCE}/record/_{name}.h" for name in ("json", "shortest")),
            ],
            define_macros=STABLE_ABI,
            py_limited_api=True,
            extra_compile_args=ARITHMETIC,
            optional=True,
        ),
        Extension(
            "tensorprobe.sim._cards",
            sources=[f"{SOURCE}/sim/_cards.c"],
            define_macros=STABLE_ABI,
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
