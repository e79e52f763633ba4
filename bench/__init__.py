"""Benchmarks, in folders by subject. Run them from the checkout; each prints ratios and writes `bench/results/*.json`.

    python -m bench.capture               a training step: plain, captured, and under the published peer
    python -m bench.capture.where         where the time of a captured step goes
    python -m bench.compare               comparing two runs, beside the published peer
    python -m bench.compare.detection     planted faults: which policy names them, which raises false alarms
    python -m bench.heldout               faults, healthy pairs and different programs that nobody has tuned on
    python -m bench.online                online compare: cost, share compared, faults found, false alarms
    python -m bench.overflow              the overflow watch: planted NaN and inf named, false alarms, cost
    python -m bench.precheck              how much of torch precheck replays, and whether its verdicts are right
    python -m bench.legacy.ptdbg          dump and compare by the names of ptdbg_ascend
    python -m bench.sim                   the simulated device against the CPU, over torch's operator database

`driver.py` holds what the drivers share, `protocol.py` how a training step is measured, `workloads.py` and `zoo.py` the
models.
"""
