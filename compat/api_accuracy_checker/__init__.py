"""The names of api_accuracy_checker, for scripts that were written for it. Everything is done by tensorprobe.

    import api_accuracy_checker.dump                    records the second iteration of the script that imports it
    python -m api_accuracy_checker.run_ut.run_ut …      checks each recorded call alone

docs/migrating.md says what each of them is here, and what tensorprobe can do beyond it.
"""
