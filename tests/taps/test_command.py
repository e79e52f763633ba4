"""`tensorprobe capture -- python script.py`: programs that know nothing of us."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tensorprobe
from tests.taps.scripts import environment, run_python, run_tool, write_script
from tests.taps.tiny import names

TRAINING = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.randn(2, 4)).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), *sys.argv[1:])
    {end}
"""


def write_training(folder: Path, end: str = "") -> Path:
    return write_script(folder, TRAINING.replace("{end}", end))


def test_script_is_recorded_without_being_edited(tmp_path: Path) -> None:
    script = write_training(tmp_path)
    plain = run_python([script, "--flag"], tmp_path)
    command = ["capture", "-o", "run 一", "--level", "mix", "--", sys.executable, script, "--flag"]
    done = run_tool(command, tmp_path, cold=True)
    assert done.stdout == plain.stdout
    assert "tensorprobe inspect 'run 一'" in done.stderr
    run = tensorprobe.open_run(tmp_path / "run 一")
    assert run.closed
    assert run.steps[:3] == [0, 1, 2]
    for step in (0, 1, 2):
        found = names(run, step=step)
        assert "Module.Sequential.forward.0" in found
        assert "Module.2.Linear.backward.0" in found
        assert "Functional.linear.1.backward" in found


@pytest.mark.parametrize("what", ["open(manifest, 'w').write('{')", "os.unlink(manifest), os.mkdir(manifest)"])
def test_the_exit_code_of_the_command_counts_also_where_its_run_cannot_be_read(what: str, tmp_path: Path) -> None:
    spoil = f"import atexit, os; manifest = 'run/manifest.json'; atexit.register(lambda: ({what}))\n"
    script = write_training(tmp_path, end="sys.exit(5)")
    script.write_text(spoil + script.read_text())
    done = run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path, code=5)
    assert "manifest.json" in done.stderr and "Traceback" not in done.stderr


def test_a_command_that_records_nothing_replaces_nothing(tmp_path: Path) -> None:
    script = write_training(tmp_path)
    run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path)
    other = tmp_path / "run" / "process7"
    other.mkdir()
    (other / "manifest.json").touch()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for command in (["no such command"], [sys.executable, "none.py"]):
        done = run_tool(["capture", "-o", "run", "--overwrite", "--", *command], tmp_path, code=None)
        assert done.returncode
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert "recorded nothing" in done.stderr and "still there" in done.stderr and "coverage" not in done.stderr
    run_tool(["capture", "-o", "run", "--overwrite", "--", sys.executable, script], tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").iterdir())[:2] == ["manifest.json", "rank0.json"]
    assert not other.exists()


def test_options_choose_what_is_recorded(tmp_path: Path) -> None:
    script = write_training(tmp_path)
    options = ["--steps", "1-2", "--mode", "summary", "--direction", "forward", "--op", "linear", "--no-stacks"]
    run_tool(["capture", "-o", "run", *options, "--", sys.executable, script], tmp_path)
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.steps == [1, 2]
    assert set(names(run)) == {"Functional.linear.0.forward", "Functional.linear.1.forward"}
    refused = run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path, code=2)
    assert "RunExists" in refused.stderr
    assert refused.stdout == ""
    wrong = run_tool(["capture", "-o", "other", "--level", "modul", "--", sys.executable, script], tmp_path, code=2)
    assert "Did you mean 'module'?" in wrong.stderr
    run_tool(["capture", "-o", "run", "--overwrite", "--", sys.executable, script], tmp_path)
    assert len(names(tensorprobe.open_run(tmp_path / "run"))) > 20


def test_exit_code_of_the_script_is_ours(tmp_path: Path) -> None:
    script = write_training(tmp_path, end="sys.exit(7)")
    done = run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path, code=7)
    assert "exit code 7" in done.stderr
    assert tensorprobe.open_run(tmp_path / "run").closed
    failing = write_training(tmp_path, end='raise ValueError("of the user")')
    done = run_tool(["capture", "-o", "run2", "--", sys.executable, failing], tmp_path, code=1)
    assert "ValueError: of the user" in done.stderr
    assert tensorprobe.open_run(tmp_path / "run2").closed
    killed = write_training(tmp_path, end="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    run_tool(["capture", "-o", "run3", "--", sys.executable, killed], tmp_path, code=137)
    run = tensorprobe.open_run(tmp_path / "run3")
    assert not run.closed
    assert run.steps[:3] == [0, 1, 2]


@pytest.mark.parametrize("text", ["print('no torch here')", "import torch; print(torch.ones(2).sum())"])
def test_script_in_which_no_module_is_called_gives_a_clear_error(text: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, text)
    done = run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path, code=2)
    assert "CommandFailed" in done.stderr
    assert "recorded nothing" in done.stderr
    assert not (tmp_path / "run").exists()
    absent = run_tool(["capture", "-o", "run", "--", "no-such-program"], tmp_path, code=2)
    assert "cannot start 'no-such-program'" in absent.stderr


def test_a_script_that_fails_before_torch_is_used_keeps_its_exit_code_and_gets_no_advice_about_torch(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, "import sys; sys.exit('unrecognized arguments: --stepz')")
    done = run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path, code=1)
    assert "ended with exit code 1 and recorded nothing into 'run'" in done.stderr
    assert "its own output says why" in done.stderr and "--from start" not in done.stderr


def test_script_may_tell_its_steps_itself(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import tensorprobe, torch
        from torch import nn
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for part in range(2):
                model(torch.ones(1, 2)).sum().backward()
                if part:
                    optimizer.step()
            tensorprobe.active_probe().step()
        """,
    )
    run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path)
    run = tensorprobe.open_run(tmp_path / "run")
    linears = [[name for name in names(run, step=step) if name.startswith("Functional.linear")] for step in run.steps]
    assert run.steps == [0, 1]
    assert [len(found) for found in linears] == [4, 4]


def test_script_with_a_capture_of_its_own_keeps_it(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import tensorprobe, torch
        from torch import nn
        with tensorprobe.capture("own", level="module"):
            nn.Linear(2, 2)(torch.ones(1, 2))
        """,
    )
    done = run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path, code=2)
    assert "the script captures by itself" in done.stderr
    assert names(tensorprobe.open_run(tmp_path / "own")) == ["Module.Linear.forward.0"]


def test_sitecustomize_of_the_user_still_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    write_script(tmp_path / "site", "import sys; sys.users_own = 'was here'", name="sitecustomize.py")
    script = write_script(
        tmp_path,
        """
        import sys, torch
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        print(sys.users_own, sys.modules['sitecustomize'].__file__)
        """,
    )
    paths = f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"
    done = run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path, cold=True, PYTHONPATH=paths)
    assert "was here" in done.stdout
    assert str(tmp_path / "site") in done.stdout
    assert tensorprobe.open_run(tmp_path / "run").closed


def test_workers_of_a_data_loader_record_nothing(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __init__(self):
                self.scale = nn.Linear(2, 2)
            def __len__(self):
                return 4
            def __getitem__(self, index):
                with torch.no_grad():
                    return self.scale(torch.full((2,), float(index)))

        if __name__ == "__main__":
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context="spawn"):
                model(batch).sum().backward()
                optimizer.step()
            print("done")
        """,
    )
    done = run_tool(["capture", "-o", "run", "--", sys.executable, script], tmp_path)
    assert done.stdout == "done\n"
    assert "RunExists" not in done.stderr
    run = tensorprobe.open_run(tmp_path / "run")
    assert [name for name in names(run, step=0) if "linear" in name] == [
        "Functional.linear.0.forward",
        "Functional.linear.0.backward",
    ]


WITHOUT_MODULES = """
    import torch

    torch.manual_seed(0)
    a = torch.ones(3, 3)
    print(torch.mm(a, a.exp()).sum().item())
    print(len(torch.overrides._get_current_function_mode_stack()))
"""


def test_a_program_without_modules_is_recorded_from_the_start(tmp_path: Path) -> None:
    script = write_script(tmp_path, WITHOUT_MODULES)
    refused = run_tool(["capture", "-o", "none", "--", sys.executable, script], tmp_path, code=2)
    assert "--from start also records calls outside of modules" in refused.stderr
    done = run_tool(["capture", "-o", "run", "--from", "start", "--", sys.executable, script], tmp_path)
    assert done.stdout.splitlines()[-1] == "1"  # ours; the one that waited for the first call has left
    run = tensorprobe.open_run(tmp_path / "run")
    assert [name.rsplit(".", 2)[0] for name in names(run)] == ["Torch.ones", "Tensor.exp", "Torch.mm", "Tensor.sum"]
    assert run.coverage[0].notes == []


def test_calls_before_the_first_module_are_recorded_on_request_else_noted(tmp_path: Path) -> None:
    script = write_training(tmp_path)
    for begin in ("start", "module"):
        run_tool(["capture", "-o", begin, "--from", begin, "--", sys.executable, script], tmp_path)
    whole, part = (tensorprobe.open_run(tmp_path / begin) for begin in ("start", "module"))
    assert names(whole)[0] == "Torch.empty.0.forward" and names(part)[0] != "Torch.empty.0.forward"
    assert len(names(whole)) == len(names(part)) + 9  # two layers, each with weight and bias; the first batch
    told = "calls before the first call of a module are not recorded; --from start records them"
    assert (whole.coverage[0].notes, part.coverage[0].notes) == ([], [told])
    assert "recorded from: start / module" in tensorprobe.compare(whole, part).summary.differing
    wrong = run_tool(["capture", "-o", "x", "--from", "begin", "--", sys.executable, script], tmp_path, code=2)
    assert "--from is 'begin'; expected 'start' or 'module'." in wrong.stderr


def test_workers_of_a_loader_do_not_begin_a_recording(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch

        class Squares(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return torch.tensor(float(i)) ** 2

        if __name__ == "__main__":
            for batch in torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context="fork"):
                pass
            print(batch + 1)
        """,
    )
    run_tool(["capture", "-o", "run", "--from", "start", "--", sys.executable, script], tmp_path)
    assert "Tensor.add.0.forward" in names(tensorprobe.open_run(tmp_path / "run"))
    assert not list((tmp_path / "run").glob("process*"))
