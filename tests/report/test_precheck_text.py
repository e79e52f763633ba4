"""What `tensorprobe precheck` prints: the answer first, then what failed, then counts that add up, the next command last."""

from __future__ import annotations

from tensorprobe.report.precheck_text import render_precheck
from tests.report.made import HOSTILE
from tests.report.made_precheck import check, checked, failing, precheck, skipped, wrong


def test_a_precheck_that_fails() -> None:
    made = precheck(
        check("Functional.linear.0.forward", equal=["Functional.linear.1.forward"]),
        failing(equal=["Functional.softmax.1.forward"]),
        skipped(),
        output="out",
    )
    assert render_precheck(made) == (
        "FAILED    2 of 5 calls fail, in 1 op, 1 not checked: empty returns memory that is not initialised\n"
        "  Functional.softmax.0.forward in module 'layers.0.attn'   model.py:88   (1 distinct call of Functional.softmax, 2 times)\n"
        "          forward output.0 (float32 [8, 16]): relative L2 3.1e-02 (allowed 2e-07)\n"
        "\n"
        "calls     5   3 of them distinct\n"
        "passed    2   50 % of the calls that ran\n"
        "failed    2\n"
        "skipped   1\n"
        "          1   empty returns memory that is not initialised\n"
        "backward  4   4 passed\n"
        "device npu against the CPU in higher precision, random data, standard noise-aware, 2 s\n"
        "Full table: out/accuracy_checking_result.csv\n"
        "Save a script for it: tensorprobe precheck runs/a --device npu --call Functional.softmax.0.forward --save-failures -o FOLDER"
    )


def test_a_call_that_fails_because_of_another_stands_under_it() -> None:
    made = precheck(
        failing("Torch.exp.0.forward", because="Tensor.mul.0.forward"),
        failing("Tensor.mul.0.forward", details=[wrong(place=[3, 1])]),
    )
    lines = render_precheck(made).splitlines()
    assert lines[0] == "FAILED    2 of 2 calls fail, in 1 op, and 1 op that calls it"
    assert [line.split()[0] for line in lines[1:] if line.startswith("  T")] == ["Tensor.mul.0.forward"]
    assert lines[2].endswith("(allowed 2e-07), worst at [3, 1]")
    assert lines[3].strip() == "fails inside Torch.exp: they call it"


def test_a_precheck_that_passes() -> None:
    lines = render_precheck(precheck(check(), notes=["only step 0 was looked at"])).splitlines()
    assert lines[0] == "PASSED    1 call passes"
    assert "passed    1   100 % of the calls that ran" in lines
    assert lines[-1] == "note      only step 0 was looked at"


def test_nothing_that_could_be_run_is_no_success() -> None:
    lines = render_precheck(precheck(skipped())).splitlines()
    assert lines[0] == "CANNOT CHECK  0 of 1 call could be run"
    assert lines[-1] == "Look at it:   tensorprobe inspect runs/a"
    assert render_precheck(precheck()).startswith("CANNOT CHECK  the run has no call that can be run alone\n")


def test_a_script_that_was_saved_is_the_next_command() -> None:
    made = precheck(failing("Torch.exp.0.forward"), failing(), output="out")
    text = render_precheck(made, replays={"Functional.softmax.0.forward": "out/failures/my softmax.py"})
    assert text.splitlines()[-1] == "Run it alone: python 'out/failures/my softmax.py'"


def test_the_next_command_repeats_what_was_asked() -> None:
    made = precheck(failing(step=3), data="real", standard="seed", device="cpu")
    assert render_precheck(made).splitlines()[-1] == (
        "Save a script for it: tensorprobe precheck runs/a --device cpu --data real --standard seed --steps 3 "
        "--call Functional.softmax.0.forward --save-failures -o FOLDER"
    )


def test_a_call_without_figures_says_why() -> None:
    dead = failing(message="the process died with signal 11 (SIGSEGV)", details=[], backward="skip")
    assert "\n          the process died with signal 11 (SIGSEGV)\n" in render_precheck(precheck(dead))
    raised = failing(details=[wrong(slot="", judged_by="raised", message="it raised on npu: RuntimeError: no kernel")])
    assert "\n          it raised on npu: RuntimeError: no kernel\n" in render_precheck(precheck(raised))
    shaped = failing(details=[checked(), wrong(judged_by="shape", message="output.0 has shape [1], the reference [2]")])
    assert "\n          output.0 has shape [1], the reference [2]\n" in render_precheck(precheck(shaped))


def test_hard_inputs_are_named() -> None:
    made = precheck(failing(details=[checked(), wrong(variant="subnormals")]))
    text = render_precheck(made)
    assert "(float32 [8, 16]) with inputs 'subnormals': relative L2" in text
    assert text.endswith(" --call Functional.softmax.0.forward --hard --save-failures -o FOLDER")


def test_a_backward_that_fails_is_counted() -> None:
    made = failing(forward="pass", backward="fail", details=[checked(), wrong(direction="backward", slot="output.1")])
    text = render_precheck(precheck(made))
    assert "backward output.1 (float32 [8, 16]): relative L2 3.1e-02" in text
    assert "backward  1   0 passed, 1 failed" in text


def test_long_lists_are_cut_and_said() -> None:
    checks = [failing(f"Torch.op{number}.0.forward") for number in range(5)]
    reasons = [skipped(f"Torch.other{number}.0.forward", message=f"reason {number}") for number in range(4)]
    text = render_precheck(precheck(*checks, *reasons, notes=["a", "b", "c"]), limit=2)
    assert "Torch.op1.0" in text and "Torch.op2.0" not in text
    assert "  and 3 ops more\n" in text
    assert "          2   for 2 other reasons\n" in text
    assert "and 1 note more in summary.json" in text


def test_almost_all_is_not_all() -> None:
    made = precheck(check(), failing(), passed=99_999, calls=100_000)
    assert "passed     99,999   99.99 % of the calls that ran" in render_precheck(made)


def test_a_hostile_run_commands_nobody() -> None:
    made = precheck(failing(HOSTILE, message=HOSTILE, module=HOSTILE, details=[]), run=HOSTILE, device=HOSTILE)
    text = render_precheck(made)
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert not any(line.startswith("::") for line in text.splitlines())
